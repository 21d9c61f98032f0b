//! The errors of a node's operations.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use conman_core::EndCause;
use conman_linux::ProcessError;
use conman_net::attached::LinkError;
use conman_proto::{
    ExecId, FieldError, Generation, LimitMet, RuntimeKind, Session, SessionId, SessionState,
};
use conman_registry::RegistryError;
use conman_runtime::RuntimeError;
use tokio::sync::mpsc::error::TrySendError;

/// Why a node could not start.
#[derive(Debug, thiserror::Error)]
pub enum NodeStartError {
    #[error("cannot read the registry's records")]
    Records(#[source] RegistryError),
    #[error("cannot release sessions whose processes are dead")]
    Release(#[source] RegistryError),
    #[error(
        "cannot determine whether session {id} (generation {generation}) still runs; nothing was \
        changed"
    )]
    Adopt {
        id: SessionId,
        generation: Generation,
        #[source]
        source: ProcessError,
    },
    #[error("no runtime was given; configure one")]
    NoRuntime,
    #[error("cannot {action}")]
    Thread {
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the setting of the notice source `{name}`, `{setting}`, {rule}")]
    NoticeSource {
        name: &'static str,
        setting: String,
        rule: String,
    },
}

/// What kept a start from succeeding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The runtime does not answer.
    RuntimeUnavailable,
    /// The image is not on this node.
    NoSuchImage,
    /// The runtime refuses the spec, or its program cannot be run.
    Refused,
    /// A bind's source is missing or not allowed.
    Bind,
    /// The program runs and did not answer in time.
    NotReady,
    /// The program ended before it was ready.
    Exited,
    /// A bound on one of conman's or the runtime's steps passed.
    TimedOut,
    /// The registry failed.
    Registry,
    /// Files, processes or limits of the host.
    Host,
    /// A client stopped the session while it was starting.
    Stopped,
    /// The machine is about to stop.
    Preempted,
    /// The node is being drained.
    Drained,
    /// The daemon ends, and its sessions with it.
    ShutDown,
    /// The daemon was restarted during the start, or its node's fence killed it.
    Interrupted,
}

impl FailureKind {
    /// Of a start that was ordered to stop.
    pub(crate) fn of_stop(cause: EndCause) -> Self {
        match cause {
            EndCause::Drained => Self::Drained,
            EndCause::ShutDown => Self::ShutDown,
            _ => Self::Stopped,
        }
    }

    /// Whether the same start may succeed later without a change by its caller.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        match self {
            Self::RuntimeUnavailable
            | Self::TimedOut
            | Self::Registry
            | Self::Host
            | Self::Preempted
            | Self::Drained
            | Self::ShutDown
            | Self::Interrupted => true,
            Self::NoSuchImage
            | Self::Refused
            | Self::Bind
            | Self::NotReady
            | Self::Exited
            | Self::Stopped => false,
        }
    }
}

/// Why a drain was not cancelled, or has no report.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DrainError {
    #[error(
        "cannot save in {} whether the node is being drained; {outcome}",
        path.display()
    )]
    NotWritten {
        path: std::path::PathBuf,
        outcome: &'static str,
        #[source]
        source: Arc<io::Error>,
    },
    #[error("the drain was cancelled meanwhile; to drain the node, order it again")]
    NotDraining,
}

/// Why a cordon was not taken back.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot remove {}, so the node stays cordoned; try again", path.display())]
pub struct CordonError {
    pub path: std::path::PathBuf,
    #[source]
    pub source: Arc<io::Error>,
}

/// Why `ensure` gave no running session.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EnsureError {
    #[error("the spec of session {id} is not valid")]
    BadSpec {
        id: SessionId,
        errors: Vec<FieldError>,
    },
    #[error("this node has no {runtime} runtime; its runtimes are {known}")]
    NoSuchRuntime { runtime: RuntimeKind, known: String },
    #[error("session {id} did not start: {why}")]
    NoSuchImage { id: SessionId, why: String },
    #[error(
        "this node runs {max_sessions} sessions, which is its limit (max_sessions); stop one, \
        or raise the limit"
    )]
    Full { max_sessions: usize },
    #[error(
        "this host has no room for another session: {} ({}) is {}, of which {} are taken; {}",
        limit.name, limit.bounds, limit.value, limit.used, limit.remedy
    )]
    NoRoom { limit: Box<LimitMet> },
    #[error("this node is preempted ({reason}) and takes no new sessions; use another one")]
    Preempted { reason: String },
    #[error("this node is being drained ({reason}) and takes no new sessions; use another one")]
    Draining { reason: String },
    #[error("this node is cordoned and takes no new sessions; use another one")]
    Cordoned,
    #[error(
        "session {id} is to run only on a node with the labels {missing}, which this node does not have; \
        set them in [fleet] labels of its configuration, or leave `node_labels` out"
    )]
    LacksLabels { id: SessionId, missing: String },
    #[error("session {id} was not started: {reason}")]
    RuntimeSilent { id: SessionId, reason: String },
    #[error("this node is shutting down")]
    ShuttingDown,
    #[error("session {id} did not start: {}", session.reason.as_deref().unwrap_or("no reason given"))]
    StartFailed {
        id: SessionId,
        kind: FailureKind,
        session: Box<Session>,
    },
    #[error("session {id} was stopped while it was starting")]
    Stopped {
        id: SessionId,
        session: Box<Session>,
    },
    #[error(
        "the former container of session {id} (generation {generation}) could not be killed \
        yet: {reason}"
    )]
    Stuck {
        id: SessionId,
        generation: Generation,
        reason: String,
    },
    #[error("the former container of session {id} did not end within {} s; try again",
        waited.as_secs())]
    StillEnding { id: SessionId, waited: Duration },
    #[error("the start of session {id} could not be recorded")]
    Registry {
        id: SessionId,
        #[source]
        source: Arc<RegistryError>,
    },
    #[error("the registry did not record the start of session {id} within {} s; try again",
        waited.as_secs())]
    RegistrySlow { id: SessionId, waited: Duration },
}

impl EnsureError {
    /// Whether the same request may succeed later without a change by its caller.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Full { .. }
            | Self::NoRoom { .. }
            | Self::Preempted { .. }
            | Self::Draining { .. }
            | Self::Cordoned
            | Self::RuntimeSilent { .. }
            | Self::ShuttingDown
            | Self::Stuck { .. }
            | Self::StillEnding { .. }
            | Self::Stopped { .. }
            | Self::RegistrySlow { .. } => true,
            Self::BadSpec { .. }
            | Self::NoSuchRuntime { .. }
            | Self::NoSuchImage { .. }
            | Self::LacksLabels { .. } => false,
            Self::StartFailed { kind, .. } => kind.is_retryable(),
            Self::Registry { source, .. } => source.is_retryable(),
        }
    }
}

/// Why a session was not stopped.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StopError {
    #[error("there is no session {id}")]
    NoSuchSession { id: SessionId },
    #[error("session {id} is dead, but its release is not recorded yet: {reason}")]
    NotReleased { id: SessionId, reason: String },
    #[error("session {id} has been started on another node since it lost this one; try again")]
    Moved { id: SessionId },
    #[error("cannot record that session {id} must not be started again")]
    NotForgotten {
        id: SessionId,
        #[source]
        source: Arc<RegistryError>,
    },
}

/// Why a session that lost its node was not restarted.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RestartError {
    #[error(
        "cannot restart generation {generation} of session {id}: it has an owner, was stopped, or \
         is forgotten"
    )]
    NotWanted {
        id: SessionId,
        generation: Generation,
    },
    #[error("session {id} could not be restarted")]
    NotStarted {
        id: SessionId,
        #[source]
        source: EnsureError,
    },
}

/// Why a connection cannot reach a session.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RouteError {
    #[error("there is no session {id}")]
    NoSuchSession { id: SessionId },
    #[error("session {id} is {state}{}; start it with PUT /v1/sessions/{id}",
        reason.as_deref().map(|r| format!(" ({r})")).unwrap_or_default())]
    Ended {
        id: SessionId,
        state: SessionState,
        reason: Option<String>,
    },
    #[error("session {id} was paused by an order; resume it with POST /v1/sessions/{id}/resume")]
    Paused { id: SessionId },
    #[error("session {id} has no port")]
    NoPort { id: SessionId },
    #[error("{limit} connections already wait for {what}; try again in a moment")]
    TooManyWaiting { what: Waiting, limit: usize },
    #[error("session {id} cannot be reached: its container could not be killed yet: {reason}")]
    Stuck { id: SessionId, reason: String },
    #[error("session {id} was not ready within {} s", waited.as_secs())]
    HoldTimedOut { id: SessionId, waited: Duration },
    #[error("session {id} cannot be started")]
    NotStarted {
        id: SessionId,
        #[source]
        source: EnsureError,
    },
}

impl RouteError {
    /// Whether the same connection may succeed later without further action.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NoSuchSession { .. }
            | Self::Ended { .. }
            | Self::Paused { .. }
            | Self::NoPort { .. } => false,
            Self::TooManyWaiting { .. } | Self::Stuck { .. } | Self::HoldTimedOut { .. } => true,
            Self::NotStarted { source, .. } => source.is_retryable(),
        }
    }
}

/// Why this node refuses a connection that another node forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotHere {
    /// It owns neither that generation nor a newer one.
    NotOwner,
    /// The session is starting, ending or frozen, or has no port.
    NotReady,
}

/// Whose limit on held connections is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    Session(SessionId),
    Node,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Session(id) => write!(formatter, "session {id}"),
            Self::Node => formatter.write_str("sessions of this node"),
        }
    }
}

/// Why a command was not run, a terminal not attached to, a log not read, or an order about files has no result.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    #[error("there is no session {id}")]
    NoSuchSession { id: SessionId },
    #[error("session {id} is {state}, not running; {}", until_it_runs(*state))]
    NotRunning { id: SessionId, state: SessionState },
    #[error(
        "session {id} is frozen, because its node cannot renew its ownership; try again once it \
         can, or another node has started the session"
    )]
    Fenced { id: SessionId },
    #[error(
        "session {id} has no terminal; start it with `tty`, or keep a command's terminal in it"
    )]
    NoTerminal { id: SessionId },
    #[error("kept command {exec} of session {id} has ended")]
    ExecEnded { id: SessionId, exec: ExecId },
    #[error("{limit} clients are attached to session {id} or follow its log; detach one of them")]
    TooManyAttached { id: SessionId, limit: usize },
    #[error(
        "{limit} watches {of} are open, so no file of session {id} can be watched; close one of them"
    )]
    TooManyWatches {
        id: SessionId,
        limit: usize,
        /// `of the session`, or of the node.
        of: &'static str,
    },
    #[error(
        "the log of session {id} is not kept: its container is gone, and the end of its log is kept only \
         for some time (`limits.kept_log_s`)"
    )]
    NotKept { id: SessionId },
    #[error(
        "an order about the files of session {id} has no result: its process was killed, because {why}; it may have \
         been carried out; try again once the session runs"
    )]
    KilledWithSession { id: SessionId, why: String },
    #[error("an order about the files of session {id} has no result: its process was killed")]
    NoResult { id: SessionId },
    #[error("session {id} has this node's own network, to which no link is attached here")]
    NodesNetwork { id: SessionId },
    #[error("the link is not valid: `{}` {}", error.field, error.message)]
    BadLink { error: FieldError },
    #[error("the links of session {id} are unchanged")]
    Link {
        id: SessionId,
        #[source]
        source: LinkError,
    },
    #[error("an operation in the container of session {id} failed")]
    Runtime {
        id: SessionId,
        #[source]
        source: RuntimeError,
    },
}

/// Why a session is not changed.
#[derive(Debug, thiserror::Error)]
pub enum PatchError {
    #[error("there is no session {id}")]
    NoSuchSession { id: SessionId },
    #[error("session {id} is {state} or about to end; only a session that runs can be changed")]
    Ended { id: SessionId, state: SessionState },
    #[error("the change is not valid")]
    BadPatch(Vec<FieldError>),
    #[error("the change of session {id} cannot be recorded")]
    Registry {
        id: SessionId,
        #[source]
        source: RegistryError,
    },
}

/// What a caller can do about a session that does not run.
fn until_it_runs(state: SessionState) -> &'static str {
    match state {
        SessionState::Starting => "try again once it runs",
        SessionState::Running => "its program has just ended; try again",
        SessionState::Frozen => "try again once its node owns it again",
        SessionState::Paused => "resume it",
        SessionState::Stopping => "once it has ended, PUT it to start it again",
        SessionState::Stuck => "it was killed and does not die, so nothing can be done in it",
        SessionState::Stopped | SessionState::Failed => "PUT it to start it again",
    }
}

/// Why a preemption gave no report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PreemptError {
    #[error("the emergency thread has ended; restart conman")]
    ThreadEnded,
    #[error("too many preemption notices wait for an answer; the first one is being acted on")]
    TooManyWaiting,
}

impl<T> From<TrySendError<T>> for PreemptError {
    fn from(error: TrySendError<T>) -> Self {
        match error {
            TrySendError::Full(_) => Self::TooManyWaiting,
            TrySendError::Closed(_) => Self::ThreadEnded,
        }
    }
}
