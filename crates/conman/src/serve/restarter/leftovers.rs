//! Removes records without a responsible node: those of lost nodes, and those that this node
//! failed to remove.

use std::sync::Arc;
use std::time::Duration;

use conman_core::retention::{AGE_STEP, Lot, Retention};
use conman_node::{Node, end_of};
use conman_registry::{Fleet, FleetSession, Peer, RecordState, RegistryError, SessionRecord};
use jiff::Timestamp;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::ages::Ages;
use super::turns::Turns;

/// Most records that are removed after one scan; the others follow after later scans, in turn,
/// since damaged ones may never be removed.
const MAX_AT_ONCE: usize = 200;

/// Interval between exchanges of nodes' ages with the registry: an age is stored once it has
/// grown by this much.
const COUNT_EVERY: Duration = AGE_STEP;
/// Pause before a failed exchange is tried again.
const COUNT_AGAIN: Duration = Duration::from_mins(1);
/// Bound on an exchange, since no node is checked meanwhile.
const COUNT_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Leftovers {
    node: Arc<Node>,
    retention: Retention,
    ages: Ages,
    next_count: Instant,
    found: Turns<(SessionRecord, Lot), MAX_AT_ONCE>,
    /// The running removal.
    going: Option<JoinHandle<()>>,
}

impl Leftovers {
    pub(super) fn new(node: Arc<Node>, retention: Retention) -> Self {
        Self {
            node,
            retention,
            ages: Ages::default(),
            next_count: Instant::now(),
            found: Turns::default(),
            going: None,
        }
    }

    /// Takes the nodes' current state.
    pub(super) fn see(&mut self, peers: &[Peer]) {
        self.ages.see(peers);
    }

    /// How long the node of a record has been lost. `known`: its entry, unless it is forgotten.
    pub(super) fn gone_for(&mut self, node: &str, known: Option<&Peer>) -> Duration {
        self.ages.gone_for(node, known)
    }

    /// All records were read: exchanges the nodes' ages with the registry if that is due.
    pub(super) async fn count(&mut self, fleet: &dyn Fleet) {
        if Instant::now() < self.next_count {
            return;
        }
        let why = match timeout(COUNT_PATIENCE, fleet.count_gone(self.ages.seen())).await {
            Ok(Ok(ages)) => {
                self.ages.learn(&ages);
                self.next_count = Instant::now() + COUNT_EVERY;
                return;
            }
            Ok(Err(error)) => super::super::chain(&error),
            Err(_) => "the registry took too long".to_owned(),
        };
        self.next_count = Instant::now() + COUNT_AGAIN;
        tracing::debug!(why, "cannot store how long nodes have been lost");
    }

    /// Considers a session that is not restarted automatically. `gone_for`: how long its node has
    /// been lost, if this node is responsible for it.
    pub(super) fn look_at(&mut self, session: &FleetSession, gone_for: Option<Duration>) {
        let record = &session.record;
        let ended_at = match &record.state {
            RecordState::Ended(ending) => Some(ending.ended_at),
            _ => None,
        };
        let lot = match gone_for {
            Some(gone_for) => {
                let (end, now) = (end_of(record), Timestamp::now());
                let retention = &self.retention;
                retention.lot(&record.spec, end, ended_at, gone_for, now)
            }
            None if ended_at.is_some() && self.was_not_forgotten(session) => Lot::Forgotten,
            None => Lot::Stays,
        };
        if lot != Lot::Stays {
            self.found.meet(&record.id, || (record.clone(), lot));
        }
    }

    /// Whether this node should have removed it: an ended session is kept for a limited time.
    fn was_not_forgotten(&self, session: &FleetSession) -> bool {
        session.node == self.node.name() && self.node.sessions().get(&session.record.id).is_none()
    }

    /// Not all records were read. Lost nodes stay so unless they are seen to be back.
    pub(super) fn look_failed(&mut self) {
        self.ages.look_failed();
        self.found.drop_met();
    }

    /// All records were read: removes the ones found, in the background.
    pub(super) fn clear(&mut self) {
        self.ages.all_met();
        let busy = self
            .going
            .as_ref()
            .is_some_and(|going| !going.is_finished());
        if busy {
            self.found.drop_met();
            return;
        }
        let found = self.found.take();
        if found.is_empty() {
            return;
        }
        let (node, kept) = (Arc::clone(&self.node), self.retention.lost);
        // A removal dropped at shutdown is repeated by the next daemon.
        self.going = Some(tokio::spawn(async move {
            for (record, lot) in found {
                go(&node, record, lot, kept).await;
            }
        }));
    }
}

async fn go(node: &Node, record: SessionRecord, lot: Lot, kept: Duration) {
    let (id, generation) = (record.id.clone(), record.generation);
    let failed = match lot {
        Lot::Stays => None,
        Lot::Forgotten => match node.sessions().forget(&id, generation).await {
            // Another node was faster.
            Ok(()) | Err(RegistryError::Superseded { .. }) => None,
            Err(error) => Some(super::super::chain(&error)),
        },
        Lot::Ended => {
            let days = kept.as_secs() / (24 * 3_600);
            let why = format!("its node was lost, and no client used it for {days} days");
            let ended = node.sessions().stop_lost(record, why).await;
            ended.err().map(|error| super::super::chain(&error))
        }
    };
    match failed {
        Some(why) => tracing::debug!(session = %id, why, "cannot remove an old record yet"),
        None => tracing::debug!(session = %id, %generation, "removed an old record"),
    }
}
