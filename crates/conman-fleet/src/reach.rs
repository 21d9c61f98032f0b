//! Probes the other nodes, and finds out which nodes of the fleet are cut off.
//!
//! One task sends each live node a small request every second, over the connections that calls use. What
//! it finds is published with the node's other data; [`conman_core::reach`] has the rules.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use conman_core::ownership::BootTime;
use conman_core::reach::{PeerReach, ReachReport, cut_off};
use conman_node::StatusHandle;
use conman_peer::{LIVENESS, PeerAddress, RequestError};
use conman_proto::NodeStanding;
use conman_registry::Peer;
use conman_watchdog::{Watchdog, essential};
use http::Request;
use http_body_util::Empty;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::{FleetMap, Node};

/// The task's name in the log when it ends or stalls.
const NAME: &str = "reach";
/// Interval between probes of a node …
const INTERVAL: Duration = Duration::from_secs(1);
/// … and for each node at least this long, so that probes of large fleets do not become a load.
const INTERVAL_PER_NODE: Duration = Duration::from_millis(20);
/// A packet that is lost once is sent again well within this time.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time for a round: the probes run side by side, and a request may be sent a second time.
const ROUND_TIMEOUT: Duration = Duration::from_secs(10);

const UNREACHED: &str = "conman_fleet_unreached_peers";
const CUT_OFF: &str = "conman_fleet_cut_off";

/// What the probes have found of each node.
#[derive(Debug)]
pub(crate) struct Probed {
    began: Instant,
    by_name: Mutex<BTreeMap<String, PeerReach>>,
    /// The verdict after the latest round.
    cut_off: Mutex<Arc<BTreeSet<String>>>,
}

impl Probed {
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            by_name: Mutex::default(),
            cut_off: Mutex::default(),
        }
    }

    /// A probe of a node was sent at `sent`, and has ended now.
    fn note(&self, node: String, sent: Instant, answered: bool) {
        let at = |instant: Instant| {
            let since = instant.saturating_duration_since(self.began);
            BootTime(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
        };
        let mut probed = self.lock();
        let reach = probed.entry(node.clone()).or_default();
        let before = reach.is_unreached();
        reach.probed(at(sent), at(Instant::now()), answered);
        match (before, reach.is_unreached()) {
            (false, true) => tracing::warn!(node, "this node does not reach a live node"),
            (true, false) => tracing::info!(node, "this node reaches a node again"),
            (true, true) | (false, false) => {}
        }
    }

    fn unreached(&self) -> Vec<String> {
        let probed = self.lock();
        let unreached = probed.iter().filter(|(_, reach)| reach.is_unreached());
        unreached.map(|(name, _)| name.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PeerReach>> {
        lock(&self.by_name)
    }
}

/// A panic while a lock is held cannot leave a partial change: each is one map operation or assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the task; it runs until `closing`. The node shows which nodes it does not reach, and whether it
/// is cut off.
pub fn run_reach(
    map: &Arc<FleetMap>,
    status: &StatusHandle,
    watchdog: &Watchdog,
    closing: CancellationToken,
) {
    metrics::describe_gauge!(UNREACHED, "Live nodes that this node does not reach");
    metrics::describe_gauge!(
        CUT_OFF,
        "1 while this node does not reach most of the nodes that reach each other, 0 otherwise"
    );
    let (map, status) = (Arc::clone(map), status.clone());
    let progress = watchdog.task(NAME);
    let work = async move {
        loop {
            progress.beat().await;
            let peers = map.fleet().peers();
            let others = live_others(&map, &peers);
            let pause = INTERVAL.max(INTERVAL_PER_NODE * u32::try_from(others.len()).unwrap_or(1));
            let round = map.probe(others);
            let _ = progress
                .wait(ROUND_TIMEOUT, timeout(ROUND_TIMEOUT, round))
                .await;
            map.publish(&status);
            progress.idle(sleep(pause)).await;
        }
    };
    // A probe that is dropped at shutdown is not needed.
    tokio::spawn(essential(NAME, async move {
        closing.run_until_cancelled(work).await;
    }));
}

/// The other nodes that should answer.
fn live_others(map: &FleetMap, peers: &[Peer]) -> Vec<Node> {
    let others = peers.iter().filter(|peer| peer.name != map.me());
    let live = others.filter(|peer| is_probed(map, peer));
    live.map(|peer| map.node(&peer.name)).collect()
}

fn is_probed(map: &FleetMap, peer: &Peer) -> bool {
    matches!(map.standing(peer), NodeStanding::Live | NodeStanding::Late)
}

impl FleetMap {
    async fn probe(self: &Arc<Self>, others: Vec<Node>) {
        let probed = others.iter().filter(|node| node.address.is_ok());
        let names: BTreeSet<&str> = probed.map(|node| &*node.name).collect();
        let known = |name: &String, _: &mut PeerReach| names.contains(&**name);
        self.probed().lock().retain(known);
        let sent = Instant::now();
        let mut probes = JoinSet::new();
        for node in &others {
            let Ok(address) = node.address.clone() else {
                continue;
            };
            let map = Arc::clone(self);
            probes.spawn(async move {
                let answered = map.serves(&address).await;
                (address.node, answered)
            });
        }
        while let Some(probe) = probes.join_next().await {
            if let Ok((node, answered)) = probe {
                self.probed().note(node, sent, answered);
            }
        }
    }

    /// Whether a node serves this one's requests: one that is full answers, and one that refuses this node
    /// does not serve it.
    async fn serves(&self, address: &PeerAddress) -> bool {
        let Ok(request) = Request::get(LIVENESS).body(Empty::<Bytes>::new()) else {
            return false;
        };
        match timeout(TIMEOUT, self.client().request(address, request)).await {
            Ok(Ok(_) | Err(RequestError::NoRoom { .. })) => true,
            Ok(Err(error)) => {
                tracing::debug!(node = address.node, %error, "a node does not answer a probe");
                false
            }
            Err(_) => false,
        }
    }

    fn publish(&self, status: &StatusHandle) {
        let unreached = self.probed().unreached();
        let cut_off = Arc::new(self.judge(&unreached));
        let is_cut_off = cut_off.contains(self.me());
        *lock(&self.probed().cut_off) = cut_off;
        metrics::gauge!(UNREACHED).set(f64::from(u32::try_from(unreached.len()).unwrap_or(0)));
        metrics::gauge!(CUT_OFF).set(f64::from(u8::from(is_cut_off)));
        status.set_reach(unreached, is_cut_off);
    }

    /// The live nodes that do not reach most of the nodes that reach each other, as of the latest round of
    /// probes.
    #[must_use]
    pub fn cut_off(&self) -> Arc<BTreeSet<String>> {
        Arc::clone(&lock(&self.probed().cut_off))
    }

    /// `own`: the nodes that this one does not reach.
    fn judge(&self, own: &[String]) -> BTreeSet<String> {
        let peers = self.fleet().peers();
        // What a node reported before it ended or began to leave says nothing about the others.
        let reports = peers.iter().filter(|peer| {
            let leaves = peer.announcement.as_ref().is_some_and(|it| it.draining);
            peer.name == self.me() || (self.renews(&peer.name) && !leaves)
        });
        let reports = reports.filter_map(|peer| {
            let view = peer.announcement.as_ref()?.view.as_ref()?;
            let unreached = match peer.name == self.me() {
                true => own,
                false => &view.unreached,
            };
            Some(ReachReport {
                node: &peer.name,
                unreached,
            })
        });
        let reports: Vec<ReachReport<'_>> = reports.collect();
        cut_off(&reports).into_iter().map(String::from).collect()
    }
}
