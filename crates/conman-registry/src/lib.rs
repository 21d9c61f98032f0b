//! Ownership of sessions: records, generations, and the journal of events.
//!
//! [`Registry`] is the interface. [`EmbeddedRegistry`] stores it in a file on this node,
//! `conman-etcd` in the etcd that a fleet shares, `conman-testkit` in memory. All pass the same
//! conformance suite (`conman-testkit`). [`Journal`] stores this node's events apart from the
//! records, so that writing events never delays a release.
//!
//! A node without a fleet runs two OS threads and no tasks: `registry` writes the records,
//! `journal` writes the events. Requests reach the first through a bounded queue and are answered
//! through one-shot channels after the durable commit. Events reach the second through a bounded
//! queue that drops and counts instead of blocking; readers follow a watch channel of the last
//! durable position. Reads of records and of the newest events are served from memory; older events
//! are read on tokio's blocking threads.
//!
//! [`Fleet`] is what the rest of the daemon requests about other nodes; [`SoloFleet`] has none.
//! `conman-etcd` and a model in memory pass the same suite (`conman-testkit`).
//! [`FenceLink`] is the registry's connection to the fence that freezes sessions whose ownership
//! has lapsed.
//!
//! Neither knows containers: the data that a runtime needs to find a container is an opaque part of
//! the record.
#![forbid(unsafe_code)]

mod database;
mod embedded;
mod error;
mod fabric;
mod fence_link;
mod files;
mod fleet;
pub mod fleet_mark;
mod high_water;
mod journal;
mod record;
pub mod rules;
pub mod state_lock;

// The test kit's types are those of another build of this crate, so its model is built again here.
#[cfg(test)]
extern crate self as conman_registry;
#[cfg(test)]
#[path = "../../conman-testkit/src/registry_model.rs"]
pub mod registry_model;

pub use embedded::{EmbeddedOptions, EmbeddedRegistry, LeftAlone, left_alone, used_through};
pub use error::{RegistryError, serve_above, start_afresh};
pub use fabric::{ConfirmedParts, HeldPart, HeldParts, PartError, PartRegistry};
pub use fence_link::{FenceLink, FenceOrder};
pub use fleet::{
    Announcement, Fleet, FleetSession, ForgetError, Located, MAX_SESSION_PAGE, MAX_UNREADABLE,
    NodeLoad, Peer, PeerStanding, READS, SessionPage, Sighting, SoloFleet, Standing,
};
pub use journal::{Journal, JournalError, MAX_EVENT_PAGE, NewEvent};
pub use record::{ContainerIdentity, Ending, Phase, Phases, RecordState, Release, SessionRecord};

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};

/// Greatest generation ever assigned: 2^53 - 1, so that JSON readers that store numbers as doubles
/// keep it exact.
pub const GREATEST_GENERATION: Generation =
    Generation::new((1 << 53) - 1).expect("the number is not zero");

/// Linearizable records of sessions, with fencing by generation.
///
/// Every change names the generation that it acts for. It is refused with
/// [`RegistryError::Superseded`] when the record has another generation, so a late caller changes
/// nothing. `Ok` means durable. A retryable error means that the change has no effect: no reader
/// sees it and the caller may retry. Only after a crash in that state may the change appear, and a
/// starting daemon must expect this. Futures may be polled from any tokio runtime, including that
/// of the preemption thread, and wait only for the store.
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

    /// Like [`Self::claim`], based on the record that the caller has `read`: refused with
    /// [`RegistryError::Changed`] unless that is still the session's record at the moment of the
    /// claim.
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError>;

    /// Whether the start of this generation may be sent to the runtime. Call it right before
    /// sending, because the session may have been lost or condemned since it was claimed. Refused
    /// with [`RegistryError::Superseded`] when the start is never allowed again, and with a
    /// retryable error while this is unknown. After an `Ok` the registry assumes that parts of the
    /// session may run.
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

    /// Records how the container can be found and verified, before the session is reported as
    /// started.
    async fn set_container(
        &self,
        id: &SessionId,
        generation: Generation,
        container: &ContainerIdentity,
    ) -> Result<(), RegistryError>;

    /// Records the state of a session that has not ended: running, stopping or stuck.
    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError>;

    /// Replaces the spec of a session that has not ended.
    async fn set_spec(
        &self,
        id: &SessionId,
        generation: Generation,
        spec: &ResolvedSpec,
    ) -> Result<(), RegistryError>;

    /// Gives up ownership of sessions that are proven dead, in one durable batch. The results have
    /// the order of `batch`; one refused entry does not delay the others. Releasing a session that
    /// the same generation has already released succeeds.
    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>>;

    /// Forgets an ended session. Its generation is never reused. Refused with
    /// [`RegistryError::Owned`] while the session has not ended.
    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError>;

    /// The record of one session.
    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError>;

    /// Every record of this node, ordered by id, for adoption. The registry of a fleet returns this
    /// node's records; owned sessions without a readable record are ended by `Order::Condemned` of `conman-etcd`.
    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError>;
}
