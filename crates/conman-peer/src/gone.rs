//! Who is told when a node that it has a stream with is gone: a node that stands still closes none.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_core::Closing;
use conman_registry::{Peer, PeerStanding};
use tokio::sync::watch;

use crate::Node;

type Incarnation = (Arc<str>, u64);

/// By the incarnation of each node that somebody has a stream with.
#[derive(Debug, Default)]
pub(crate) struct GoneNodes(Mutex<HashMap<Incarnation, watch::Sender<Option<Closing>>>>);

impl GoneNodes {
    pub(crate) fn watch(&self, node: &Node) -> watch::Receiver<Option<Closing>> {
        self.watched()
            .entry((Arc::clone(&node.name), node.incarnation))
            .or_insert_with(|| watch::Sender::new(None))
            .subscribe()
    }

    pub(crate) fn tell(&self, peers: &[Peer]) {
        self.watched().retain(|(name, incarnation), told| {
            // An incarnation that was not known cannot be told from another.
            let here = *incarnation == 0
                || peers.iter().any(|peer| {
                    peer.name == **name
                        && peer.incarnation == *incarnation
                        && peer.standing != PeerStanding::Fenced
                });
            if !here {
                let why = format!("node {name} is gone, connect again");
                told.send_replace(Some(Closing::service_restart(&why)));
            }
            here && told.receiver_count() > 0
        });
    }

    /// A panic while the lock is held cannot leave half a change.
    fn watched(&self) -> MutexGuard<'_, HashMap<Incarnation, watch::Sender<Option<Closing>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
