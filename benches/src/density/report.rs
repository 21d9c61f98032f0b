//! The report of the density benchmark.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use serde_json::json;

use super::{Measured, Start};
use crate::arguments::{Density, DensityStore};
use crate::report::{Chart, Curve, Curves, Part, Report, Table, shown};
use crate::statistics::{Quantiles, median, quantiles};

/// Starts that are compared at each end.
const BLOCK: usize = 500;
/// Starts for each point of the curve.
const POINT: usize = 100;
/// What is enabled during the measurements.
const SWITCHED_ON: &str = "limits of memory, CPU and processes; user, pid, mount, network, ipc, \
    uts and cgroup namespaces; seccomp; no_new_privs; short list of capabilities; masked /proc; \
    an init; a view of limits; writable root; logging; durable ownership records";

/// `beside`: the same with overlays.
pub(super) fn report(
    options: &Density,
    measured: &Measured,
    beside: Option<&Measured>,
) -> Result<Report> {
    let block = BLOCK.min(measured.starts.len());
    let first = &measured.starts[..block];
    let last = &measured.starts[measured.starts.len() - block..];
    let (first_ms, last_ms) = (whole(first)?, whole(last)?);
    let rate = measured.starts.len() as f64 / measured.elapsed_s;
    let lead = format!(
        "{} starts at a time: {} starts a second\nswitched on: {SWITCHED_ON}\n",
        options.parallel,
        shown(rate),
    );
    let mut parts = vec![
        lead.into(),
        limits(options, measured).into(),
        measured.conditions.to_text().into(),
        chart(options, measured)?.into(),
    ];
    parts.extend(starts(block, first, last)?);
    parts.extend(rivals(measured)?);
    parts.push(costs(measured).into());
    if let Some(beside) = beside {
        parts.push(stores([(options.store, measured), (DensityStore::Overlay, beside)])?.into());
    }
    Ok(Report {
        missed: None,
        title: format!(
            "{} sessions of busybox's httpd, {} runtime, network {}, store {}",
            measured.starts.len(),
            options.runtime,
            options.network.name(),
            options.store.name()
        ),
        parts,
        json: json!({
            "benchmark": "density", "runtime": options.runtime, "count": options.count,
            "network": options.network.name(), "reached": measured.starts.len(), "bound": measured.bound,
            "doctor": measured.doctor, "parallel": options.parallel, "ptys": options.ptys, "store": options.store.name(), "beside": beside, "switched_on": SWITCHED_ON, "starts_per_s": rate,
            "first": { "starts": block, "ms": first_ms }, "last": { "starts": block, "ms": last_ms },
            "last_over_first_p50": last_ms.p50 / first_ms.p50, "measured": measured,
        }),
    })
}

/// Both stores, as they were measured one after the other.
fn stores(all: [(DensityStore, &Measured); 2]) -> Result<Table> {
    let mut table = Table::new([
        "store",
        "first starts, p50",
        "last, p50",
        "last, p99",
        "starts a second",
        "superblocks at once",
        "a session pays for them",
        "memory besides its program",
        "memory",
        "page cache",
    ]);
    let kib = |bytes: f64| format!("{} KiB", shown(bytes / 1_024.0));
    for (store, measured) in all {
        let block = BLOCK.min(measured.starts.len());
        let first = whole(&measured.starts[..block])?;
        let last = whole(&measured.starts[measured.starts.len() - block..])?;
        let superblocks = measured.conditions.superblocks();
        table.row([
            store.name().to_owned(),
            format!("{} ms", shown(first.p50)),
            format!("{} ms", shown(last.p50)),
            format!("{} ms", shown(last.p99)),
            shown(measured.starts.len() as f64 / measured.elapsed_s),
            superblocks.map_or("unknown".to_owned(), |(count, _)| count.to_string()),
            superblocks.map_or("unknown".to_owned(), |(_, bytes)| kib(bytes as f64)),
            kib(measured.footprint.overhead()),
            kib(measured.footprint.all),
            kib(measured.footprint.page_cache),
        ]);
    }
    Ok(table)
}

/// What binds, in the words of `conman doctor`, and of the refusal if there was one.
fn limits(options: &Density, measured: &Measured) -> String {
    let (wanted, reached) = (options.count, measured.starts.len());
    let doctor = match (measured.doctor.holds, &measured.doctor.first_limit) {
        (Some(holds), Some(limit)) => {
            format!("conman doctor: this host holds {holds} sessions; {limit} binds first")
        }
        _ => format!("conman doctor: nothing binds before {wanted} sessions"),
    };
    match &measured.bound {
        Some(why) => format!("{reached} of {wanted} sessions reached: {why}\n{doctor}"),
        None => format!("all {wanted} sessions reached\n{doctor}"),
    }
}

fn whole(starts: &[Start]) -> Result<Quantiles> {
    let sample: Vec<f64> = starts.iter().map(|start| start.ms).collect();
    quantiles(&sample).context("no session was started")
}

/// The whole start as the client saw it, and every phase, at both ends.
fn starts(block: usize, first: &[Start], last: &[Start]) -> Result<[Part; 2]> {
    let mut table = Table::new([
        "phase".to_owned(),
        format!("first {block}, p50"),
        "p99".to_owned(),
        format!("last {block}, p50"),
        "p99".to_owned(),
        "grows by".to_owned(),
    ]);
    let mut row = |name: &str, first: Quantiles, last: Quantiles| {
        let ms = |value| format!("{} ms", shown(value));
        table.row([
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
    let growth = shown(last.p50 / first.p50);
    let text = format!("last {block} against first {block}, p50: {growth} ×");
    Ok([table.into(), text.into()])
}

fn rivals(measured: &Measured) -> Result<Vec<Part>> {
    let Some(own) = measured.rivals.first() else {
        return Ok(Vec::new());
    };
    let own = own.times_ms.as_ref().ok().and_then(|times| median(times));
    let mut table = Table::new(["one at a time", "p50", "p99", "slower than conman"]);
    for rival in &measured.rivals {
        match &rival.times_ms {
            Ok(times) => {
                let found = quantiles(times).context("a rival without a start")?;
                table.row([
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
                table.row([rival.name.to_owned(), format!("not measured: {why}")]);
            }
        }
    }
    let text = format!("next to {} live sessions:", measured.rivals_at);
    Ok(vec![text.into(), table.into()])
}

fn costs(measured: &Measured) -> String {
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
        shown(descriptors as f64 / measured.starts.len() as f64)
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
        measured.starts.len(),
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
    let curve = |name: String, points| Curve { name, points };
    let mut curves = vec![
        curve("conman, p50".to_owned(), points(|found| found.p50)?),
        curve("conman, p99".to_owned(), points(|found| found.p99)?),
    ];
    for rival in measured.rivals.iter().skip(1) {
        if let Some(p50) = rival.times_ms.as_ref().ok().and_then(|times| median(times)) {
            let at = measured.rivals_at as f64;
            curves.push(curve(format!("{}, p50", rival.name), vec![(at, p50)]));
        }
    }
    Ok(Chart::curves(
        format!("start of a session, {} runtime", options.runtime),
        "ms",
        Curves {
            over: "sessions alive",
            logarithmic: true,
            curves,
            marks: Vec::new(),
        },
    ))
}
