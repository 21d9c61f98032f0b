//! Notifies streams when their node is lost: a stalled node closes no connection.
//!
//! The known incarnation of a node may be out of date, so a stream may be with the next daemon of a node
//! that has just restarted. Such a stream continues: an incarnation that becomes known shortly after
//! it was opened counts as its own. The connections of the former daemon were closed with its
//! process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use conman_core::Closing;
use conman_registry::{Peer, PeerStanding};
use tokio::sync::watch;

use crate::Node;

/// Streams that are opened within this time are handled together.
const TOGETHER: Duration = Duration::from_secs(1);
/// After this time a stream has been set up or has failed, and the nodes' incarnations at that moment
/// are known.
const SETTLED: Duration = Duration::from_secs(5);

/// Returns once a stream's node is lost. The end of this daemon is no such loss: it closes its streams with 1012.
pub(crate) async fn becomes_lost(lost: &mut watch::Receiver<Option<Closing>>) {
    if lost.wait_for(Option::is_some).await.is_err() {
        std::future::pending().await
    }
}

/// Streams by node.
#[derive(Debug, Default)]
pub(crate) struct StreamsByNode(Mutex<HashMap<Arc<str>, Vec<Streams>>>);

/// Streams with a node that were opened shortly after each other.
#[derive(Debug)]
struct Streams {
    /// The node's incarnation, as far as known.
    incarnation: u64,
    /// When the first of them was opened.
    begun: Instant,
    closing: watch::Sender<Option<Closing>>,
}

impl StreamsByNode {
    /// Registers a stream with a node that is opened now.
    pub(crate) fn watch(&self, node: &Node, now: Instant) -> watch::Receiver<Option<Closing>> {
        let mut watched = self.watched();
        let streams_of_node = watched.entry(Arc::clone(&node.name)).or_default();
        let latest = streams_of_node.last().filter(|latest| {
            latest.incarnation == node.incarnation && now < latest.begun + TOGETHER
        });
        if let Some(latest) = latest {
            return latest.closing.subscribe();
        }
        let closing = watch::Sender::new(None);
        let receiver = closing.subscribe();
        streams_of_node.push(Streams {
            incarnation: node.incarnation,
            begun: now,
            closing,
        });
        receiver
    }

    /// Notifies the streams whose node is lost, by the nodes as known at `now`.
    pub(crate) fn close_lost(&self, peers: &[Peer], now: Instant) {
        self.watched().retain(|name, streams_of_node| {
            let peer = peers.iter().find(|peer| peer.name == **name);
            streams_of_node.retain_mut(|streams| {
                let here = streams.continues(peer, now);
                if !here {
                    let why = format!("node {name} is lost, connect again");
                    streams
                        .closing
                        .send_replace(Some(Closing::service_restart(&why)));
                }
                here && streams.closing.receiver_count() > 0
            });
            !streams_of_node.is_empty()
        });
    }

    /// A panic while the lock is held cannot leave a partial change.
    fn watched(&self) -> MutexGuard<'_, HashMap<Arc<str>, Vec<Streams>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Streams {
    /// Whether their node still has the daemon that they are connected to.
    fn continues(&mut self, peer: Option<&Peer>, now: Instant) -> bool {
        // An unknown incarnation cannot be compared.
        if self.incarnation == 0 {
            return true;
        }
        let Some(peer) = peer.filter(|peer| peer.standing != PeerStanding::Fenced) else {
            return false;
        };
        if now < self.begun + SETTLED {
            self.incarnation = self.incarnation.max(peer.incarnation);
        }
        peer.incarnation == self.incarnation
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoAddress;

    fn known(incarnation: u64, standing: PeerStanding) -> Vec<Peer> {
        vec![Peer {
            name: "n1".to_owned(),
            incarnation,
            standing,
            fenced_at: None,
            is_late: false,
            heartbeat_ago_ms: 0,
            announcement: None,
            announced_ago_ms: 0,
        }]
    }

    fn node(incarnation: u64) -> Node {
        Node {
            name: Arc::from("n1"),
            incarnation,
            address: Err(NoAddress::NotYet {
                node: "n1".to_owned(),
            }),
        }
    }

    /// Opens a stream at 0 s with a node of incarnation 1, which is then known as this at these
    /// seconds. Returns whether the stream continues.
    fn continues(looks: &[(u64, u64, PeerStanding)]) -> bool {
        let (streams, began) = (StreamsByNode::default(), Instant::now());
        let closing = streams.watch(&node(1), began);
        for (second, incarnation, standing) in looks {
            let now = began + Duration::from_secs(*second);
            streams.close_lost(&known(*incarnation, *standing), now);
        }
        closing.borrow().is_none()
    }

    #[test]
    fn a_stream_continues_when_its_nodes_earlier_restart_becomes_known() {
        use PeerStanding::{Fenced, Live};
        let restarted = [(1, 1, Live), (2, 2, Live)];
        assert!(continues(&restarted));
        for later in [(60, 3, Live), (60, 2, Fenced)] {
            assert!(!continues(&[&restarted[..], &[later]].concat()));
        }
    }

    #[test]
    fn a_stream_ends_once_its_node_is_lost_or_has_another_daemon() {
        use PeerStanding::{Fenced, Live, Silent};
        let there = [(6, 1, Live), (12, 1, Silent)];
        assert!(continues(&there));
        for later in [(13, 2, Live), (13, 2, Fenced), (13, 1, Fenced)] {
            assert!(!continues(&[&there[..], &[later]].concat()), "{later:?}");
        }
        for incarnation in [1, 2] {
            assert!(!continues(&[(1, incarnation, Fenced)]));
        }
    }

    #[test]
    fn streams_opened_later_are_judged_separately_and_ended_ones_are_dropped() {
        let (streams, began) = (StreamsByNode::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let live = |incarnation| known(incarnation, PeerStanding::Live);
        let former = streams.watch(&node(1), at(0));
        let later = streams.watch(&node(1), at(9));
        streams.close_lost(&live(2), at(10));
        assert!(former.borrow().is_some(), "its daemon was another");
        assert!(later.borrow().is_none());
        streams.close_lost(&[], at(14));
        assert!(later.borrow().is_some());
        assert!(streams.watched().is_empty());

        drop(streams.watch(&node(2), at(15)));
        streams.close_lost(&live(2), at(16));
        assert!(streams.watched().is_empty());
    }
}
