//! Arguments of the subcommands that the binary implements: `serve`, `shim`, `doctor`, `bench`,
//! `auth`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use conman_proto::{Generation, RuntimeKind};

/// Arguments of `conman serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Configuration file; /etc/conman/conman.toml when that exists, else the defaults
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Start although the registry's files are lost, or outside the fleet that this node was in:
    /// use only generations above N
    #[arg(long, value_name = "N", value_parser = parse_generation)]
    pub generation_floor: Option<Generation>,
}

/// Arguments of `conman shim`.
#[derive(Debug, Clone, Args)]
pub struct ShimArgs {
    /// Configuration file; /etc/conman/conman.toml when that exists, else the defaults
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The daemon's state directory; no configuration is read
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    pub state_dir: Option<PathBuf>,
    /// Prepare the kernel for so many sessions; 0 changes nothing [default: `limits.max_sessions` if
    /// the configuration's sessions are native, 0 with --state-dir]
    #[arg(long, value_name = "COUNT")]
    pub prepare_for: Option<u32>,
    /// User and group ids of containers; the configuration's `node.id_range` unless given
    #[arg(long, value_name = "FIRST-LAST")]
    pub id_range: Option<String>,
    /// Processors of all containers together; the configuration's `limits.total_cpus` unless given,
    /// and no limit with --state-dir
    #[arg(long, value_name = "CPUS")]
    pub total_cpus: Option<f64>,
    /// How long the fence waits for proof that a container is frozen before it kills it
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    pub freeze_ms: u64,
    /// If another shim runs, wait for its end and take over
    #[arg(long, conflicts_with_all = ["stop", "replace"])]
    pub standby: bool,
    /// Make the running shim continue as this program, with its containers: after an upgrade
    #[arg(long, conflicts_with = "stop")]
    pub replace: bool,
    /// Stop the running shim, unless containers live
    #[arg(long)]
    pub stop: bool,
}

/// Arguments of `conman doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Number of sessions to check the host for
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub target: u64,
    /// Assume sessions of this runtime; of the node's unless given
    #[arg(long, value_enum, value_name = "RUNTIME")]
    pub runtime: Option<DoctorRuntime>,
    /// Assume sessions on Docker's bridge instead of sessions without a network
    #[arg(long)]
    pub bridge: bool,
    /// Raise the kernel settings that are too low, now and in /etc/sysctl.d/90-conman.conf
    #[arg(long)]
    pub fix: bool,
    /// Configuration file; /etc/conman/conman.toml when that exists, else the defaults
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Runtimes whose resource needs are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DoctorRuntime {
    Native,
    Docker,
}

/// Arguments of `conman bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// The benchmarks.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// Kill many sessions at once: `docker kill`, conman on the bridge, conman without a network
    Kill(BenchKillArgs),
    /// Preempt native sessions of 0.01 CPU, idle and spinning in alternation
    Preempt(BenchKillArgs),
    /// Start many sessions: conman's part of every start, phase by phase
    Start(BenchStartArgs),
    /// Echo through conman, nginx, HAProxy and directly, in rotation
    Proxy(BenchProxyArgs),
    /// Echo through a session's own node and through another one, in rotation
    Hop(BenchProxyArgs),
    /// Hold many idle tunnels open: the daemon's memory for each
    Tunnels(BenchTunnelsArgs),
    /// Hold many sessions: what one more costs, in time and in memory
    Density(BenchDensityArgs),
    /// Echo WebSocket messages: the program inside the benchmarks' sessions
    #[command(hide = true)]
    Echo(BenchEchoArgs),
    /// Forward everything to one address with conman's proxy alone
    #[command(hide = true)]
    Forward(BenchForwardArgs),
}

/// Arguments of `conman bench echo`.
#[derive(Debug, Clone, Args)]
pub struct BenchEchoArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: std::net::SocketAddr,
}

/// Arguments of `conman bench forward`.
#[derive(Debug, Clone, Args)]
pub struct BenchForwardArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: std::net::SocketAddr,
    /// Address that all sessions lead to
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub backend: Option<std::net::SocketAddr>,
    /// Address to listen on for other nodes
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub peers: Option<std::net::SocketAddr>,
    /// Address of the node that has all sessions, for other nodes
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub node: Option<std::net::SocketAddr>,
    /// File with the secret that authenticates nodes
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}

/// Arguments of `conman bench kill` and `conman bench preempt`.
#[derive(Debug, Clone, Args)]
pub struct BenchKillArgs {
    /// Containers per measurement
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub count: u32,
    /// How often every variant is measured, in alternation
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Write a chart of the result to FILE
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of `conman bench start`.
#[derive(Debug, Clone, Args)]
pub struct BenchStartArgs {
    /// Sessions to start
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub count: u32,
    /// Concurrent starts
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: u32,
    /// Write a chart of the result to FILE
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of `conman bench density`.
#[derive(Debug, Clone, Args)]
pub struct BenchDensityArgs {
    /// Sessions to hold
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub count: u32,
    /// Runtime of the sessions
    #[arg(long, value_name = "RUNTIME", default_value = "native", value_parser = runtime)]
    pub runtime: RuntimeKind,
    /// Concurrent starts
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: u32,
    /// Containers that `crun run` and `docker run` start for comparison; 0 leaves them out
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=200))]
    pub rivals: u32,
    /// Sessions alive while these are started
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub rivals_at: u32,
    /// Write the curve of the start's latency to FILE
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

fn runtime(text: &str) -> Result<RuntimeKind, String> {
    match text {
        "native" => Ok(RuntimeKind::Native),
        "docker" => Ok(RuntimeKind::Docker),
        _ => Err("it is native or docker".to_owned()),
    }
}

/// Arguments of `conman bench proxy` and `conman bench hop`.
#[derive(Debug, Clone, Args)]
pub struct BenchProxyArgs {
    /// How often every path is measured, in rotation
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Length of one measurement
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = super::quantity::parse_duration)]
    pub duration: std::time::Duration,
    /// Write a chart of the result to FILE
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of `conman bench tunnels`.
#[derive(Debug, Clone, Args)]
pub struct BenchTunnelsArgs {
    /// Tunnels to hold open
    #[arg(long, value_name = "N", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub count: u32,
}

/// Arguments of `conman auth`.
#[derive(Debug, Clone, Args)]
pub struct AuthArgs {
    #[command(subcommand)]
    pub command: AuthCommand,
}

/// Commands about tokens.
#[derive(Debug, Clone, Subcommand)]
pub enum AuthCommand {
    /// Make a bearer token: prints it once, with the entry for the token file
    NewToken(NewTokenArgs),
}

/// Arguments of `conman auth new-token`.
#[derive(Debug, Clone, Args)]
pub struct NewTokenArgs {
    /// Name of the token's holder, for the journal
    #[arg(long)]
    pub name: String,
    /// What the token allows
    #[arg(long, value_enum)]
    pub scope: TokenScope,
}

/// What a bearer token allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TokenScope {
    /// Everything, including preemption
    Admin,
    /// Start, stop, use sessions, and make connect tokens
    Frontend,
    /// Read only
    Read,
}

impl TokenScope {
    /// The name in the token file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Frontend => "frontend",
            Self::Read => "read",
        }
    }
}

/// Highest floor of generations: more than enough are left above it for any fleet.
const MAX_FLOOR: u64 = 1 << 62;

fn parse_generation(text: &str) -> Result<Generation, String> {
    let number = text.parse().ok().filter(|number| *number <= MAX_FLOOR);
    number.and_then(Generation::new).ok_or_else(|| {
        format!(
            "`{}` is not a generation: give a whole number from 1 to {MAX_FLOOR}, which leaves \
             room for new sessions",
            text.escape_default()
        )
    })
}
