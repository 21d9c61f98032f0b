//! A registry whose disk is full at times.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use conman_registry::{
    ContainerIdentity, RecordState, Registry, RegistryError, Release, SessionRecord,
};
use conman_testkit::ModelRegistry;
use tokio::sync::watch;

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
    /// The next list cannot be read.
    lose_list: AtomicBool,
    /// No record can be read.
    unreadable: AtomicBool,
    /// What stands there instead of any record is none.
    garbled: AtomicBool,
    /// Nobody can tell whose anything is.
    unsure: AtomicBool,
    /// What was claimed is somebody else's by now.
    lost: AtomicBool,
    /// Another node was first with every claim.
    beaten: AtomicBool,
    /// Claims are recorded, and answered only once this is over.
    held: watch::Sender<bool>,
    /// What was to be released, recorded or not.
    released: Mutex<Vec<(SessionId, Generation)>>,
    /// Questions whether something may be started.
    asked: AtomicU32,
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

    pub(crate) fn lose_next_list(&self) {
        self.lose_list.store(true, Ordering::Relaxed);
    }

    pub(crate) fn be_unreadable(&self, unreadable: bool) {
        self.unreadable.store(unreadable, Ordering::Relaxed);
    }

    pub(crate) fn be_garbled(&self) {
        self.garbled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn be_unsure(&self, unsure: bool) {
        self.unsure.store(unsure, Ordering::Relaxed);
    }

    pub(crate) fn hold_claims(&self, hold: bool) {
        self.held.send_replace(hold);
    }

    pub(crate) fn lose_what_is_claimed(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    pub(crate) fn lose_claims_to_another(&self) {
        self.beaten.store(true, Ordering::Relaxed);
    }

    pub(crate) fn was_released(&self, id: &SessionId, generation: Generation) -> bool {
        let released = self.released.lock().expect("no panic");
        released.contains(&(id.clone(), generation))
    }

    pub(crate) fn asked(&self) -> u32 {
        self.asked.load(Ordering::Relaxed)
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

fn unavailable() -> RegistryError {
    RegistryError::Unavailable {
        reason: "nobody can tell just now".to_owned(),
    }
}

#[async_trait]
impl Registry for FlakyRegistry {
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError> {
        self.write()?;
        let record = self.records.claim_by(id, spec, read).await?;
        if self.lose_claim.swap(false, Ordering::Relaxed) {
            return Err(no_space());
        }
        if self.mute.load(Ordering::Relaxed) {
            return std::future::pending().await;
        }
        let mut held = self.held.subscribe();
        // The sender lives in `self`.
        let _ = held.wait_for(|held| !held).await;
        if self.beaten.load(Ordering::Relaxed) {
            return Err(RegistryError::Changed { id: id.clone() });
        }
        Ok(record)
    }

    async fn may_start(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if self.unsure.load(Ordering::Relaxed) {
            return Err(unavailable());
        }
        if self.lost.load(Ordering::Relaxed) {
            return Err(RegistryError::Superseded {
                id: id.clone(),
                generation,
                current: None,
            });
        }
        self.records.may_start(id, generation).await
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

    async fn set_spec(
        &self,
        id: &SessionId,
        generation: Generation,
        spec: &ResolvedSpec,
    ) -> Result<(), RegistryError> {
        self.write()?;
        self.records.set_spec(id, generation, spec).await
    }

    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        let named = batch.iter().map(|one| (one.id.clone(), one.generation));
        self.released.lock().expect("no panic").extend(named);
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
        if self.unreadable.load(Ordering::Relaxed) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(unavailable());
        }
        if self.garbled.load(Ordering::Relaxed) {
            let reason = "it is garbage".to_owned();
            return Err(RegistryError::Unreadable { reason });
        }
        self.records.get(id).await
    }

    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError> {
        if self.lose_list.swap(false, Ordering::Relaxed) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(unavailable());
        }
        self.records.list().await
    }
}
