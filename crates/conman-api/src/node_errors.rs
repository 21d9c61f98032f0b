//! Maps each error of the node to a problem. This is the only place. Every match is exhaustive,
//! so that a new error needs a decision.

pub(crate) use conman_core::error_chain as chain;
use conman_fleet::LocateError;
use conman_node::{
    AccessError, CordonError, DrainError, EnsureError, FailureKind, LinkError, PatchError,
    PreemptError, RestartError, RouteError, StopError,
};
use conman_proto::{LimitMet, Problem};
use conman_registry::{JournalError, RegistryError};
use conman_runtime::RuntimeError;

use crate::problem::{ApiError, IntoApiError as _, Kind};

impl From<EnsureError> for ApiError {
    fn from(error: EnsureError) -> Self {
        if let EnsureError::BadSpec { errors, .. } = error {
            return Kind::BAD_SPEC.with_fields(errors);
        }
        let refusal = ensure_kind(&error)
            .because(chain(&error))
            .retryable(error.is_retryable())
            .limit(limit_met(&error));
        if is_elsewhere(&error) {
            crate::forwarding::misdirected(refusal)
        } else {
            refusal
        }
    }
}

impl From<StopError> for ApiError {
    fn from(error: StopError) -> Self {
        let kind = match &error {
            StopError::NoSuchSession { .. } => Kind::NO_SUCH_SESSION,
            StopError::NotReleased { .. } | StopError::NotForgotten { .. } => Kind::NO_REGISTRY,
            StopError::Moved { .. } => Kind::ELSEWHERE,
        };
        let refusal = kind.because(chain(&error));
        match error {
            StopError::Moved { .. } => crate::forwarding::misdirected(refusal),
            _ => refusal,
        }
    }
}

impl From<PatchError> for ApiError {
    fn from(error: PatchError) -> Self {
        let kind = match &error {
            PatchError::NoSuchSession { .. } => Kind::NO_SUCH_SESSION,
            PatchError::Ended { .. } => Kind::NOT_RUNNING,
            PatchError::BadPatch(errors) => return Kind::BAD_BODY.with_fields(errors.clone()),
            PatchError::Registry { .. } => Kind::NO_REGISTRY,
        };
        kind.because(chain(&error))
    }
}

impl From<RestartError> for ApiError {
    fn from(error: RestartError) -> Self {
        match error {
            RestartError::NotWanted { .. } => {
                crate::forwarding::misdirected(Kind::ELSEWHERE.because(chain(&error)))
            }
            RestartError::NotStarted { source, .. } => source.into(),
        }
    }
}

impl From<AccessError> for ApiError {
    fn from(error: AccessError) -> Self {
        let kind = match &error {
            AccessError::BadLink { error } => {
                return Kind::BAD_BODY.with_fields(vec![error.clone()]);
            }
            AccessError::NodesNetwork { .. } => Kind::UNSUPPORTED,
            AccessError::Link { source, .. } => link_kind(source),
            AccessError::NoSuchSession { .. } => Kind::NO_SUCH_SESSION,
            AccessError::NotRunning { .. }
            | AccessError::Fenced { .. }
            | AccessError::KilledWithSession { .. } => Kind::NOT_RUNNING,
            AccessError::NoResult { .. } => Kind::FILES_FAILED,
            AccessError::NoTerminal { .. } => Kind::NO_TERMINAL,
            AccessError::ExecEnded { .. } => Kind::EXEC_ENDED,
            AccessError::TooManyAttached { .. } => Kind::TOO_MANY_TERMINALS,
            AccessError::TooManyWatches { .. } => Kind::TOO_MANY_WATCHES,
            AccessError::NotKept { .. } => Kind::NOT_KEPT,
            AccessError::Runtime { source, .. } => runtime_kind(source),
        };
        let refusal = kind.because(chain(&error));
        match error {
            AccessError::Fenced { .. } => refusal.retryable(true),
            _ => refusal,
        }
    }
}

fn link_kind(error: &LinkError) -> Kind {
    match error {
        LinkError::NoLink(_) => Kind::NO_SUCH_LINK,
        LinkError::NoInterface(_)
        | LinkError::NoBridge(_)
        | LinkError::NameTaken(_)
        | LinkError::Unsupported(_)
        | LinkError::AddressTaken(_)
        | LinkError::Limit(_)
        | LinkError::Netlink { .. } => Kind::LINK_REFUSED,
        // It has just ended.
        LinkError::Namespace(_) => Kind::NOT_RUNNING,
    }
}

impl From<PreemptError> for ApiError {
    fn from(error: PreemptError) -> Self {
        let kind = match &error {
            PreemptError::ThreadEnded => Kind::INTERNAL,
            PreemptError::TooManyWaiting => Kind::CROWDED,
        };
        kind.because(chain(&error))
    }
}

impl From<DrainError> for ApiError {
    fn from(error: DrainError) -> Self {
        let kind = match &error {
            DrainError::NotWritten { .. } => Kind::HOST_FAILED,
            DrainError::NotDraining => Kind::NOT_DRAINING,
        };
        kind.because(chain(&error))
    }
}

impl From<CordonError> for ApiError {
    fn from(error: CordonError) -> Self {
        Kind::HOST_FAILED.because(chain(&error))
    }
}

impl From<JournalError> for ApiError {
    fn from(error: JournalError) -> Self {
        Kind::NO_REGISTRY.because(chain(&error))
    }
}

/// The problem of a connection to a session, for servers of sessions.
#[must_use]
pub fn route_problem(error: &RouteError) -> Problem {
    let kind = match error {
        RouteError::NoSuchSession { .. } => Kind::NO_SUCH_SESSION,
        RouteError::Ended { .. } => Kind::ENDED,
        RouteError::Paused { .. } => Kind::PAUSED,
        RouteError::NoPort { .. } => Kind::NO_PORT,
        RouteError::TooManyWaiting { .. } => Kind::CROWDED,
        RouteError::Stuck { .. } => Kind::STUCK,
        RouteError::HoldTimedOut { .. } => Kind::HELD_TOO_LONG,
        RouteError::NotStarted { source, .. } => ensure_kind(source),
    };
    let mut problem = kind
        .because(chain(error))
        .retryable(error.is_retryable())
        .into_problem();
    if let RouteError::NotStarted { source, .. } = error {
        problem.limit = limit_met(source).map(Box::new);
        if let EnsureError::BadSpec { errors, .. } = source {
            problem.errors.clone_from(errors);
        }
    }
    problem
}

/// The problem of a session that is not reached or started, for servers of sessions.
#[must_use]
pub fn locate_problem(error: &LocateError) -> Problem {
    let kind = match error {
        LocateError::Route(error) => return route_problem(error),
        LocateError::Answered { problem, .. } => return (**problem).clone(),
        LocateError::Registry(_) => Kind::NO_REGISTRY,
        LocateError::Unreachable(_) | LocateError::CutOff { .. } | LocateError::NoAnswer { .. } => {
            Kind::NODE_UNREACHABLE
        }
        LocateError::Refused(_) => Kind::NODE_REFUSES,
        LocateError::NoNode { .. } => Kind::NO_NODE,
        LocateError::Moves { .. } => Kind::MOVES,
        LocateError::TooManyWaiting { .. } | LocateError::TooManySessions { .. } => Kind::CROWDED,
    };
    *kind.problem(chain(error))
}

/// [`route_problem`] for another node: it also says if a third node has the session.
pub(crate) fn route_error(error: &RouteError) -> ApiError {
    let refusal = ApiError::from(Box::new(route_problem(error)));
    match error {
        RouteError::NotStarted { source, .. } if is_elsewhere(source) => {
            crate::forwarding::misdirected(refusal)
        }
        _ => refusal,
    }
}

/// Whether another node owns the session.
fn is_elsewhere(error: &EnsureError) -> bool {
    matches!(error, EnsureError::Registry { source, .. }
        if matches!(**source, RegistryError::Elsewhere { .. }))
}

/// The limit that left no room for the session.
fn limit_met(error: &EnsureError) -> Option<LimitMet> {
    match error {
        EnsureError::NoRoom { limit } => Some((**limit).clone()),
        EnsureError::Full { max_sessions } => Some(LimitMet {
            name: "limits.max_sessions".to_owned(),
            bounds: "sessions of this node, by its configuration".to_owned(),
            value: *max_sessions as u64,
            used: *max_sessions as u64,
            remedy: "stop a session, or raise it in the node's configuration".to_owned(),
        }),
        _ => None,
    }
}

fn ensure_kind(error: &EnsureError) -> Kind {
    match error {
        EnsureError::BadSpec { .. } => Kind::BAD_SPEC,
        EnsureError::NoSuchRuntime { .. } => Kind::NO_SUCH_RUNTIME,
        EnsureError::NoSuchImage { .. } => Kind::NO_SUCH_IMAGE,
        EnsureError::Full { .. } => Kind::FULL,
        EnsureError::NoRoom { .. } => Kind::NO_ROOM,
        EnsureError::Preempted { .. } => Kind::PREEMPTED,
        EnsureError::Draining { .. } => Kind::DRAINING,
        EnsureError::Cordoned => Kind::CORDONED,
        EnsureError::LacksLabels { .. } => Kind::NO_NODE,
        EnsureError::RuntimeSilent { .. } => Kind::NO_RUNTIME,
        EnsureError::ShuttingDown => Kind::SHUTTING_DOWN,
        EnsureError::StartFailed { kind, .. } => failure_kind(*kind),
        EnsureError::Stopped { .. } => Kind::STOPPED,
        EnsureError::Stuck { .. } => Kind::STUCK,
        EnsureError::StillEnding { .. } => Kind::ENDING,
        EnsureError::Registry { .. } if is_elsewhere(error) => Kind::ELSEWHERE,
        EnsureError::Registry { .. } | EnsureError::RegistrySlow { .. } => Kind::NO_REGISTRY,
    }
}

fn failure_kind(failure: FailureKind) -> Kind {
    match failure {
        FailureKind::RuntimeUnavailable => Kind::NO_RUNTIME,
        FailureKind::NoSuchImage => Kind::NO_SUCH_IMAGE,
        FailureKind::Refused => Kind::REFUSED,
        FailureKind::Bind => Kind::BAD_BIND,
        FailureKind::NotReady => Kind::UNREADY,
        FailureKind::Exited => Kind::EXITED,
        FailureKind::TimedOut => Kind::SLOW_START,
        FailureKind::Registry => Kind::NO_REGISTRY,
        FailureKind::Host => Kind::HOST_FAILED,
        FailureKind::Stopped => Kind::STOPPED,
        FailureKind::Preempted => Kind::PREEMPTED,
        FailureKind::Drained => Kind::DRAINING,
        FailureKind::ShutDown => Kind::SHUTTING_DOWN,
        FailureKind::Interrupted => Kind::INTERRUPTED,
    }
}

fn runtime_kind(error: &RuntimeError) -> Kind {
    match error {
        RuntimeError::Unavailable { .. }
        | RuntimeError::NotSent { .. }
        | RuntimeError::TimedOut { .. }
        | RuntimeError::Fenced { .. } => Kind::NO_RUNTIME,
        RuntimeError::NoSuchImage { .. } => Kind::NO_SUCH_IMAGE,
        RuntimeError::Refused { .. } => Kind::REFUSED,
        RuntimeError::NoSuchCommand { .. } => Kind::NO_SUCH_COMMAND,
        RuntimeError::NoSuchUser { .. } => Kind::NO_SUCH_USER,
        RuntimeError::NoSuchWorkdir { .. } => Kind::NO_SUCH_WORKDIR,
        RuntimeError::NoSuchContainer { .. } => Kind::NOT_RUNNING,
        RuntimeError::Unsupported { .. } => Kind::UNSUPPORTED,
        RuntimeError::NoTerminal { .. } => Kind::NO_TERMINAL,
        RuntimeError::NoSuchExec { .. } => Kind::NO_SUCH_EXEC,
        RuntimeError::TooMany { .. } => Kind::TOO_MANY_TERMINALS,
        // None of them comes from running a command or reading a log.
        RuntimeError::EndedAtOnce { .. }
        | RuntimeError::Exists { .. }
        | RuntimeError::StillAlive { .. } => Kind::INTERNAL,
        RuntimeError::Host { .. } => Kind::HOST_FAILED,
    }
}
