//! A registry whose disk is full at times.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use conman_registry::{
    ContainerIdentity, ModelRegistry, RecordState, Registry, RegistryError, Release, SessionRecord,
};

#[derive(Debug, Default)]
pub(crate) struct FlakyRegistry {
    records: ModelRegistry,
    full: AtomicBool,
    refused: AtomicU32,
    /// The answer to the next claim is lost.
    lose_claim: AtomicBool,
    /// No claim is answered, though all are recorded.
    mute: AtomicBool,
    /// Whatever is released is forgotten at once, and the answer is lost.
    forgetful: AtomicBool,
}

impl FlakyRegistry {
    pub(crate) fn fill(&self, full: bool) {
        self.full.store(full, Ordering::Relaxed);
    }

    pub(crate) fn refused(&self) -> u32 {
        self.refused.load(Ordering::Relaxed)
    }

    pub(crate) fn lose_next_claim(&self) {
        self.lose_claim.store(true, Ordering::Relaxed);
    }

    pub(crate) fn answer_no_claims(&self, mute: bool) {
        self.mute.store(mute, Ordering::Relaxed);
    }

    pub(crate) fn forget_what_is_released(&self) {
        self.forgetful.store(true, Ordering::Relaxed);
    }

    async fn release_and_forget(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        let results = self.records.release(batch.clone()).await;
        let mut answers = Vec::with_capacity(batch.len());
        for (release, result) in batch.into_iter().zip(results) {
            answers.push(match result {
                Ok(()) => {
                    let forgotten = self.records.forget(&release.id, release.generation);
                    forgotten.await.and(Err(no_space()))
                }
                refused => refused,
            });
        }
        answers
    }

    fn write(&self) -> Result<(), RegistryError> {
        if !self.full.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        Err(no_space())
    }
}

fn no_space() -> RegistryError {
    RegistryError::Io {
        action: "write",
        path: PathBuf::from("registry.redb"),
        source: Arc::new(io::Error::from(io::ErrorKind::StorageFull)),
    }
}

#[async_trait]
impl Registry for FlakyRegistry {
    async fn claim(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
    ) -> Result<SessionRecord, RegistryError> {
        self.write()?;
        let record = self.records.claim(id, spec).await?;
        if self.lose_claim.swap(false, Ordering::Relaxed) {
            return Err(no_space());
        }
        if self.mute.load(Ordering::Relaxed) {
            return std::future::pending().await;
        }
        Ok(record)
    }

    async fn set_container(
        &self,
        id: &SessionId,
        generation: Generation,
        container: &ContainerIdentity,
    ) -> Result<(), RegistryError> {
        self.write()?;
        self.records.set_container(id, generation, container).await
    }

    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError> {
        self.write()?;
        self.records.set_state(id, generation, state).await
    }

    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        match self.write() {
            Ok(()) if self.forgetful.load(Ordering::Relaxed) => {
                self.release_and_forget(batch).await
            }
            Ok(()) => self.records.release(batch).await,
            Err(_) => batch.iter().map(|_| Err(no_space())).collect(),
        }
    }

    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        self.write()?;
        self.records.forget(id, generation).await
    }

    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError> {
        self.records.get(id).await
    }

    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError> {
        self.records.list().await
    }
}
