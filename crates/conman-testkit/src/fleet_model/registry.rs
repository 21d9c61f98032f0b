//! The registry of a fleet in memory, as one node uses it.

use std::sync::Arc;

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use jiff::Timestamp;

use super::{Locations, ModelFleet, lock};
use conman_registry::{
    ContainerIdentity, Ending, PeerStanding, Phases, RecordState, Registry, RegistryError, Release,
    SessionRecord,
};

#[derive(Debug)]
pub(super) struct Shared {
    world: Arc<ModelFleet>,
    me: String,
    /// An entry is dropped when its session is claimed or forgotten.
    locations: Locations,
}

impl Shared {
    pub(super) fn new(world: Arc<ModelFleet>, me: String, locations: Locations) -> Self {
        Self {
            world,
            me,
            locations,
        }
    }

    fn answers(&self) -> Result<(), RegistryError> {
        self.world.answers(&self.me)
    }
}

impl ModelFleet {
    /// Ends a session whose node is fenced, as any node that claims it may.
    async fn end_lost(&self, id: &SessionId, generation: Generation) -> bool {
        let owner = lock(&self.owners).get(id).cloned();
        let is_fenced = owner.is_some_and(|owner| {
            let members = lock(&self.members);
            let member = members.get(&owner);
            member.is_some_and(|member| member.peer.standing == PeerStanding::Fenced)
        });
        if !is_fenced {
            return false;
        }
        let ending = Ending {
            cause: None,
            failed_phase: None,
            failed: true,
            reason: "its node is gone".to_owned(),
            exit_code: None,
            ended_at: Timestamp::now(),
            started_at: None,
            phases: Phases::default(),
        };
        let release = Release {
            id: id.clone(),
            generation,
            ending,
        };
        let released = self.records.release(vec![release]).await;
        released.iter().all(Result::is_ok)
    }
}

#[async_trait]
impl Registry for Shared {
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError> {
        self.answers()?;
        match self.world.records.claim_by(id, spec, read).await {
            Ok(record) => {
                lock(&self.world.unreadable).remove(id);
                lock(&self.locations).remove(id);
                let mut owners = lock(&self.world.owners);
                owners.insert(id.clone(), self.me.clone());
                Ok(record)
            }
            Err(RegistryError::Owned { id, generation }) => {
                if self.world.end_lost(&id, generation).await {
                    return self.claim(&id, spec).await;
                }
                // The other claim may not have recorded its node yet.
                let owner = loop {
                    let owner = lock(&self.world.owners).get(&id).cloned();
                    match owner {
                        Some(owner) => break owner,
                        None => tokio::task::yield_now().await,
                    }
                };
                if owner == self.me {
                    return Err(RegistryError::Owned { id, generation });
                }
                Err(RegistryError::Elsewhere { id, node: owner })
            }
            Err(error) => Err(error),
        }
    }

    async fn set_container(
        &self,
        id: &SessionId,
        generation: Generation,
        container: &ContainerIdentity,
    ) -> Result<(), RegistryError> {
        self.answers()?;
        let records = &self.world.records;
        records.set_container(id, generation, container).await
    }

    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError> {
        self.answers()?;
        self.world.records.set_state(id, generation, state).await
    }

    async fn set_spec(
        &self,
        id: &SessionId,
        generation: Generation,
        spec: &ResolvedSpec,
    ) -> Result<(), RegistryError> {
        self.answers()?;
        self.world.records.set_spec(id, generation, spec).await
    }

    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        let mut unheard = self.world.unheard.subscribe();
        // This world owns the sender, so it cannot be closed.
        let _ = unheard
            .wait_for(|unheard| !unheard.contains(&self.me))
            .await;
        match self.answers() {
            Ok(()) => self.world.records.release(batch).await,
            Err(error) => batch.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        self.answers()?;
        self.world.records.forget(id, generation).await?;
        lock(&self.locations).remove(id);
        Ok(())
    }

    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError> {
        self.answers()?;
        if let Some(what) = lock(&self.world.unreadable).get(id) {
            let reason = what.clone();
            return Err(RegistryError::Unavailable { reason });
        }
        self.world.records.get(id).await
    }

    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError> {
        self.answers()?;
        let mut records = self.world.records.list().await?;
        let owners = lock(&self.world.owners);
        records.retain(|record| owners.get(&record.id) == Some(&self.me));
        Ok(records)
    }
}
