//! Arguments of `conman run`.

use std::collections::BTreeMap;
use std::str::FromStr as _;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use conman_proto::{
    Bandwidth, IdleAction, Network, OnNodeLoss, PortRange, Rate, SessionId, SessionRequest,
};

use super::quantity::{parse_cpus, parse_duration_ms, parse_duration_s, parse_size};
use super::session::parse_pair;

/// Arguments of `conman run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// The session's name: a-z, 0-9 and '-', at most 63 characters; generated unless given
    #[arg(value_parser = parse_id)]
    pub id: Option<SessionId>,
    /// The session's name, as the first argument
    #[arg(long = "name", hide = true, value_name = "ID", conflicts_with = "id", value_parser = parse_id)]
    pub name: Option<SessionId>,
    /// Template in the node's configuration; the options below override it
    #[arg(long, value_name = "NAME")]
    pub template: Option<String>,
    /// Image, as the runtime knows it
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Port that the program serves inside the container; `none` for no port
    #[arg(long, value_name = "PORT", value_parser = parse_port)]
    pub port: Option<PortChoice>,
    /// Further ports that it serves, for example 8080,3000-3010
    #[arg(long, value_name = "PORTS", value_delimiter = ',')]
    pub ports: Vec<PortRange>,
    /// Environment variable; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub env: Vec<(String, String)>,
    /// Label for filters; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub label: Vec<(String, String)>,
    /// Only on a node of the fleet with this label; repeatable
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub node_label: Vec<(String, String)>,
    /// Memory limit, for example 256M
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Limit of the disk space that its files and its log take, for example 2G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub disk: Option<u64>,
    /// CPU limit in cores, for example 0.5
    #[arg(long, value_name = "CORES", value_parser = parse_cpus)]
    pub cpus: Option<CpuCount>,
    /// Most processes and threads at a time
    #[arg(long, value_name = "N")]
    pub pids: Option<u32>,
    /// Limit of what it receives, for example 100mbit
    #[arg(long, value_name = "RATE", value_parser = Rate::from_str)]
    pub bandwidth_in: Option<Rate>,
    /// Limit of what it sends, for example 20mbit
    #[arg(long, value_name = "RATE", value_parser = Rate::from_str)]
    pub bandwidth_out: Option<Rate>,
    /// Bind mount below the node's allow-list; {id} stands for the session's name; may be repeated
    #[arg(short = 'v', long, alias = "volume", value_name = "SOURCE:TARGET[:ro]")]
    pub bind: Vec<String>,
    /// How the container is connected
    #[arg(long, value_name = "NETWORK", value_parser = Network::from_str)]
    pub network: Option<Network>,
    /// What it may connect to, within its template's list; may be repeated
    #[arg(long, value_name = "HOST:PORT")]
    pub egress: Vec<String>,
    /// HTTP path whose 2xx or 3xx answer means ready
    #[arg(long, value_name = "PATH")]
    pub ready_path: Option<String>,
    /// Bound on the time until it is ready
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_s)]
    pub ready_timeout: Option<u32>,
    /// Stop the session after this time without a connection; 0 for never
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_s)]
    pub idle_timeout: Option<u32>,
    /// What to do with a session that is idle for so long
    #[arg(long, value_name = "WHAT", value_parser = idle_action_parser())]
    pub idle_action: Option<IdleAction>,
    /// Stop the session this long after its start; 0 for never
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_s)]
    pub max_lifetime: Option<u32>,
    /// Signal to send first on preemption, for example SIGTERM
    #[arg(long, value_name = "SIGNAL")]
    pub preempt_signal: Option<String>,
    /// Time between that signal and SIGKILL
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_ms)]
    pub preempt_grace: Option<u32>,
    /// Signal to send first when it is stopped, for example SIGTERM; the image's when absent
    #[arg(long, value_name = "SIGNAL", requires = "stop_grace")]
    pub stop_signal: Option<String>,
    /// Time between that signal and SIGKILL
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_ms)]
    pub stop_grace: Option<u32>,
    /// Run its program below an init; `false` for a program that is one
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub init: Option<bool>,
    /// When its node is lost, preempted or drained: wait for a connection, or restart elsewhere
    #[arg(long, value_name = "WHAT", value_parser = on_node_loss_parser())]
    pub on_node_loss: Option<OnNodeLoss>,
    /// Run its program in a terminal, for `conman attach`
    #[arg(short, long)]
    pub tty: bool,
    /// Attach to its terminal once it runs; Ctrl-P Ctrl-Q detaches
    #[arg(short, long, requires = "tty", conflicts_with = "no_wait")]
    pub interactive: bool,
    /// A session always runs in the background
    #[arg(short, long, hide = true, conflicts_with = "rm")]
    pub detach: bool,
    /// Show its output or terminal until its program ends, then remove the session; also when this
    /// command is interrupted
    #[arg(long, conflicts_with = "no_wait")]
    pub rm: bool,
    /// Do not wait until the session is ready
    #[arg(long)]
    pub no_wait: bool,
    /// Program and arguments instead of the template's or the image's
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl RunArgs {
    /// The session's name, if one is given.
    #[must_use]
    pub fn id(&self) -> Option<&SessionId> {
        self.id.as_ref().or(self.name.as_ref())
    }

    /// The request's body: only the given fields, so that the template sets the rest.
    #[must_use]
    pub fn request(&self) -> SessionRequest {
        fn given<T: Clone>(list: &[T]) -> Option<Vec<T>> {
            (!list.is_empty()).then(|| list.to_vec())
        }
        fn map(pairs: &[(String, String)]) -> Option<BTreeMap<String, String>> {
            (!pairs.is_empty()).then(|| pairs.iter().cloned().collect())
        }
        let bandwidth = Bandwidth {
            inward: self.bandwidth_in,
            outward: self.bandwidth_out,
        };
        SessionRequest {
            template: self.template.clone(),
            image: self.image.clone(),
            command: given(&self.command),
            // A program on the command line comes with its arguments; the template's belong to the
            // template's program.
            args: (!self.command.is_empty()).then(Vec::new),
            env: map(&self.env),
            port: match self.port {
                Some(choice) => Some(choice.0),
                // A command that runs to its end need not serve the template's port.
                None if self.rm && !self.command.is_empty() => Some(None),
                None => None,
            },
            ports: given(&self.ports),
            strip_prefix: None,
            ready_path: self.ready_path.clone(),
            ready_timeout_s: self.ready_timeout,
            network: self.network.clone(),
            egress: given(&self.egress),
            talk: None,
            bandwidth: (!bandwidth.is_unlimited()).then_some(bandwidth),
            memory_bytes: self.memory,
            disk_bytes: self.disk,
            disk_inodes: None,
            cpus: self.cpus.map(|cpus| cpus.0),
            pids: self.pids,
            ptys: None,
            labels: map(&self.label),
            binds: given(&self.bind),
            idle_timeout_s: self.idle_timeout,
            idle_action: self.idle_action,
            max_lifetime_s: self.max_lifetime,
            preempt_signal: self.preempt_signal.clone(),
            preempt_grace_ms: self.preempt_grace,
            stop_signal: self.stop_signal.clone(),
            stop_grace_ms: self.stop_grace,
            init: self.init,
            tty: self.tty.then_some(true),
            log_streams: None,
            on_node_loss: self.on_node_loss,
            node_labels: map(&self.node_label),
        }
    }
}

/// A port, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortChoice(pub Option<u16>);

/// A number of processor cores, positive and finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CpuCount(pub f64);

fn parse_id(text: &str) -> Result<SessionId, String> {
    text.parse().map_err(|error| {
        let looks_like_image = text.contains(['/', ':', '.']);
        match looks_like_image {
            true => format!("{error}; an image is given as: conman run NAME --image {text}"),
            false => format!("{error}"),
        }
    })
}

fn parse_port(text: &str) -> Result<PortChoice, String> {
    match (text, text.parse::<u16>()) {
        ("none", _) => Ok(PortChoice(None)),
        (_, Ok(port)) if port > 0 => Ok(PortChoice(Some(port))),
        _ => Err(format!(
            "`{}` is not a port: 1 to 65535, or none",
            text.escape_default()
        )),
    }
}

fn on_node_loss_parser() -> impl clap::builder::TypedValueParser<Value = OnNodeLoss> {
    PossibleValuesParser::new(["wait", "restart"]).map(|name| match name.as_str() {
        "restart" => OnNodeLoss::Restart,
        _ => OnNodeLoss::Wait,
    })
}

fn idle_action_parser() -> impl clap::builder::TypedValueParser<Value = IdleAction> {
    PossibleValuesParser::new(["stop", "pause"]).map(|name| match name.as_str() {
        "pause" => IdleAction::Pause,
        _ => IdleAction::Stop,
    })
}
