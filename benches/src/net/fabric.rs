//! What a fabric costs between two machines, next to the same without conman: plain forwarding, and a plain VXLAN
//! link of the kernel with packets of the same size.
//!
//! ```text
//! session ─veth─ node ─veth─ bridge ─veth─ node ─veth─ session
//! ```
//! The plain ways have the same links between namespaces of their own.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use conman_cluster::{Cluster, Ready};
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::{Value, json};

use super::loads::Metric;
use super::namespaces::{Place, ip};
use super::services::{PORT, Services, programs};
use crate::arguments::Networking;
use crate::interruption::{early_end, until_interrupted};
use crate::needs;
use crate::report::{Bar, Chart, Report, Table, shown};
use crate::rivals::{self, Rival};
use crate::statistics::median;

/// Where ip-netns(8) keeps namespaces.
const FOLDER: &str = "/run/netns";
/// Bytes that VXLAN adds to a packet.
const VXLAN_BYTES: u32 = 50;
const MTU: u32 = 1_500;

const METRICS: [Metric; 5] = [
    Metric::LatencyUs,
    Metric::MessagesPerS,
    Metric::Iperf3GbitPerS,
    Metric::FetchGbitPerS,
    Metric::PushGbitPerS,
];

/// Least throughput and greatest latency, of the plain way's.
const LEAST_THROUGHPUT: f64 = 0.9;
const MOST_LATENCY: f64 = 1.15;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    Forwarding,
    HostGateway,
    PlainVxlan,
    Vxlan,
}

impl Way {
    const ALL: [Self; 4] = [
        Self::Forwarding,
        Self::HostGateway,
        Self::PlainVxlan,
        Self::Vxlan,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Forwarding => "plain forwarding",
            Self::HostGateway => "conman, host-gw",
            Self::PlainVxlan => "plain VXLAN",
            Self::Vxlan => "conman, VXLAN",
        }
    }

    /// The plain way that it is compared with.
    const fn plain(self) -> Option<Self> {
        match self {
            Self::Forwarding | Self::PlainVxlan => None,
            Self::HostGateway => Some(Self::Forwarding),
            Self::Vxlan => Some(Self::PlainVxlan),
        }
    }

    const fn kind(self) -> Option<&'static str> {
        match self {
            Self::Forwarding | Self::PlainVxlan => None,
            Self::HostGateway => Some("host-gw"),
            Self::Vxlan => Some("vxlan"),
        }
    }
}

#[derive(Debug, Clone, Serialize)]
struct Measurement {
    way: Way,
    metric: Metric,
    value: f64,
}

/// A client, and what serves it on another machine.
struct Route {
    way: Way,
    client: Place,
    services: Services,
    // Dropped in this order: processes before the namespaces that they run in.
    _serving: Rival,
    _fleet: Option<Cluster>,
}

/// Measures each kind and the plain way in rotation.
///
/// # Errors
/// When a program is missing, or a fleet or a plain network cannot be made.
pub(super) async fn compare(conman: &Path, options: &Networking) -> Result<Report> {
    needs::require("fabrics", &needs::FLEET)?;
    programs()?;
    let ready = conman_cluster::requirements().context("this machine lacks what is named above")?;
    let plain = Plain::new()?;
    let mut measured = Vec::new();
    let ended = until_interrupted(async {
        for ways in Way::ALL.chunks(2) {
            let mut routes = Vec::new();
            for way in ways {
                routes.push(match way.kind() {
                    Some(kind) => of_conman(*way, kind, conman, &ready).await?,
                    None => plain.route(*way).await?,
                });
            }
            measure(options, &routes, &mut measured).await?;
        }
        Ok(())
    })
    .await;
    let early = early_end(ended, measured.len())?;
    Ok(report(options, &measured).ended_early(early))
}

/// Starts the services in a place, at an address of it.
async fn serve(place: &Place, address: IpAddr) -> Result<(Rival, Services)> {
    let this = std::env::current_exe().context("finding this program")?;
    let mut command = place.command(&this);
    command.args(["services", "--listen", &format!("{address}:{PORT}")]);
    let serving = rivals::announcing("conman-bench services", command).await?;
    Ok((serving, Services::at(address, PORT)))
}

/// Two sessions on two nodes of a fleet.
async fn of_conman(way: Way, kind: &str, conman: &Path, ready: &Ready) -> Result<Route> {
    let this = std::env::current_exe().context("finding this program")?;
    let builder = Cluster::builder()
        .binary(conman)
        .nodes(2)
        .members(1)
        .set("net", "pool = [\"10.88.0.0/16\"]")
        .set("net.fabric", &format!("kind = \"{kind}\""))
        .set("net.fabric", "pool = [\"10.96.0.0/16\"]")
        .toml(&format!(
            "[templates.fabric]\nimage = \"{}\"\ncommand = [\"sleep\", \"1000000\"]\nnetwork = \"routed\"\n\
             talk = [\"bench\"]\n",
            conman_cluster::IMAGE
        ));
    let fleet = Cluster::start(&builder, ready, &this).await?;
    let mut places = Vec::new();
    for node in fleet.nodes() {
        let path = format!("/v1/sessions/{}", node.name());
        let spec = json!({"template": "fabric", "node_labels": {"host": node.name()}});
        let answer = node.api().put(&path, &spec).await;
        ensure!(answer.status.is_success(), "{}", answer.text());
        let session: Value = node.api().get(&path).await.json();
        let pid = session["pid"]
            .as_i64()
            .and_then(|pid| i32::try_from(pid).ok());
        places.push(Place::of_process(pid.context("a session has a process")?));
    }
    let [client, server] = <[Place; 2]>::try_from(places)
        .ok()
        .context("two sessions")?;
    let address = address_of(&server).await?;
    let (serving, services) = serve(&server, address).await?;
    Ok(Route {
        way,
        client,
        services,
        _serving: serving,
        _fleet: Some(fleet),
    })
}

/// The address of a session's link.
async fn address_of(place: &Place) -> Result<IpAddr> {
    let mut command = place.command(Path::new("ip"));
    command.args(["-4", "-o", "address", "show", "dev", "eth0"]);
    let output = command.output().await.context("starting ip")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut words = text.split_whitespace().skip_while(|word| *word != "inet");
    let address = words.nth(1).and_then(|word| word.split('/').next());
    let address = address.and_then(|word| word.parse().ok());
    address.with_context(|| format!("a session has no address: {text}"))
}

/// Namespaces that are two machines, a bridge between them, and two places on each.
struct Plain {
    prefix: String,
}

/// The namespaces: places of plain forwarding and of VXLAN, machines, the bridge.
const NAMES: [&str; 7] = ["f1", "f2", "v1", "v2", "m1", "m2", "bridge"];

impl Plain {
    fn new() -> Result<Self> {
        let plain = Self {
            prefix: format!("conman-bench-fabric-{}", std::process::id()),
        };
        for name in NAMES {
            ip(&["netns", "add", &plain.name(name)], "")?;
            plain.batch(name, "link set lo up\n")?;
        }
        plain.batch(
            "bridge",
            "link add bridge type bridge\nlink set bridge up\n",
        )?;
        for (number, other) in [(1, 2), (2, 1)] {
            plain.machine(number, other)?;
        }
        Ok(plain)
    }

    fn machine(&self, number: u8, other: u8) -> Result<()> {
        let machine = self.name(&format!("m{number}"));
        self.batch(
            "bridge",
            &format!(
                "link add m{number} type veth peer name eth0 netns {machine}\n\
                 link set m{number} master bridge up\n"
            ),
        )?;
        let vxlan = MTU - VXLAN_BYTES;
        let mut script = format!(
            "address add 198.18.0.{number}/24 dev eth0\nlink set eth0 up\n\
             link add vx0 address 02:00:00:00:00:0{number} mtu {vxlan} type vxlan id 9 local 198.18.0.{number} \
             dev eth0 dstport 7705 nolearning\n\
             address add 198.18.9.{number}/24 dev vx0\nlink set vx0 up\n\
             route add 198.18.{other}.0/24 via 198.18.0.{other}\n\
             route add 198.18.{other}0.0/24 via 198.18.9.{other} dev vx0\n\
             neigh add 198.18.9.{other} lladdr 02:00:00:00:00:0{other} dev vx0 nud permanent\n"
        );
        for (place, network, mtu) in [("f", "", MTU), ("v", "0", vxlan)] {
            let namespace = self.name(&format!("{place}{number}"));
            let _ = write!(
                script,
                "link add {place}0 mtu {mtu} type veth peer name eth0 mtu {mtu} netns {namespace}\n\
                 address add 198.18.{number}{network}.1/24 dev {place}0\nlink set {place}0 up\n"
            );
        }
        self.batch(&format!("m{number}"), &script)?;
        for (place, network) in [("f", ""), ("v", "0")] {
            let script = format!(
                "address add 198.18.{number}{network}.2/24 dev eth0\nlink set eth0 up\n\
                 route add default via 198.18.{number}{network}.1\n"
            );
            self.batch(&format!("{place}{number}"), &script)?;
        }
        self.shell(
            &format!("m{number}"),
            &format!(
                "echo 1 > /proc/sys/net/ipv4/ip_forward
                 bridge fdb add 02:00:00:00:00:0{other} dev vx0 dst 198.18.0.{other} self permanent"
            ),
        )
    }

    async fn route(&self, way: Way) -> Result<Route> {
        let (places, address) = match way {
            Way::PlainVxlan => (["v1", "v2"], Ipv4Addr::new(198, 18, 20, 2)),
            _ => (["f1", "f2"], Ipv4Addr::new(198, 18, 2, 2)),
        };
        let [client, server] = places.map(|name| Place::Namespace(self.file(name)));
        let (serving, services) = serve(&server, address.into()).await?;
        Ok(Route {
            way,
            client,
            services,
            _serving: serving,
            _fleet: None,
        })
    }

    fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    fn file(&self, name: &str) -> PathBuf {
        Path::new(FOLDER).join(self.name(name))
    }

    fn batch(&self, name: &str, lines: &str) -> Result<()> {
        ip(&["-netns", &self.name(name), "-batch", "-"], lines)
    }

    fn shell(&self, name: &str, script: &str) -> Result<()> {
        let status = Command::new("nsenter")
            .arg(format!("--net={}", self.file(name).display()))
            .args(["--", "sh", "-ec", script])
            .status()
            .context("starting nsenter")?;
        match status.success() {
            true => Ok(()),
            false => bail!("a script failed in a namespace: {script}"),
        }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        for name in NAMES {
            // After a failed start some do not exist. Links disappear with their namespaces.
            let _ = Command::new("ip")
                .args(["netns", "delete", &self.name(name)])
                .stderr(Stdio::null())
                .status();
        }
    }
}

async fn measure(
    options: &Networking,
    routes: &[Route],
    measured: &mut Vec<Measurement>,
) -> Result<()> {
    let length = Duration::from_secs(options.seconds as u64);
    let bar = ProgressBar::new((options.rounds * routes.len() * METRICS.len()) as u64);
    for round in 0..options.rounds {
        for metric in METRICS {
            // Each round begins with another way, so that none always runs after the same one.
            for turn in 0..routes.len() {
                let route = &routes[(turn + round) % routes.len()];
                bar.inc(1);
                let value = metric.measure(&route.client, &route.services, length).await;
                let value = value.with_context(|| format!("{}: {metric:?}", route.way.name()))?;
                measured.extend(value.map(|value| Measurement {
                    way: route.way,
                    metric,
                    value,
                }));
            }
        }
    }
    bar.finish_and_clear();
    Ok(())
}

fn report(options: &Networking, measured: &[Measurement]) -> Report {
    let value = |way: Way, metric: Metric| {
        let of = measured
            .iter()
            .filter(|one| (one.way, one.metric) == (way, metric));
        let values: Vec<f64> = of.map(|one| one.value).collect();
        median(&values)
    };
    let mut table = Table::new(
        ["between two machines"]
            .into_iter()
            .chain(METRICS.map(Metric::title)),
    );
    let mut missed = Vec::new();
    for way in Way::ALL {
        let cells = METRICS.map(|metric| {
            let Some(here) = value(way, metric) else {
                return "–".to_owned();
            };
            let text = format!("{} {}", shown(here), metric.unit());
            let Some(plain) = way.plain().and_then(|plain| value(plain, metric)) else {
                return text;
            };
            let ratio = here / plain;
            let is_kept = match metric {
                Metric::LatencyUs => ratio <= MOST_LATENCY,
                _ => ratio >= LEAST_THROUGHPUT,
            };
            if !is_kept {
                missed.push(format!("{}, {}: {ratio:.2}", way.name(), metric.title()));
            }
            format!("{text} ({ratio:.2})")
        });
        table.row([way.name().to_owned()].into_iter().chain(cells));
    }
    let bars = Way::ALL.into_iter().filter_map(|way| {
        let rate = value(way, Metric::Iperf3GbitPerS)?;
        Some(Bar::one(way.name(), rate))
    });
    Report {
        missed: (!missed.is_empty()).then(|| {
            format!(
                "promised are {LEAST_THROUGHPUT} of the plain way's throughput and {MOST_LATENCY} × its latency: {}",
                missed.join("; ")
            )
        }),
        title: "Fabrics between two machines".to_owned(),
        parts: vec![
            Chart::bars("iperf3", "Gbit/s", bars.collect()).into(),
            table.into(),
            "In parentheses: of the plain way with the same packets.".into(),
        ],
        json: json!({
            "benchmark": "net fabric", "rounds": options.rounds, "measurements": measured,
        }),
    }
}
