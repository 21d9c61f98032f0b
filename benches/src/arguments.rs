//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use conman_proto::RuntimeKind;

use crate::overhead::Load;
use crate::storm::Way;
use crate::storm::old::OldNode;

/// Measures a separate conman, which it starts and removes
#[derive(Debug, Parser)]
#[command(name = "conman-bench", bin_name = "conman bench", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) benchmark: Benchmark,
    /// The conman to measure; the one beside this program unless given, else the one in PATH
    #[arg(long, global = true, value_name = "PROGRAM")]
    pub(crate) conman: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Write a report to FILE, as HTML with charts, and its data beside it, as JSON
    #[arg(long, global = true, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

/// The benchmarks, and the servers that they need.
#[derive(Debug, Subcommand)]
pub(crate) enum Benchmark {
    /// Kill many sessions at once, and as many containers with `docker kill`
    Kill(Kill),
    /// Preempt native sessions of 0.01 CPU, idle and spinning in alternation
    Preempt(Killing),
    /// Start many sessions: every phase of a start, and the time to the first answer next to plain containers
    Start(Starting),
    /// Echo through conman, nginx, HAProxy and directly, in rotation
    Proxy(Proxying),
    /// Echo through a session's own node and through another one, in rotation
    Hop(Echoing),
    /// Latency, bulk and Redis over every kind of network: sessions', Docker's, plain ones
    Net(Networking),
    /// Preempt the nodes of a fleet behind HAProxy, the old way and conman's: what clients see
    Storm(Storming),
    /// Run the same programs as a plain process, in sessions and in Docker: what containers cost
    Overhead(Overhead),
    /// Hold many idle tunnels open: the daemon's memory for each
    Tunnels(Tunnelling),
    /// Copy files into and out of a session, against `docker cp` and `tar` through `docker exec`
    Files(Copying),
    /// Hold many sessions: what one more costs, in time and in memory
    Density(Density),
    /// Pause sessions: what they still use, and how soon they answer again
    Pause(Pausing),
    /// Echo WebSocket messages: the program inside the benchmarks' sessions
    #[command(hide = true)]
    Echo(Listening),
    /// A node of the old way, for the storm
    #[command(hide = true)]
    OldNode(OldNode),
    /// Serve echo, bulk, iperf3 and Redis
    #[command(hide = true)]
    Services(Listening),
    /// Load such services
    #[command(hide = true)]
    Load(Loading),
    /// Forward everything to one address with conman's proxy alone
    #[command(hide = true)]
    Forward(Forwarding),
}

impl Benchmark {
    /// Whether it is none of the servers and loads that benchmarks start.
    pub(crate) const fn measures(&self) -> bool {
        !matches!(
            self,
            Self::Echo(_) | Self::OldNode(_) | Self::Services(_) | Self::Load(_) | Self::Forward(_)
        )
    }
}

#[derive(Debug, Args)]
pub(crate) struct Kill {
    #[command(flatten)]
    pub(crate) killing: Killing,
    /// Runtime of the sessions: native, docker or gvisor
    #[arg(long, value_name = "RUNTIME", default_value = "docker", value_parser = runtime)]
    pub(crate) runtime: RuntimeKind,
}

#[derive(Debug, Args)]
pub(crate) struct Killing {
    /// Containers per measurement
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = from_to(1, 1_000))]
    pub(crate) count: usize,
    /// How often every variant is measured, in alternation
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = from_to(1, 100))]
    pub(crate) rounds: usize,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Copying {
    /// Size of the big file in MiB
    #[arg(long, value_name = "N", default_value_t = 1_024, value_parser = from_to(1, 100_000))]
    pub(crate) mebibytes: usize,
    /// Small files
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = from_to(1, 1_000_000))]
    pub(crate) files: usize,
    /// How often every copy is made, in alternation
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = from_to(1, 100))]
    pub(crate) rounds: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Starting {
    /// Sessions to start
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = from_to(1, 10_000))]
    pub(crate) count: usize,
    /// Concurrent starts
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = from_to(1, 256))]
    pub(crate) parallel: usize,
    /// Instead: native sessions one at a time, without a pool and with one of N containers made ahead, in alternation
    #[arg(long, value_name = "N", conflicts_with = "parallel", value_parser = from_to(1, 64))]
    pub(crate) pool: Option<usize>,
    /// Runtime of the sessions: native, docker or gvisor
    #[arg(long, value_name = "RUNTIME", default_value = "docker", value_parser = runtime)]
    pub(crate) runtime: RuntimeKind,
    /// Starts of a session and of a plain container, one after the other, to their first answers; 0 leaves them out
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = from_to(0, 200))]
    pub(crate) rivals: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Echoing {
    /// How often every path is measured, in rotation
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = from_to(1, 100))]
    pub(crate) rounds: usize,
    /// Length of one measurement in seconds
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = number)]
    pub(crate) seconds: f64,
}

impl Echoing {
    pub(crate) fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

#[derive(Debug, Args)]
pub(crate) struct Proxying {
    #[command(flatten)]
    pub(crate) echoing: Echoing,
    /// Runtime of the session: native, docker or gvisor
    #[arg(long, value_name = "RUNTIME", default_value = "docker", value_parser = runtime)]
    pub(crate) runtime: RuntimeKind,
}

#[derive(Debug, Args)]
pub(crate) struct Networking {
    /// Instead: clean up after many routed sessions, next to deleting as many links one by one
    #[arg(long, group = "instead")]
    pub(crate) cleanup: bool,
    /// Instead: sessions of two nodes over each kind of fabric, next to plain forwarding and plain VXLAN
    #[arg(long, group = "instead")]
    pub(crate) fabric: bool,
    /// Instead: start routed and loopback sessions in alternation
    #[arg(long, group = "instead")]
    pub(crate) start: bool,
    /// Instead: preempt routed and loopback sessions in alternation
    #[arg(long, group = "instead")]
    pub(crate) preempt: bool,
    /// Sessions of these: alive next to the starts, cleaned up, or preempted
    #[arg(long, value_name = "N", default_value_t = 200, requires = "instead", value_parser = from_to(1, 20_000))]
    pub(crate) count: usize,
    /// How often every way is measured, in rotation
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = from_to(1, 100))]
    pub(crate) rounds: usize,
    /// Length of one measurement in seconds
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = from_to(1, 60))]
    pub(crate) seconds: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Overhead {
    /// How often every way is measured, in rotation
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = from_to(1, 100))]
    pub(crate) rounds: usize,
    /// Also a session of this runtime: docker or gvisor
    #[arg(long, value_name = "RUNTIME", default_value = "native", value_parser = runtime)]
    pub(crate) runtime: RuntimeKind,
    /// Only these loads
    #[arg(long, value_name = "LOAD", value_delimiter = ',', value_enum)]
    pub(crate) loads: Vec<Load>,
    /// Length of each measurement of disks and databases in seconds
    #[arg(long, value_name = "S", default_value_t = 3.0, value_parser = number)]
    pub(crate) seconds: f64,
    /// Rows of hpcc's matrices
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = from_to(100, 100_000))]
    pub(crate) size: usize,
    /// Clients of the database at a time
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,4,16,64", value_parser = from_to(1, 1_000))]
    pub(crate) threads: Vec<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct Storming {
    /// Nodes of the fleet
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = from_to(2, 20))]
    pub(crate) nodes: usize,
    /// Sessions, each with a client
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = from_to(1, 250))]
    pub(crate) sessions: usize,
    /// Length of each way's storm in minutes
    #[arg(long, value_name = "M", default_value_t = 5.0, value_parser = number)]
    pub(crate) minutes: f64,
    /// Time from a notice to the end of the machine in seconds
    #[arg(long, value_name = "S", default_value_t = 5.0, value_parser = number)]
    budget: f64,
    /// Time between two notices in seconds
    #[arg(long, value_name = "S", default_value_t = 10.0, value_parser = number)]
    every: f64,
    /// Only these ways
    #[arg(long, value_name = "WAY", value_delimiter = ',', value_enum)]
    pub(crate) ways: Vec<Way>,
    /// Members of etcd
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = from_to(1, 9))]
    pub(crate) members: usize,
    /// Seed of the order of the nodes and of the moments of connections
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Instead: take conman through every way in which a node leaves or is lost
    #[arg(long, conflicts_with_all = ["ways", "minutes", "budget", "every"])]
    pub(crate) every_way: bool,
    /// One step of each kind
    #[arg(long, requires = "every_way")]
    pub(crate) short: bool,
}

impl Storming {
    pub(crate) fn length(&self) -> Duration {
        Duration::from_secs_f64(self.minutes * 60.0)
    }

    pub(crate) fn budget(&self) -> Duration {
        Duration::from_secs_f64(self.budget)
    }

    pub(crate) fn every(&self) -> Duration {
        Duration::from_secs_f64(self.every)
    }
}

#[derive(Debug, Args)]
pub(crate) struct Loading {
    pub(crate) kind: LoadKind,
    /// Address of the service
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) address: SocketAddr,
    /// Path of the requests
    #[arg(long, default_value = "/")]
    pub(crate) path: String,
    /// Proxy that is asked to CONNECT
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) through: Option<SocketAddr>,
    /// Connections for echo
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = from_to(1, 1_000))]
    pub(crate) connections: usize,
    /// Length of the load in seconds
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = from_to(1, 60))]
    pub(crate) seconds: usize,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LoadKind {
    Echo,
    Fetch,
    Push,
}

#[derive(Debug, Args)]
pub(crate) struct Tunnelling {
    /// Tunnels to hold open
    #[arg(long, value_name = "N", default_value_t = 5_000, value_parser = from_to(1, 1_000_000))]
    pub(crate) count: usize,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Density {
    /// Sessions to hold
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = from_to(1, 20_000))]
    pub(crate) count: usize,
    /// Runtime of the sessions: native, docker or gvisor
    #[arg(long, value_name = "RUNTIME", default_value = "native", value_parser = runtime)]
    pub(crate) runtime: RuntimeKind,
    /// Network of the sessions
    #[arg(long, value_enum, default_value = "loopback")]
    pub(crate) network: DensityNetwork,
    /// Concurrent starts
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = from_to(1, 256))]
    pub(crate) parallel: usize,
    /// Containers that `crun run` and `docker run` start for comparison; 0 leaves them out
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = from_to(0, 200))]
    pub(crate) rivals: usize,
    /// Sessions alive while these are started
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = from_to(1, 20_000))]
    pub(crate) rivals_at: usize,
    /// How the sessions' roots are made; with `btrfs` a second run in a daemon with overlays is shown beside it
    #[arg(long, value_enum, default_value = "overlay")]
    pub(crate) store: DensityStore,
    /// `ptys` of the sessions, if their template is to have it
    #[arg(long, value_name = "N", value_parser = from_to(0, 1_024))]
    pub(crate) ptys: Option<usize>,
}

/// Stores of native sessions' roots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DensityStore {
    /// An overlay of the image's layers for each session
    Overlay,
    /// A snapshot of the image for each session
    Btrfs,
}

impl DensityStore {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Overlay => "overlay",
            Self::Btrfs => "btrfs",
        }
    }
}

/// Networks of native sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DensityNetwork {
    /// Nothing but the session's loopback
    Loopback,
    /// That, and a proxy and resolver inside for what the template lists
    Egress,
    /// A link and an address for each session
    Routed,
}

impl DensityNetwork {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Egress => "egress",
            Self::Routed => "routed",
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Pausing {
    /// Sessions to pause
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = from_to(1, 10_000))]
    pub(crate) count: usize,
    /// Memory that the program of each has filled, in MiB
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = from_to(1, 1_024))]
    pub(crate) mebibytes: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Listening {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: SocketAddr,
}

#[derive(Debug, Args)]
pub(crate) struct Forwarding {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: SocketAddr,
    /// Address that all sessions lead to
    #[arg(long, value_name = "ADDRESS:PORT", required_unless_present = "node")]
    pub(crate) backend: Option<SocketAddr>,
    /// Address to listen on for other nodes
    #[arg(long, value_name = "ADDRESS:PORT", requires = "secret_file")]
    pub(crate) peers: Option<SocketAddr>,
    /// Address of the node that has all sessions, for other nodes
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        requires = "secret_file",
        conflicts_with = "backend"
    )]
    pub(crate) node: Option<SocketAddr>,
    /// File with the secret that authenticates nodes
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

fn runtime(text: &str) -> Result<RuntimeKind, String> {
    match text {
        "native" => Ok(RuntimeKind::Native),
        "gvisor" => Ok(RuntimeKind::Gvisor),
        "docker" => Ok(RuntimeKind::Docker),
        _ => Err("it is native, gvisor or docker".to_owned()),
    }
}

/// A time that is neither nothing nor endless.
fn number(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| *number > 0.0 && *number <= 1_000.0);
    number.ok_or_else(|| "it is a number above 0, up to 1000".to_owned())
}

fn from_to(least: usize, most: usize) -> impl Fn(&str) -> Result<usize, String> + Clone {
    move |text| {
        let number = text.parse().ok();
        let number = number.filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("it is a whole number from {least} to {most}"))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_arguments_do_not_contradict_each_other() {
        Arguments::command().debug_assert();
    }
}
