//! A fleet in memory, as [`ModelRegistry`] is a registry in memory, for tests of code that uses
//! [`Fleet`]. It passes the same suite as the real one ([`crate::fleet_conformance`]).
//!
//! Nothing in it renews or takes time: a node is silent, fenced or back when the test says so, and
//! announcements reach the other nodes at once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use conman_proto::{Generation, SessionId};
use jiff::Timestamp;
use tokio::sync::watch;

use conman_registry::{
    Announcement, Fleet, FleetSession, ForgetError, Located, Peer, PeerStanding, Registry,
    RegistryError, SessionPage, Sighting, Standing,
};
use conman_registry::{MAX_SESSION_PAGE, MAX_UNREADABLE};

mod registry;

use registry::Shared;

use crate::ModelRegistry;

/// A node's cached session locations.
type Locations = Arc<Mutex<HashMap<SessionId, Located>>>;

/// What the nodes share.
#[derive(Debug)]
pub struct ModelFleet {
    records: ModelRegistry,
    owners: Mutex<BTreeMap<SessionId, String>>,
    members: Mutex<BTreeMap<String, Member>>,
    member_changes: watch::Sender<()>,
    /// Error texts for sessions whose records cannot be read.
    unreadable: Mutex<BTreeMap<SessionId, String>>,
    /// Nodes whose releases are delayed.
    unheard: watch::Sender<BTreeSet<String>>,
    key: [u8; 32],
}

/// A node that has joined once.
#[derive(Debug)]
struct Member {
    /// The node as the others see it.
    peer: Peer,
    is_forgotten: bool,
    is_cut: bool,
    /// Its latest announcement, whether it was delivered or not.
    told: Option<Announcement>,
    standing: watch::Sender<Standing>,
}

impl Member {
    fn rejoins(&mut self) {
        self.peer.incarnation += 1;
        self.peer.standing = PeerStanding::Live;
        self.peer.fenced_at = None;
        self.is_forgotten = false;
    }

    /// Notes when the node was declared dead.
    fn date(&mut self) {
        match self.peer.standing {
            PeerStanding::Fenced => {
                self.peer.fenced_at.get_or_insert_with(Timestamp::now);
            }
            PeerStanding::Live | PeerStanding::Silent => self.peer.fenced_at = None,
        }
    }
}

impl ModelFleet {
    #[must_use]
    pub fn new() -> Arc<Self> {
        let mut key = [0; 32];
        // Tests need no secret key where there are no random numbers.
        let _ = getrandom::fill(&mut key);
        Arc::new(Self {
            records: ModelRegistry::new(),
            owners: Mutex::default(),
            members: Mutex::default(),
            member_changes: watch::Sender::default(),
            unreadable: Mutex::default(),
            unheard: watch::Sender::default(),
            key,
        })
    }

    /// Joins a new or returning node: its registry and its fleet.
    #[must_use]
    pub fn join(self: &Arc<Self>, name: &str) -> (Arc<dyn Registry>, Arc<ModelNode>) {
        let standing = watch::Sender::new(Standing::Live);
        let mut members = lock(&self.members);
        let member = members.entry(name.to_owned()).or_insert_with(|| Member {
            peer: Peer {
                name: name.to_owned(),
                incarnation: 0,
                standing: PeerStanding::Live,
                fenced_at: None,
                is_late: false,
                // Tests say when one arrives.
                heartbeat_ago_ms: u64::MAX,
                announcement: None,
                announced_ago_ms: 0,
            },
            is_forgotten: false,
            is_cut: false,
            told: None,
            standing: standing.clone(),
        });
        member.rejoins();
        member.standing = standing.clone();
        (member.told, member.peer.announcement, member.is_cut) = (None, None, false);
        drop(members);
        self.member_changes.send_replace(());
        let locations = Locations::default();
        let registry = Shared::new(Arc::clone(self), name.to_owned(), Arc::clone(&locations));
        let node = ModelNode {
            world: Arc::clone(self),
            me: name.to_owned(),
            standing,
            locations,
            asked: AtomicU64::new(0),
        };
        (Arc::new(registry), Arc::new(node))
    }

    /// Changes what is known of a node that has joined.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Peer)) {
        if let Some(member) = lock(&self.members).get_mut(name) {
            change(&mut member.peer);
            member.date();
            member.told.clone_from(&member.peer.announcement);
        }
        self.member_changes.send_replace(());
    }

    /// Changes a node's announcement.
    pub fn announced(&self, name: &str, change: impl FnOnce(&mut Announcement)) {
        self.change(name, |peer| {
            change(peer.announcement.get_or_insert_default());
        });
    }

    /// Cuts a node off: no message reaches it or comes from it, its fence fires, and the other
    /// nodes stop hearing from it.
    pub fn cut(&self, name: &str) {
        if let Some(member) = lock(&self.members).get_mut(name) {
            member.is_cut = true;
            member.peer.standing = PeerStanding::Silent;
            member.standing.send_replace(Standing::Fenced);
        }
    }

    /// Declares all cut-off nodes dead.
    pub fn declare_dead(&self) {
        for member in lock(&self.members).values_mut() {
            if member.is_cut {
                member.peer.standing = PeerStanding::Fenced;
                member.date();
            }
        }
        self.member_changes.send_replace(());
    }

    /// A node that was cut off joins again and publishes its latest announcement.
    pub fn heal(&self, name: &str) {
        if let Some(member) = lock(&self.members).get_mut(name) {
            member.is_cut = false;
            match member.peer.standing {
                PeerStanding::Fenced => member.rejoins(),
                PeerStanding::Live | PeerStanding::Silent => {
                    member.peer.standing = PeerStanding::Live;
                }
            }
            member.peer.announcement.clone_from(&member.told);
            member.standing.send_replace(Standing::Live);
        }
        self.member_changes.send_replace(());
    }

    /// Makes a session's record unreadable, reported with this text.
    pub fn cannot_read(&self, id: &SessionId, what: &str) {
        lock(&self.unreadable).insert(id.clone(), what.to_owned());
    }

    /// Delays a node's releases until it is called with `false`.
    pub fn hold_releases(&self, name: &str, held: bool) {
        self.unheard.send_modify(|unheard| {
            match held {
                true => unheard.insert(name.to_owned()),
                false => unheard.remove(name),
            };
        });
    }

    /// Fails when this node is cut off from the registry.
    fn answers(&self, me: &str) -> Result<(), RegistryError> {
        match lock(&self.members).get(me) {
            Some(member) if member.is_cut => Err(RegistryError::Unavailable {
                reason: "this node is cut off".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    async fn located(&self, id: &SessionId) -> Result<Option<Located>, RegistryError> {
        let record = self.records.get(id).await?;
        let owner = lock(&self.owners).get(id).cloned();
        Ok(record.zip(owner).map(|(record, node)| Located {
            node,
            generation: record.generation,
            released: record.state.is_ended(),
        }))
    }
}

/// The maps are consistent after every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The fleet as one node sees it.
#[derive(Debug)]
pub struct ModelNode {
    world: Arc<ModelFleet>,
    me: String,
    standing: watch::Sender<Standing>,
    locations: Locations,
    asked: AtomicU64,
}

impl ModelNode {
    /// Sets this node's cached location of a session.
    pub fn believe(&self, id: &SessionId, located: Located) {
        lock(&self.locations).insert(id.clone(), located);
    }

    /// Whether this location is still cached.
    #[must_use]
    pub fn believes(&self, id: &SessionId, located: &Located) -> bool {
        lock(&self.locations).get(id) == Some(located)
    }

    /// How often it has read a session's location from the registry.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Sets the node's standing.
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
        let members = lock(&self.world.members);
        let known = members.iter().filter_map(|(name, member)| {
            let mine = *name == self.me;
            (mine || !member.is_forgotten).then(|| Peer {
                announcement: match mine {
                    true => member.told.clone(),
                    false => member.peer.announcement.clone(),
                },
                ..member.peer.clone()
            })
        });
        known.collect()
    }

    fn peer_changes(&self) -> watch::Receiver<()> {
        self.world.member_changes.subscribe()
    }

    async fn locate(&self, id: &SessionId, fresh: bool) -> Result<Sighting, RegistryError> {
        let remembered = lock(&self.locations).get(id).cloned();
        if let Some(remembered) = remembered.filter(|_| !fresh) {
            return Ok(Sighting {
                located: Some(remembered),
                fresh: false,
            });
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.world.answers(&self.me)?;
        let located = self.world.located(id).await?;
        let mut locations = lock(&self.locations);
        match &located {
            Some(located) => locations.insert(id.clone(), located.clone()),
            None => locations.remove(id),
        };
        Ok(Sighting {
            located,
            fresh: true,
        })
    }

    fn forget_location(&self, id: &SessionId, generation: Generation) {
        let mut locations = lock(&self.locations);
        let known = locations.get(id);
        if known.is_some_and(|known| known.generation <= generation) {
            locations.remove(id);
        }
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    fn announce(&self, announcement: Announcement) {
        if let Some(member) = lock(&self.world.members).get_mut(&self.me) {
            if !member.is_cut {
                member.peer.announcement = Some(announcement.clone());
            }
            member.told = Some(announcement);
        }
    }

    async fn forget_node(&self, node: &str) -> Result<(), ForgetError> {
        self.world.answers(&self.me)?;
        let name = node.to_owned();
        let standing = lock(&self.world.members)
            .get(node)
            .filter(|member| !member.is_forgotten)
            .map(|member| member.peer.standing);
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
        // Its incarnation is never reused.
        if let Some(member) = lock(&self.world.members).get_mut(node) {
            member.is_forgotten = true;
            member.peer.announcement = None;
        }
        self.world.member_changes.send_replace(());
        Ok(())
    }

    async fn shared_key(&self) -> Result<Option<[u8; 32]>, RegistryError> {
        self.world.answers(&self.me)?;
        Ok(Some(self.world.key))
    }

    async fn sessions(
        &self,
        after: Option<&SessionId>,
        limit: usize,
    ) -> Result<SessionPage, RegistryError> {
        self.world.answers(&self.me)?;
        let records = self.world.records.list().await?.into_iter();
        let mut records: BTreeMap<SessionId, _> =
            records.map(|record| (record.id.clone(), record)).collect();
        let unreadable = lock(&self.world.unreadable).clone();
        let ids: BTreeSet<SessionId> = records.keys().chain(unreadable.keys()).cloned().collect();
        let limit = limit.clamp(1, MAX_SESSION_PAGE);
        let mut behind = ids
            .into_iter()
            .filter(|id| after.is_none_or(|after| id > after));
        let mut page = SessionPage::default();
        let owners = lock(&self.world.owners);
        for id in behind.by_ref().take(limit) {
            if let Some(what) = unreadable.get(&id) {
                if page.unreadable.len() < MAX_UNREADABLE {
                    page.unreadable.push(what.clone());
                }
            } else if let Some((record, node)) = records.remove(&id).zip(owners.get(&id)) {
                page.sessions.push(FleetSession {
                    node: node.clone(),
                    record,
                });
            }
            page.next = Some(id);
        }
        if behind.next().is_none() {
            page.next = None;
        }
        Ok(page)
    }
}
