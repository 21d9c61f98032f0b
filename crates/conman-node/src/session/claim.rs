//! Has the registry record a start.

use conman_proto::{ResolvedSpec, SessionId};
use conman_registry::{Ending, RecordState, Registry, RegistryError, Release, SessionRecord};
use jiff::Timestamp;

/// Claims, and does so again after giving up a claim whose answer was lost: the caller is the only
/// life of the session, so a record that says `Starting` and knows no container is such a claim's,
/// and the runtime was never told of it.
pub(super) async fn claim(
    registry: &dyn Registry,
    id: &SessionId,
    spec: &ResolvedSpec,
) -> Result<SessionRecord, RegistryError> {
    let owned = match registry.claim(id, spec).await {
        Err(error @ RegistryError::Owned { .. }) => error,
        other => return other,
    };
    let abandoned = registry
        .get(id)
        .await?
        .filter(|record| record.state == RecordState::Starting && record.container.is_none());
    let Some(record) = abandoned else {
        return Err(owned);
    };
    let ending = Ending {
        failed: true,
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
