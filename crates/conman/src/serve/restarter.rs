//! Restarts the sessions of nodes that have gone, where their specs want that.
//!
//! One task looks at the records now and then, and at once when a node goes. Whose restart is this
//! node's, and when, `conman_core::restart` says; what it begins runs in tasks of its own, a few at
//! a time. Nothing here is relied on for who owns what: a restart is a claim like any other. What is
//! restarted by nobody, and tells of nodes that are gone, it has forgotten in time.

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

/// What the task is called when it ends or stands still.
const NAME: &str = "restarter";
/// Above what the registry takes at most to read a page, or to give that up.
const READ_PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at the nodes, which cost nothing; jittered.
const LOOK_EVERY_MS: u64 = 500;
/// Records are read this often while the nodes that are gone have just changed.
const SCAN_SOON: Duration = Duration::from_secs(1);
/// Likewise while sessions wait for their restart, as that may last.
const SCAN_LACKING: Duration = Duration::from_secs(10);
/// Likewise in quiet times, for what nobody has told of.
const SCAN_EVERY: Duration = Duration::from_secs(30);
/// For so long after a node went its records are read often: it may be giving up its sessions yet.
const ATTENTIVE: Duration = Duration::from_secs(20);
/// Restarts under way at a time, of those that this node orders.
const PARALLEL: usize = 8;
/// How long an order is waited for; what it has begun goes on.
const ORDER_PATIENCE: Duration = Duration::from_secs(10);
/// Between scans passes so many times what the last one took, which etcd and the network took part in.
const REST: u32 = 20;
/// Records read at a time.
const PAGE: usize = 500;
/// Sessions that were given up, and that it was told of; beyond, it is told again.
const MAX_TOLD: usize = 10_000;

/// Begins to look, until the daemon stops.
pub(super) fn run(
    node: &Arc<Node>,
    fleet: &Arc<dyn Fleet>,
    seeker: &Arc<Seeker>,
    vitals: &Vitals,
    retention: Retention,
    closing: CancellationToken,
) {
    node.relocate_by(Arc::new(Relocator {
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
    // Orders that are dropped with the daemon are another node's to give again.
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
    /// Those given up, by the generation that was the last.
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
            // A node that comes back is about to tell what its fence has killed.
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
                        tracing::warn!(%error, "the sessions' records cannot be looked through");
                        self.leftovers.look_failed();
                    }
                }
                scanned = Some(Instant::now());
            }
        }
    }

    /// Looks at all records, and has restarted whatever is this node's to restart now.
    async fn scan(&mut self, pulse: &Pulse) -> Result<(), RegistryError> {
        let peers = self.fleet.peers();
        let mut lacking = HashSet::new();
        let mut after = None;
        loop {
            let page = self.fleet.sessions(after.as_ref(), PAGE);
            // A page is looked through at once; reading it ends in time, whatever etcd does.
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

    /// Whether the session is to be restarted by somebody.
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
                // One of the nodes says so.
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
            // Nobody closes it.
            let _place = parallel.acquire_owned().await;
            let (id, from) = (&lost.id, &lost.from);
            // Cancelled with the time: what another node has begun goes on, and is seen.
            match timeout(ORDER_PATIENCE, seeker.restart(&lost)).await {
                Ok(Ok(node)) => {
                    tracing::info!(session = %id, from, node, "restarted, as its node has gone");
                }
                Ok(Err(why)) => {
                    tracing::warn!(session = %id, from, why, "could not be restarted yet");
                }
                Err(_) => tracing::warn!(session = %id, from, "its restart takes long"),
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
            duration_ms: None,
            message,
        }]);
    }

    fn now_ms(&self) -> u64 {
        ms_since(self.began)
    }
}

/// Tells the watch that an order is over when it is dropped.
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

/// Which of the nodes that can this one is, to see to a session.
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

/// The nodes whose sessions go, or have gone.
fn gone_nodes(peers: &[Peer]) -> BTreeSet<(String, u64)> {
    peers
        .iter()
        .filter(|peer| peer.standing == PeerStanding::Fenced || is_leaving(peer))
        .map(|peer| (peer.name.clone(), peer.incarnation))
        .collect()
}

/// Between a half and one and a half of it, so that nodes do not all ask etcd at once.
fn jittered(ms: u64) -> Duration {
    let random = getrandom::u64().unwrap_or_default();
    Duration::from_millis(ms / 2 + random % ms.max(1))
}

fn ms_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Each call on it is complete in itself.
fn lock(watch: &Mutex<Watch>) -> MutexGuard<'_, Watch> {
    watch.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a drain asks.
#[derive(Debug)]
struct Relocator {
    /// The node must not keep itself.
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
