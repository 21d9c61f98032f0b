//! Who owns a session: records, generations, and the journal of what happened.
//!
//! [`Registry`] is the one interface; [`EmbeddedRegistry`] keeps it in a file of this node,
//! [`EtcdRegistry`] in the etcd that a fleet shares, [`ModelRegistry`] in memory. All pass the same
//! conformance suite ([`conformance`]).
//! [`Journal`] keeps this node's events apart from the records, so that writing down what
//! happened never delays a release.
//!
//! Two OS threads on a node by itself, no tasks: `registry` writes the records, `journal` the events. Requests reach
//! the first through a bounded queue and are answered through one-shot channels after the durable
//! commit; events reach the second through a bounded queue that drops and counts rather than
//! wait, and readers follow a watch channel of the last durable position. Reads of records, and
//! of the newest events, are served from memory; older events are read on tokio's blocking
//! threads.
//!
//! In a fleet the thread `fleet` takes the place of `registry`, with a runtime of its own (`etcd`).
//!
//! [`Fleet`] is what the rest of the daemon asks about other nodes; [`SoloFleet`] has none.
//! [`EtcdRegistry`] and [`ModelFleet`], in memory, pass one suite of it ([`fleet_conformance`]).
//! [`FenceLink`] is how the registry reaches the fence that freezes what is no longer owned.
//!
//! Neither knows containers: what a runtime must find again is an opaque part of the record.
#![forbid(unsafe_code)]

pub mod conformance;
mod database;
mod embedded;
mod error;
mod etcd;
mod fence_link;
mod files;
mod fleet;
pub mod fleet_conformance;
mod fleet_model;
mod high_water;
mod journal;
mod model;
mod record;
mod rules;
mod state_lock;

pub use embedded::{EmbeddedOptions, EmbeddedRegistry};
pub use error::RegistryError;
pub use etcd::{
    AccessError, COMPACT_EVERY, EtcdAccess, EtcdCredentials, EtcdOptions, EtcdRegistry,
    EtcdStartError, EtcdTls, FORGET_AFTER, Order, Orders, was_in_fleet,
};
pub use fence_link::{FenceHolds, FenceLink, FenceLinkError, FenceNews, FenceOrder, MemoryFence};
pub use fleet::{
    Announcement, Fleet, FleetSession, ForgetError, Located, MAX_SESSION_PAGE, MAX_UNREADABLE,
    NodeLoad, Peer, PeerStanding, SessionPage, Sighting, SoloFleet, Standing,
};
pub use fleet_model::{ModelFleet, ModelNode};
pub use journal::{Journal, JournalError, MAX_EVENT_PAGE, NewEvent};
pub use model::ModelRegistry;
pub use record::{ContainerIdentity, Ending, Phase, Phases, RecordState, Release, SessionRecord};

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};

/// Greatest generation that is ever given out: 2^53 - 1, so that readers of JSON that hold numbers
/// as doubles keep it exact.
pub const GREATEST_GENERATION: Generation =
    Generation::new((1 << 53) - 1).expect("the number is not zero");

/// Linearizable records of sessions, with fencing by generation.
///
/// Every change names the generation that it acts for and is refused with
/// [`RegistryError::Superseded`] when the record bears another, so that whoever acts late changes
/// nothing. An `Ok` means durable. A retryable error means that the change does not count: it may
/// be asked for again, and nobody sees it; only after a crash in that very state may it turn up
/// all the same, which is what every daemon must expect of its records. Futures may be driven from any tokio runtime, that of the
/// preemption thread included, and never wait for anything but the store itself.
#[async_trait]
pub trait Registry: Send + Sync + std::fmt::Debug + 'static {
    /// Records a start: a greater generation than every earlier one of the session, in state
    /// [`RecordState::Starting`]. Refused with [`RegistryError::Owned`] unless the session has no
    /// record or an ended one.
    async fn claim(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
    ) -> Result<SessionRecord, RegistryError> {
        self.claim_by(id, spec, None).await
    }

    /// [`Self::claim`] by what the caller has `read`: refused with [`RegistryError::Changed`] unless
    /// that still is the session's record at the very moment of the claim.
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError>;

    /// Whether the start of this generation may be sent to the runtime now: asked right before, as
    /// it may have been lost or condemned since it was claimed. Refused with
    /// [`RegistryError::Superseded`] when it never may any more, with a retryable error while nobody
    /// can tell. From an `Ok` on something of it may run, as far as the registry knows.
    async fn may_start(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        match self.get(id).await? {
            Some(record) if record.generation == generation && !record.state.is_ended() => Ok(()),
            other => Err(RegistryError::Superseded {
                id: id.clone(),
                generation,
                current: other.map(|record| record.generation),
            }),
        }
    }

    /// Notes how the container can be found and verified again, before anybody is told of it.
    async fn set_container(
        &self,
        id: &SessionId,
        generation: Generation,
        container: &ContainerIdentity,
    ) -> Result<(), RegistryError>;

    /// Notes the state of a session that has not ended: running, stopping or stuck.
    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError>;

    /// Gives up ownership of sessions that are proven dead, in one durable batch. The results
    /// stand in the order of `batch`; one refused entry does not hold up the others. Releasing
    /// what is already released by the same generation succeeds.
    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>>;

    /// Forgets an ended session. Its generation stays used up. Refused with
    /// [`RegistryError::Owned`] while it has not ended.
    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError>;

    /// The record of one session.
    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError>;

    /// Every record of this node's, ordered by id: for whoever adopts them. A fleet's registry has
    /// what is this node's, and has no record that can be read, ended by [`Order::Condemned`].
    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError>;
}
