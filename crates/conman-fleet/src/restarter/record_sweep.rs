//! Removes what no node is responsible for: lost nodes that own nothing, the records of their
//! sessions, and records that this node failed to remove.

use std::collections::HashSet;
use std::sync::Arc;

use conman_core::error_chain;
use conman_core::retention::{Removal, Retention};
use conman_node::{Node, end_of};
use conman_registry::{Fleet, FleetSession, Peer, RecordState, RegistryError, SessionRecord};
use jiff::Timestamp;
use tokio::task::JoinHandle;

/// Most records that are removed after one scan. If more are found, a random subset of them is, so
/// that records that cannot be removed do not hold up the others.
const MAX_AT_ONCE: usize = 200;

#[derive(Debug)]
pub(super) struct RecordSweep {
    node: Arc<Node>,
    fleet: Arc<dyn Fleet>,
    retention: Retention,
    /// Records to remove after the current scan.
    selected: Vec<(SessionRecord, Removal)>,
    /// The number of records that `selected` was selected from.
    found: usize,
    /// Lost nodes that own a session.
    owners: HashSet<String>,
    /// The running removal.
    running: Option<JoinHandle<()>>,
}

impl RecordSweep {
    pub(super) fn new(node: Arc<Node>, fleet: Arc<dyn Fleet>, retention: Retention) -> Self {
        Self {
            node,
            fleet,
            retention,
            selected: Vec::new(),
            found: 0,
            owners: HashSet::new(),
            running: None,
        }
    }

    /// A lost node owns a session, so it is not forgotten.
    pub(super) fn owns_one(&mut self, node: &str) {
        if !self.owners.contains(node) {
            self.owners.insert(node.to_owned());
        }
    }

    /// Considers a session of a lost node that is not restarted automatically. `known`: the node,
    /// unless it is forgotten.
    pub(super) fn consider_lost(&mut self, session: &FleetSession, known: Option<&Peer>) {
        let record = &session.record;
        let fenced_at = known.and_then(|peer| peer.fenced_at);
        let (end, now) = (end_of(record), Timestamp::now());
        let retention = &self.retention;
        if let Some(removal) =
            retention.removal(&record.spec, end, ended_at(record), fenced_at, now)
        {
            self.select(record, removal);
        }
    }

    /// Considers a session of a live node: an ended one that this node should have removed, since
    /// it keeps ended sessions for a limited time.
    pub(super) fn consider_live(&mut self, session: &FleetSession) {
        let record = &session.record;
        if ended_at(record).is_some()
            && session.node == self.node.name()
            && self.node.sessions().get(&record.id).is_none()
        {
            self.select(record, Removal::Forget);
        }
    }

    /// Selects at most [`MAX_AT_ONCE`] records at random, each with the same probability.
    fn select(&mut self, record: &SessionRecord, removal: Removal) {
        self.found += 1;
        if self.selected.len() < MAX_AT_ONCE {
            self.selected.push((record.clone(), removal));
            return;
        }
        let random = getrandom::u64().unwrap_or_default() % self.found as u64;
        let place = usize::try_from(random).unwrap_or(MAX_AT_ONCE);
        if let Some(selected) = self.selected.get_mut(place) {
            *selected = (record.clone(), removal);
        }
    }

    /// A scan begins.
    pub(super) fn begin(&mut self) {
        self.found = 0;
        self.selected.clear();
        self.owners.clear();
    }

    /// All records were read: removes what was found, in the background. `nodes` are the lost nodes
    /// that this node is responsible for.
    pub(super) fn finish<'a>(&mut self, nodes: impl Iterator<Item = &'a Peer>) {
        let now = Timestamp::now();
        let long_lost = nodes.filter(|peer| {
            let lost_for_long = |at| self.retention.forgets_node(at, now);
            peer.fenced_at.is_some_and(lost_for_long) && !self.owners.contains(&peer.name)
        });
        let nodes: Vec<String> = long_lost.map(|peer| peer.name.clone()).collect();
        let running = self.running.as_ref();
        let busy = running.is_some_and(|running| !running.is_finished());
        if busy || (nodes.is_empty() && self.selected.is_empty()) {
            return;
        }
        let selected = std::mem::take(&mut self.selected);
        let (node, fleet) = (Arc::clone(&self.node), Arc::clone(&self.fleet));
        let kept = self.retention.lost;
        // A removal dropped at shutdown is repeated by the next daemon.
        self.running = Some(tokio::spawn(async move {
            for name in nodes {
                match fleet.forget_node(&name).await {
                    Ok(()) => tracing::info!(node = name, "forgot a lost node"),
                    Err(error) => {
                        tracing::debug!(node = name, %error, "cannot forget a lost node yet");
                    }
                }
            }
            for (record, removal) in selected {
                remove(&node, record, removal, kept.as_secs() / (24 * 3_600)).await;
            }
        }));
    }
}

fn ended_at(record: &SessionRecord) -> Option<Timestamp> {
    match &record.state {
        RecordState::Ended(ending) => Some(ending.ended_at),
        _ => None,
    }
}

async fn remove(node: &Node, record: SessionRecord, removal: Removal, days: u64) {
    let (id, generation) = (record.id.clone(), record.generation);
    let failed = match removal {
        Removal::Forget => match node.sessions().forget(&id, generation).await {
            // Another node was faster.
            Ok(()) | Err(RegistryError::Superseded { .. }) => None,
            Err(error) => Some(error_chain(&error)),
        },
        Removal::End => {
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
