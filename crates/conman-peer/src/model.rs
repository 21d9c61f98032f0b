//! A fleet in memory, as [`ModelRegistry`] is a registry in memory: for tests of whatever stands on
//! [`Fleet`]. Nothing in it renews, and a node is fenced when the test says so.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use conman_registry::{
    Announcement, ContainerIdentity, Ending, Fleet, FleetSession, ForgetError, Located,
    ModelRegistry, Peer, PeerStanding, Phases, RecordState, Registry, RegistryError, Release,
    SessionPage, SessionRecord, Sighting, Standing,
};
use jiff::Timestamp;
use tokio::sync::watch;

/// What the nodes share.
#[derive(Debug, Default)]
pub struct ModelFleet {
    records: ModelRegistry,
    owners: Mutex<BTreeMap<SessionId, String>>,
    peers: Mutex<BTreeMap<String, Peer>>,
    /// What stands where records should.
    unreadable: Mutex<Vec<String>>,
    /// Nodes whose releases do not arrive.
    unheard: watch::Sender<BTreeSet<String>>,
}

impl ModelFleet {
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            records: ModelRegistry::new(),
            owners: Mutex::default(),
            peers: Mutex::default(),
            unreadable: Mutex::default(),
            unheard: watch::Sender::default(),
        })
    }

    /// The registry and the fleet as a new node has them.
    #[must_use]
    pub fn join(self: &Arc<Self>, name: &str) -> (Arc<dyn Registry>, Arc<ModelNode>) {
        let registry = Shared {
            world: Arc::clone(self),
            me: name.to_owned(),
        };
        let node = ModelNode {
            world: Arc::clone(self),
            me: name.to_owned(),
            standing: watch::Sender::new(Standing::Live),
            stale: Mutex::default(),
            asked: AtomicU64::new(0),
        };
        let peer = Peer {
            name: name.to_owned(),
            incarnation: 1,
            standing: PeerStanding::Live,
            announcement: None,
            announced_ago_ms: 0,
        };
        lock(&self.peers).insert(name.to_owned(), peer);
        (Arc::new(registry), Arc::new(node))
    }

    /// Changes what is known of a node that has joined.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Peer)) {
        if let Some(peer) = lock(&self.peers).get_mut(name) {
            change(peer);
        }
    }

    /// Has listings tell of a record that cannot be read.
    pub fn cannot_read(&self, what: &str) {
        lock(&self.unreadable).push(what.to_owned());
    }

    /// Has a node's releases wait until they are let through again.
    pub fn hold_releases(&self, name: &str, held: bool) {
        self.unheard.send_modify(|unheard| {
            match held {
                true => unheard.insert(name.to_owned()),
                false => unheard.remove(name),
            };
        });
    }

    /// Changes what a node has told of itself.
    pub fn announced(&self, name: &str, change: impl FnOnce(&mut Announcement)) {
        self.change(name, |peer| {
            change(peer.announcement.get_or_insert_default());
        });
    }
}

impl ModelFleet {
    /// Ends a session whose node is fenced, as whoever claims it may.
    async fn end_lost(&self, id: &SessionId, generation: Generation) -> bool {
        let owner = lock(&self.owners).get(id).cloned();
        let is_fenced = owner.is_some_and(|owner| {
            let peers = lock(&self.peers);
            let peer = peers.get(&owner);
            peer.is_some_and(|peer| peer.standing == PeerStanding::Fenced)
        });
        if !is_fenced {
            return false;
        }
        let ending = Ending {
            cause: None,
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

/// The maps are sound after every single step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The registry as one node uses it.
#[derive(Debug)]
struct Shared {
    world: Arc<ModelFleet>,
    me: String,
}

#[async_trait]
impl Registry for Shared {
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError> {
        match self.world.records.claim_by(id, spec, read).await {
            Ok(record) => {
                let mut owners = lock(&self.world.owners);
                owners.insert(id.clone(), self.me.clone());
                Ok(record)
            }
            Err(RegistryError::Owned { id, generation }) => {
                if self.world.end_lost(&id, generation).await {
                    return self.claim(&id, spec).await;
                }
                // The other one may be between its claim and its name.
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
        let records = &self.world.records;
        records.set_container(id, generation, container).await
    }

    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError> {
        self.world.records.set_state(id, generation, state).await
    }

    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        let mut unheard = self.world.unheard.subscribe();
        // The sender is this world's own.
        let _ = unheard
            .wait_for(|unheard| !unheard.contains(&self.me))
            .await;
        self.world.records.release(batch).await
    }

    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        self.world.records.forget(id, generation).await
    }

    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError> {
        self.world.records.get(id).await
    }

    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError> {
        let mut records = self.world.records.list().await?;
        let owners = lock(&self.world.owners);
        records.retain(|record| owners.get(&record.id) == Some(&self.me));
        Ok(records)
    }
}

/// The fleet as one node sees it.
#[derive(Debug)]
pub struct ModelNode {
    world: Arc<ModelFleet>,
    me: String,
    standing: watch::Sender<Standing>,
    /// What was known once, and is not true any more.
    stale: Mutex<HashMap<SessionId, Located>>,
    asked: AtomicU64,
}

impl ModelNode {
    /// Lets this node believe something, until it is told otherwise.
    pub fn believe(&self, id: &SessionId, located: Located) {
        lock(&self.stale).insert(id.clone(), located);
    }

    /// Whether it believes anything that is not so.
    #[must_use]
    pub fn is_mistaken(&self) -> bool {
        !lock(&self.stale).is_empty()
    }

    /// How often it has asked the registry where a session is.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Changes how the node stands.
    pub fn stand(&self, standing: Standing) {
        self.standing.send_replace(standing);
    }
}

#[async_trait]
impl Fleet for ModelNode {
    fn me(&self) -> &str {
        &self.me
    }

    fn peers(&self) -> Arc<[Peer]> {
        let peers = lock(&self.world.peers);
        peers.values().cloned().collect()
    }

    async fn locate(&self, id: &SessionId, fresh: bool) -> Result<Sighting, RegistryError> {
        let stale = lock(&self.stale).get(id).cloned();
        if let Some(stale) = stale.filter(|_| !fresh) {
            return Ok(Sighting {
                located: Some(stale),
                fresh: false,
            });
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        let record = self.world.records.get(id).await?;
        let owner = lock(&self.world.owners).get(id).cloned();
        let located = record.zip(owner).map(|(record, node)| Located {
            node,
            generation: record.generation,
            released: record.state.is_ended(),
        });
        Ok(Sighting {
            located,
            fresh: true,
        })
    }

    fn forget_location(&self, id: &SessionId, _: Generation) {
        lock(&self.stale).remove(id);
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    fn announce(&self, announcement: Announcement) {
        self.world
            .announced(&self.me, |present| *present = announcement);
    }

    async fn forget_node(&self, node: &str) -> Result<(), ForgetError> {
        let standing = lock(&self.world.peers).get(node).map(|peer| peer.standing);
        let name = node.to_owned();
        match standing {
            None => return Err(ForgetError::Unknown { node: name }),
            Some(PeerStanding::Live | PeerStanding::Silent) => {
                return Err(ForgetError::Alive { node: name });
            }
            Some(PeerStanding::Fenced) => {}
        }
        let mut owned = Vec::new();
        for record in self.world.records.list().await? {
            let owner = lock(&self.world.owners).get(&record.id).cloned();
            if owner.as_deref() == Some(node) && !record.state.is_ended() {
                owned.push(record.id.to_string());
            }
        }
        if let Some(first) = owned.first() {
            return Err(ForgetError::Owns {
                node: name,
                count: owned.len(),
                first: first.clone(),
            });
        }
        lock(&self.world.peers).remove(node);
        Ok(())
    }

    async fn sessions(
        &self,
        after: Option<&SessionId>,
        limit: usize,
    ) -> Result<SessionPage, RegistryError> {
        let mut records = self.world.records.list().await?;
        let owners = lock(&self.world.owners);
        records.retain(|record| after.is_none_or(|after| record.id > *after));
        let more = records.len() > limit;
        records.truncate(limit);
        let last = records.last().map(|record| record.id.clone());
        let sessions = records.into_iter().map(|record| FleetSession {
            node: owners.get(&record.id).cloned().unwrap_or_default(),
            record,
        });
        Ok(SessionPage {
            sessions: sessions.collect(),
            unreadable: lock(&self.world.unreadable).clone(),
            next: last.filter(|_| more),
        })
    }
}
