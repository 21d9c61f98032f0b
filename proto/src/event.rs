//! Events of a node and its sessions.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::de::IntoDeserializer as _;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{EndCause, Generation, NodeStanding, SessionId};

/// How the message of [`EventKind::SessionTakenOver`] begins, before the node's name and a comma.
pub const TAKEN_OVER_FROM: &str = "taken over from node ";

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A start was admitted and its generation recorded.
    SessionClaimed,
    /// The node claimed a session that a lost node still owned; the message begins with
    /// [`TAKEN_OVER_FROM`] and that node's name.
    SessionTakenOver,
    /// The fleet started it by itself, because its node had gone.
    SessionRestarted,
    /// The fleet does not restart it any more: too often in a short time.
    RestartGivenUp,
    /// One phase of a start ended; `phase` and `duration_ms` tell which and how long.
    SessionPhase,
    /// The session is running and, where it has a port, answered on it.
    SessionReady,
    /// The start failed.
    SessionFailed,
    /// The session's program ended by itself.
    SessionExited,
    /// The signal to end was sent; the message says which, when SIGKILL follows, and why.
    SessionSignalled,
    /// SIGKILL was sent; the message says on whose behalf.
    SessionKilled,
    /// The death certificate: the PID namespace holds no process any more.
    SessionDead,
    /// Killed, and still not dead.
    SessionStuck,
    /// Ownership was given up in the registry.
    SessionReleased,
    /// What the container left behind was removed.
    SessionCleaned,
    /// Its processes were stopped until the next use; the message says why.
    SessionPaused,
    /// Its processes continue.
    SessionResumed,
    /// Its disk usage cannot be measured; it is ended if this does not change.
    SessionUnmeasured,
    /// The kernel killed processes of the session, because its memory ran out; the message says how many.
    SessionOutOfMemory,
    /// A new daemon took over a container that an earlier one had started.
    SessionAdopted,
    /// A connection of the session by its egress proxy was refused or failed; the message says which
    /// and why. One in a minute, with the number of the others.
    EgressRefused,
    /// A container without a record was found and ended.
    OrphanEnded,
    /// Clean-up failed and will be tried again.
    CleanupFailed,
    /// The daemon started.
    NodeStarted,
    /// The daemon stops; containers may go on.
    NodeStopping,
    /// The daemon is about to stop: load balancers are notified, and clients are still served.
    NodeLeaving,
    /// The registry does not renew the node's ownership, which ends soon; the message says why.
    RegistryLost,
    /// The registry renews the node's ownership again.
    RegistryReturned,
    /// The node's ownership has lapsed: its sessions are frozen, since another node may take them over.
    NodeFrozen,
    /// The node owns its sessions again: those that no other node took over continue.
    NodeThawed,
    /// This node declared a silent node dead; the message names it. Its sessions may be taken over.
    NodeFenced,
    /// The machine is going: no more admissions.
    PreemptStarted,
    /// Every session that could be released is released.
    PreemptFinished,
    /// The preemption notice was withdrawn, or an operator admitted sessions again.
    NodeReadmitted,
    /// An operator wants the node empty: no more admissions, its sessions are moved away.
    DrainStarted,
    /// Nothing is left on the node but what is stuck.
    DrainFinished,
    /// An operator took a drain back.
    NodeUndrained,
    /// An operator wants no new sessions on the node; those present stay.
    NodeCordoned,
    /// An operator took a cordon back.
    NodeUncordoned,
    /// An operator ordered to move sessions of a node that has more than its share.
    RebalanceStarted,
    /// The sessions of that order were moved, or the node leaves.
    RebalanceFinished,
    /// Events are missing here: dropped by the journal's bound, or lost before they were durable;
    /// the message says how many or why.
    EventsLost,
    /// A node's events are missing from here on, because it cannot be asked; the message says why.
    /// Told by the node that was asked, and in no journal.
    NodeUnreachable,
    /// The node can be asked again, and its events go on where they were. In no journal either.
    NodeReached,
    /// A kind that this version does not know; written by a newer one.
    #[serde(other)]
    Unknown,
}

impl EventKind {
    /// The name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SessionClaimed => "session_claimed",
            Self::SessionTakenOver => "session_taken_over",
            Self::SessionRestarted => "session_restarted",
            Self::RestartGivenUp => "restart_given_up",
            Self::SessionPhase => "session_phase",
            Self::SessionReady => "session_ready",
            Self::SessionFailed => "session_failed",
            Self::SessionExited => "session_exited",
            Self::SessionSignalled => "session_signalled",
            Self::SessionKilled => "session_killed",
            Self::SessionDead => "session_dead",
            Self::SessionStuck => "session_stuck",
            Self::SessionReleased => "session_released",
            Self::SessionCleaned => "session_cleaned",
            Self::SessionPaused => "session_paused",
            Self::SessionResumed => "session_resumed",
            Self::SessionUnmeasured => "session_unmeasured",
            Self::SessionOutOfMemory => "session_out_of_memory",
            Self::SessionAdopted => "session_adopted",
            Self::EgressRefused => "egress_refused",
            Self::OrphanEnded => "orphan_ended",
            Self::CleanupFailed => "cleanup_failed",
            Self::NodeStarted => "node_started",
            Self::NodeStopping => "node_stopping",
            Self::NodeLeaving => "node_leaving",
            Self::RegistryLost => "registry_lost",
            Self::RegistryReturned => "registry_returned",
            Self::NodeFrozen => "node_frozen",
            Self::NodeThawed => "node_thawed",
            Self::NodeFenced => "node_fenced",
            Self::PreemptStarted => "preempt_started",
            Self::PreemptFinished => "preempt_finished",
            Self::NodeReadmitted => "node_readmitted",
            Self::DrainStarted => "drain_started",
            Self::DrainFinished => "drain_finished",
            Self::NodeUndrained => "node_undrained",
            Self::NodeCordoned => "node_cordoned",
            Self::NodeUncordoned => "node_uncordoned",
            Self::RebalanceStarted => "rebalance_started",
            Self::RebalanceFinished => "rebalance_finished",
            Self::EventsLost => "events_lost",
            Self::NodeUnreachable => "node_unreachable",
            Self::NodeReached => "node_reached",
            Self::Unknown => "unknown",
        }
    }

    /// Whether an event of the node with this kind is part of the story of its sessions.
    #[must_use]
    pub const fn concerns_sessions(self) -> bool {
        matches!(self, Self::NodeFrozen | Self::NodeThawed | Self::EventsLost)
    }
}

/// There is no such kind of event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "is not an event kind; `EventKind` in openapi.json lists them, for example `session_ready`"
)]
pub struct NoEventKind;

impl FromStr for EventKind {
    type Err = NoEventKind;

    fn from_str(text: &str) -> Result<Self, NoEventKind> {
        let kind: Result<Self, serde::de::value::Error> =
            Self::deserialize(text.into_deserializer());
        kind.ok()
            .filter(|kind| kind.as_str() == text)
            .ok_or(NoEventKind)
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// One thing that happened on a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Position in the journal of `node`: grows by at least one with every event of it, also across
    /// restarts of its daemon.
    pub seq: u64,
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    pub kind: EventKind,
    pub node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<Generation>,
    /// Name of the phase that ended, with `session_phase`; of the phase in which the start failed, with
    /// `session_failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Why the session ended, with `session_failed`, `session_exited` and `session_released`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<EndCause>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<f64>,
    /// The event in words.
    pub message: String,
}

/// Events after a position, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventPage {
    pub events: Vec<Event>,
    /// Greatest position in the journal of the node that answers, when the page was read.
    pub last_seq: u64,
    /// Where the next page begins: for `after`.
    #[serde(default)]
    pub cursor: String,
    /// Whether events between the asked position and the first one here were already dropped.
    pub truncated: bool,
    /// Whether nothing more is stored that can be told now. Nodes that cannot be asked are told of by
    /// an event.
    #[serde(default)]
    pub complete: bool,
}

/// What happened to one session, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Timeline {
    pub id: SessionId,
    pub events: Vec<Event>,
    /// The phases of the latest start in order, with their durations.
    pub phases: Vec<TimelinePhase>,
    /// Whether older events of this session were already dropped from a journal.
    pub truncated: bool,
    /// How the fleet stands to the session: null where only the node that is asked has told.
    #[serde(default)]
    pub fleet: Option<SessionInFleet>,
}

/// How a fleet stands to a session, by its registry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionInFleet {
    pub ownership: SessionOwnership,
    /// The node that owns it, or owned it last.
    pub node: Option<String>,
    /// How that node stands; null when the fleet does not know it.
    pub standing: Option<NodeStanding>,
    pub generation: Option<Generation>,
    /// Nodes that would start it now, the best first; empty while it is owned.
    pub takers: Vec<String>,
    /// Why others would not; empty while it is owned.
    pub refused: Vec<NodeReason>,
    /// Nodes whose journals could not be read, so that their events are missing.
    pub unreachable_nodes: Vec<NodeReason>,
    /// Why the registry could not be read.
    pub registry_error: Option<String>,
}

/// Whether a node owns a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SessionOwnership {
    /// No node owns it, and none is known to have owned it.
    Nobody,
    Owned,
    /// Its node has given it up.
    Released,
    /// Its node was declared dead: whoever claims it gets it.
    Lost,
    /// The registry could not be read.
    Unknown,
}

/// Why something is so with a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeReason {
    pub node: String,
    pub why: String,
}

/// One phase of a start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TimelinePhase {
    pub name: String,
    pub generation: Generation,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    pub duration_ms: f64,
}
