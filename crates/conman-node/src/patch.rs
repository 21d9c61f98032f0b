//! Changes of a session while it runs.

use std::sync::Arc;

use conman_proto::{SessionId, SessionPatch};
use conman_registry::RegistryError;
use jiff::Timestamp;

use crate::context::Context;
use crate::error::PatchError;
use crate::session::SessionHandle;

/// Changes the spec of a session that has not ended: first in the registry, then for its task.
pub(crate) async fn patch(
    context: &Arc<Context>,
    id: &SessionId,
    patch: &SessionPatch,
) -> Result<Arc<SessionHandle>, PatchError> {
    let none = || PatchError::NoSuchSession { id: id.clone() };
    let handle = context.sessions.shown(id).ok_or_else(none)?;
    let generation = handle.generation().ok_or_else(none)?;
    let ended = || PatchError::Ended {
        id: id.clone(),
        state: handle.state(),
    };
    // Its record is about to be replaced by that of its end.
    let is_ending = || handle.is_ended() || handle.is_ending() || context.table.closed().is_some();
    if is_ending() {
        return Err(ended());
    }
    let change = handle.live_spec.change(async |spec| {
        let changed = conman_core::patched(spec, patch, Timestamp::now());
        let changed = changed.map_err(PatchError::BadPatch)?;
        let stored = context.registry.set_spec(id, generation, &changed).await;
        stored.map_err(|error| match error {
            RegistryError::Ended { .. } | RegistryError::Superseded { .. } => ended(),
            source => PatchError::Registry {
                id: id.clone(),
                source,
            },
        })?;
        // Its end may have been written after the change, without it.
        match is_ending() {
            true => Err(ended()),
            false => Ok(changed),
        }
    });
    change.await?;
    tracing::info!(session = %id, "changed the session's spec");
    Ok(handle)
}
