//! Why a session cannot be reached or started.

use conman_core::placement::Placement;
use conman_node::{EnsureError, FailureKind, RouteError};
use conman_peer::RefusedBy;
use conman_proto::{Problem, SessionId};
use conman_registry::RegistryError;
use thiserror::Error;

use crate::{Missing, NoAddress};

/// Slug of a node whose clients take all the places of a session that is not ready.
const TOO_MANY_WAITING: &str = "too-many-waiting";

/// Why a session cannot be reached or started.
#[derive(Debug, Clone, Error)]
pub enum LocateError {
    /// This node's answer.
    #[error(transparent)]
    Route(RouteError),
    /// Another node's answer.
    #[error("node `{node}`: {}", problem.detail)]
    Answered { node: String, problem: Box<Problem> },
    #[error(transparent)]
    Registry(RegistryError),
    #[error(transparent)]
    Unreachable(NoAddress),
    #[error(
        "node `{node}` renews its place in the fleet and does not answer this node: the network between the \
         two is interrupted, or the port of `listen.peers` is closed; try again, or connect to another node"
    )]
    CutOff { node: String },
    #[error("node `{node}` did not answer")]
    NoAnswer { node: String },
    #[error(transparent)]
    Refused(RefusedBy),
    #[error("no node takes session `{id}`: {reasons}. Wait, add a node, or undrain one")]
    NoNode { id: SessionId, reasons: String },
    #[error("session `{id}` changed its node each time that it was looked up; try again")]
    Moves { id: SessionId },
    #[error(
        "{limit} connections wait for session `{id}` already, a quarter of `limits.max_held`; try \
         again in a moment"
    )]
    TooManyWaiting { id: SessionId, limit: usize },
    #[error("connections wait for {limit} sessions already; try again in a moment")]
    TooManySessions { limit: usize },
}

impl LocateError {
    /// No node of `placement` may take the session.
    #[must_use]
    pub fn no_node(id: &SessionId, placement: &Placement) -> Self {
        let (id, reasons) = (id.clone(), reasons(placement));
        Self::NoNode { id, reasons }
    }

    /// What a node lacks that did not start a session for this reason; `None` if no other node has
    /// a better chance.
    pub(crate) fn missing(&self) -> Option<Missing> {
        match self {
            Self::Answered { problem, .. } => {
                Missing::of(problem).or(problem.retryable.then_some(Missing::Room))
            }
            Self::Route(error) => {
                missing_here(error).or(error.is_retryable().then_some(Missing::Room))
            }
            Self::Refused(_) => Some(Missing::Trust),
            Self::Registry(_)
            | Self::Unreachable(_)
            | Self::CutOff { .. }
            | Self::NoAnswer { .. }
            | Self::NoNode { .. }
            | Self::Moves { .. }
            | Self::TooManyWaiting { .. }
            | Self::TooManySessions { .. } => Some(Missing::Room),
        }
    }

    /// Whether the node's own clients have all the places for the session.
    pub(crate) fn is_crowded(&self) -> bool {
        matches!(self, Self::Answered { problem, .. } if problem.slug() == TOO_MANY_WAITING)
    }
}

fn missing_here(error: &RouteError) -> Option<Missing> {
    let RouteError::NotStarted { source, .. } = error else {
        return None;
    };
    match source {
        EnsureError::NoSuchRuntime { .. } => Some(Missing::Runtime),
        EnsureError::NoSuchImage { .. }
        | EnsureError::StartFailed {
            kind: FailureKind::NoSuchImage,
            ..
        } => Some(Missing::Image),
        _ => None,
    }
}

/// Why nodes are not used, or only as a second choice.
pub(crate) fn reasons(placement: &Placement) -> String {
    let refused = placement.refused.iter();
    let reasons: Vec<String> = refused
        .map(|refused| format!("node `{}` {}", refused.node, refused.why))
        .collect();
    match reasons.is_empty() {
        true => "none is known".to_owned(),
        false => reasons.join("; "),
    }
}

/// Whether another node was first.
pub(crate) fn is_elsewhere(error: &RouteError) -> bool {
    matches!(error, RouteError::NotStarted { source, .. } if is_of_another(source))
}

/// Whether the session ended or cannot run here, so that another node may own it.
pub(crate) fn has_ended(error: &RouteError) -> bool {
    matches!(error, RouteError::Ended { .. } | RouteError::Stuck { .. })
}

pub(crate) fn is_of_another(error: &EnsureError) -> bool {
    matches!(error, EnsureError::Registry { source, .. }
        if matches!(**source, RegistryError::Elsewhere { .. } | RegistryError::Changed { .. }))
}
