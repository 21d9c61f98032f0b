//! Measures the proxy, and nginx and HAProxy in its place.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use crate::arguments::Echoing;
use crate::daemon::{Daemon, free_ports};
use crate::docker::Docker;
use crate::interruption::until_interrupted;
use crate::load::{Target, echo};
use crate::report::{Bar, Chart, Report, Table, figure, shown};
use crate::rivals;
use crate::statistics::{median, quantiles};

/// Numbers of connections and sizes of messages that are measured.
const CASES: [(usize, usize); 4] = [(1, 64), (32, 64), (1, 65_536), (32, 65_536)];

/// The rivals, with their names in the table.
const NGINX: &str = "nginx";
const HAPROXY: &str = "HAProxy";

#[derive(Debug, Clone, Serialize)]
struct Measurement {
    path: &'static str,
    connections: usize,
    message_bytes: usize,
    p50_us: f64,
    p99_us: f64,
    messages_per_s: f64,
}

/// WebSocket echo through conman, nginx and HAProxy in front of the same backend address, through
/// conman's path inside the session's network namespace, and directly.
///
/// # Errors
/// When Docker, the image, nginx or HAProxy is missing, or an echo fails.
pub(crate) async fn proxy(conman: &Path, options: &Echoing) -> Result<Report> {
    let docker = Docker::new().await?;
    let daemon = Daemon::start(conman).await?;
    let measured = until_interrupted(measure(options, &docker, &daemon)).await;
    let stopped = daemon.stop(&docker).await;
    let measurements = measured?;
    stopped?;
    report(options, &measurements)
}

async fn measure(options: &Echoing, docker: &Docker, daemon: &Daemon) -> Result<Vec<Measurement>> {
    daemon.open_one("echo".to_owned(), "echo-bridge").await?;
    let backend = SocketAddr::new(
        docker
            .address(&daemon.label())
            .await?
            .parse()
            .context("reading an address")?,
        8080,
    );
    let directory = tempfile::tempdir().context("making a temporary folder")?;
    let [nginx, haproxy, conman] = free_ports()?;
    let _rivals = [
        rivals::nginx(directory.path(), nginx, backend).await?,
        rivals::haproxy(directory.path(), haproxy, backend).await?,
        rivals::conman(conman, backend).await?,
    ];
    let local = |port: u16, path: &str| Target {
        address: SocketAddr::from(([127, 0, 0, 1], port)),
        path: path.to_owned(),
        through: None,
    };
    let inside = Target {
        address: daemon
            .sessions
            .parse()
            .context("reading conman's address")?,
        path: "/s/echo/".to_owned(),
        through: None,
    };
    let paths = [
        (
            "direct",
            Target {
                address: backend,
                path: "/".to_owned(),
                through: None,
            },
        ),
        (NGINX, local(nginx, "/")),
        (HAPROXY, local(haproxy, "/")),
        ("conman", local(conman, "/s/echo/")),
        ("conman, inside the namespace", inside),
    ];
    let mut measurements = Vec::new();
    for round in 0..options.rounds {
        for (connections, bytes) in CASES {
            // Each round begins with another path, so that none always runs after the same one.
            for turn in 0..paths.len() {
                let (name, target) = &paths[(turn + round) % paths.len()];
                let measured = echo(target, connections, bytes, options.duration())
                    .await
                    .with_context(|| format!("measuring {name}"))?;
                let latency = quantiles(&measured.latencies_us).context("nothing was echoed")?;
                measurements.push(Measurement {
                    path: name,
                    connections,
                    message_bytes: bytes,
                    p50_us: latency.p50,
                    p99_us: latency.p99,
                    messages_per_s: measured.messages_per_s,
                });
            }
        }
    }
    Ok(measurements)
}

fn report(options: &Echoing, measurements: &[Measurement]) -> Result<Report> {
    let mut names: Vec<&'static str> = Vec::new();
    for one in measurements {
        if !names.contains(&one.path) {
            names.push(one.path);
        }
    }
    let mut table = Table::new([
        "path",
        "connections",
        "message",
        "p50",
        "p99",
        "messages a second",
        "against the better of nginx and HAProxy",
    ]);
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for (connections, bytes) in CASES {
        let all = |name: &str, value: fn(&Measurement) -> f64| -> Vec<f64> {
            measurements
                .iter()
                .filter(|one| {
                    one.path == name && one.connections == connections && one.message_bytes == bytes
                })
                .map(value)
                .collect()
        };
        let of = |name: &str, value: fn(&Measurement) -> f64| {
            median(&all(name, value)).context("a case was not measured")
        };
        // One connection shows the delay, many the throughput.
        let (measure, value): (_, fn(&Measurement) -> f64) = match connections {
            1 => ("p50", |one| one.p50_us),
            _ => ("rate", |one| one.messages_per_s),
        };
        let rivals = [of(NGINX, value)?, of(HAPROXY, value)?];
        let best = match connections {
            1 => rivals[0].min(rivals[1]),
            _ => rivals[0].max(rivals[1]),
        };
        for name in &names {
            let (p50, p99, rate) = (
                of(name, |one| one.p50_us)?,
                of(name, |one| one.p99_us)?,
                of(name, |one| one.messages_per_s)?,
            );
            let ratio = of(name, value)? / best;
            table.row([
                (*name).to_owned(),
                connections.to_string(),
                format!("{bytes} B"),
                figure(&all(name, |one| one.p50_us), "µs"),
                format!("{} µs", shown(p99)),
                shown(rate),
                format!("{measure} {ratio:.2} ×"),
            ]);
            rows.push(json!({
                "path": name, "connections": connections, "message_bytes": bytes,
                "p50_us": p50, "p99_us": p99, "messages_per_s": rate,
                "compared": measure, "ratio": ratio,
            }));
            if (connections, bytes) == CASES[0] {
                bars.push(Bar::of(*name, &all(name, |one| one.p50_us)));
            }
        }
    }
    Ok(Report {
        missed: None,
        title: "WebSocket echo through proxies".to_owned(),
        parts: vec![
            format!(
                "Medians of {} rounds of {} s in rotation.",
                options.rounds,
                options.duration().as_secs_f64()
            )
            .into(),
            Chart::bars("64 B, one connection: median", "µs", bars).into(),
            table.into(),
        ],
        json: json!({
            "benchmark": "proxy", "rounds": options.rounds,
            "duration_s": options.duration().as_secs_f64(), "medians": rows, "measurements": measurements,
        }),
    })
}
