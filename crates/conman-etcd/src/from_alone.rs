//! State of a node from before it joins a fleet: no generation used then is used again.

use std::path::Path;
use std::sync::Arc;

use conman_proto::Generation;

use conman_registry::state_lock::StateLock;
use conman_registry::{LeftAlone, RegistryError, fleet_mark, left_alone};

/// What a node has from before its fleet.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FromAlone {
    /// Sessions of the fleet start above this generation: the greatest one used here before, or
    /// given by an operator, if any.
    pub(super) floor: Option<Generation>,
    /// Whether sessions may run here that are unknown to the fleet.
    pub(super) runs: bool,
}

/// Reads what a node has from before its fleet.
///
/// # Errors
/// When the generations used here are unknown, at the first join of the node.
pub(super) fn look(
    state_dir: &Path,
    lock: &StateLock,
    accept_above: Option<Generation>,
) -> Result<FromAlone, RegistryError> {
    let joined = fleet_mark::in_fleet(state_dir).map_err(|source| RegistryError::Io {
        action: "look for what a fleet left in",
        path: state_dir.to_owned(),
        source: Arc::new(source),
    })?;
    let left = match left_alone(state_dir, lock) {
        Ok(left) => left,
        // An operator gave the floor, or the fleet's floor was raised when the node joined.
        Err(error) if accept_above.is_some() || joined.is_some() => {
            tracing::warn!(
                %error,
                "cannot read the generations that this node used before it joined its fleet"
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
            "this node was alone, and its fleet does not know these sessions: their containers are \
             frozen, and are ended once the node has joined, or has failed to join for 15 minutes. \
             Start the sessions again after that, not before, to give them greater generations. \
             Until then they continue if the configuration names no etcd"
        );
    }
    Ok(FromAlone {
        floor: Generation::new(left.through).max(accept_above),
        runs,
    })
}
