//! The registry of a fleet, in etcd: [`EtcdRegistry`].
//!
//! One OS thread, `fleet`, with a separate tokio runtime, so that renewals depend on nothing else
//! in the daemon:
//!
//! ```text
//!  Registry::claim, release ─▶ bounded channel ─▶ driver (the protocol) ─▶ etcd, fence, Orders
//!  other calls ─────────────▶ tasks on the same runtime ─▶ etcd ─▶ many records: parsed elsewhere
//!  membership: reads the other nodes, publishes this one ─▶ driver: the nodes to watch
//! ```
//! Claims, and reads and changes of single records, pass a queue that sends many of them as one call.
//! Only `conman_core::ownership` decides ownership. etcd is used only for transactions and
//! linearizable reads: no leases, no locks, and watches are hints.
#![forbid(unsafe_code)]

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::ownership::Timing;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use conman_watchdog::Watchdog;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::timeout;

use conman_registry::FenceLink;
use conman_registry::rules::Change;
use conman_registry::state_lock::StateLock;
use conman_registry::{
    ContainerIdentity, Journal, RecordState, Registry, RegistryError, Release, SessionRecord,
};

mod access;
mod call_error;
mod call_queue;
mod client;
mod codec;
mod compaction;
mod driver;
mod events;
mod fence_orders;
mod figures;
mod fleet;
mod fleet_thread;
mod forgetting;
mod from_alone;
mod joining;
mod key_walk;
mod listing;
mod membership;
mod notes;
mod orders;
mod parts;
mod records;
mod rendezvous;
mod schema;
mod seen;
mod shared;
mod shared_key;
mod store;
mod talk_names;
mod wire;

pub use access::{AccessError, EtcdAccess, EtcdCredentials, EtcdTls};
pub use compaction::COMPACT_EVERY;
pub use key_walk::KeyWalk;
pub use orders::{Order, Orders};

use client::Client;
use codec::{Holder, Keys};
use driver::{Command, Driver};
use fleet_thread::FleetThread;
use membership::Membership;
use seen::Seen;
use shared::Shared;
use store::Store;

/// Claims and releases that wait for the driver, which takes all of them at once.
const MAX_COMMANDS: usize = 4_096;

/// A call to etcd takes at most this share of the fence timeout, in percent: more than a third, so
/// that no store freezes a node whose round trip is shorter than that, and little enough to try another
/// endpoint within the rest.
const PATIENCE_PERCENT: u64 = 40;
const MIN_PATIENCE_MS: u64 = 100;
const MAX_PATIENCE_MS: u64 = 10_000;

/// Concurrent reads of many records: each may take some megabytes, and shares the connection to
/// etcd with the renewals.
const MAX_LISTS: usize = 4;

/// Maximum wait for a turn to read many records. Together with the read itself it is below the
/// callers' timeouts.
const LIST_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct EtcdOptions {
    /// This node's name in the fleet.
    pub node: String,
    /// Identifies the installation; another one may not use the same node name.
    pub instance: String,
    pub boot_id: String,
    /// Where the observed state of etcd is saved.
    pub state_dir: PathBuf,
    pub access: EtcdAccess,
    /// Prefix of all keys; ends with `/`.
    pub prefix: String,
    /// Must be safe: see [`Timing::slack_ms`].
    pub timing: Timing,
    /// Accepts an etcd that has lost its state, with all generations up to this one used up.
    pub accept_above: Option<Generation>,
    /// How often one of the nodes compacts etcd; `None` where an operator compacts it or needs its
    /// history.
    pub compact_every: Option<Duration>,
    /// Watches the tasks of the fleet's thread.
    pub watchdog: Watchdog,
}

/// Why the registry cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EtcdStartError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    State(#[from] RegistryError),
    #[error("`{prefix}` is no prefix of keys; begin and end it with `/`")]
    Prefix { prefix: String },
    #[error("cannot read the saved state of etcd in {path}; repair or remove the file")]
    Seen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot {action}")]
    Thread {
        action: &'static str,
        #[source]
        source: io::Error,
    },
}

/// The registry that all nodes of a fleet share.
#[derive(Debug)]
pub struct EtcdRegistry {
    shared: Arc<Shared>,
    membership: Arc<Membership>,
    commands: mpsc::Sender<Command>,
    runtime: Handle,
    lists: Arc<Semaphore>,
    /// Only one daemon runs in an installation, so that a node name's holder is either this
    /// installation's earlier daemon or another installation.
    _lock: StateLock,
}

impl EtcdRegistry {
    /// Connects to etcd with these certificates and credentials from here on, at the same
    /// endpoints.
    ///
    /// # Errors
    /// When they cannot be used: then the old ones stay in use.
    pub fn renew_access(&self, access: &EtcdAccess) -> Result<(), AccessError> {
        self.shared.store.client.renew(access)
    }

    /// Starts joining the fleet, which is retried until it succeeds: see [`Fleet::standing`](conman_registry::Fleet::standing). The
    /// node stays a member for as long as this value lives; when it is dropped, the fence closes
    /// after its timeout.
    pub fn start(
        options: EtcdOptions,
        link: Arc<dyn FenceLink>,
    ) -> Result<Arc<Self>, EtcdStartError> {
        if !options.prefix.starts_with('/') || !options.prefix.ends_with('/') {
            let prefix = options.prefix;
            return Err(EtcdStartError::Prefix { prefix });
        }
        let lock = StateLock::acquire(&options.state_dir)?;
        let from_alone = from_alone::look(&options.state_dir, &lock, options.accept_above)?;
        let store = open_store(&options)?;
        let thread = |action| move |source| EtcdStartError::Thread { action, source };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(thread("make the fleet's runtime"))?;
        let shared = Arc::new(Shared::new(
            options.node.as_str().into(),
            options.timing,
            store,
        ));
        let membership = Arc::<Membership>::default();
        let (commands, receiver) = mpsc::channel(MAX_COMMANDS);
        let (watched, observed) = watch::channel(Vec::new());
        let driver = Driver {
            shared: Arc::clone(&shared),
            link,
            holder: Holder {
                instance: options.instance,
                boot_id: options.boot_id,
            },
            from_alone,
            next_attempt: first_attempt(),
            commands: receiver,
            observed,
            watchdog: options.watchdog.clone(),
        };
        let handle = runtime.handle().clone();
        let fleet = FleetThread {
            shared: Arc::clone(&shared),
            membership: Arc::clone(&membership),
            watched,
            driver,
            progress: options.watchdog.task(fleet_thread::MEMBERSHIP),
            compact_every: options.compact_every,
        };
        fleet
            .spawn(runtime)
            .map_err(thread("start the fleet's thread"))?;
        Ok(Arc::new(Self {
            shared,
            membership,
            commands,
            runtime: handle,
            lists: Arc::new(Semaphore::new(MAX_LISTS)),
            _lock: lock,
        }))
    }

    /// Reports to this journal what happens to the node's ownership.
    pub fn record_events(&self, journal: Arc<Journal>) {
        self.shared.events.record(journal);
    }

    /// The sessions that the node has to end.
    #[must_use]
    pub fn orders(&self) -> Arc<Orders> {
        Arc::clone(&self.shared.orders)
    }

    /// Runs a call on the fleet's runtime, so that callers may be on any other.
    async fn run<T, F>(&self, call: F) -> Result<T, RegistryError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, RegistryError>> + Send + 'static,
    {
        match self.runtime.spawn(call).await {
            Ok(answer) => answer,
            Err(error) => Err(RegistryError::Closed {
                reason: error.to_string(),
            }),
        }
    }

    /// The same for a call that reads many records. It continues when its caller is gone, and
    /// counts towards [`MAX_LISTS`] until it has ended.
    async fn run_list<T, F>(&self, call: F) -> Result<T, RegistryError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, RegistryError>> + Send + 'static,
    {
        let turn = timeout(LIST_PATIENCE, Arc::clone(&self.lists).acquire_owned()).await;
        let Ok(turn) = turn else {
            let why = "too many lists of sessions are being read; try again";
            return Err(notes::unavailable(why));
        };
        let turn = turn.map_err(|_| closed())?;
        self.run(async move {
            let answer = call.await;
            drop(turn);
            answer
        })
        .await
    }

    /// The revision that wrote the given record, if it is still the session's record.
    async fn written_at(&self, record: &SessionRecord) -> Result<i64, RegistryError> {
        let (shared, id) = (Arc::clone(&self.shared), record.id.clone());
        let found = self.run(async move {
            let read = notes::read(&shared, &id).await;
            read.map_err(|error| notes::unavailable(&error.to_string()))
        });
        let unchanged = found.await?.filter(|now| now.details.record == *record);
        let revision = unchanged.and_then(|now| now.mod_revision);
        revision.ok_or_else(|| RegistryError::Changed {
            id: record.id.clone(),
        })
    }

    async fn change(
        &self,
        id: &SessionId,
        generation: Generation,
        change: Change,
    ) -> Result<(), RegistryError> {
        let (shared, id) = (Arc::clone(&self.shared), id.clone());
        self.run(async move { notes::change(&shared, &id, generation, &change).await })
            .await
    }
}

/// Opens the store with the saved state of etcd.
fn open_store(options: &EtcdOptions) -> Result<Store, EtcdStartError> {
    let forget = options.accept_above.is_some();
    let seen = Seen::open(&options.state_dir, forget).map_err(|source| {
        let path = options.state_dir.clone();
        EtcdStartError::Seen { path, source }
    })?;
    let patience = options.timing.fence_ms * PATIENCE_PERCENT / 100;
    let patience = patience.clamp(MIN_PATIENCE_MS, MAX_PATIENCE_MS);
    let patience = Duration::from_millis(patience);
    let client = Client::new(&options.access, patience, Arc::new(seen))?;
    Ok(Store::new(client, Keys::new(options.prefix.clone())))
}

/// Above every number that an earlier daemon used, except with a chance of one in billions, and
/// with room for as many more.
fn first_attempt() -> u64 {
    let random = getrandom::u64().unwrap_or_else(|_| shared::boot_time().0);
    random >> 2
}

fn closed() -> RegistryError {
    RegistryError::Closed {
        reason: "the fleet's thread has ended".to_owned(),
    }
}

#[async_trait]
impl Registry for EtcdRegistry {
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError> {
        let revision = match read {
            // If the record has changed since, etcd refuses the claim.
            Some(read) => match self.shared.take_revision(read) {
                Some(revision) => Some(revision),
                None => Some(self.written_at(read).await?),
            },
            None => None,
        };
        let (reply, answer) = oneshot::channel();
        let command = Command::Claim {
            id: id.clone(),
            spec: Box::new(spec.clone()),
            read: revision,
            reply,
        };
        self.commands.send(command).await.map_err(|_| closed())?;
        let claimed = answer.await.map_err(|_| closed())?;
        match (read, claimed) {
            // The record may have changed, which is why etcd refused.
            (Some(read), Err(error @ RegistryError::Unavailable { .. })) => {
                self.written_at(read).await?;
                Err(error)
            }
            (_, claimed) => claimed,
        }
    }

    async fn may_start(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        let (reply, answer) = oneshot::channel();
        let command = Command::MayStart {
            id: id.clone(),
            generation,
            reply,
        };
        self.commands.send(command).await.map_err(|_| closed())?;
        answer.await.map_err(|_| closed())?
    }

    async fn set_container(
        &self,
        id: &SessionId,
        generation: Generation,
        container: &ContainerIdentity,
    ) -> Result<(), RegistryError> {
        let change = Change::SetContainer(container.clone());
        self.change(id, generation, change).await
    }

    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError> {
        self.change(id, generation, Change::SetState(state)).await
    }

    async fn set_spec(
        &self,
        id: &SessionId,
        generation: Generation,
        spec: &ResolvedSpec,
    ) -> Result<(), RegistryError> {
        let change = Change::SetSpec(Box::new(spec.clone()));
        self.change(id, generation, change).await
    }

    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        let count = batch.len();
        let (mut releases, mut answers) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for release in batch {
            let (reply, answer) = oneshot::channel();
            releases.push((release, reply));
            answers.push(answer);
        }
        // If the driver is gone, the answers' senders are dropped with the command.
        let _ = self.commands.send(Command::Release { releases }).await;
        let mut results = Vec::with_capacity(count);
        for answer in answers {
            results.push(answer.await.unwrap_or_else(|_| Err(closed())));
        }
        results
    }

    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        let (shared, id) = (Arc::clone(&self.shared), id.clone());
        self.run(async move { notes::forget(&shared, &id, generation).await })
            .await
    }

    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError> {
        if let Some(mine) = self.shared.mine(id) {
            return Ok(Some(mine.details.record));
        }
        let (shared, id) = (Arc::clone(&self.shared), id.clone());
        self.run(async move {
            let found = notes::read(&shared, &id).await.map_err(notes::not_read)?;
            Ok(found.map(|found| {
                shared.note_revision(&found);
                found.details.record
            }))
        })
        .await
    }

    /// When this returns, sessions without a record are ordered to be ended.
    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError> {
        let (shared, commands) = (Arc::clone(&self.shared), self.commands.clone());
        self.run_list(async move {
            let listed = listing::mine(&shared).await?;
            for slot in listed.undescribed {
                let (reply, answer) = oneshot::channel();
                let command = Command::EndUndescribed { slot, reply };
                commands.send(command).await.map_err(|_| closed())?;
                answer.await.map_err(|_| closed())??;
            }
            Ok(listed.records)
        })
        .await
    }
}
