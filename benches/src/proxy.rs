//! Measures the proxy, and nginx and HAProxy in its place.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use conman_proto::RuntimeKind;
use serde::Serialize;
use serde_json::json;

use crate::arguments::{Echoing, Proxying};
use crate::daemon::{Daemon, free_ports};
use crate::docker::Docker;
use crate::image;
use crate::interruption::{early_end, until_interrupted};
use crate::load::{Target, echo};
use crate::needs;
use crate::plain::{Network, OciContainers, Plain};
use crate::report::{Bar, Chart, Report, Table, figure, shown};
use crate::rivals::{self, wait_listening};
use crate::statistics::{median, quantiles};

/// Numbers of connections and sizes of messages that are measured.
const CASES: [(usize, usize); 4] = [(1, 64), (32, 64), (1, 65_536), (32, 65_536)];

/// The rivals, with their names in the table.
const NGINX: &str = "nginx";
const HAPROXY: &str = "HAProxy";
const DIRECT: &str = "direct";
const INSIDE: &str = "conman, inside the namespace";

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
/// When the runtime or the image is missing, or an echo fails.
pub(crate) async fn proxy(conman: &Path, options: &Proxying) -> Result<Report> {
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let root = image::root(scratch.path())?;
    image::add_this_program(&root)?;
    let archive = image::archive(&root)?;
    let docker = Docker::for_runtime(options.runtime, &archive).await?;
    let plain = Plain::of(options.runtime, docker.as_ref()).await?;
    let daemon = Daemon::start(conman, options.runtime, 1, &archive).await?;
    let place = Place {
        runtime: options.runtime,
        root: &root,
        docker: docker.as_ref(),
        plain: &plain,
        daemon: &daemon,
    };
    let mut measurements = Vec::new();
    let measured = place.measure(&options.echoing, &mut measurements);
    let ended = until_interrupted(measured).await;
    let stopped = daemon.stop(docker.as_ref()).await;
    let early = early_end(ended, measurements.len())?;
    stopped?;
    Ok(report(options, &plain, &measurements)?.ended_early(early))
}

struct Place<'a> {
    runtime: RuntimeKind,
    /// The root directory of containers without Docker.
    root: &'a Path,
    docker: Option<&'a Docker>,
    plain: &'a Plain,
    daemon: &'a Daemon,
}

impl Place<'_> {
    async fn measure(&self, options: &Echoing, measurements: &mut Vec<Measurement>) -> Result<()> {
        let session = match self.runtime {
            RuntimeKind::Docker => "echo-bridge",
            RuntimeKind::Native
            | RuntimeKind::Gvisor
            | RuntimeKind::Oci(_)
            | RuntimeKind::Process => "echo",
        };
        self.daemon.open_one("echo".to_owned(), session).await?;
        // Ends when this is dropped.
        let (backend, _containers) = self.backend().await?;
        let directory = tempfile::tempdir().context("making a temporary folder")?;
        let [nginx, haproxy, conman] = free_ports()?;
        let mut proxies = vec![rivals::conman(conman, backend).await?];
        if needs::find("nginx").is_some() {
            proxies.push(rivals::nginx(directory.path(), nginx, backend).await?);
        }
        if needs::find("haproxy").is_some() {
            proxies.push(rivals::haproxy(directory.path(), haproxy, backend).await?);
        }
        let target = |address: SocketAddr, path: &str| Target {
            address,
            path: path.to_owned(),
            through: None,
        };
        let local = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let inside = self.daemon.sessions.parse();
        let inside = inside.context("reading conman's address")?;
        let mut paths = vec![
            (DIRECT, target(backend, "/")),
            (NGINX, target(local(nginx), "/")),
            (HAPROXY, target(local(haproxy), "/")),
            ("conman", target(local(conman), "/s/echo/")),
            (INSIDE, target(inside, "/s/echo/")),
        ];
        let lacks = |program: &str| needs::find(program).is_none();
        paths.retain(|(name, _)| match *name {
            NGINX => !lacks("nginx"),
            HAPROXY => !lacks("haproxy"),
            _ => true,
        });
        for round in 0..options.rounds {
            for (connections, bytes) in CASES {
                // Each round begins with another path, so that none always runs after the same one.
                for turn in 0..paths.len() {
                    let (name, target) = &paths[(turn + round) % paths.len()];
                    let measured = echo(target, connections, bytes, options.duration())
                        .await
                        .with_context(|| format!("measuring {name}"))?;
                    let latency =
                        quantiles(&measured.latencies_us).context("nothing was echoed")?;
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
        Ok(())
    }

    /// The program that is reached without conman: the session itself if it is on Docker's bridge, and else a plain
    /// container.
    async fn backend(&self) -> Result<(SocketAddr, Option<OciContainers>)> {
        let Plain::Oci(oci) = self.plain else {
            let docker = self.docker.context("Docker does not run")?;
            let mut label = self.daemon.label();
            if self.runtime != RuntimeKind::Docker {
                label = format!("dev.conman.bench=proxy-{}", std::process::id());
                let listen = ["/bin/conman-bench", "echo", "--listen", "0.0.0.0:8080"];
                let runtime = self.plain.docker_arguments();
                docker.run(&label, &runtime, &listen).await?;
            }
            let address = docker.address(&label).await?;
            let address = SocketAddr::new(address.parse().context("reading an address")?, 8080);
            wait_listening(address).await?;
            return Ok((address, None));
        };
        let mut containers = OciContainers::new(*oci, Network::Host, self.root, "proxy")?;
        let [port] = free_ports()?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let listen = address.to_string();
        containers
            .run(&["/bin/conman-bench", "echo", "--listen", &listen])
            .await?;
        wait_listening(address).await?;
        Ok((address, Some(containers)))
    }
}

fn report(options: &Proxying, plain: &Plain, measurements: &[Measurement]) -> Result<Report> {
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
        "against direct",
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
        if names
            .iter()
            .any(|name| all(name, |one| one.p50_us).is_empty())
        {
            // It was interrupted.
            continue;
        }
        let of = |name: &str, value: fn(&Measurement) -> f64| {
            median(&all(name, value)).context("a case was not measured")
        };
        // One connection shows the delay, many the throughput.
        let (measure, value): (_, fn(&Measurement) -> f64) = match connections {
            1 => ("p50", |one| one.p50_us),
            _ => ("rate", |one| one.messages_per_s),
        };
        let rivals = [NGINX, HAPROXY].map(|name| median(&all(name, value)));
        let rivals = rivals.into_iter().flatten();
        let best = match connections {
            1 => rivals.min_by(f64::total_cmp),
            _ => rivals.max_by(f64::total_cmp),
        };
        for name in &names {
            let (p50, p99, rate) = (
                of(name, |one| one.p50_us)?,
                of(name, |one| one.p99_us)?,
                of(name, |one| one.messages_per_s)?,
            );
            let (own, direct) = (of(name, value)?, of(DIRECT, value)?);
            let (ratio, direct) = (best.map(|best| own / best), own / direct);
            table.row([
                (*name).to_owned(),
                connections.to_string(),
                format!("{bytes} B"),
                figure(&all(name, |one| one.p50_us), "µs"),
                format!("{} µs", shown(p99)),
                shown(rate),
                ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{measure} {ratio:.2} ×")),
                format!("{measure} {direct:.2} ×"),
            ]);
            rows.push(json!({
                "path": name, "connections": connections, "message_bytes": bytes,
                "p50_us": p50, "p99_us": p99, "messages_per_s": rate,
                "compared": measure, "ratio": ratio, "ratio_to_direct": direct,
            }));
            if (connections, bytes) == CASES[0] {
                bars.push(Bar::of(*name, &all(name, |one| one.p50_us)));
            }
        }
    }
    anyhow::ensure!(!rows.is_empty(), "no case was measured on all paths");
    let mut text = format!(
        "Medians of {} rounds of {} s in rotation. The session's runtime is {}; direct is {}, by its address.",
        options.echoing.rounds,
        options.echoing.seconds,
        options.runtime,
        plain.name(),
    );
    let missing = needs::missing(&[("nginx", "nginx-light"), ("haproxy", "haproxy")]);
    if let Some(missing) = missing {
        text += &format!("\nskipped: {missing}");
    }
    Ok(Report {
        missed: None,
        title: format!(
            "WebSocket echo through proxies, {} runtime",
            options.runtime
        ),
        parts: vec![
            text.into(),
            Chart::bars("64 B, one connection: median", "µs", bars).into(),
            table.into(),
        ],
        json: json!({
            "benchmark": "proxy", "runtime": options.runtime, "direct": plain.name(),
            "rounds": options.echoing.rounds, "duration_s": options.echoing.seconds,
            "medians": rows, "measurements": measurements,
        }),
    })
}
