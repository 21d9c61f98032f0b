//! Measures echoes through another node.

use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use crate::arguments::Echoing;
use crate::daemon::free_ports;
use crate::interruption::{early_end, until_interrupted};
use crate::load::{Target, echo};
use crate::report::{Bar, Chart, Report, Table, figure, shown};
use crate::rivals;
use crate::statistics::{median, quantiles};

/// Sizes of the measured messages.
const SIZES: [usize; 2] = [64, 4_096];

/// Largest allowed ratio of an echo through another node to one through the session's own.
const MAX_RATIO: f64 = 2.2;

/// The paths, with their names in the table.
const LOCAL: &str = "the session's own node";
const HOP: &str = "another node";
const DIRECT: &str = "direct";

#[derive(Debug, Clone, Serialize)]
struct Measurement {
    path: &'static str,
    message_bytes: usize,
    p50_us: f64,
    p99_us: f64,
}

/// WebSocket echo through the session's own node and through another one: two processes with
/// conman's proxy, its listener for nodes and its seals, in front of the same program, on
/// loopback.
///
/// # Errors
/// When a process cannot be started, or an echo fails.
pub(crate) async fn hop(options: &Echoing) -> Result<Report> {
    let mut measurements = Vec::new();
    let ended = until_interrupted(measure(options, &mut measurements)).await;
    // A round has every path and size.
    let early = early_end(ended, measurements.len() / (3 * SIZES.len()))?;
    Ok(report(options, &measurements)?.ended_early(early))
}

async fn measure(options: &Echoing, measurements: &mut Vec<Measurement>) -> Result<()> {
    let directory = tempfile::tempdir().context("making a temporary folder")?;
    let secret = directory.path().join("fleet.key");
    write_secret(&secret)?;
    let [program, owner, peers, entry] = free_ports()?;
    let _processes = [
        rivals::echo(program).await?,
        rivals::owner((owner, peers), local(program), &secret).await?,
        rivals::entry(entry, local(peers), &secret).await?,
    ];
    let target = |port: u16, path: &str| Target {
        address: local(port),
        path: path.to_owned(),
        through: None,
    };
    let paths = [
        (DIRECT, target(program, "/")),
        (LOCAL, target(owner, "/s/echo/")),
        (HOP, target(entry, "/s/echo/")),
    ];
    for round in 0..options.rounds {
        for bytes in SIZES {
            // Each round begins with another path, so that none always runs after the same one.
            for turn in 0..paths.len() {
                let (name, target) = &paths[(turn + round) % paths.len()];
                let measured = echo(target, 1, bytes, options.duration())
                    .await
                    .with_context(|| format!("measuring {name}"))?;
                let latency = quantiles(&measured.latencies_us).context("nothing was echoed")?;
                measurements.push(Measurement {
                    path: name,
                    message_bytes: bytes,
                    p50_us: latency.p50,
                    p99_us: latency.p99,
                });
            }
        }
    }
    Ok(())
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn write_secret(path: &Path) -> Result<()> {
    use std::io::Write as _;

    let file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    // Only these processes know it, and it protects nothing.
    let text = "a benchmark of the hop between two nodes";
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("writing {}", path.display()))
}

fn report(options: &Echoing, measurements: &[Measurement]) -> Result<Report> {
    let mut table = Table::new([
        "through",
        "message",
        "p50",
        "p99",
        "p50 against its own node",
    ]);
    let (mut rows, mut bars, mut missed) = (Vec::new(), Vec::new(), Vec::new());
    for bytes in SIZES {
        let all = |path: &str, value: fn(&Measurement) -> f64| -> Vec<f64> {
            measurements
                .iter()
                .filter(|one| one.path == path && one.message_bytes == bytes)
                .map(value)
                .collect()
        };
        let of = |path: &str, value: fn(&Measurement) -> f64| {
            median(&all(path, value)).context("a case was not measured")
        };
        let base = of(LOCAL, |one| one.p50_us)?;
        for path in [DIRECT, LOCAL, HOP] {
            let (p50, p99) = (of(path, |one| one.p50_us)?, of(path, |one| one.p99_us)?);
            let ratio = p50 / base;
            if path == HOP && ratio > MAX_RATIO {
                missed.push(format!(
                    "{bytes} B through another node take {ratio:.2} times as long as through their \
                     own, and may take {MAX_RATIO}"
                ));
            }
            table.row([
                path.to_owned(),
                format!("{bytes} B"),
                figure(&all(path, |one| one.p50_us), "µs"),
                format!("{} µs", shown(p99)),
                format!("{ratio:.2} ×"),
            ]);
            rows.push(json!({
                "path": path, "message_bytes": bytes, "p50_us": p50, "p99_us": p99, "ratio": ratio,
            }));
            if bytes == SIZES[0] {
                bars.push(Bar::of(path, &all(path, |one| one.p50_us)));
            }
        }
    }
    Ok(Report {
        missed: (!missed.is_empty()).then(|| missed.join("; ")),
        title: "WebSocket echo through another node".to_owned(),
        parts: vec![
            format!(
                "One connection, medians of {} rounds of {} s in rotation.",
                options.rounds, options.seconds
            )
            .into(),
            Chart::bars("64 B: median", "µs", bars).into(),
            table.into(),
        ],
        json: json!({
            "benchmark": "hop", "rounds": options.rounds,
            "duration_s": options.seconds, "medians": rows,
            "measurements": measurements,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hop_that_takes_longer_than_it_may_is_told_of() {
        let options = Echoing {
            rounds: 1,
            seconds: 1.0,
        };
        let missed = |hop_us: f64| {
            let sized = SIZES.map(|message_bytes| {
                [(DIRECT, 50.0), (LOCAL, 100.0), (HOP, hop_us)].map(|(path, p50_us)| Measurement {
                    path,
                    message_bytes,
                    p50_us,
                    p99_us: p50_us,
                })
            });
            let measured: Vec<_> = sized.into_iter().flatten().collect();
            report(&options, &measured)
                .expect("all was measured")
                .missed
        };
        assert_eq!(missed(219.0), None);
        assert!(missed(221.0).is_some_and(|why| why.contains("2.21")));
    }
}
