//! The registry in memory: for tests, and the reference for the embedded one.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use conman_registry::rules::{self, Change, Effect};
use conman_registry::{
    ContainerIdentity, GREATEST_GENERATION, RecordState, Registry, RegistryError, Release,
    SessionRecord,
};
use jiff::Timestamp;

/// Records in memory, lost with the value. Its methods never wait.
#[derive(Debug, Default)]
pub struct ModelRegistry {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    records: BTreeMap<SessionId, SessionRecord>,
    /// Greatest generation assigned; 0 for none.
    used: u64,
}

impl ModelRegistry {
    /// An empty registry whose first generation is 1.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty registry whose generations are all greater than `floor`.
    #[must_use]
    pub fn above(floor: Generation) -> Self {
        Self {
            state: Mutex::new(State {
                records: BTreeMap::new(),
                used: floor.get(),
            }),
        }
    }

    /// A panic while the lock is held cannot leave a record half changed: every change is one
    /// map operation.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(
        &self,
        id: &SessionId,
        generation: Generation,
        change: &Change,
    ) -> Result<(), RegistryError> {
        let mut state = self.state();
        match rules::apply(id, generation, state.records.get(id), change)? {
            Effect::Keep => {}
            Effect::Put(record) => {
                state.records.insert(id.clone(), *record);
            }
            Effect::Remove => {
                state.records.remove(id);
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Registry for ModelRegistry {
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError> {
        let mut state = self.state();
        rules::may_claim(id, state.records.get(id), read)?;
        let generation = state
            .used
            .checked_add(1)
            .and_then(Generation::new)
            .filter(|next| *next <= GREATEST_GENERATION)
            .ok_or(RegistryError::Exhausted)?;
        state.used = generation.get();
        let record = SessionRecord {
            id: id.clone(),
            generation,
            state: RecordState::Starting,
            spec: spec.clone(),
            container: None,
            created_at: Timestamp::now(),
        };
        state.records.insert(id.clone(), record.clone());
        Ok(record)
    }

    async fn set_container(
        &self,
        id: &SessionId,
        generation: Generation,
        container: &ContainerIdentity,
    ) -> Result<(), RegistryError> {
        self.change(id, generation, &Change::SetContainer(container.clone()))
    }

    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError> {
        self.change(id, generation, &Change::SetState(state))
    }

    async fn set_spec(
        &self,
        id: &SessionId,
        generation: Generation,
        spec: &ResolvedSpec,
    ) -> Result<(), RegistryError> {
        self.change(id, generation, &Change::SetSpec(Box::new(spec.clone())))
    }

    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        batch
            .into_iter()
            .map(|one| self.change(&one.id, one.generation, &Change::Release(one.ending)))
            .collect()
    }

    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        self.change(id, generation, &Change::Forget)
    }

    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError> {
        Ok(self.state().records.get(id).cloned())
    }

    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError> {
        Ok(self.state().records.values().cloned().collect())
    }
}
