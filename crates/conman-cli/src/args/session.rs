//! Arguments of the subcommands that call the daemon.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Subcommand};
use conman_proto::{EventKind, ExecId, PortRange, SessionId, SessionPatch, SessionState};
use jiff::Timestamp;

use super::detach_keys::{DETACH_KEYS, DetachKeys};
use super::files::{CpArgs, LsArgs, WatchArgs};
use super::image::{ImageArgs, ImageLsArgs, ImagePullArgs, ImageRmArgs};
use super::net::NetArgs;
use super::node::{DrainArgs, NodeArgs, NodesArgs, PreemptArgs, RebalanceArgs};
use super::quantity::{parse_duration, parse_duration_ms, parse_duration_s};
use super::run::RunArgs;

/// The subcommands that call the daemon.
#[derive(Debug, Clone, Subcommand)]
pub enum ClientCommand {
    /// Start a session, or find it running, and print its URL
    #[command(alias = "start")]
    Run(Box<RunArgs>),
    /// List the sessions of all nodes
    Ps(PsArgs),
    /// Show everything about a session, as JSON
    Inspect(InspectArgs),
    /// Change labels, idle timeout, ports or end of a session while it runs
    Update(UpdateArgs),
    /// Stop sessions: returns when they are proven dead and released
    #[command(alias = "stop")]
    Rm(RmArgs),
    /// Pause a session: its processes do not run until the next connection, or `conman resume`
    Pause(SessionArgs),
    /// Resume a paused session
    Resume(SessionArgs),
    /// Stop a session and start it again by the same spec
    Restart(SessionArgs),
    /// Send a signal to a session's program, or to a kept command
    Kill(KillArgs),
    /// Run a command in a session; the exit code is the command's
    Exec(ExecArgs),
    /// List the commands of a session that `conman exec --detach` or `--keep` started
    Execs(SessionArgs),
    /// Attach to the terminal of a session's program, or to a kept command; Ctrl-P Ctrl-Q detaches
    Attach(AttachArgs),
    /// Copy files and directories into or out of a session
    Cp(CpArgs),
    /// List a directory of a session
    Ls(LsArgs),
    /// Show changes of files in a directory of a session, as they happen
    Watch(WatchArgs),
    /// Show a session's output
    Logs(LogsArgs),
    /// Show what sessions use: processors, memory, processes, disks, network
    Stats(StatsArgs),
    /// List the processes of a session
    Processes(SessionArgs),
    /// Watch nodes and sessions, and what they use: sort, filter, follow one
    Top,
    /// Show what happens on all nodes, as it happens
    Events(EventsArgs),
    /// Explain a session: what happened, how long it took, why it ended, what to do
    Why(WhyArgs),
    /// List a session's ports with their URLs
    Port(PortArgs),
    /// Attach running sessions to interfaces of their nodes
    Net(NetArgs),
    /// Forward a port of this machine to a port of a session
    Forward(ForwardArgs),
    /// Make a short-lived token that opens connections to one session
    Token(TokenArgs),
    /// Import, pull, list and remove images
    Image(ImageArgs),
    /// List images, as `conman image ls`
    #[command(hide = true)]
    Images(ImageLsArgs),
    /// Pull an image, as `conman image pull`
    #[command(hide = true)]
    Pull(ImagePullArgs),
    /// Remove names of images, as `conman image rm`
    #[command(hide = true)]
    Rmi(ImageRmArgs),
    /// List nodes with their state and load; or forget one that is gone
    #[command(alias = "info")]
    Nodes(NodesArgs),
    /// Empty a node: take no new sessions, stop the present ones in order, a few at a time
    Drain(DrainArgs),
    /// Admit sessions again after a drain
    Undrain(NodeArgs),
    /// Move the sessions that a node has beyond its share, idle ones first
    Rebalance(RebalanceArgs),
    /// Keep new sessions away from a node; those that are there stay and are served
    Cordon(NodeArgs),
    /// Take a cordon back: the node admits sessions again
    Uncordon(NodeArgs),
    /// Preempt a node, as if its machine stopped: kill and release every session, admit no more
    Preempt(PreemptArgs),
    /// Admit sessions again after a preemption
    Readmit(NodeArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Write the manual pages
    #[command(hide = true)]
    Man(ManArgs),
    /// Show the versions of client and daemon
    Version,
}

/// Arguments of `conman port`.
#[derive(Debug, Clone, Args)]
pub struct PortArgs {
    /// The session's name
    pub id: SessionId,
}

/// Arguments of `conman forward`.
#[derive(Debug, Clone, Args)]
pub struct ForwardArgs {
    /// The session's name
    pub id: SessionId,
    /// Port of the session, after the port of this machine's loopback address if another one; 0 for any
    #[arg(value_name = "[LOCAL:]PORT", value_parser = parse_forwarding)]
    pub ports: Forwarding,
}

/// A port of a session, and the local one that leads to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forwarding {
    pub port: u16,
    pub local: u16,
}

/// Arguments of `conman ps`.
#[derive(Debug, Clone, Args)]
pub struct PsArgs {
    /// Show ended sessions too
    #[arg(short, long)]
    pub all: bool,
    /// Only sessions in this state; may be repeated
    #[arg(long, value_name = "STATE", value_parser = state_parser())]
    pub state: Vec<SessionState>,
    /// Only sessions with this label; may be repeated
    #[arg(short, long, value_name = "KEY[=VALUE]")]
    pub label: Vec<String>,
    /// Only sessions of this node; `self` for the node that answers
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// Print names only
    #[arg(short, long)]
    pub quiet: bool,
}

/// Arguments of commands for one session.
#[derive(Debug, Clone, Args)]
pub struct SessionArgs {
    /// The session's name
    pub id: SessionId,
}

/// Arguments of `conman update`.
#[derive(Debug, Clone, Args)]
#[command(group(clap::ArgGroup::new("change").required(true).multiple(true)))]
pub struct UpdateArgs {
    /// Label to set; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair, group = "change")]
    pub label: Vec<(String, String)>,
    /// Label to remove; may be repeated
    #[arg(long, value_name = "KEY", group = "change")]
    pub label_rm: Vec<String>,
    /// Stop or pause it after this time without a connection; 0 for never
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_s, group = "change")]
    pub idle_timeout: Option<u32>,
    /// The further ports that it serves from now on, for example 8080,3000-3010; `none` for no more
    #[arg(long, value_name = "PORTS", value_parser = parse_ports, group = "change")]
    pub ports: Option<PortChoices>,
    /// Stop it after a duration from now, or at an RFC 3339 time; `none`: as its maximum lifetime says
    #[arg(long, value_name = "WHEN", value_parser = parse_expiry, group = "change")]
    pub expires: Option<Expiry>,
    /// The session's name
    pub id: SessionId,
}

/// All further ports of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortChoices(Vec<PortRange>);

fn parse_ports(text: &str) -> Result<PortChoices, String> {
    if text == "none" {
        return Ok(PortChoices(Vec::new()));
    }
    let ports = text.split(',').map(str::parse::<PortRange>);
    let ports: Result<_, _> = ports.collect();
    ports.map(PortChoices).map_err(|error| error.to_string())
}

/// When a session is stopped whatever it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    In(Duration),
    At(Timestamp),
    None,
}

impl UpdateArgs {
    /// The request's body.
    #[must_use]
    pub fn request(&self, now: Timestamp) -> SessionPatch {
        let set = self.label.iter();
        let set = set.map(|(key, value)| (key.clone(), Some(value.clone())));
        let removed = self.label_rm.iter().map(|key| (key.clone(), None));
        SessionPatch {
            labels: set.chain(removed).collect(),
            idle_timeout_s: self.idle_timeout,
            ports: self.ports.clone().map(|ports| ports.0),
            expires_at: self.expires.map(|expiry| match expiry {
                // One too long for a timestamp is as good as the last one.
                Expiry::In(after) => Some(now.checked_add(after).unwrap_or(Timestamp::MAX)),
                Expiry::At(at) => Some(at),
                Expiry::None => None,
            }),
        }
    }
}

/// Arguments of `conman kill`.
#[derive(Debug, Clone, Args)]
pub struct KillArgs {
    /// The session's name
    pub id: SessionId,
    /// Signal by name or number; SIGKILL ends the session
    #[arg(short, long, value_name = "SIGNAL", default_value = "SIGKILL")]
    pub signal: String,
    /// A kept command instead of the session's program
    #[arg(long, value_name = "EXEC")]
    pub exec: Option<ExecId>,
}

/// Arguments of `conman inspect`.
#[derive(Debug, Clone, Args)]
pub struct InspectArgs {
    pub id: SessionId,
}

/// Arguments of `conman rm`.
#[derive(Debug, Clone, Args)]
pub struct RmArgs {
    /// Sessions to stop
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub id: Vec<SessionId>,
    /// Every session of the node that answers
    #[arg(long)]
    pub all: bool,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
    /// Kill them at once, without their stop signal and the time to obey it
    #[arg(short, long)]
    pub force: bool,
    /// Forget them as well: `conman ps --all` no longer shows them
    #[arg(long)]
    pub forget: bool,
    /// Only remove a kept command of the session: kill it, if it has not ended, and forget it
    #[arg(long, value_name = "EXEC", conflicts_with_all = ["all", "forget"])]
    pub exec: Option<ExecId>,
}

/// Arguments of `conman exec`.
#[derive(Debug, Clone, Args)]
pub struct ExecArgs {
    /// Connect standard input
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// Keep its terminal after detaching: `conman attach --exec` comes back to it
    #[arg(long, requires = "tty", requires = "interactive")]
    pub keep: bool,
    /// Start it in the background and print its id, for `conman attach --exec`; with -i its input stays open
    #[arg(short, long, conflicts_with = "keep")]
    pub detach: bool,
    /// Kill it after this time
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_ms)]
    pub timeout: Option<u32>,
    /// Keys that detach from a kept terminal
    #[arg(long, value_name = "KEYS", default_value = DETACH_KEYS, requires = "keep")]
    pub detach_keys: DetachKeys,
    /// Environment variable; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub env: Vec<(String, String)>,
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User name or uid, USER:GROUP allowed
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    pub id: SessionId,
    /// Program and arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub command: Vec<String>,
}

/// Arguments of `conman attach`.
#[derive(Debug, Clone, Args)]
pub struct AttachArgs {
    /// A kept command instead of the terminal of the session's program
    #[arg(long, value_name = "EXEC")]
    pub exec: Option<ExecId>,
    /// Connect standard input to a command without a terminal
    #[arg(short, long, requires = "exec")]
    pub interactive: bool,
    /// Keys that detach, typed one after the other: characters, or ctrl- and one; none when empty
    #[arg(long, value_name = "KEYS", default_value = DETACH_KEYS, allow_hyphen_values = true)]
    pub detach_keys: DetachKeys,
    /// Begin without the last output
    #[arg(long)]
    pub no_scrollback: bool,
    pub id: SessionId,
}

/// Arguments of `conman logs`.
#[derive(Debug, Clone, Args)]
pub struct LogsArgs {
    /// Continue with new output, until the session's container ends; exits with 5 if its node ended
    /// it, or the session moved
    #[arg(short, long)]
    pub follow: bool,
    /// Only this many lines from the end
    #[arg(short = 'n', long, value_name = "N")]
    pub tail: Option<u32>,
    /// Only lines since a time, such as 2030-01-31T18:00:00Z, or a duration before now, such as 10m
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    pub since: Option<Timestamp>,
    /// Put the time before every line
    #[arg(short, long)]
    pub timestamps: bool,
    /// The log of the session's start before this one
    #[arg(short, long, conflicts_with = "follow")]
    pub previous: bool,
    /// On a terminal, let the program's control sequences take effect (colours, but also titles and the clipboard)
    /// instead of showing them
    #[arg(long)]
    pub raw: bool,
    pub id: SessionId,
}

/// Arguments of `conman stats`.
#[derive(Debug, Clone, Args)]
pub struct StatsArgs {
    /// Print a line each second, until the session ends
    #[arg(short, long, requires = "id")]
    pub follow: bool,
    /// Only sessions with this label; may be repeated
    #[arg(short, long, value_name = "KEY[=VALUE]", conflicts_with = "id")]
    pub label: Vec<String>,
    /// What the sessions with the most are listed first by
    #[arg(long, value_name = "WHAT", value_enum)]
    pub sort: Option<StatsOrder>,
    /// Figures are shown once without --follow
    #[arg(long, hide = true, conflicts_with = "follow")]
    pub no_stream: bool,
    /// One session; all running ones unless given
    pub id: Option<SessionId>,
}

/// The figure that `conman stats` sorts by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum StatsOrder {
    Cpu,
    Memory,
    Pids,
    Read,
    Written,
}

/// Arguments of `conman events`.
#[derive(Debug, Clone, Args)]
pub struct EventsArgs {
    /// Only events of this session
    #[arg(long, value_name = "ID")]
    pub session: Option<SessionId>,
    /// Only events of this node; `self` for the node that answers
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// Only events of these kinds, such as node_frozen,session_ready; without it all but
    /// session_phase, the phases of starts
    #[arg(long, value_name = "KIND", value_delimiter = ',', value_parser = str::parse::<EventKind>)]
    pub kind: Vec<EventKind>,
    /// Read only the events of the node that answers
    #[arg(long, conflicts_with = "node")]
    pub local: bool,
    /// Begin after this position, a `cursor` that `--json` shows; 0 for the oldest kept
    #[arg(long, value_name = "CURSOR")]
    pub after: Option<String>,
    /// Show what has happened and stop
    #[arg(long)]
    pub no_follow: bool,
}

/// Arguments of `conman why`.
#[derive(Debug, Clone, Args)]
pub struct WhyArgs {
    pub id: SessionId,
}

/// Arguments of `conman token`.
#[derive(Debug, Clone, Args)]
pub struct TokenArgs {
    pub id: SessionId,
    /// How long connections may be opened with it; 5 minutes unless given
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_s)]
    pub ttl: Option<u32>,
}

/// Arguments of `conman completions`.
#[derive(Debug, Clone, Args)]
pub struct CompletionsArgs {
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Arguments of `conman man`.
#[derive(Debug, Clone, Args)]
pub struct ManArgs {
    /// Directory that exists
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

fn parse_forwarding(text: &str) -> Result<Forwarding, String> {
    let (local, port) = text.split_once(':').unwrap_or((text, text));
    match (port.parse(), local.parse()) {
        (Ok(port), Ok(local)) if port > 0 => Ok(Forwarding { port, local }),
        _ => Err("write a port of the session, such as 5432, or 15432:5432".to_owned()),
    }
}

pub(super) fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("`{}` is not KEY=VALUE", text.escape_default())),
    }
}

fn parse_expiry(text: &str) -> Result<Expiry, String> {
    if text == "none" {
        return Ok(Expiry::None);
    }
    let at = text.parse().map(Expiry::At);
    at.or_else(|_| parse_duration(text).map(Expiry::In))
        .map_err(|_| {
            let shown = text.escape_default();
            format!("`{shown}` is no time: write for example 2h, 2030-01-31T18:00:00Z or none")
        })
}

fn parse_since(text: &str) -> Result<Timestamp, String> {
    let ago = |before| {
        Timestamp::now()
            .checked_sub(before)
            .map_err(|_| String::new())
    };
    let at = text.parse().map_err(|_| String::new());
    at.or_else(|_| parse_duration(text).and_then(ago))
        .map_err(|_| {
            let shown = text.escape_default();
            format!("`{shown}` is no time: write for example 10m or 2030-01-31T18:00:00Z")
        })
}

fn state_parser() -> impl clap::builder::TypedValueParser<Value = SessionState> {
    PossibleValuesParser::new(SessionState::ALL.map(SessionState::as_str))
        .try_map(|name| name.parse::<SessionState>())
}
