//! What a node brings along that was alone before it joins: no generation of that time is used again.

use std::path::Path;
use std::sync::Arc;

use conman_proto::Generation;

use super::seen;
use crate::RegistryError;
use crate::embedded::{LeftAlone, left_alone};
use crate::state_lock::StateLock;

/// What a node brings along.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FromAlone {
    /// What no session of the fleet may start at or below: whatever was used here alone, and what an
    /// operator says, if any.
    pub(super) floor: Option<Generation>,
    /// Whether sessions may run here that the fleet has never heard of.
    pub(super) runs: bool,
}

/// Looks what a node brings along.
///
/// # Errors
/// When nobody knows what was used here, at the first time that the node joins.
pub(super) fn look(
    state_dir: &Path,
    lock: &StateLock,
    accept_above: Option<Generation>,
) -> Result<FromAlone, RegistryError> {
    let joined = seen::in_fleet(state_dir).map_err(|source| RegistryError::Io {
        action: "look for what a fleet left in",
        path: state_dir.to_owned(),
        source: Arc::new(source),
    })?;
    let left = match left_alone(state_dir, lock) {
        Ok(left) => left,
        // An operator says what it was, or the fleet's floor was raised when the node joined.
        Err(error) if accept_above.is_some() || joined.is_some() => {
            tracing::warn!(
                %error,
                "which generations this node has used while it was alone cannot be read"
            );
            LeftAlone::default()
        }
        Err(error) => return Err(error),
    };
    let runs = joined.is_none() && !left.going.is_empty();
    if runs {
        let sessions: Vec<&str> = left.going.iter().map(|id| id.as_str()).collect();
        tracing::warn!(
            sessions = sessions.join(", "),
            above = left.through,
            "this node was alone, and its fleet knows nothing of these sessions: what its shim still \
             has of them is frozen, and all that runs of them here is ended once it has joined, or \
             has tried to for a quarter of an hour; start them anew then, not before, which gives \
             them greater generations. Until then they go on where its configuration names no etcd"
        );
    }
    Ok(FromAlone {
        floor: Generation::new(left.through).max(accept_above),
        runs,
    })
}
