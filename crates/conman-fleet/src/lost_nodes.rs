//! Notifies streams when their node is lost: a stalled node closes no connection.
//!
//! The known incarnation of a node may be out of date. So a stream that is opened after it was read
//! may be with the next daemon of a node that has just restarted. Such a stream continues; the
//! connections of the former daemon were closed with its process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use conman_core::Closing;
use conman_registry::{Peer, PeerStanding};
use tokio::sync::watch;

use crate::Node;

/// Streams that are opened within this time are handled together.
const TOGETHER: Duration = Duration::from_secs(1);
/// After this time a stream has been set up or has failed.
const BEGINNING: Duration = Duration::from_secs(3);
/// Rounding error of the read times.
const ROUNDED: Duration = Duration::from_millis(1);

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
    /// The node was seen with that incarnation after all of them had been set up.
    is_certain: bool,
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
            is_certain: false,
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
        if peer.incarnation > self.incarnation && !self.is_certain {
            self.incarnation = peer.incarnation;
        }
        if peer.incarnation == self.incarnation {
            let ago = Duration::from_millis(peer.seen_ago_ms) + ROUNDED;
            let seen = now.checked_sub(ago);
            self.is_certain |= seen.is_some_and(|seen| seen > self.begun + TOGETHER + BEGINNING);
        }
        peer.incarnation == self.incarnation
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoAddress;

    /// A node as it was known so long ago.
    fn seen(incarnation: u64, standing: PeerStanding, seen_ago_ms: u64) -> Vec<Peer> {
        vec![Peer {
            name: "n1".to_owned(),
            incarnation,
            standing,
            is_late: false,
            announcement: None,
            announced_ago_ms: 0,
            seen_ago_ms,
        }]
    }

    fn believed(incarnation: u64) -> Node {
        Node {
            name: Arc::from("n1"),
            incarnation,
            address: Err(NoAddress::NotYet {
                node: "n1".to_owned(),
            }),
        }
    }

    /// Opens a stream at 0 s with a node of incarnation 1, which is then read at these times with
    /// data of this age. Returns whether the stream continues.
    fn continues(looks: &[(u64, u64, PeerStanding, u64)]) -> bool {
        let (streams, began) = (StreamsByNode::default(), Instant::now());
        let closing = streams.watch(&believed(1), began);
        for (at_ms, incarnation, standing, ago_ms) in looks {
            let now = began + Duration::from_millis(*at_ms);
            streams.close_lost(&seen(*incarnation, *standing, *ago_ms), now);
        }
        closing.borrow().is_none()
    }

    #[test]
    fn a_stream_begun_before_its_nodes_restart_was_known_continues_with_the_next_daemon() {
        use PeerStanding::{Fenced, Live};
        for looks in [
            &[(500, 2, Live, 100)][..],
            &[(500, 1, Live, 600), (1_500, 2, Live, 10)],
            // Read repeatedly, each time with old data.
            &[(5_000, 1, Live, 5_100), (40_000, 2, Live, 10)],
        ] {
            assert!(continues(looks), "{looks:?}");
            // It is then with that daemon.
            let later = [looks, &[(60_000, 2, Live, 10), (61_000, 3, Live, 10)]].concat();
            assert!(!continues(&later), "{later:?}");
            let later = [looks, &[(60_000, 2, Fenced, 10)]].concat();
            assert!(!continues(&later), "{later:?}");
        }
    }

    #[test]
    fn a_stream_with_a_daemon_that_was_seen_since_ends_once_there_is_another_or_none() {
        use PeerStanding::{Fenced, Live, Silent};
        let known = [(5_000, 1, Live, 900)];
        assert!(continues(&known));
        assert!(continues(
            &[&known[..], &[(12_000, 1, Silent, 100)]].concat()
        ));
        for (incarnation, standing) in [(2, Live), (2, Fenced), (1, Fenced)] {
            let looks = [&known[..], &[(12_000, incarnation, standing, 100)]].concat();
            assert!(!continues(&looks), "{looks:?}");
        }
        // Whatever daemon it is with, it is dead.
        for incarnation in [1, 2] {
            assert!(!continues(&[(500, incarnation, Fenced, 100)]));
        }
    }

    #[test]
    fn streams_begun_later_are_judged_by_themselves_and_nothing_is_kept_of_those_that_ended() {
        let (streams, began) = (StreamsByNode::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let live = |incarnation| seen(incarnation, PeerStanding::Live, 100);
        let former = streams.watch(&believed(1), at(0));
        // However many follow it.
        let followers: Vec<_> = (1..=9)
            .map(|s| streams.watch(&believed(1), at(s)))
            .collect();
        streams.close_lost(&live(1), at(10));
        let later = [11, 12].map(|second| streams.watch(&believed(1), at(second)));
        streams.close_lost(&live(2), at(13));
        assert!(former.borrow().is_some(), "its daemon was another");
        let ended = followers
            .iter()
            .filter(|closing| closing.borrow().is_some());
        assert_eq!(ended.count(), 5, "those that had come about by the look");
        assert!(later.iter().all(|closing| closing.borrow().is_none()));
        streams.close_lost(&[], at(14));
        assert!(later.iter().all(|closing| closing.borrow().is_some()));
        assert!(streams.watched().is_empty());

        drop(streams.watch(&believed(2), at(15)));
        streams.close_lost(&live(2), at(16));
        assert!(streams.watched().is_empty());
    }
}
