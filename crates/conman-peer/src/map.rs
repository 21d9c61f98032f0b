use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use conman_core::Closing;
use conman_core::placement::{
    self, Demand, NodeBusy, NodeStanding, NodeView, Placement, PlacementLimits,
};
use conman_proto::{Generation, RuntimeKind, SessionId};
use conman_registry::{Fleet, Located, Peer, PeerStanding, RegistryError, Standing};

use tokio::sync::{Semaphore, SemaphorePermit, watch};

use crate::gone::GoneNodes;
use crate::holding::{Cause, Held};
use crate::{PeerAddress, PeerClient};

/// Requests that wait for a node, where nobody says otherwise: half of the API's connections.
const MAX_WAITING: usize = 512;

/// The nodes of the fleet and their sessions, as one of them sees them.
#[derive(Debug)]
pub struct FleetMap {
    fleet: Arc<dyn Fleet>,
    client: PeerClient,
    limits: PlacementLimits,
    /// Of requests that wait for a node.
    places: Semaphore,
    gone: GoneNodes,
}

/// A request's place among those that wait for a node.
#[derive(Debug)]
pub struct Waiting<'map> {
    _held: Held,
    _place: SemaphorePermit<'map>,
}

/// Where a session is.
#[derive(Debug, Clone, PartialEq)]
pub enum Whereabouts {
    /// Nobody has ever owned it, or it was forgotten.
    Nobody,
    /// This node owns it.
    Here { generation: Generation },
    /// Another node owns it.
    There(Owner),
    /// Its node has given it up.
    Released {
        node: String,
        generation: Generation,
    },
    /// Its node is gone for good: whoever claims it gets it.
    Lost {
        node: String,
        generation: Generation,
    },
}

/// The node that owns a session.
#[derive(Debug, Clone, PartialEq)]
pub struct Owner {
    pub node: Node,
    pub generation: Generation,
}

/// Another node, and how it is reached.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub name: Arc<str>,
    pub incarnation: u64,
    pub address: Result<PeerAddress, NoAddress>,
}

impl Node {
    /// Whether it may be about to say where it listens.
    #[must_use]
    pub fn has_not_announced(&self) -> bool {
        matches!(self.address, Err(NoAddress::NotYet { .. }))
    }
}

/// Why another node cannot be reached, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoAddress {
    #[error(
        "node `{node}` has not announced yet where it listens for other nodes, as one that is \
         starting; try again in a moment"
    )]
    NotYet { node: String },
    #[error(
        "node `{node}` does not listen for other nodes; set `listen.peers` in its configuration"
    )]
    NotListening { node: String },
    #[error("{reason}")]
    Malformed { reason: String },
}

/// What is to be placed.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    pub template: Option<String>,
    /// Absent for each node's default.
    pub runtime: Option<RuntimeKind>,
    /// Labels that the node must have.
    pub labels: BTreeMap<String, String>,
    pub memory_bytes: u64,
}

/// How long a request waits for what a node says that has just joined: others hear it within a second
/// or two, unless it has many sessions to adopt first.
const ANNOUNCED_SOON: Duration = Duration::from_secs(5);
const ANNOUNCED_LOOK: Duration = Duration::from_millis(250);

/// How long a look-up goes on that the registry does not answer; etcd elects within two of its time
/// outs, of a second each where it is not told otherwise.
const REGISTRY_SOON: Duration = Duration::from_secs(3);
const REGISTRY_PAUSE: Duration = Duration::from_millis(100);

impl FleetMap {
    #[must_use]
    pub fn new(fleet: Arc<dyn Fleet>, client: PeerClient, limits: PlacementLimits) -> Self {
        Self {
            fleet,
            client,
            limits,
            places: Semaphore::new(MAX_WAITING),
            gone: GoneNodes::default(),
        }
    }

    /// With as many places for requests that wait for a node.
    #[must_use]
    pub fn waiting(mut self, places: usize) -> Self {
        self.places = Semaphore::new(places.min(Semaphore::MAX_PERMITS));
        self
    }

    /// A place to wait for a node that cannot be reached; `None` while all are taken.
    #[must_use]
    pub fn wait_for(&self, node: &str) -> Option<Waiting<'_>> {
        let place = self.places.try_acquire().ok()?;
        let peer = self.peer(node);
        Some(Waiting {
            _held: Held::new(Cause::of(peer.as_ref(), Cause::Silent)),
            _place: place,
        })
    }

    /// This node.
    #[must_use]
    pub fn me(&self) -> &str {
        self.fleet.me()
    }

    /// Whether there can be no other node.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        *self.fleet.standing().borrow() == Standing::Alone
    }

    #[must_use]
    pub fn fleet(&self) -> &Arc<dyn Fleet> {
        &self.fleet
    }

    #[must_use]
    pub fn client(&self) -> &PeerClient {
        &self.client
    }

    /// Where a session is, by asking the registry.
    ///
    /// # Errors
    /// The registry does not answer.
    pub async fn whereabouts(&self, id: &SessionId) -> Result<Whereabouts, RegistryError> {
        let sighting = self.fleet.locate(id, true).await?;
        Ok(self.place_of(sighting.located))
    }

    /// Where a session is as far as is known, unless `fresh` is set; where nothing is known, the
    /// registry is asked as well, for as long as it takes to elect another leader where the one has
    /// gone, with the machine of a node for example. Sets `fresh` where it was.
    ///
    /// # Errors
    /// The registry does not answer.
    pub async fn look(
        &self,
        id: &SessionId,
        fresh: &mut bool,
    ) -> Result<Whereabouts, RegistryError> {
        let until = Instant::now() + REGISTRY_SOON;
        loop {
            match self.fleet.locate(id, *fresh).await {
                Ok(sighting) => {
                    *fresh = sighting.fresh;
                    return Ok(self.place_of(sighting.located));
                }
                Err(RegistryError::Unavailable { .. }) if Instant::now() < until => {
                    tokio::time::sleep(REGISTRY_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn place_of(&self, located: Option<Located>) -> Whereabouts {
        let Some(located) = located else {
            return Whereabouts::Nobody;
        };
        let (node, generation) = (located.node, located.generation);
        if located.released {
            return Whereabouts::Released { node, generation };
        }
        if node == self.fleet.me() {
            return Whereabouts::Here { generation };
        }
        let peer = self.peer(&node);
        match peer.as_ref().map(|peer| peer.standing) {
            Some(PeerStanding::Fenced) => Whereabouts::Lost { node, generation },
            // One that is not heard of may own it still: it says itself whether it does.
            Some(PeerStanding::Live | PeerStanding::Silent) | None => Whereabouts::There(Owner {
                node: way_to(&node, peer.as_ref()),
                generation,
            }),
        }
    }

    /// Another node by its name.
    #[must_use]
    pub fn node(&self, name: &str) -> Node {
        way_to(name, self.peer(name).as_ref())
    }

    /// The same of one that has just joined once it has said where it listens, or has not for long;
    /// at once while too many wait for nodes already.
    pub async fn announced(&self, name: &str) -> Node {
        let Some(_waiting) = self.wait_for(name) else {
            return self.node(name);
        };
        let until = Instant::now() + ANNOUNCED_SOON;
        loop {
            let peer = self.peer(name);
            let joins = peer.as_ref().is_some_and(|peer| {
                peer.standing == PeerStanding::Live && peer.announcement.is_none()
            });
            if !joins || Instant::now() >= until {
                return way_to(name, peer.as_ref());
            }
            tokio::time::sleep(ANNOUNCED_LOOK).await;
        }
    }

    fn peer(&self, name: &str) -> Option<Peer> {
        let peers = self.fleet.peers();
        peers.iter().find(|peer| peer.name == name).cloned()
    }

    /// Tells once [`Self::tell_of_gone_nodes`] finds that the node is gone, as it was when it was
    /// looked up.
    #[must_use]
    pub fn gone(&self, node: &Node) -> watch::Receiver<Option<Closing>> {
        self.gone.watch(node, Instant::now())
    }

    /// Ends the streams with nodes that are gone, so that their clients ask anew.
    pub fn tell_of_gone_nodes(&self) {
        // Before the nodes are asked for, so that nothing seems to be known later than it is.
        let now = Instant::now();
        self.gone.tell(&self.fleet.peers(), now);
    }

    /// The nodes that may start a session, the best first, and why the others may not.
    #[must_use]
    pub fn place(&self, session: &SessionId, wish: &Wish) -> Placement {
        let me = self.fleet.me();
        let own = own_standing(&self.fleet.standing().borrow());
        let nodes: Vec<NodeView> = self
            .fleet
            .peers()
            .iter()
            .map(|peer| view(peer, (peer.name == me).then_some(own)))
            .collect();
        let demand = Demand {
            session,
            template: wish.template.as_deref(),
            runtime: wish.runtime,
            labels: &wish.labels,
            memory_bytes: wish.memory_bytes,
        };
        placement::place(me, &nodes, demand, &self.limits)
    }
}

fn own_standing(standing: &Standing) -> NodeStanding {
    match standing {
        Standing::Alone | Standing::Live => NodeStanding::Live,
        Standing::Joining { .. } => NodeStanding::Joining,
        Standing::Late => NodeStanding::Late,
        Standing::Fenced => NodeStanding::Fenced,
    }
}

fn view(peer: &Peer, own: Option<NodeStanding>) -> NodeView {
    let told = peer.announcement.clone().unwrap_or_default();
    let standing = match (own, peer.standing) {
        (Some(own), _) => own,
        (None, PeerStanding::Live) if peer.announcement.is_none() => NodeStanding::Joining,
        (None, PeerStanding::Live) if peer.is_late => NodeStanding::Late,
        (None, PeerStanding::Live) => NodeStanding::Live,
        (None, PeerStanding::Silent) => NodeStanding::Silent,
        (None, PeerStanding::Fenced) => NodeStanding::Fenced,
    };
    let view = told.view.as_ref();
    NodeView {
        name: peer.name.clone(),
        standing,
        draining: told.draining,
        reachable: told.peer_url.is_some(),
        told_ago_ms: peer.announced_ago_ms,
        labels: told.labels,
        templates: told.templates,
        max_sessions: told.max_sessions,
        runtime: view.map(|view| view.runtime),
        runtimes: view.and_then(runtimes),
        ailing: view.map(ailing).unwrap_or_default(),
        load: NodeBusy {
            sessions: told.load.sessions,
            starting: told.load.starting,
            cpu_pressure_percent: told.load.cpu_pressure_percent,
            memory_available_bytes: told.load.memory_available_bytes,
            memory_total_bytes: told.load.memory_total_bytes,
        },
    }
}

/// All that a node has, where it tells them.
fn runtimes(view: &conman_proto::Node) -> Option<BTreeSet<RuntimeKind>> {
    let told = view.runtimes.iter().map(|told| told.runtime);
    Some(told.collect()).filter(|told: &BTreeSet<_>| !told.is_empty())
}

fn ailing(view: &conman_proto::Node) -> BTreeSet<RuntimeKind> {
    let ailing = view.runtimes.iter().filter(|told| told.error.is_some());
    let default = view.runtime_error.as_ref().map(|_| view.runtime);
    ailing.map(|told| told.runtime).chain(default).collect()
}

fn way_to(name: &str, peer: Option<&Peer>) -> Node {
    let told = peer.and_then(|peer| peer.announcement.as_ref());
    let node = || name.to_owned();
    let address = match told.map(|told| told.peer_url.as_deref()) {
        Some(Some(url)) => PeerAddress::new(name, url).map_err(|error| NoAddress::Malformed {
            reason: error.to_string(),
        }),
        Some(None) => Err(NoAddress::NotListening { node: node() }),
        None => Err(NoAddress::NotYet { node: node() }),
    };
    Node {
        name: Arc::from(name),
        incarnation: peer.map_or(0, |peer| peer.incarnation),
        address,
    }
}
