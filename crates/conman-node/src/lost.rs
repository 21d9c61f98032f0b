//! Ends by its record a session that no node can end any more: its node is lost, and nothing of it runs.
//!
//! The session is claimed and given up at once. After the claim no node starts it by the old record, and
//! a claim succeeds only where the former node can run nothing of it any more.

use std::sync::Arc;

use conman_core::EndCause;
use conman_proto::{EventKind, ResolvedSpec, StopReport};
use conman_registry::{Ending, RegistryError, Release, SessionRecord};
use tokio::time::Instant;

use crate::context::Context;
use crate::error::StopError;
use crate::{adoption, end_orders, view};

/// See [`crate::SessionsHandle::stop_lost`].
pub(crate) async fn stop(
    context: Arc<Context>,
    record: SessionRecord,
    why: String,
) -> Result<StopReport, StopError> {
    let (asked, id) = (Instant::now(), record.id.clone());
    // The caller may be cancelled between the claim and the release.
    let stopping = tokio::spawn(async move { end(&context, record, why, asked).await });
    stopping.await.unwrap_or(Err(StopError::Moved { id }))
}

async fn end(
    context: &Arc<Context>,
    record: SessionRecord,
    why: String,
    asked: Instant,
) -> Result<StopReport, StopError> {
    let id = record.id.clone();
    let not_noted = |source| StopError::NotForgotten {
        id: id.clone(),
        source: Arc::new(source),
    };
    // If this node is lost before the release, that does not count as a failed restart.
    let spec = ResolvedSpec {
        restarted: None,
        ..record.spec.clone()
    };
    let claimed = context.registry.claim_by(&id, &spec, Some(&record)).await;
    let claimed = match claimed {
        Ok(claimed) => claimed,
        Err(
            RegistryError::Changed { .. }
            | RegistryError::Owned { .. }
            | RegistryError::Elsewhere { .. }
            | RegistryError::Superseded { .. },
        ) => return Err(StopError::Moved { id }),
        Err(error) => return Err(not_noted(error)),
    };
    let generation = claimed.generation;
    let ending = Ending::now(false, EndCause::Deleted, why.clone());
    let release = Release {
        id: id.clone(),
        generation,
        ending: ending.clone(),
    };
    for released in context.registry.release(vec![release]).await {
        if let Err(error) = released {
            end_orders::order(context, &id, generation, Some(why));
            return Err(not_noted(error));
        }
    }
    context.note_session(EventKind::SessionReleased, &id, generation, why.clone());
    let report = StopReport {
        id,
        generation,
        state: view::ended_state(&ending),
        reason: Some(why),
        dead_ms: None,
        released_ms: Some(asked.elapsed().as_secs_f64() * 1_000.0),
    };
    let handle = adoption::ended_handle(claimed, ending);
    context.sessions.adopt_ended(&handle);
    let kept = context.options.limits.max_stopped_kept;
    adoption::forget(context, context.sessions.trim(kept));
    Ok(report)
}
