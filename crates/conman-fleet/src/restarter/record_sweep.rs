//! Removes records without a responsible node: those of lost nodes, and those that this node
//! failed to remove.

use std::sync::Arc;
use std::time::Duration;

use conman_core::error_chain;
use conman_core::retention::{AGE_STEP, Lot, Retention};
use conman_node::{Node, end_of};
use conman_registry::{Fleet, FleetSession, Peer, RecordState, RegistryError, SessionRecord};
use jiff::Timestamp;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::lost_node_times::LostNodeTimes;

/// Most records that are removed after one scan. If more are found, a random subset of them is, so
/// that records that cannot be removed do not hold up the others.
const MAX_AT_ONCE: usize = 200;

/// Interval between exchanges of lost nodes' times with the registry: a time is stored once it has
/// grown by this much.
const EXCHANGE_INTERVAL: Duration = AGE_STEP;
/// Pause before a failed exchange is tried again.
const EXCHANGE_RETRY: Duration = Duration::from_mins(1);
/// Bound on an exchange, since no node is checked meanwhile.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct RecordSweep {
    node: Arc<Node>,
    retention: Retention,
    times: LostNodeTimes,
    next_exchange: Instant,
    /// Records to remove after the current scan.
    selected: Vec<(SessionRecord, Lot)>,
    /// The number of records that `selected` was selected from.
    found: usize,
    /// The running removal.
    running: Option<JoinHandle<()>>,
}

impl RecordSweep {
    pub(super) fn new(node: Arc<Node>, retention: Retention) -> Self {
        Self {
            node,
            retention,
            times: LostNodeTimes::default(),
            next_exchange: Instant::now(),
            selected: Vec::new(),
            found: 0,
            running: None,
        }
    }

    /// Takes the nodes' current state.
    pub(super) fn update(&mut self, peers: &[Peer]) {
        self.times.update(peers);
    }

    /// How long the node of a record has been lost. `known`: its entry, unless it is forgotten.
    pub(super) fn lost_for(&mut self, node: &str, known: Option<&Peer>) -> Duration {
        self.times.lost_for(node, known)
    }

    /// All records were read: exchanges the lost nodes' times with the registry if that is due.
    pub(super) async fn exchange_times(&mut self, fleet: &dyn Fleet) {
        if Instant::now() < self.next_exchange {
            return;
        }
        let why = match timeout(EXCHANGE_TIMEOUT, fleet.count_gone(self.times.observed())).await {
            Ok(Ok(times)) => {
                self.times.merge(&times);
                self.next_exchange = Instant::now() + EXCHANGE_INTERVAL;
                return;
            }
            Ok(Err(error)) => error_chain(&error),
            Err(_) => "the registry took too long".to_owned(),
        };
        self.next_exchange = Instant::now() + EXCHANGE_RETRY;
        tracing::debug!(why, "cannot store how long nodes have been lost");
    }

    /// Considers a session that is not restarted automatically. `lost_for`: how long its node has
    /// been lost, if this node is responsible for it.
    pub(super) fn consider(&mut self, session: &FleetSession, lost_for: Option<Duration>) {
        let record = &session.record;
        let ended_at = match &record.state {
            RecordState::Ended(ending) => Some(ending.ended_at),
            _ => None,
        };
        let lot = match lost_for {
            Some(lost_for) => {
                let (end, now) = (end_of(record), Timestamp::now());
                let retention = &self.retention;
                retention.lot(&record.spec, end, ended_at, lost_for, now)
            }
            None if ended_at.is_some() && self.was_not_removed(session) => Lot::Forgotten,
            None => Lot::Stays,
        };
        if lot != Lot::Stays {
            self.select(record, lot);
        }
    }

    /// Selects at most [`MAX_AT_ONCE`] records at random, each with the same probability.
    fn select(&mut self, record: &SessionRecord, lot: Lot) {
        self.found += 1;
        if self.selected.len() < MAX_AT_ONCE {
            self.selected.push((record.clone(), lot));
            return;
        }
        let random = getrandom::u64().unwrap_or_default() % self.found as u64;
        let place = usize::try_from(random).unwrap_or(MAX_AT_ONCE);
        if let Some(selected) = self.selected.get_mut(place) {
            *selected = (record.clone(), lot);
        }
    }

    /// Whether this node should have removed it: an ended session is kept for a limited time.
    fn was_not_removed(&self, session: &FleetSession) -> bool {
        session.node == self.node.name() && self.node.sessions().get(&session.record.id).is_none()
    }

    /// Not all records were read. Lost nodes stay so until they are observed to be back.
    pub(super) fn scan_failed(&mut self) {
        self.times.scan_failed();
        self.take_selected();
    }

    /// All records were read: removes the ones found, in the background.
    pub(super) fn start(&mut self) {
        self.times.scan_complete();
        let selected = self.take_selected();
        let running = self.running.as_ref();
        let busy = running.is_some_and(|running| !running.is_finished());
        if busy || selected.is_empty() {
            return;
        }
        let (node, kept) = (Arc::clone(&self.node), self.retention.lost);
        // A removal dropped at shutdown is repeated by the next daemon.
        self.running = Some(tokio::spawn(async move {
            for (record, lot) in selected {
                remove(&node, record, lot, kept).await;
            }
        }));
    }

    fn take_selected(&mut self) -> Vec<(SessionRecord, Lot)> {
        self.found = 0;
        std::mem::take(&mut self.selected)
    }
}

async fn remove(node: &Node, record: SessionRecord, lot: Lot, kept: Duration) {
    let (id, generation) = (record.id.clone(), record.generation);
    let failed = match lot {
        Lot::Stays => None,
        Lot::Forgotten => match node.sessions().forget(&id, generation).await {
            // Another node was faster.
            Ok(()) | Err(RegistryError::Superseded { .. }) => None,
            Err(error) => Some(error_chain(&error)),
        },
        Lot::Ended => {
            let days = kept.as_secs() / (24 * 3_600);
            let why = format!("its node was lost, and no client used it for {days} days");
            let ended = node.sessions().stop_lost(record, why).await;
            ended.err().map(|error| error_chain(&error))
        }
    };
    match failed {
        Some(why) => tracing::debug!(session = %id, why, "cannot remove an old record yet"),
        None => tracing::debug!(session = %id, %generation, "removed an old record"),
    }
}
