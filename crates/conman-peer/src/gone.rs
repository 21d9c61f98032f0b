//! Who is told when a node that it has a stream with is gone: a node that stands still closes none.
//!
//! What is known of a node's incarnation is a moment old. So a stream that was begun after that was
//! read may be with the next daemon of a node that has just restarted: such a stream goes on, for
//! whatever the former daemon had was closed with its process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use conman_core::Closing;
use conman_registry::{Peer, PeerStanding};
use tokio::sync::watch;

use crate::Node;

/// Streams that are begun within this time are judged together.
const TOGETHER: Duration = Duration::from_secs(1);
/// By then a stream that was begun has come about, or nothing comes of it.
const BEGINNING: Duration = Duration::from_secs(3);
/// What the times of looks are rounded by.
const ROUNDED: Duration = Duration::from_millis(1);

/// By the node that somebody has a stream with.
#[derive(Debug, Default)]
pub(crate) struct GoneNodes(Mutex<HashMap<Arc<str>, Vec<Streams>>>);

/// Streams with a node that were begun shortly after each other.
#[derive(Debug)]
struct Streams {
    /// The node's, as far as is known.
    incarnation: u64,
    /// When the first of them was begun.
    begun: Instant,
    /// The node was seen to be of that incarnation when all of them had come about.
    is_certain: bool,
    told: watch::Sender<Option<Closing>>,
}

impl GoneNodes {
    /// For a stream with a node that is begun now.
    pub(crate) fn watch(&self, node: &Node, now: Instant) -> watch::Receiver<Option<Closing>> {
        let mut watched = self.watched();
        let with_it = watched.entry(Arc::clone(&node.name)).or_default();
        let latest = with_it.last().filter(|latest| {
            latest.incarnation == node.incarnation && now < latest.begun + TOGETHER
        });
        if let Some(latest) = latest {
            return latest.told.subscribe();
        }
        let told = watch::Sender::new(None);
        let receiver = told.subscribe();
        with_it.push(Streams {
            incarnation: node.incarnation,
            begun: now,
            is_certain: false,
            told,
        });
        receiver
    }

    /// Goes by the nodes as they are known at `now`.
    pub(crate) fn tell(&self, peers: &[Peer], now: Instant) {
        self.watched().retain(|name, with_it| {
            let peer = peers.iter().find(|peer| peer.name == **name);
            with_it.retain_mut(|streams| {
                let here = streams.goes_on(peer, now);
                if !here {
                    let why = format!("node {name} is gone, connect again");
                    streams
                        .told
                        .send_replace(Some(Closing::service_restart(&why)));
                }
                here && streams.told.receiver_count() > 0
            });
            !with_it.is_empty()
        });
    }

    /// A panic while the lock is held cannot leave half a change.
    fn watched(&self) -> MutexGuard<'_, HashMap<Arc<str>, Vec<Streams>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Streams {
    /// Whether their node is still the one that they are with.
    fn goes_on(&mut self, peer: Option<&Peer>, now: Instant) -> bool {
        // An incarnation that was not known cannot be told from another.
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

    /// A node that is known as it was so long ago.
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

    /// What becomes of a stream that is begun at 0 s with a node of incarnation 1, which is then
    /// looked at, at these times and as it was so long before: whether it goes on.
    fn goes_on(looks: &[(u64, u64, PeerStanding, u64)]) -> bool {
        let (gone, began) = (GoneNodes::default(), Instant::now());
        let told = gone.watch(&believed(1), began);
        for (at_ms, incarnation, standing, ago_ms) in looks {
            let now = began + Duration::from_millis(*at_ms);
            gone.tell(&seen(*incarnation, *standing, *ago_ms), now);
        }
        told.borrow().is_none()
    }

    #[test]
    fn a_stream_begun_before_its_nodes_restart_was_known_goes_on_with_the_next_daemon() {
        use PeerStanding::{Fenced, Live};
        for looks in [
            &[(500, 2, Live, 100)][..],
            &[(500, 1, Live, 600), (1_500, 2, Live, 10)],
            // Known again and again, and each time as it was before.
            &[(5_000, 1, Live, 5_100), (40_000, 2, Live, 10)],
        ] {
            assert!(goes_on(looks), "{looks:?}");
            // It is with that one then.
            let later = [looks, &[(60_000, 2, Live, 10), (61_000, 3, Live, 10)]].concat();
            assert!(!goes_on(&later), "{later:?}");
            let later = [looks, &[(60_000, 2, Fenced, 10)]].concat();
            assert!(!goes_on(&later), "{later:?}");
        }
    }

    #[test]
    fn a_stream_with_a_daemon_that_was_seen_since_ends_once_there_is_another_or_none() {
        use PeerStanding::{Fenced, Live, Silent};
        let known = [(5_000, 1, Live, 900)];
        assert!(goes_on(&known));
        assert!(goes_on(&[&known[..], &[(12_000, 1, Silent, 100)]].concat()));
        for (incarnation, standing) in [(2, Live), (2, Fenced), (1, Fenced)] {
            let looks = [&known[..], &[(12_000, incarnation, standing, 100)]].concat();
            assert!(!goes_on(&looks), "{looks:?}");
        }
        // Whatever it is with is dead.
        for incarnation in [1, 2] {
            assert!(!goes_on(&[(500, incarnation, Fenced, 100)]));
        }
    }

    #[test]
    fn streams_begun_later_are_judged_by_themselves_and_nothing_is_kept_of_those_that_ended() {
        let (gone, began) = (GoneNodes::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let live = |incarnation| seen(incarnation, PeerStanding::Live, 100);
        let former = gone.watch(&believed(1), at(0));
        // However many follow it.
        let followers: Vec<_> = (1..=9).map(|s| gone.watch(&believed(1), at(s))).collect();
        gone.tell(&live(1), at(10));
        let later = [11, 12].map(|second| gone.watch(&believed(1), at(second)));
        gone.tell(&live(2), at(13));
        assert!(former.borrow().is_some(), "its daemon was another");
        let ended = followers.iter().filter(|told| told.borrow().is_some());
        assert_eq!(ended.count(), 5, "those that had come about by the look");
        assert!(later.iter().all(|told| told.borrow().is_none()));
        gone.tell(&[], at(14));
        assert!(later.iter().all(|told| told.borrow().is_some()));
        assert!(gone.watched().is_empty());

        drop(gone.watch(&believed(2), at(15)));
        gone.tell(&live(2), at(16));
        assert!(gone.watched().is_empty());
    }
}
