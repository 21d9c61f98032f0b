//! Restarts the sessions of lost nodes, if their specs require it.
//!
//! One task reads the records periodically, and at once when a node is lost.
//! `conman_core::restart` decides which node restarts a session, and when. Restarts run in
//! separate tasks, a few at a time. Ownership does not depend on this: a restart is a claim like
//! any other. Records of lost nodes that no node restarts are removed in time.

mod ages;
mod leftovers;
mod turns;

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use conman_core::restart::{self, Verdict, Watch};
use conman_core::retention::Retention;
use conman_node::{Node, Relocate, end_of};
use conman_proto::{EventKind, Generation, SessionId};
use conman_registry::{Fleet, FleetSession, NewEvent, Peer, PeerStanding, RegistryError};
use conman_vitals::{Pulse, Vitals, essential};
use jiff::Timestamp;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use self::leftovers::Leftovers;
use super::seeker::{LostSession, Seeker};

/// The task's name in the log when it ends or stalls.
const NAME: &str = "restarter";
/// More than the registry needs to read a page, or to give up.
const READ_PATIENCE: Duration = Duration::from_secs(30);
/// Interval between checks of the nodes, which cost nothing; jittered.
const LOOK_EVERY_MS: u64 = 500;
/// Interval between reads of the records just after nodes were lost.
const SCAN_SOON: Duration = Duration::from_secs(1);
/// Interval while sessions wait for their restart, which may last.
const SCAN_LACKING: Duration = Duration::from_secs(10);
/// Interval in quiet times, for losses that were missed.
const SCAN_EVERY: Duration = Duration::from_secs(30);
/// How long after the loss of a node its records are read often: it may still be releasing
/// sessions.
const ATTENTIVE: Duration = Duration::from_secs(20);
/// Restarts of this node that run at a time.
const PARALLEL: usize = 8;
/// How long a restart order is waited for; the other node completes it anyway.
const ORDER_PATIENCE: Duration = Duration::from_secs(10);
/// The pause after a scan, in multiples of its duration, which also loads etcd and the network.
const REST: u32 = 20;
/// Records per page.
const PAGE: usize = 500;
/// Most given-up sessions whose report is remembered; more are reported again.
const MAX_TOLD: usize = 10_000;

/// Runs until the daemon stops.
pub(super) fn run(
    node: &Arc<Node>,
    fleet: &Arc<dyn Fleet>,
    seeker: &Arc<Seeker>,
    vitals: &Vitals,
    retention: Retention,
    closing: CancellationToken,
) {
    node.drain().relocate_by(Arc::new(Relocator {
        seeker: Arc::downgrade(seeker),
        node: Arc::downgrade(node),
    }));
    let restarter = Restarter {
        node: Arc::clone(node),
        fleet: Arc::clone(fleet),
        seeker: Arc::clone(seeker),
        watch: Arc::default(),
        parallel: Arc::new(Semaphore::new(PARALLEL)),
        began: Instant::now(),
        told: HashSet::new(),
        leftovers: Leftovers::new(Arc::clone(node), retention),
    };
    // Orders dropped at shutdown are left to other nodes.
    let pulse = vitals.task(NAME);
    let work = async move { closing.run_until_cancelled(restarter.run(&pulse)).await };
    tokio::spawn(essential(NAME, work));
}

struct Restarter {
    node: Arc<Node>,
    fleet: Arc<dyn Fleet>,
    seeker: Arc<Seeker>,
    watch: Arc<Mutex<Watch>>,
    parallel: Arc<Semaphore>,
    began: Instant,
    /// Given-up sessions that were reported, with their last generation.
    told: HashSet<(SessionId, Generation)>,
    leftovers: Leftovers,
}

impl Restarter {
    async fn run(mut self, pulse: &Pulse) {
        let mut gone = BTreeSet::new();
        let mut changed: Option<Instant> = None;
        let mut scanned: Option<Instant> = None;
        let mut took = Duration::ZERO;
        let mut was_frozen = false;
        loop {
            pulse.beat().await;
            pulse
                .idle(tokio::time::sleep(jittered(LOOK_EVERY_MS)))
                .await;
            let standing = self.fleet.standing().borrow().clone();
            was_frozen |= standing.is_frozen();
            if !standing.is_ready() {
                continue;
            }
            let peers = self.fleet.peers();
            self.leftovers.see(&peers);
            let now_gone = gone_nodes(&peers);
            let news = now_gone != gone;
            gone = now_gone;
            // A node that comes back is about to report what its fence has killed.
            if news || std::mem::take(&mut was_frozen) {
                changed = Some(Instant::now());
            }
            let recent = changed.is_some_and(|changed| changed.elapsed() < ATTENTIVE);
            let pause = match lock(&self.watch).is_idle() {
                _ if recent => SCAN_SOON,
                false => SCAN_LACKING,
                true => SCAN_EVERY,
            };
            let pause = pause.max(took * REST);
            if news || scanned.is_none_or(|scanned| scanned.elapsed() >= pause) {
                let begun = Instant::now();
                let looked = self.scan(pulse).await;
                took = begun.elapsed();
                match looked {
                    Ok(()) => {
                        let counting = self.leftovers.count(&*self.fleet);
                        pulse.wait(READ_PATIENCE, counting).await;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot read the sessions' records");
                        self.leftovers.look_failed();
                    }
                }
                scanned = Some(Instant::now());
            }
        }
    }

    /// Reads all records, and restarts the sessions that are this node's to restart.
    async fn scan(&mut self, pulse: &Pulse) -> Result<(), RegistryError> {
        let peers = self.fleet.peers();
        let mut lacking = HashSet::new();
        let mut after = None;
        loop {
            let page = self.fleet.sessions(after.as_ref(), PAGE);
            // A page is processed at once; reading it is bounded, whatever etcd does.
            let page = pulse.wait(READ_PATIENCE, page).await?;
            for session in page.sessions {
                if self.look_at(&session, &peers) {
                    lacking.insert(session.record.id);
                }
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        lock(&self.watch).keep(|id| lacking.contains(id));
        self.leftovers.clear();
        Ok(())
    }

    /// Whether the session is to be restarted by some node.
    fn look_at(&mut self, session: &FleetSession, peers: &[Peer]) -> bool {
        let record = &session.record;
        let known = peers.iter().find(|peer| peer.name == session.node);
        let fenced = known.map(|peer| peer.standing == PeerStanding::Fenced);
        let gone_for = match fenced.unwrap_or(true) {
            true => Some(self.leftovers.gone_for(&session.node, known)),
            false => None,
        };
        if !record.state.is_ended() && fenced != Some(true) {
            return false;
        }
        let (from, end) = (&session.node, end_of(record));
        let verdict = restart::judge(&record.spec, record.created_at, from, end, Timestamp::now());
        let me = self.fleet.me();
        let turn = turn(me, peers, &record.id);
        let first = turn == Some(0);
        let count = match verdict {
            Verdict::Restart(next) => next.count,
            Verdict::No | Verdict::GivenUp { .. } => {
                // One node reports it.
                if let Verdict::GivenUp { count } = verdict
                    && first
                {
                    self.give_up(session, count);
                }
                self.leftovers.look_at(session, gone_for.filter(|_| first));
                return false;
            }
        };
        if let Some(turn) = turn {
            let now_ms = self.now_ms();
            let which = (&record.id, record.generation);
            if lock(&self.watch).is_due(now_ms, which, turn, count) {
                self.order(LostSession {
                    id: record.id.clone(),
                    generation: record.generation,
                    spec: record.spec.clone(),
                    from: from.clone(),
                    count,
                });
            }
        }
        true
    }

    fn order(&self, lost: LostSession) {
        let (seeker, watch) = (Arc::clone(&self.seeker), Arc::clone(&self.watch));
        let (parallel, began) = (Arc::clone(&self.parallel), self.began);
        tokio::spawn(async move {
            // However this task ends.
            let _tried = Tried {
                watch,
                began,
                id: lost.id.clone(),
            };
            // The semaphore is never closed.
            let _place = parallel.acquire_owned().await;
            let (id, from) = (&lost.id, &lost.from);
            // Cancelled at the time-out: the other node completes its start, which is seen later.
            match timeout(ORDER_PATIENCE, seeker.restart(&lost)).await {
                Ok(Ok(node)) => {
                    tracing::info!(session = %id, from, node, "restarted a lost session");
                }
                Ok(Err(why)) => {
                    tracing::warn!(session = %id, from, why, "cannot restart the session yet");
                }
                Err(_) => tracing::warn!(session = %id, from, "the session's restart is slow"),
            }
        });
    }

    fn give_up(&mut self, session: &FleetSession, count: u32) {
        let record = &session.record;
        let (id, generation) = (&record.id, record.generation);
        if self.told.len() >= MAX_TOLD {
            self.told.clear();
        }
        if !self.told.insert((id.clone(), generation)) {
            return;
        }
        let message = format!(
            "not restarted any more: {count} restarts followed each other within {} minutes; the \
             next one is by hand",
            restart::WINDOW_S / 60
        );
        tracing::warn!(session = %id, %generation, "{message}");
        self.node.journal().append(vec![NewEvent {
            at: Timestamp::now(),
            kind: EventKind::RestartGivenUp,
            session: Some(id.clone()),
            generation: Some(generation),
            phase: None,
            cause: None,
            duration_ms: None,
            message,
        }]);
    }

    fn now_ms(&self) -> u64 {
        ms_since(self.began)
    }
}

/// Reports to the watch on drop that an order is over.
struct Tried {
    watch: Arc<Mutex<Watch>>,
    began: Instant,
    id: SessionId,
}

impl Drop for Tried {
    fn drop(&mut self) {
        lock(&self.watch).tried(ms_since(self.began), &self.id);
    }
}

/// This node's rank among those that can restart a session.
fn turn(me: &str, peers: &[Peer], id: &SessionId) -> Option<usize> {
    let live: Vec<&str> = peers
        .iter()
        .filter(|peer| peer.standing == PeerStanding::Live && !is_leaving(peer))
        .map(|peer| peer.name.as_str())
        .collect();
    restart::turn(me, &live, id)
}

fn is_leaving(peer: &Peer) -> bool {
    let told = peer.announcement.as_ref();
    told.is_some_and(|told| told.draining)
}

/// Nodes that are lost or being drained.
fn gone_nodes(peers: &[Peer]) -> BTreeSet<(String, u64)> {
    peers
        .iter()
        .filter(|peer| peer.standing == PeerStanding::Fenced || is_leaving(peer))
        .map(|peer| (peer.name.clone(), peer.incarnation))
        .collect()
}

/// Between 0.5 and 1.5 times `ms`, so that nodes do not all read etcd at once.
fn jittered(ms: u64) -> Duration {
    let random = getrandom::u64().unwrap_or_default();
    Duration::from_millis(ms / 2 + random % ms.max(1))
}

fn ms_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Every change under the lock is complete, so a poisoned lock is fine.
fn lock(watch: &Mutex<Watch>) -> MutexGuard<'_, Watch> {
    watch.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Relocates sessions for a drain.
#[derive(Debug)]
struct Relocator {
    /// Weak, so that the node does not keep itself alive.
    seeker: Weak<Seeker>,
    node: Weak<Node>,
}

#[async_trait]
impl Relocate for Relocator {
    async fn relocate(&self, id: &SessionId, generation: Generation) -> Result<String, String> {
        let stopping = || "the daemon is stopping".to_owned();
        let seeker = self.seeker.upgrade().ok_or_else(stopping)?;
        let node = self.node.upgrade().ok_or_else(stopping)?;
        let record = node
            .sessions()
            .record(id)
            .await
            .map_err(|error| super::chain(&error))?;
        let Some(record) = record.filter(|record| record.generation == generation) else {
            // Another node was first.
            return seeker.whose(id).await;
        };
        let from = node.name().to_owned();
        let end = end_of(&record);
        let now = Timestamp::now();
        match restart::judge(&record.spec, record.created_at, &from, end, now) {
            Verdict::Restart(next) => {
                let lost = LostSession {
                    id: id.clone(),
                    generation,
                    spec: record.spec,
                    from,
                    count: next.count,
                };
                seeker.restart(&lost).await
            }
            Verdict::GivenUp { count } => Err(format!("it was restarted {count} times already")),
            Verdict::No => Err("it is not to be restarted".to_owned()),
        }
    }
}
