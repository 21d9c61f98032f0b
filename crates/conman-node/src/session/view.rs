//! A session's state for the rest of the program.

use std::sync::Arc;

use conman_linux::PidFd;
use conman_proto::{EndCause, Generation, SessionEnd, SessionState};
use conman_registry::{Phases, RegistryError};
use jiff::Timestamp;
use tokio::time::Instant;

use crate::error::FailureKind;

/// The state of a session in one generation.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) state: SessionState,
    pub(crate) reason: Option<String>,
    /// Why it ended, or is being ended.
    pub(crate) end: Option<SessionEnd>,
    pub(crate) exit_code: Option<i32>,
    /// `None` until the registry has recorded the start: such a session is not shown.
    pub(crate) generation: Option<Generation>,
    pub(crate) created_at: Timestamp,
    pub(crate) started_at: Option<Timestamp>,
    pub(crate) ended_at: Option<Timestamp>,
    /// The container's init while it lives.
    pub(crate) process: Option<Arc<PidFd>>,
    /// Whether the registry knows how to find the process again.
    pub(crate) recorded: bool,
    pub(crate) phases: Phases,
    /// What kept the start from succeeding.
    pub(crate) failure: Option<Failure>,
    /// When the death certificate came.
    pub(crate) dead_at: Option<Instant>,
    /// When the registry recorded the release.
    pub(crate) released_at: Option<Instant>,
}

/// Why a start did not succeed, in addition to the reason.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    Kind(FailureKind),
    /// It was never recorded.
    Unclaimed(Arc<RegistryError>),
    /// It was not recorded in time.
    ClaimSlow,
}

impl View {
    /// What ended it, or ends it.
    pub(crate) fn cause(&self) -> Option<EndCause> {
        self.end.as_ref().map(|end| end.cause)
    }

    pub(crate) fn starting() -> Self {
        Self {
            state: SessionState::Starting,
            reason: None,
            end: None,
            exit_code: None,
            generation: None,
            created_at: Timestamp::now(),
            started_at: None,
            ended_at: None,
            process: None,
            recorded: false,
            phases: Phases::default(),
            failure: None,
            dead_at: None,
            released_at: None,
        }
    }
}
