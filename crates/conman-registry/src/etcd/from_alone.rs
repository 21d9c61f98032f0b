//! What a node brings along that was alone before it joins: no generation of that time is used again.

use std::path::Path;
use std::sync::Arc;

use conman_proto::Generation;

use super::seen;
use crate::RegistryError;
use crate::embedded::{LeftAlone, left_alone};
use crate::state_lock::StateLock;

/// What no session of the fleet may start at or below: whatever was used here alone, and what an
/// operator says, if any.
///
/// # Errors
/// When nobody knows what was used here, at the first time that the node joins.
pub(super) fn floor(
    state_dir: &Path,
    lock: &StateLock,
    accept_above: Option<Generation>,
) -> Result<Option<Generation>, RegistryError> {
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
    if joined.is_none() && !left.going.is_empty() {
        let sessions: Vec<&str> = left.going.iter().map(|id| id.as_str()).collect();
        tracing::warn!(
            sessions = sessions.join(", "),
            above = left.through,
            "this node was alone, and its fleet knows nothing of these sessions: what still runs of \
             them here is ended once it has joined; start them anew, which gives them greater \
             generations"
        );
    }
    Ok(Generation::new(left.through).max(accept_above))
}
