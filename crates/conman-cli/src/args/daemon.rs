//! Arguments of the subcommands that the binary implements: `serve`, `shim`, `doctor`, `bench`,
//! `auth`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use conman_proto::Generation;

/// Arguments of `conman serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Configuration file [env: CONMAN_CONFIG]; /etc/conman/conman.toml when that exists, else the
    /// defaults
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Only check the configuration, as `conman config check`
    #[arg(long)]
    pub check: bool,
    /// Start although the registry's files are lost, or outside the fleet that this node was in:
    /// use only generations above N
    #[arg(long, value_name = "N", value_parser = parse_generation)]
    pub generation_floor: Option<Generation>,
}

/// Arguments of `conman config`.
#[derive(Debug, Clone, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// Commands about the configuration file.
#[derive(Debug, Clone, Subcommand)]
pub enum ConfigCommand {
    /// Report every mistake in the file, with its line; nothing is started or changed
    Check {
        /// Configuration file; as for `conman serve` unless given
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

/// Arguments of `conman shim`.
#[derive(Debug, Clone, Args)]
pub struct ShimArgs {
    /// Configuration file [env: CONMAN_CONFIG]; /etc/conman/conman.toml when that exists, else the
    /// defaults
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The daemon's state directory; no configuration is read
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    pub state_dir: Option<PathBuf>,
    /// Prepare the kernel for up to so many sessions, as their number grows; 0 changes nothing [default:
    /// `limits.max_sessions` if the configuration's sessions are native, 0 with --state-dir]
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

/// Arguments of `conman notice`.
#[derive(Debug, Clone, Args)]
pub struct NoticeArgs {
    #[command(subcommand)]
    pub command: NoticeCommand,
}

/// Commands about the sources of preemption notices.
#[derive(Debug, Clone, Subcommand)]
pub enum NoticeCommand {
    /// Ask each source once, also those that `[preempt]` does not switch on; exits with 1 if one that it does
    /// switch on does not answer
    Test {
        /// Configuration file; as for `conman serve` unless given
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
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
    /// Configuration file [env: CONMAN_CONFIG]; /etc/conman/conman.toml when that exists, else the
    /// defaults
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Runtimes whose resource needs are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DoctorRuntime {
    Native,
    Gvisor,
    Docker,
}

/// Arguments of `conman bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Arguments of `conman-bench`: a benchmark and its options; `--help` lists them
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENT"
    )]
    pub arguments: Vec<OsString>,
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
