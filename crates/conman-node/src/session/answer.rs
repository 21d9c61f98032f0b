//! Results of the calls of a session's task.

use std::fmt::Display;
use std::sync::Arc;

use conman_linux::{PidFd, ProcessIdentity};
use conman_proto::Generation;
use conman_registry::{Ending, RegistryError};
use conman_runtime::{RuntimeError, Started};
use jiff::Timestamp;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::error::FailureKind;

/// Why a step of a start failed: its kind and phase for programs, the text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepFailure {
    pub(super) kind: FailureKind,
    pub(super) phase: &'static str,
    /// Phase, cause and remedy.
    pub(super) why: String,
    /// Exit code of a program that cannot be run, as a shell gives it.
    pub(super) exit_code: Option<i32>,
}

impl StepFailure {
    /// `why` is the cause and the remedy.
    pub(super) fn new(kind: FailureKind, phase: &'static str, why: impl Display) -> Self {
        Self {
            kind,
            phase,
            why: format!("{phase}: {why}"),
            exit_code: None,
        }
    }

    /// From a runtime's error during `phase`.
    pub(super) fn of_runtime(phase: &'static str, error: &RuntimeError) -> Self {
        let (kind, remedy) = match error {
            RuntimeError::Unavailable { .. } => (
                FailureKind::RuntimeUnavailable,
                "; see that it runs (for Docker: systemctl status docker; for native: `conman shim`)",
            ),
            RuntimeError::TimedOut { .. } => (
                FailureKind::RuntimeUnavailable,
                "; see whether it hangs or is overloaded",
            ),
            // It names its own remedy.
            RuntimeError::NoSuchImage { .. } => (FailureKind::NoSuchImage, ""),
            RuntimeError::Refused { .. }
            | RuntimeError::NoSuchCommand { .. }
            | RuntimeError::NoSuchUser { .. }
            | RuntimeError::Unsupported { .. } => {
                (FailureKind::Refused, "; correct the session's spec")
            }
            // A start never returns them.
            RuntimeError::NoTerminal { .. }
            | RuntimeError::NoSuchExec { .. }
            | RuntimeError::NoSuchWorkdir { .. } => (FailureKind::Refused, ""),
            // The spec is not the cause, and the same start may succeed later.
            RuntimeError::TooMany { .. } => (FailureKind::Host, ""),
            RuntimeError::NotSent { .. } | RuntimeError::Fenced { .. } => {
                (FailureKind::RuntimeUnavailable, "")
            }
            // Its exit code and last output are more useful than any remedy.
            RuntimeError::EndedAtOnce { .. } => (FailureKind::Exited, ""),
            RuntimeError::Exists { .. } => (
                FailureKind::Host,
                "; something else made it: remove it, then start the session again",
            ),
            RuntimeError::NoSuchContainer { .. } => (
                FailureKind::Host,
                "; something else removed it: start the session again",
            ),
            RuntimeError::StillAlive { .. } | RuntimeError::Host { .. } => (
                FailureKind::Host,
                "; see to the host, then start the session again",
            ),
        };
        let exit_code = match error {
            RuntimeError::NoSuchCommand { exit_code, .. } => Some(*exit_code),
            _ => None,
        };
        Self {
            exit_code,
            ..Self::new(
                kind,
                phase,
                format_args!("{}{remedy}", conman_core::error_chain(error)),
            )
        }
    }
}

/// A call's outcome.
#[derive(Debug)]
pub(super) enum Answer {
    Claim(Result<Claimed, RegistryError>),
    Make(Made, Option<OwnedSemaphorePermit>),
    Launch(Launched),
    Hold(Hold),
    Record(Result<Instant, StepFailure>),
    Probe(Result<Instant, StepFailure>),
    StartResolved(StartOutcome),
    Release(Result<Ending, ReleaseFailure>),
    /// The held process is certified dead.
    Dead,
    /// Nothing of the killed container can run, although it is not dead yet.
    Exiting,
}

/// What the registry gave a start.
#[derive(Debug)]
pub(super) struct Claimed {
    pub(super) generation: Generation,
    pub(super) created_at: Timestamp,
}

/// How far the creation of a container came; each time is the end of a phase.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) admitted: Option<Instant>,
    pub(super) prepared: Option<Instant>,
    pub(super) created: Option<Instant>,
    pub(super) result: Result<(), StepFailure>,
}

/// The result of a start.
#[derive(Debug)]
pub(super) enum Launched {
    Started(Started),
    /// It was not sent, or was refused: nothing runs and nothing will.
    Failed(StepFailure),
    Ambiguous(StepFailure),
}

#[derive(Debug)]
pub(super) enum Hold {
    Held(Arc<PidFd>, ProcessIdentity),
    Vanished,
    NotOurs,
    Failed(StepFailure),
}

#[derive(Debug)]
pub(crate) enum StartOutcome {
    Found {
        pid: i32,
    },
    /// It was this runtime's, and has ended.
    Ended,
    /// This runtime has no container of it, and will have none.
    Gone,
    Unknown(String),
}

#[derive(Debug)]
pub(super) enum ReleaseFailure {
    Superseded(Ending),
    /// Why, and the actual ending where it differs from the assumed one.
    Failed(String, Option<Ending>),
}

#[cfg(test)]
mod tests {
    use conman_proto::RuntimeKind;

    use super::*;

    #[test]
    fn a_spec_that_is_not_at_fault_is_not_to_be_corrected() {
        let refused = RuntimeError::Refused {
            runtime: RuntimeKind::Native,
            action: "start",
            subject: "alice".to_owned(),
            reason: "no".to_owned(),
        };
        let failure = StepFailure::of_runtime("start", &refused);
        assert!(
            failure.why.ends_with("correct the session's spec"),
            "{failure:?}"
        );
        let full = RuntimeError::TooMany {
            subject: "alice".to_owned(),
            what: "containers".to_owned(),
            remedy: "stop some",
        };
        let fenced = RuntimeError::Fenced {
            runtime: RuntimeKind::Native,
            action: "start",
            subject: "alice".to_owned(),
        };
        for error in [full, fenced] {
            let failure = StepFailure::of_runtime("start", &error);
            assert!(failure.kind.is_retryable(), "{failure:?}");
            assert!(!failure.why.contains("spec"), "{failure:?}");
        }
    }
}
