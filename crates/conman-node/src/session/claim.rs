//! Has the registry record a start.

use std::sync::Arc;
use std::time::Duration;

use conman_core::EndCause;
use conman_proto::{ResolvedSpec, SessionId};
use conman_registry::{Ending, RecordState, RegistryError, Release, SessionRecord};
use conman_runtime::ContainerKey;
use jiff::Timestamp;
use tokio::time::{Instant, sleep};

use super::answer::LostStart;
use super::lost_start;
use crate::context::Context;

/// How long it is tried to prove that nothing runs of an earlier claim.
const PROOF_PATIENCE: Duration = Duration::from_secs(10);

const PROOF_PAUSE: Duration = Duration::from_millis(50);

/// Claims, and does so again after giving up a claim whose answer was lost: a record that says
/// `Starting` and knows no container, while no life but the caller's goes on, is such a claim's.
/// Whether its start was sent, by an earlier daemon perhaps, the record does not tell; so it is
/// given up as any start without an answer is, with proof that nothing of it runs or may appear.
pub(super) async fn claim(
    context: &Context,
    id: &SessionId,
    spec: &ResolvedSpec,
    read: Option<&SessionRecord>,
) -> Result<SessionRecord, RegistryError> {
    let registry = &context.registry;
    let owned = match registry.claim_by(id, spec, read).await {
        // What was read is not an abandoned claim's.
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
    let ending = Ending {
        failed: true,
        cause: Some(EndCause::Failed),
        reason: "its claim was not answered".to_owned(),
        exit_code: None,
        ended_at: Timestamp::now(),
        started_at: None,
        phases: Default::default(),
    };
    let release = Release {
        id: id.clone(),
        generation: record.generation,
        ending,
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
    let key = ContainerKey {
        session: record.id.clone(),
        generation: record.generation,
    };
    let deadline = Instant::now() + PROOF_PATIENCE;
    loop {
        match lost_start::resolve(Arc::clone(runtime), key.clone()).await {
            LostStart::Ended | LostStart::Gone => {
                context.cleanup.push(record.spec.runtime, key);
                return true;
            }
            LostStart::Found { pid } => {
                tracing::warn!(container = %key, pid, "killed what nobody knew to have been started");
            }
            LostStart::Unknown(reason) => {
                tracing::debug!(container = %key, reason, "it is not proven dead yet");
            }
        }
        if Instant::now() >= deadline {
            return false;
        }
        sleep(PROOF_PAUSE).await;
    }
}
