//! What a session is to run, as requested and as resolved.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Bandwidth, Network, PortRange, RuntimeKind};

/// What becomes of a session whose node is lost, preempted or drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnNodeLoss {
    /// It is started on another node when a client connects to it.
    #[default]
    Wait,
    /// The fleet starts it on another node by itself.
    Restart,
}

impl fmt::Display for OnNodeLoss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Wait => "wait",
            Self::Restart => "restart",
        })
    }
}

/// What happens to a session that has had no connection for `idle_timeout_s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IdleAction {
    /// It is stopped.
    #[default]
    Stop,
    /// It is paused until the next connection. With the native runtime only.
    Pause,
}

impl fmt::Display for IdleAction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Stop => "stop",
            Self::Pause => "pause",
        })
    }
}

/// How a session lost its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeLoss {
    /// Declared dead, or its machine was rebooted.
    Lost,
    Preempted,
    Drained,
}

impl fmt::Display for NodeLoss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Lost => "lost",
            Self::Preempted => "preempted",
            Self::Drained => "drained",
        })
    }
}

/// That the fleet started a session again, because its node had gone: by itself, or when a connection
/// came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Restarted {
    /// The node that it was on.
    pub from: String,
    /// What became of that node.
    pub because: NodeLoss,
    /// Which one it is of the restarts that followed each other; 0 where a connection came first.
    pub count: u32,
    /// When the first of them began, or the connection came.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
}

/// What a caller asks of a session: a template's name and whatever it overrides.
///
/// A field that is absent comes from the template, or from the documented default when there is
/// no template. `env` and `labels` are merged key by key, every other field replaces.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SessionRequest {
    /// Name of a template in the node's configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 63)]
    pub template: Option<String>,
    /// Image reference as the runtime knows it, for example `python:demo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 512)]
    pub image: Option<String>,
    /// Program and leading arguments; the image's own when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 256)]
    pub command: Option<Vec<String>>,
    /// Arguments appended to `command`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 256)]
    pub args: Option<Vec<String>>,
    /// Environment variables, merged over the template's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// TCP port that the program serves inside the container; null for none.
    ///
    /// Absent (take the template's) and null (no port) differ, hence the two levels.
    #[serde(skip_serializing_if = "Option::is_none", with = "present_or_null")]
    #[schema(value_type = Option<u16>, minimum = 1, maximum = 65_535)]
    pub port: Option<Option<u16>>,
    /// Further ports that its programs serve, such as `[8080, "3000-3010"]`; with `"public": true` also to
    /// callers without a token. Needs a `port`, which alone decides when the session is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<crate::PortEntry>>, max_items = 64)]
    pub ports: Option<Vec<PortRange>>,
    /// Whether `/s/{id}` is removed from the path of requests that have it; true when absent. A program
    /// that gets `false` serves its pages below that path itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strip_prefix: Option<bool>,
    /// HTTP path whose 2xx or 3xx answer means ready; a TCP connection suffices when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 2_048, pattern = "^/")]
    pub ready_path: Option<String>,
    /// Bound on the time from the container's start to readiness, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 600)]
    pub ready_timeout_s: Option<u32>,
    /// How the container is connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// What it may connect to: `HOST:PORT`, `*.HOST:PORT` (names below HOST), `NETWORK:PORT`, or
    /// `internet`. A request can only narrow its template's list; nothing when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 128)]
    pub egress: Option<Vec<String>>,
    /// Groups of sessions that may connect to each other, on all nodes of the fleet: those with a group in common.
    /// Only a template can give them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 8)]
    pub talk: Option<Vec<String>>,
    /// Limits of what it sends and receives. A request can only lower its template's; no limit when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Memory limit in bytes, swap included.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 6_291_456)]
    pub memory_bytes: Option<u64>,
    /// Limit of the disk space that its files and its log take, in bytes; binds do not count. With
    /// the native runtime only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 67_108_864)]
    pub disk_bytes: Option<u64>,
    /// Limit of its files and directories; one for each 16 KiB of `disk_bytes` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1_024)]
    pub disk_inodes: Option<u64>,
    /// CPU limit in cores, for example 0.5.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0.01)]
    pub cpus: Option<f64>,
    /// Most processes and threads at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub pids: Option<u32>,
    /// Maximum number of terminals that its programs open at a time; 0 for no `/dev/pts`. When absent it is 4, and
    /// without `tty` there is no `/dev/pts` before the first command with a terminal. With the native runtime only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 4_096)]
    pub ptys: Option<u32>,
    /// Free-form labels for filters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// `SOURCE:TARGET` or `SOURCE:TARGET:ro`; `{id}` in SOURCE becomes the session's id, and
    /// SOURCE must lie below the node's allow-list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binds: Option<Vec<String>>,
    /// Stop the session after so many seconds without a tunnel or request; 0 for never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_s: Option<u32>,
    /// Whether a session that is idle for so long is stopped or paused; `stop` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_action: Option<IdleAction>,
    /// Stop the session so many seconds after its start, whatever it does; 0 for never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_lifetime_s: Option<u32>,
    /// Signal sent first on preemption, for example `SIGTERM`; none when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preempt_signal: Option<String>,
    /// Time between `preempt_signal` and SIGKILL, in milliseconds, within the notice's budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 60_000)]
    pub preempt_grace_ms: Option<u32>,
    /// Signal sent first when the session is stopped (by `DELETE` without `force`, at the end of its idle time or
    /// lifetime, by a restart), for example `SIGTERM`; with `stop_grace_ms` only. When absent, the image's, or
    /// `SIGTERM`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// Time between that signal and SIGKILL, in milliseconds; 0 for SIGKILL at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 60_000)]
    pub stop_grace_ms: Option<u32>,
    /// Run the program below an init, which forwards signals to it, reaps orphans and ends with it; `true` when
    /// absent. `false` for a program that is an init itself; with the native runtime only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<bool>,
    /// Run the program in a terminal, which is kept, with its last 64 KiB, while no client is
    /// attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tty: Option<bool>,
    /// Keep standard output and standard error of a native session apart in its log. Past output then comes
    /// ordered by output, not by time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_streams: Option<bool>,
    /// What becomes of the session when its node is lost, preempted or drained: `wait` for the
    /// next connection when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_node_loss: Option<OnNodeLoss>,
    /// Only on a node of the fleet that has these labels (`fleet.labels`), wherever it is started
    /// again, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_labels: Option<BTreeMap<String, String>>,
}

/// A spec with every default filled in, as the session runs it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ResolvedSpec {
    pub template: Option<String>,
    pub runtime: RuntimeKind,
    pub image: String,
    /// Empty: the image's own entrypoint and command.
    pub command: Vec<String>,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub port: Option<u16>,
    /// Besides `port`; without one, the first of them is the default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<crate::PortEntry>)]
    pub ports: Vec<PortRange>,
    #[serde(default = "strips_prefix")]
    pub strip_prefix: bool,
    pub ready_path: Option<String>,
    pub ready_timeout_s: u32,
    pub network: Network,
    /// In order, without duplicates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    /// The groups in which it is; in order, without duplicates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub talk: Vec<String>,
    #[serde(default, skip_serializing_if = "Bandwidth::is_unlimited")]
    pub bandwidth: Bandwidth,
    pub memory_bytes: Option<u64>,
    #[serde(default)]
    pub disk_bytes: Option<u64>,
    #[serde(default)]
    pub disk_inodes: Option<u64>,
    pub cpus: Option<f64>,
    pub pids: u32,
    /// 0 without `/dev/pts`.
    #[serde(default)]
    pub ptys: u32,
    /// There is no `/dev/pts` before the first command with a terminal.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ptys_when_asked: bool,
    pub labels: BTreeMap<String, String>,
    /// With `{id}` expanded.
    pub binds: Vec<String>,
    /// 0 for never.
    pub idle_timeout_s: u32,
    #[serde(default)]
    pub idle_action: IdleAction,
    /// 0 for never.
    pub max_lifetime_s: u32,
    /// When it is stopped, whatever it does, instead of by `max_lifetime_s`. Only a `PATCH` sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Timestamp>,
    pub preempt_signal: Option<String>,
    pub preempt_grace_ms: u32,
    /// The image's when absent, or `SIGTERM`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// 0 for SIGKILL at once.
    #[serde(default)]
    pub stop_grace_ms: u32,
    /// Whether its program runs below an init.
    #[serde(default, skip_serializing_if = "is_false")]
    pub init: bool,
    /// Whether its program runs in a terminal.
    #[serde(default)]
    pub tty: bool,
    /// Whether its log separates standard output and standard error; Docker's always does.
    #[serde(default)]
    pub log_streams: bool,
    /// Whether its programs may install system call filters.
    #[serde(default, skip_serializing_if = "is_false")]
    pub own_filters: bool,
    /// Whether it sees its own limits at /sys/fs/cgroup, read-only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sys: bool,
    /// Whether `fsync` on its root waits for the disk.
    #[serde(default, skip_serializing_if = "is_false")]
    pub durable: bool,
    /// Whether its programs may gain privileges in it through setuid programs, such as sudo.
    #[serde(default, skip_serializing_if = "is_false")]
    pub new_privs: bool,
    /// Whether its programs have neither System V IPC nor POSIX message queues.
    #[serde(default, skip_serializing_if = "is_false")]
    pub without_ipc: bool,
    /// Containers of its template that are made ahead.
    #[serde(default, skip_serializing_if = "is_none")]
    pub pool: u32,
    #[serde(default)]
    pub on_node_loss: OnNodeLoss,
    /// Absent when a client requested this start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarted: Option<Restarted>,
    /// What its node's labels must be.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_labels: BTreeMap<String, String>,
}

fn strips_prefix() -> bool {
    true
}

impl ResolvedSpec {
    /// Whether the first process of its PID namespace is conman's init, and the program's the child of that.
    #[must_use]
    pub fn has_own_init(&self) -> bool {
        self.runtime == RuntimeKind::Native && self.init
    }
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a field by reference"
)]
pub(crate) fn is_false(value: &bool) -> bool {
    !value
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a field by reference"
)]
fn is_none(count: &u32) -> bool {
    *count == 0
}

impl ResolvedSpec {
    /// The port of a connection that names none: `port`, else the first of `ports`.
    #[must_use]
    pub fn default_port(&self) -> Option<u16> {
        self.port.or(self.ports.first().map(|ports| ports.first))
    }

    /// Whether conman serves its `egress` by a proxy inside its network namespace.
    #[must_use]
    pub fn has_egress_proxy(&self) -> bool {
        !self.egress.is_empty() && !self.network.traits().leads_out
    }

    /// Whether conman serves names inside its network namespace.
    #[must_use]
    pub fn has_resolver(&self) -> bool {
        self.has_egress_proxy() || !self.talk.is_empty()
    }
}

/// A field that may be absent, null or a value, which all differ.
pub(crate) mod present_or_null {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        value: &Option<Option<T>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value
            .as_ref()
            .and_then(Option::as_ref)
            .serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Option<T>>, D::Error> {
        Option::<T>::deserialize(deserializer).map(Some)
    }
}
