//! The report of the density benchmark.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use serde_json::json;

use super::{Measured, Start};
use crate::arguments::Density;
use crate::chart::{Plot, shown};
use crate::statistics::{Quantiles, median, quantiles};
use crate::{Chart, Report};

/// Starts that are compared at each end.
const BLOCK: usize = 500;
/// Starts for each point of the curve.
const POINT: usize = 100;
/// What is enabled during the measurements.
const SWITCHED_ON: &str = "limits of memory, CPU and processes; user, pid, mount, network, ipc, \
    uts and cgroup namespaces; seccomp; no_new_privs; short list of capabilities; masked /proc; \
    writable root; logging; durable ownership records";

pub(super) fn report(options: &Density, measured: &Measured) -> Result<Report> {
    let block = BLOCK.min(measured.starts.len());
    let first = &measured.starts[..block];
    let last = &measured.starts[measured.starts.len() - block..];
    let (first_ms, last_ms) = (whole(first)?, whole(last)?);
    let rate = measured.starts.len() as f64 / measured.elapsed_s;
    let mut table = format!(
        "{} sessions of busybox's httpd on the {:?} runtime, {} starts at a time: {} starts a \
         second\nswitched on: {SWITCHED_ON}\n",
        options.count,
        options.runtime,
        options.parallel,
        shown(rate),
    );
    table += &starts(block, first, last)?;
    table += &rivals(measured)?;
    table += &costs(options, measured);
    Ok(Report {
        missed: None,
        table,
        json: json!({
            "benchmark": "density", "runtime": options.runtime, "count": options.count,
            "parallel": options.parallel, "ptys": options.ptys, "switched_on": SWITCHED_ON, "starts_per_s": rate,
            "first": { "starts": block, "ms": first_ms }, "last": { "starts": block, "ms": last_ms },
            "last_over_first_p50": last_ms.p50 / first_ms.p50, "measured": measured,
        }),
        chart: chart(options, measured)?,
    })
}

fn whole(starts: &[Start]) -> Result<Quantiles> {
    let sample: Vec<f64> = starts.iter().map(|start| start.ms).collect();
    quantiles(&sample).context("no session was started")
}

/// The whole start as the client saw it, and every phase, at both ends.
fn starts(block: usize, first: &[Start], last: &[Start]) -> Result<String> {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "phase".to_owned(),
        format!("first {block}, p50"),
        "p99".to_owned(),
        format!("last {block}, p50"),
        "p99".to_owned(),
        "grows by".to_owned(),
    ]);
    let mut row = |name: &str, first: Quantiles, last: Quantiles| {
        let ms = |value| format!("{} ms", shown(value));
        table.add_row([
            name.to_owned(),
            ms(first.p50),
            ms(first.p99),
            ms(last.p50),
            ms(last.p99),
            ms(last.p50 - first.p50),
        ]);
    };
    let names: BTreeSet<&String> = first
        .iter()
        .chain(last)
        .flat_map(|start| start.phases_ms.keys())
        .collect();
    for name in names {
        let of = |starts: &[Start]| {
            let sample: Vec<f64> = starts
                .iter()
                .map(|start| start.phases_ms.get(name).copied().unwrap_or(0.0))
                .collect();
            quantiles(&sample).context("a phase without a value")
        };
        row(name, of(first)?, of(last)?);
    }
    let (first, last) = (whole(first)?, whole(last)?);
    row("whole, at the client", first, last);
    Ok(format!(
        "{table}\nlast {block} against first {block}, p50: {} ×\n",
        shown(last.p50 / first.p50)
    ))
}

fn rivals(measured: &Measured) -> Result<String> {
    let Some(own) = measured.rivals.first() else {
        return Ok(String::new());
    };
    let own = own.times_ms.as_ref().ok().and_then(|times| median(times));
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["one at a time", "p50", "p99", "slower than conman"]);
    for rival in &measured.rivals {
        match &rival.times_ms {
            Ok(times) => {
                let found = quantiles(times).context("a rival without a start")?;
                table.add_row([
                    rival.name.to_owned(),
                    format!("{} ms", shown(found.p50)),
                    format!("{} ms", shown(found.p99)),
                    own.map_or_else(
                        || "–".to_owned(),
                        |own| format!("{} ×", shown(found.p50 / own)),
                    ),
                ]);
            }
            Err(why) => {
                table.add_row([rival.name.to_owned(), format!("not measured: {why}")]);
            }
        }
    }
    Ok(format!(
        "next to {} live sessions:\n{table}\n",
        measured.rivals_at
    ))
}

fn costs(options: &Density, measured: &Measured) -> String {
    let mib = |bytes: f64| format!("{} MiB", shown(bytes / 1_048_576.0));
    let kib = |bytes: f64| format!("{} KiB", shown(bytes / 1_024.0));
    let mut text = format!(
        "memory of a session beyond its program: {} (all {}, program {})\n",
        kib(measured.footprint.overhead()),
        kib(measured.footprint.all),
        kib(measured.footprint.program),
    );
    for (name, bytes) in measured.footprint.parts() {
        text += &format!("  {name}: {}\n", kib(bytes));
    }
    let mut descriptors = measured.daemon.descriptors;
    text += &format!("daemon: {}", mib(measured.daemon.resident_bytes as f64));
    if let Some(shim) = measured.shim {
        descriptors += shim.descriptors;
        text += &format!("; shim: {}", mib(shim.resident_bytes as f64));
    }
    text += &format!(
        "; descriptors of both: {descriptors}, {} a session\n",
        shown(descriptors as f64 / options.count as f64)
    );
    text += &format!(
        "processor time of daemon and shim: {} ms for each request of all statistics, {} ms a second without requests\n",
        shown(measured.looks.one_s * 1e3),
        shown(measured.looks.quiet_s * 1e3),
    );
    text += &format!(
        "{} of {} sessions whose page was requested returned it\n",
        measured.answering, measured.asked
    );
    text += &format!(
        "preemption of {} sessions ({} processes): last dead after {} ms, last released after {} ms\n",
        options.count,
        measured.processes,
        shown(measured.last_dead_ms),
        shown(measured.last_release_ms)
    );
    text
}

fn chart(options: &Density, measured: &Measured) -> Result<Chart> {
    let points = |pick: fn(Quantiles) -> f64| -> Result<Vec<(f64, f64)>> {
        measured
            .starts
            .chunks(POINT)
            .map(|starts| {
                let middle = starts.iter().map(|start| start.alive).sum::<usize>() / starts.len();
                Ok((middle as f64, pick(whole(starts)?)))
            })
            .collect()
    };
    let mut curves = vec![
        ("conman, p50".to_owned(), points(|found| found.p50)?),
        ("conman, p99".to_owned(), points(|found| found.p99)?),
    ];
    for rival in measured.rivals.iter().skip(1) {
        if let Some(p50) = rival.times_ms.as_ref().ok().and_then(|times| median(times)) {
            let at = measured.rivals_at as f64;
            // A short stroke: one point is easily overlooked.
            let stroke = vec![(at * 0.9, p50), (at * 1.1, p50)];
            curves.push((format!("{}, p50", rival.name), stroke));
        }
    }
    Ok(Chart {
        title: format!("Start of a session, {:?} runtime", options.runtime),
        unit: "ms",
        plot: Plot::Curves {
            over: "sessions alive",
            curves,
        },
    })
}
