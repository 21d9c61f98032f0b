//! The parts of a fabric's pool of addresses, as the nodes of a fleet share them.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use conman_core::ownership::{FabricRecord, PartRecord, PartRefusal, Underlay, WantedPart};
use conman_core::{TalkName, TalkingSession};
use tokio::sync::watch;

use crate::RegistryError;

/// Every part that a node holds, by its number, as this node has read them last: hints, like all about other
/// nodes. What is held is decided by the registry's transactions.
pub type HeldParts = BTreeMap<u32, HeldPart>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldPart {
    pub record: PartRecord,
    /// Its holder was declared dead: nothing of it runs.
    pub lost: bool,
}

/// This node's parts, confirmed under one incarnation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfirmedParts {
    pub incarnation: u64,
    pub parts: BTreeMap<u32, PartRecord>,
}

/// Why a node gets no part.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    #[error(transparent)]
    Refused(#[from] PartRefusal),
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// The parts of the pool that a fleet's nodes share.
#[async_trait]
pub trait PartRegistry: Send + Sync + std::fmt::Debug + 'static {
    /// This node's incarnation; 0 while it is not live. Addresses may be taken only of parts that were confirmed
    /// under it.
    fn incarnation(&self) -> watch::Receiver<u64>;

    /// The parts of all nodes; changes within a second of any change.
    fn held_parts(&self) -> watch::Receiver<Arc<HeldParts>>;

    /// Confirms the parts that this node holds, and publishes how the node is reached.
    async fn confirm_parts(
        &self,
        fabric: &FabricRecord,
        underlay: &Underlay,
    ) -> Result<ConfirmedParts, RegistryError>;

    /// The sessions of this name that have not ended and whose nodes are not lost, as the registry has them now;
    /// not all of them if there are many.
    async fn named(&self, name: &TalkName) -> Result<Vec<TalkingSession>, RegistryError>;

    /// Claims one more part.
    async fn claim_part(&self, wanted: &WantedPart) -> Result<(), PartError>;
}
