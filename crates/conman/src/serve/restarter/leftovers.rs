//! Has records go that nobody looks after: of nodes that are gone, and what this one failed to
//! forget.

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

/// Records that go after one look at all of them; the others go after the next ones, all in turn:
/// some may be damaged, so that they never go.
const MAX_AT_ONCE: usize = 200;

/// For how long nodes have been gone is told and asked this often: what a daemon sees must have grown
/// by so much to be kept.
const COUNT_EVERY: Duration = AGE_STEP;
/// Before what failed of that is tried again.
const COUNT_AGAIN: Duration = Duration::from_mins(1);
/// How long the registry is waited for then: nobody looks meanwhile whether nodes go.
const COUNT_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Leftovers {
    node: Arc<Node>,
    retention: Retention,
    ages: Ages,
    next_count: Instant,
    found: Turns<(SessionRecord, Lot), MAX_AT_ONCE>,
    /// What goes just now.
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

    /// What the nodes are like now.
    pub(super) fn see(&mut self, peers: &[Peer]) {
        self.ages.see(peers);
    }

    /// For how long a node has been seen to be gone that a record is of; `known` where it is not
    /// forgotten.
    pub(super) fn gone_for(&mut self, node: &str, known: Option<&Peer>) -> Duration {
        self.ages.gone_for(node, known)
    }

    /// All records were looked at: has it kept for how long nodes have been gone, and asks what others
    /// saw, now and then.
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
        tracing::debug!(why, "for how long nodes have been gone is not kept yet");
    }

    /// Of a session that nobody restarts by itself; `gone_for` where its node is gone and it is this
    /// node's to see to.
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

    /// Whether this node should have forgotten it: what has ended is shown for as long as it is kept.
    fn was_not_forgotten(&self, session: &FleetSession) -> bool {
        session.node == self.node.name() && self.node.get(&session.record.id).is_none()
    }

    /// Not all records could be looked at. Which nodes were gone then still are, unless they are seen
    /// to be back.
    pub(super) fn look_failed(&mut self) {
        self.ages.look_failed();
        self.found.drop_met();
    }

    /// All records were looked at: those that were found go, in the background.
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
        // One that ends with the daemon is begun again by the next one.
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
        Lot::Forgotten => match node.forget(&id, generation).await {
            // Somebody was quicker.
            Ok(()) | Err(RegistryError::Superseded { .. }) => None,
            Err(error) => Some(super::super::chain(&error)),
        },
        Lot::Ended => {
            let days = kept.as_secs() / (24 * 3_600);
            let why = format!("its node was lost, and nobody asked for it for {days} days");
            let ended = node.stop_lost(record, why).await;
            ended.err().map(|error| super::super::chain(&error))
        }
    };
    match failed {
        Some(why) => tracing::debug!(session = %id, why, "an old record did not go yet"),
        None => tracing::debug!(session = %id, %generation, "an old record has gone"),
    }
}
