//! Records a start in the registry.

use std::sync::Arc;
use std::time::Duration;

use conman_core::EndCause;
use conman_proto::{ResolvedSpec, SessionId};
use conman_registry::{Ending, RecordState, RegistryError, Release, SessionRecord};
use conman_runtime::ContainerKey;
use tokio::time::{Instant, sleep};

use super::answer::StartOutcome;
use super::unanswered_start;
use crate::context::Context;

/// How long to try to prove that nothing runs of an earlier claim.
const PROOF_PATIENCE: Duration = Duration::from_secs(10);

const PROOF_PAUSE: Duration = Duration::from_millis(50);

/// Claims a session, after giving up an earlier claim whose answer was lost, if there is one: a record in
/// state `Starting` without a container, while the caller's is the only life. The record does not say
/// whether that start was sent, perhaps by an earlier daemon. So it is given up like any start without an
/// answer, with proof that nothing of it runs or may appear.
pub(super) async fn claim(
    context: &Context,
    id: &SessionId,
    spec: &ResolvedSpec,
    read: Option<&SessionRecord>,
) -> Result<SessionRecord, RegistryError> {
    let registry = &context.registry;
    let owned = match registry.claim_by(id, spec, read).await {
        // The record that was read is not of an abandoned claim.
        Err(error @ RegistryError::Owned { .. }) if read.is_none() => error,
        other => return other,
    };
    let abandoned = registry
        .get(id)
        .await?
        .filter(|record| record.state == RecordState::Starting && record.container.is_none());
    let Some(record) = abandoned else {
        return Err(owned);
    };
    if !prove_nothing_runs(context, &record).await {
        return Err(owned);
    }
    let release = Release {
        id: id.clone(),
        generation: record.generation,
        ending: Ending::now(true, EndCause::StartFailed, "its claim was not answered"),
    };
    for result in registry.release(vec![release]).await {
        result?;
    }
    registry.claim(id, spec).await
}

async fn prove_nothing_runs(context: &Context, record: &SessionRecord) -> bool {
    let Some(runtime) = context.runtime(record.spec.runtime) else {
        return false;
    };
    let key = ContainerKey::new(record.id.clone(), record.generation);
    let deadline = Instant::now() + PROOF_PATIENCE;
    loop {
        match unanswered_start::resolve(Arc::clone(runtime), key.clone()).await {
            StartOutcome::Ended | StartOutcome::Gone => {
                context.cleanup.push(record.spec.runtime, key);
                return true;
            }
            StartOutcome::Found { pid } => {
                tracing::warn!(container = %key, pid, "killed an orphaned container");
            }
            StartOutcome::Unknown(reason) => {
                tracing::debug!(
                    container = %key,
                    reason,
                    "cannot prove that the container is dead yet"
                );
            }
        }
        if Instant::now() >= deadline {
            return false;
        }
        sleep(PROOF_PAUSE).await;
    }
}
