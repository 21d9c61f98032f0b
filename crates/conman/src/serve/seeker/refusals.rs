//! Answers to clients, and the meaning of other nodes' problems.

use conman_fleet::RefusedBy;
use conman_node::{EnsureError, RouteError};
use conman_proto::{Problem, SessionId};
use conman_proxy::Refusal;
use conman_registry::RegistryError;

use crate::serve::chain;

/// Slug of a node whose clients take all the places of a session that is not ready.
pub(super) const TOO_MANY_WAITING: &str = "too-many-waiting";
/// Slug of a node that lacks what the session needs; another one may have it.
pub(super) const NO_SUCH_IMAGE: &str = "no-such-image";
pub(super) const NO_SUCH_RUNTIME: &str = "no-such-runtime";
/// Retry-After of transient problems.
const RETRY_AFTER_S: u32 = 1;

pub(super) fn is_for_want_of_something(problem: &Problem) -> bool {
    [NO_SUCH_IMAGE, NO_SUCH_RUNTIME].contains(&problem.slug())
}

/// Whether another node was first.
pub(super) fn is_elsewhere(error: &RouteError) -> bool {
    matches!(error, RouteError::NotStarted { source, .. } if is_of_another(source))
}

/// Whether the session ended or cannot run here, so that another node may own it.
pub(super) fn is_over(error: &RouteError) -> bool {
    matches!(error, RouteError::Ended { .. } | RouteError::Stuck { .. })
}

pub(super) fn is_of_another(error: &EnsureError) -> bool {
    matches!(error, EnsureError::Registry { source, .. }
        if matches!(**source, RegistryError::Elsewhere { .. } | RegistryError::Changed { .. }))
}

pub(super) fn with_retry(problem: Problem) -> Refusal {
    let retry_after_s = problem.retryable.then_some(RETRY_AFTER_S);
    Refusal {
        problem,
        retry_after_s,
    }
}

pub(super) fn passing(problem: Problem) -> Refusal {
    with_retry(Problem {
        retryable: true,
        ..problem
    })
}

pub(super) fn no_registry(error: RegistryError) -> Refusal {
    passing(Problem::new(
        "registry-failed",
        "The registry failed",
        503,
        chain(&error),
    ))
}

pub(super) fn unreachable(why: String) -> Refusal {
    passing(Problem::new(
        "node-unreachable",
        "The session's node cannot be reached",
        503,
        why,
    ))
}

pub(super) fn refused(by: &RefusedBy) -> Refusal {
    let title = "The session's node does not know this one";
    Refusal::from(Problem::new("node-refuses", title, 502, by.to_string()))
}

/// Why no node may take a session.
pub(super) fn reasons(refused: &[conman_core::placement::Refused]) -> String {
    let reasons: Vec<String> = refused
        .iter()
        .map(|refused| format!("node `{}` {}", refused.node, refused.why))
        .collect();
    if reasons.is_empty() {
        "none is known".to_owned()
    } else {
        reasons.join("; ")
    }
}

pub(super) fn no_node(id: &SessionId, refused: &[conman_core::placement::Refused]) -> Refusal {
    let reasons = reasons(refused);
    passing(Problem::new(
        "no-node",
        "No node takes the session",
        503,
        format!("no node takes session `{id}`: {reasons}. Wait, add a node, or undrain one"),
    ))
}
