//! Drains and rebalances of a node.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Generation, SessionId, Unreleased};

/// Body of `POST /v1/nodes/{id}/drain`; may be empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DrainRequest {
    /// Only say what would happen.
    pub dry_run: bool,
    /// Sessions that are stopped at a time; 8 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256)]
    pub parallel: Option<u32>,
    /// Sent first to every session's program, for example `SIGTERM`; the session's own
    /// `preempt_signal`, if it has one, when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(SIG)?(HUP|INT|QUIT|USR1|USR2|ALRM|TERM|CONT|WINCH|PWR)$")]
    pub signal: Option<String>,
    /// So long before SIGKILL where a signal is sent, in milliseconds; 0 for no signal. When absent,
    /// the session's own `preempt_grace_ms`, or 10,000 where it has none and `signal` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 3_600_000)]
    pub grace_ms: Option<u32>,
    /// Why, for the journal and for those who are connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 500, pattern = r"^[^\u0000-\u001f\u007f-\u009f]*$")]
    pub reason: Option<String>,
}

/// Body of `POST /v1/nodes/{id}/rebalance`; may be empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RebalanceRequest {
    /// Only return what would be moved.
    pub dry_run: bool,
}

/// What a node's latest rebalance has done so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RebalanceReport {
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// Null while it is in progress.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Timestamp>,
    /// How many sessions it was to move.
    pub planned: u64,
    /// Stopped here, and running on other nodes afterwards.
    pub moved: u64,
    /// Stopped here; they are not restarted automatically, and start where a client connects.
    pub waiting: u64,
    /// Stopped, and running here again, or not started or released.
    pub not_moved: u64,
}

/// What a drain or a rebalance would do: the answer to a dry run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainPlan {
    /// In the order in which they would be stopped.
    pub sessions: Vec<DrainSession>,
    pub parallel: u32,
    /// How long it would take, about, in milliseconds, the starts on other nodes included: every grace
    /// is taken to be used up, and every start to take as long as the session's latest. It takes longer
    /// if a container cannot be proven dead, or if the other nodes have no room.
    pub predicted_ms: u64,
}

/// One session in a [`DrainPlan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainSession {
    pub id: SessionId,
    pub generation: Generation,
    /// Open connections and requests in flight; those without any go first.
    pub connections: u64,
    /// What it may take of the node's memory, by which those that are alike are ordered; null
    /// for one without a limit, which goes last.
    pub memory_bytes: Option<u64>,
    /// Sent first; null to kill at once.
    pub signal: Option<String>,
    pub grace_ms: u64,
    /// When its turn would come, in milliseconds from the beginning.
    pub at_ms: u64,
}

/// How a drain stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DrainState {
    /// Sessions are being moved away.
    Draining,
    /// No session is left but stuck ones, and connections to sessions elsewhere were closed; the
    /// node admits no session until it is undrained.
    Drained,
}

/// What a drain has done so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainReport {
    pub state: DrainState,
    pub reason: String,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// Null while it is in progress.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Timestamp>,
    /// Stopped and released since it began.
    pub released: u64,
    /// Still there, those included that have not had their turn.
    pub remaining: u64,
    /// Those with `on_node_loss = "restart"` that run on another node again, the first 1,000; the
    /// others start there when a client connects.
    #[serde(default)]
    pub moved: Vec<Moved>,
    /// How many those are, also beyond the first 1,000.
    #[serde(default)]
    pub moved_count: u64,
    /// What could not be released, each with its reason.
    pub unreleased: Vec<Unreleased>,
    /// Tunnels and requests to sessions on other nodes that still pass through the node. With 0 and
    /// `drained`, the machine can be switched off without cutting a client's connection.
    #[serde(default)]
    pub through: u64,
}

/// A session that a drain brought to another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Moved {
    pub id: SessionId,
    /// Where it is now.
    pub node: String,
}
