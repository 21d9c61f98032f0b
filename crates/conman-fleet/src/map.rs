//! The nodes of the fleet, the locations of sessions, and the placement of new ones, as this node sees them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use conman_auth::{Caller, CallerOrigin};
use conman_core::Closing;
use conman_core::placement::{self, Demand, NodeBusy, NodeView, Placement, PlacementLimits};
use conman_node::Leave;
use conman_peer::{PeerAddress, PeerClient};
use conman_proto::{Generation, NodeStanding, ResolvedSpec, RuntimeKind, SessionId};
use conman_registry::{Fleet, Located, Peer, PeerStanding, RegistryError, Standing};
use tokio::sync::{Semaphore, watch};

use crate::Passage;
use crate::lost_nodes::StreamsByNode;
use crate::reach::Probed;

/// Default limit of requests that wait for a node: half of the API's connections.
const MAX_WAITING: usize = 512;

/// The nodes of the fleet and their sessions, as one of them sees them.
#[derive(Debug)]
pub struct FleetMap {
    fleet: Arc<dyn Fleet>,
    client: PeerClient,
    limits: PlacementLimits,
    /// Places for requests that wait for a node.
    pub(crate) places: Semaphore,
    streams: StreamsByNode,
    probed: Probed,
    leave: Option<Arc<Leave>>,
}

/// The location of a session.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionLocation {
    /// It was never owned, or it was forgotten.
    NoOwner,
    /// This node owns it.
    Here { generation: Generation },
    /// Another node owns it.
    There(Owner),
    /// Its node has given it up.
    Released {
        node: String,
        generation: Generation,
    },
    /// Its node was declared dead: any node may claim it.
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

/// Another node, and its address.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub name: Arc<str>,
    pub incarnation: u64,
    pub address: Result<PeerAddress, NoAddress>,
}

/// Why another node cannot be reached, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoAddress {
    #[error(
        "node `{node}` has not announced its peer listener yet, because it is starting; try again \
         in a moment"
    )]
    NotYet { node: String },
    #[error(
        "node `{node}` has no listener for other nodes; set `listen.peers` in its configuration"
    )]
    NotListening { node: String },
    #[error("{reason}")]
    Malformed { reason: String },
}

/// The session to place.
#[derive(Debug, Clone, Default)]
pub struct PlacementRequest {
    pub template: Option<String>,
    /// Each node's default if absent.
    pub runtime: Option<RuntimeKind>,
    /// Labels that the node must have.
    pub labels: BTreeMap<String, String>,
    pub memory_bytes: u64,
    /// No client's request is for it, so that this node is not preferred.
    pub anywhere: bool,
}

impl From<&ResolvedSpec> for PlacementRequest {
    fn from(spec: &ResolvedSpec) -> Self {
        Self {
            template: spec.template.clone(),
            runtime: Some(spec.runtime),
            labels: spec.node_labels.clone(),
            memory_bytes: spec.memory_bytes.unwrap_or_default(),
            anywhere: false,
        }
    }
}

/// Nodes of the fleet by standing, this one included.
const PEERS: &str = "conman_fleet_peers";

/// How long a lookup is retried if the registry does not answer; etcd elects a leader within two
/// election timeouts, by default one second each.
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
            streams: StreamsByNode::default(),
            probed: Probed::new(),
            leave: None,
        }
    }

    /// Counts calls of other nodes as passing through this one, and ends streams among them when it leaves.
    #[must_use]
    pub fn leaving(mut self, leave: &Arc<Leave>) -> Self {
        self.leave = Some(Arc::clone(leave));
        self
    }

    /// `None` for an operator on this machine: nobody else depends on that connection.
    pub(crate) fn passage(&self, caller: &Caller) -> Option<Passage> {
        let is_here = matches!(caller.origin, CallerOrigin::AdminSocket { .. });
        let leave = self.leave.as_ref().filter(|_| !is_here)?;
        Some(Passage::begin(leave))
    }

    /// Sets the limit of requests that wait for a node.
    #[must_use]
    pub fn waiting(mut self, places: usize) -> Self {
        self.places = Semaphore::new(places.min(Semaphore::MAX_PERMITS));
        self
    }

    /// This node's name.
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

    pub(crate) fn probed(&self) -> &Probed {
        &self.probed
    }

    /// The location of a session, read from the registry.
    ///
    /// # Errors
    /// The registry does not answer.
    pub async fn locate_fresh(&self, id: &SessionId) -> Result<SessionLocation, RegistryError> {
        let seen = self.fleet.locate(id, true).await?;
        Ok(self.location_of(seen.located))
    }

    /// The location of a session, from the cache unless `fresh` is set. If it is not cached, the
    /// registry is read too, and retried for as long as it takes to elect another leader, for
    /// example after the loss of its machine. Sets `fresh` if the registry was read.
    ///
    /// # Errors
    /// The registry does not answer.
    pub async fn locate(
        &self,
        id: &SessionId,
        fresh: &mut bool,
    ) -> Result<SessionLocation, RegistryError> {
        let until = Instant::now() + REGISTRY_SOON;
        loop {
            match self.locate_now(id, fresh).await {
                Err(RegistryError::Unavailable { .. }) if Instant::now() < until => {
                    tokio::time::sleep(REGISTRY_PAUSE).await;
                }
                located => return located,
            }
        }
    }

    /// Does the same as [`Self::locate`] without retries.
    pub(crate) async fn locate_now(
        &self,
        id: &SessionId,
        fresh: &mut bool,
    ) -> Result<SessionLocation, RegistryError> {
        let seen = self.fleet.locate(id, *fresh).await?;
        *fresh = seen.fresh;
        Ok(self.location_of(seen.located))
    }

    fn location_of(&self, located: Option<Located>) -> SessionLocation {
        let Some(located) = located else {
            return SessionLocation::NoOwner;
        };
        let (node, generation) = (located.node, located.generation);
        if located.released {
            return SessionLocation::Released { node, generation };
        }
        if node == self.fleet.me() {
            return SessionLocation::Here { generation };
        }
        let peer = self.peer(&node);
        match peer.as_ref().map(|peer| peer.standing) {
            Some(PeerStanding::Fenced) => SessionLocation::Lost { node, generation },
            // A node that is not heard from may still own it; that node's answer decides.
            Some(PeerStanding::Live | PeerStanding::Silent) | None => {
                SessionLocation::There(Owner {
                    node: node_of(&node, peer.as_ref()),
                    generation,
                })
            }
        }
    }

    /// Another node by its name.
    #[must_use]
    pub fn node(&self, name: &str) -> Node {
        node_of(name, self.peer(name).as_ref())
    }

    pub(crate) fn peer(&self, name: &str) -> Option<Peer> {
        let peers = self.fleet.peers();
        peers.iter().find(|peer| peer.name == name).cloned()
    }

    /// Notifies once [`Self::close_streams_of_lost_nodes`] finds that this incarnation of the node is
    /// lost.
    #[must_use]
    pub fn lost(&self, node: &Node) -> watch::Receiver<Option<Closing>> {
        self.streams.watch(node, Instant::now())
    }

    /// Ends the streams with lost nodes, so that their clients connect again.
    pub fn close_streams_of_lost_nodes(&self) {
        // Taken before the nodes are read, so that no data counts as newer than it is.
        let now = Instant::now();
        self.streams.close_lost(&self.fleet.peers(), now);
    }

    /// Whether a node owns what it owns, as far as this node knows.
    #[must_use]
    pub fn standing(&self, peer: &Peer) -> NodeStanding {
        if peer.name == self.me() {
            return match *self.fleet.standing().borrow() {
                Standing::Alone | Standing::Live => NodeStanding::Live,
                Standing::Joining { .. } => NodeStanding::Joining,
                Standing::Late => NodeStanding::Late,
                Standing::Fenced => NodeStanding::Fenced,
            };
        }
        match peer.standing {
            PeerStanding::Live if peer.announcement.is_none() => NodeStanding::Joining,
            PeerStanding::Live if peer.is_late => NodeStanding::Late,
            PeerStanding::Live => NodeStanding::Live,
            PeerStanding::Silent => NodeStanding::Silent,
            PeerStanding::Fenced => NodeStanding::Fenced,
        }
    }

    /// Sets the gauge of nodes by standing, as [`Self::standing`] is now.
    pub fn measure(&self) {
        let mut counts = NodeStanding::ALL.map(|standing| (standing, 0_u32));
        for peer in self.fleet.peers().iter() {
            let now = self.standing(peer);
            let counted = counts.iter_mut().filter(|(standing, _)| *standing == now);
            counted.for_each(|(_, count)| *count += 1);
        }
        for (standing, count) in counts {
            metrics::gauge!(PEERS, "standing" => standing.as_str()).set(f64::from(count));
        }
    }

    /// The nodes that may start a session, best first, and why the others may not.
    #[must_use]
    pub fn place(&self, session: &SessionId, wanted: &PlacementRequest) -> Placement {
        let nodes = self.views();
        let demand = Demand {
            session,
            template: wanted.template.as_deref(),
            runtime: wanted.runtime,
            labels: &wanted.labels,
            memory_bytes: wanted.memory_bytes,
            anywhere: wanted.anywhere,
        };
        placement::place(self.me(), &nodes, demand, &self.limits)
    }

    /// Returns how many sessions this node has beyond its share of the fleet's.
    #[must_use]
    pub fn excess(&self) -> u32 {
        placement::excess(self.me(), &self.views(), &self.limits)
    }

    fn views(&self) -> Vec<NodeView> {
        let peers = self.fleet.peers();
        let cut_off = self.cut_off();
        let views = peers.iter().map(|peer| NodeView {
            cut_off: cut_off.contains(&peer.name),
            ..view(peer, self.standing(peer))
        });
        views.collect()
    }
}

fn view(peer: &Peer, standing: NodeStanding) -> NodeView {
    let announced = peer.announcement.clone().unwrap_or_default();
    let view = announced.view.as_ref();
    NodeView {
        name: peer.name.clone(),
        standing,
        draining: announced.draining,
        reachable: announced.peer_url.is_some(),
        cut_off: false,
        announced_ago_ms: peer.announced_ago_ms,
        labels: announced.labels,
        templates: announced.templates,
        max_sessions: announced.max_sessions,
        runtime: view.map(|view| view.runtime),
        runtimes: view.and_then(runtimes),
        ailing: view.map(ailing).unwrap_or_default(),
        load: NodeBusy {
            sessions: announced.load.sessions,
            starting: announced.load.starting,
            cpu_pressure_percent: announced.load.cpu_pressure_percent,
            memory_available_bytes: announced.load.memory_available_bytes,
            memory_total_bytes: announced.load.memory_total_bytes,
        },
    }
}

/// All runtimes of a node, if it announces them.
fn runtimes(view: &conman_proto::Node) -> Option<BTreeSet<RuntimeKind>> {
    let runtimes = view.runtimes.iter().map(|announced| announced.runtime);
    Some(runtimes.collect()).filter(|runtimes: &BTreeSet<_>| !runtimes.is_empty())
}

fn ailing(view: &conman_proto::Node) -> BTreeSet<RuntimeKind> {
    let ailing = view.runtimes.iter().filter(|one| one.error.is_some());
    let default = view.runtime_error.as_ref().map(|_| view.runtime);
    ailing.map(|one| one.runtime).chain(default).collect()
}

fn node_of(name: &str, peer: Option<&Peer>) -> Node {
    let announced = peer.and_then(|peer| peer.announcement.as_ref());
    let node = || name.to_owned();
    let address = match announced.map(|announced| announced.peer_url.as_deref()) {
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
