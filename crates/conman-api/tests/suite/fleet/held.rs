//! What changes between two looks into the registry.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use conman_registry::{
    ContainerIdentity, RecordState, Registry, RegistryError, Release, SessionRecord,
};
use tokio::sync::oneshot;

/// The records, of which the next one that is asked for may be held back before it is read.
#[derive(Debug)]
pub(crate) struct HeldRegistry {
    records: Arc<dyn Registry>,
    holds: Holds,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Holds(Arc<Mutex<Option<Hold>>>);

#[derive(Debug)]
struct Hold {
    came: oneshot::Sender<()>,
    /// Until its other end is dropped.
    held: oneshot::Receiver<()>,
}

impl Holds {
    pub(crate) fn over(&self, records: Arc<dyn Registry>) -> Arc<dyn Registry> {
        let holds = self.clone();
        Arc::new(HeldRegistry { records, holds })
    }

    /// The first tells that the next record was asked for, which is read once the second is dropped.
    pub(crate) fn hold_next(&self) -> (oneshot::Receiver<()>, oneshot::Sender<()>) {
        let (came, has_come) = oneshot::channel();
        let (holds, held) = oneshot::channel();
        *self.0.lock().expect("no panic") = Some(Hold { came, held });
        (has_come, holds)
    }
}

#[async_trait]
impl Registry for HeldRegistry {
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError> {
        self.records.claim_by(id, spec, read).await
    }

    async fn may_start(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        self.records.may_start(id, generation).await
    }

    async fn set_container(
        &self,
        id: &SessionId,
        generation: Generation,
        container: &ContainerIdentity,
    ) -> Result<(), RegistryError> {
        self.records.set_container(id, generation, container).await
    }

    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError> {
        self.records.set_state(id, generation, state).await
    }

    async fn set_spec(
        &self,
        id: &SessionId,
        generation: Generation,
        spec: &ResolvedSpec,
    ) -> Result<(), RegistryError> {
        self.records.set_spec(id, generation, spec).await
    }

    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        self.records.release(batch).await
    }

    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        self.records.forget(id, generation).await
    }

    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError> {
        let hold = self.holds.0.lock().expect("no panic").take();
        if let Some(Hold { came, held }) = hold {
            let _ = came.send(());
            let _ = held.await;
        }
        self.records.get(id).await
    }

    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError> {
        self.records.list().await
    }
}
