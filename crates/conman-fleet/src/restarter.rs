//! Restarts the sessions of lost nodes, if their specs require it.
//!
//! One task reads the records periodically, and at once when a node is lost.
//! `conman_core::restart` decides which node restarts a session, and when. Restarts run in
//! separate tasks, a few at a time. Ownership does not depend on this: a restart is a claim like
//! any other. Lost nodes, and records that no node restarts, are removed in time.

mod record_sweep;
mod relocation;

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::placement;
use conman_core::restart::{self, Verdict, Watch};
use conman_core::retention::Retention;
use conman_node::{Node, end_of};
use conman_proto::{EventKind, Generation, SessionId};
use conman_registry::{Fleet, FleetSession, NewEvent, Peer, PeerStanding, RegistryError};
use conman_watchdog::{TaskProgress, Watchdog, essential};
use jiff::Timestamp;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use self::record_sweep::RecordSweep;
use self::relocation::Relocator;
use crate::Locator;
use crate::locator::LostSession;

/// The task's name in the log when it ends or stalls.
const NAME: &str = "restarter";
/// More than the registry needs to read a page, or to give up.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between checks of the nodes, which cost nothing; jittered.
const CHECK_INTERVAL_MS: u64 = 500;
/// Interval between reads of the records just after nodes were lost.
const SCAN_AFTER_LOSS: Duration = Duration::from_secs(1);
/// Interval while sessions wait for their restart, which may last.
const SCAN_PENDING: Duration = Duration::from_secs(10);
/// Interval in quiet times, for losses that were missed.
const SCAN_IDLE: Duration = Duration::from_secs(30);
/// How long after the loss of a node its records are read often: it may still be releasing
/// sessions.
const LOSS_PERIOD: Duration = Duration::from_secs(20);
/// Restarts of this node that run at a time.
const MAX_PARALLEL: usize = 8;
/// How long a restart order is waited for; the other node completes it anyway.
const ORDER_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after a scan, in multiples of its duration, which also loads etcd and the network.
const SCAN_BACKOFF: u32 = 20;
/// Records per page.
const PAGE: usize = 500;
/// Most given-up sessions whose report is remembered; more are reported again.
const MAX_REPORTED: usize = 10_000;

/// Starts the task; it runs until `closing`. Drains relocate sessions through it.
pub fn run_restarter(
    locator: &Arc<Locator>,
    watchdog: &Watchdog,
    retention: Retention,
    closing: CancellationToken,
) {
    let (node, fleet) = (locator.node(), locator.map().fleet());
    node.drain()
        .relocate_by(Arc::new(Relocator::new(locator, node)));
    let restarter = Restarter {
        node: Arc::clone(node),
        fleet: Arc::clone(fleet),
        locator: Arc::clone(locator),
        watch: Arc::default(),
        parallel: Arc::new(Semaphore::new(MAX_PARALLEL)),
        began: Instant::now(),
        reported: HashSet::new(),
        sweep: RecordSweep::new(Arc::clone(node), Arc::clone(fleet), retention),
    };
    // Orders dropped at shutdown are left to other nodes.
    let progress = watchdog.task(NAME);
    let work = async move { closing.run_until_cancelled(restarter.run(&progress)).await };
    tokio::spawn(essential(NAME, work));
}

struct Restarter {
    node: Arc<Node>,
    fleet: Arc<dyn Fleet>,
    locator: Arc<Locator>,
    watch: Arc<Mutex<Watch>>,
    parallel: Arc<Semaphore>,
    began: Instant,
    /// Given-up sessions that were reported, with their last generation.
    reported: HashSet<(SessionId, Generation)>,
    sweep: RecordSweep,
}

impl Restarter {
    async fn run(mut self, progress: &TaskProgress) {
        let mut lost = BTreeSet::new();
        let mut changed: Option<Instant> = None;
        let mut scanned: Option<Instant> = None;
        let mut took = Duration::ZERO;
        let mut was_frozen = false;
        loop {
            progress.beat().await;
            progress
                .idle(tokio::time::sleep(jittered(CHECK_INTERVAL_MS)))
                .await;
            let standing = self.fleet.standing().borrow().clone();
            was_frozen |= standing.is_frozen();
            if !standing.is_ready() {
                continue;
            }
            let peers = self.fleet.peers();
            let now_lost = lost_or_leaving(&peers);
            let is_new = now_lost != lost;
            lost = now_lost;
            // A node that comes back is about to report what its fence has killed.
            if is_new || std::mem::take(&mut was_frozen) {
                changed = Some(Instant::now());
            }
            let recent = changed.is_some_and(|changed| changed.elapsed() < LOSS_PERIOD);
            let pause = match lock(&self.watch).is_idle() {
                _ if recent => SCAN_AFTER_LOSS,
                false => SCAN_PENDING,
                true => SCAN_IDLE,
            };
            let pause = pause.max(took * SCAN_BACKOFF);
            if is_new || scanned.is_none_or(|scanned| scanned.elapsed() >= pause) {
                let begun = Instant::now();
                let scanned_now = self.scan(progress).await;
                took = begun.elapsed();
                if let Err(error) = scanned_now {
                    tracing::warn!(%error, "cannot read the sessions' records");
                }
                scanned = Some(Instant::now());
            }
        }
    }

    /// Reads all records, and restarts the sessions that are this node's to restart.
    async fn scan(&mut self, progress: &TaskProgress) -> Result<(), RegistryError> {
        let peers = self.fleet.peers();
        let mut pending = HashSet::new();
        let mut after = None;
        self.sweep.begin();
        loop {
            let page = self.fleet.sessions(after.as_ref(), PAGE);
            // A page is processed at once; reading it is bounded, whatever etcd does.
            let page = progress.wait(READ_TIMEOUT, page).await?;
            for session in page.sessions {
                if self.consider(&session, &peers) {
                    pending.insert(session.record.id);
                }
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        lock(&self.watch).keep(|id| pending.contains(id));
        // One node removes lost nodes.
        let is_first = first_live(&peers) == Some(self.fleet.me());
        let lost = peers.iter().filter(|peer| is_first && is_lost(peer));
        self.sweep.finish(lost);
        Ok(())
    }

    /// Whether the session is to be restarted by some node.
    fn consider(&mut self, session: &FleetSession, peers: &[Peer]) -> bool {
        let record = &session.record;
        if session.node != self.fleet.me() {
            let sessions = self.node.sessions();
            sessions.note_elsewhere(&record.id, record.generation);
        }
        let known = peers.iter().find(|peer| peer.name == session.node);
        if !record.state.is_ended() {
            match known.is_some_and(is_lost) {
                true => self.sweep.owns_one(&session.node),
                false => return false,
            }
        }
        let (from, end) = (&session.node, end_of(record));
        let verdict = restart::judge(&record.spec, record.created_at, from, end, Timestamp::now());
        let me = self.fleet.me();
        let rank = rank(me, peers, &record.id);
        let first = rank == Some(0);
        let count = match verdict {
            Verdict::Restart(next) => next.count,
            Verdict::No | Verdict::GivenUp { .. } => {
                // One node reports it.
                if let Verdict::GivenUp { count } = verdict
                    && first
                {
                    self.give_up(session, count);
                }
                match known.is_none_or(is_lost) {
                    true if first => self.sweep.consider_lost(session, known),
                    true => {}
                    false => self.sweep.consider_live(session),
                }
                return false;
            }
        };
        if let Some(rank) = rank {
            let now_ms = self.now_ms();
            let which = (&record.id, record.generation);
            if lock(&self.watch).is_due(now_ms, which, rank, count) {
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
        let (locator, watch) = (Arc::clone(&self.locator), Arc::clone(&self.watch));
        let (parallel, began) = (Arc::clone(&self.parallel), self.began);
        tokio::spawn(async move {
            // However this task ends.
            let _attempt = AttemptGuard {
                watch,
                began,
                id: lost.id.clone(),
            };
            // The semaphore is never closed.
            let _place = parallel.acquire_owned().await;
            let (id, from) = (&lost.id, &lost.from);
            // Cancelled at the time-out: the other node completes its start, which is seen later.
            match timeout(ORDER_TIMEOUT, locator.restart(&lost)).await {
                Ok(Ok(node)) => {
                    tracing::info!(session = %id, from, node, "restarted a lost session");
                }
                Ok(Err(why)) => {
                    tracing::warn!(session = %id, from, why, "did not restart the session");
                }
                Err(_) => tracing::warn!(session = %id, from, "the session's restart is slow"),
            }
        });
    }

    fn give_up(&mut self, session: &FleetSession, count: u32) {
        let record = &session.record;
        let (id, generation) = (&record.id, record.generation);
        if self.reported.len() >= MAX_REPORTED {
            self.reported.clear();
        }
        if !self.reported.insert((id.clone(), generation)) {
            return;
        }
        let message = format!(
            "no longer restarted: {count} restarts followed each other within {} minutes; the \
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
struct AttemptGuard {
    watch: Arc<Mutex<Watch>>,
    began: Instant,
    id: SessionId,
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        lock(&self.watch).tried(ms_since(self.began), &self.id);
    }
}

/// This node's rank among those that can restart a session.
fn rank(me: &str, peers: &[Peer], id: &SessionId) -> Option<usize> {
    let live: Vec<&str> = peers
        .iter()
        .filter(|peer| peer.standing == PeerStanding::Live && !is_leaving(peer))
        .map(|peer| peer.name.as_str())
        .collect();
    placement::turn(me, &live, id.as_str())
}

fn is_lost(peer: &Peer) -> bool {
    peer.standing == PeerStanding::Fenced
}

/// The live node with the least name.
fn first_live(peers: &[Peer]) -> Option<&str> {
    let mut live = peers
        .iter()
        .filter(|peer| peer.standing == PeerStanding::Live);
    live.next().map(|peer| peer.name.as_str())
}

fn is_leaving(peer: &Peer) -> bool {
    let announcement = peer.announcement.as_ref();
    announcement.is_some_and(|announced| announced.draining)
}

/// Nodes that are lost or being drained.
fn lost_or_leaving(peers: &[Peer]) -> BTreeSet<(String, u64)> {
    peers
        .iter()
        .filter(|peer| is_lost(peer) || is_leaving(peer))
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
