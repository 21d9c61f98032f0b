//! What this node knows about the others, and what it publishes to them: hints, except for the
//! choice of nodes that it watches.
//!
//! Everything is read again each renewal interval, whatever the watches deliver; they only cause an
//! earlier read. So nothing depends on a watch that lags, breaks or is compacted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::RateLimitedLog;
use conman_core::ownership::{BootTime, Heartbeat, NodeName, NodeRecord, NodeState, Timing};
use conman_watchdog::TaskProgress;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::codec::{self, Keys, PeerText};
use super::figures;
use super::rendezvous;
use super::shared::{Shared, boot_time};
use conman_registry::{Announcement, HeldParts, NodeLoad, Peer, PeerStanding};

pub(super) mod hints;
mod look;
mod tell;

use look::{Found, OneRead, Read, look};
use tell::tell;

/// Minimum interval between announcements, and between reads of the other nodes.
const HURRY_PAUSE: Duration = Duration::from_millis(100);

/// Far above the timeout of a call to etcd, with all endpoints.
const CALL_BOUND: Duration = Duration::from_secs(30);

/// Interval between repeated warnings.
const REPEAT_AFTER: Duration = Duration::from_mins(10);

#[derive(Debug, Clone)]
struct KnownNode {
    record: NodeRecord,
    /// A part of it cannot be read, and including it in a read with other nodes would hide them: it
    /// is not observed.
    odd: bool,
    heartbeat: Option<Heartbeat>,
    heartbeat_at: BootTime,
    fenced_at: Option<Timestamp>,
    /// How long it is not heard from before it is declared dead; 0 where it does not say.
    patience_ms: u64,
    text: Option<PeerText>,
    text_revision: i64,
    text_at: BootTime,
}

#[derive(Debug, Default)]
pub(super) struct Membership {
    known: Mutex<HashMap<String, KnownNode>>,
    /// This node's announcement, once it has one.
    announcement: Mutex<Option<Announcement>>,
    /// Sent when a node's record has appeared, changed or gone.
    changes: watch::Sender<()>,
    parts: watch::Sender<Arc<HeldParts>>,
}

impl Membership {
    /// The known nodes, and `me` as it is: this node's incarnation and announcement are shown at
    /// once, without a round trip to etcd.
    pub(super) fn peers(&self, me: (&str, u64), timing: &Timing) -> Arc<[Peer]> {
        let now = boot_time();
        let fence_ms = timing.fence_ms;
        let mut peers: Vec<Peer> = self
            .known()
            .iter()
            .map(|(name, known)| Peer {
                name: name.clone(),
                incarnation: known.record.incarnation,
                standing: standing(known, now, fence_ms),
                fenced_at: known.fenced_at,
                is_late: is_late(known, now, timing),
                heartbeat_ago_ms: now.since(known.heartbeat_at),
                announcement: known.text.as_ref().map(|text| text.announcement.clone()),
                announced_ago_ms: now.since(known.text_at),
            })
            .collect();
        let (me, incarnation) = me;
        let announced = self.own_announcement();
        if incarnation != 0 || announced.is_some() {
            let index = peers.iter().position(|peer| peer.name == me);
            let mut own = match index {
                Some(index) => peers.swap_remove(index),
                None => Peer {
                    name: me.to_owned(),
                    incarnation,
                    standing: PeerStanding::Live,
                    fenced_at: None,
                    is_late: false,
                    heartbeat_ago_ms: 0,
                    announcement: None,
                    announced_ago_ms: 0,
                },
            };
            // Anything else stored is from an earlier life.
            own.announcement = announced;
            own.is_late = false;
            own.heartbeat_ago_ms = 0;
            own.announced_ago_ms = 0;
            peers.push(own);
        }
        peers.sort_by(|a, b| a.name.cmp(&b.name));
        peers.into()
    }

    /// Returns whether the other nodes should receive it at once. The node's load changes all the
    /// time, and is published and read once in each renewal interval.
    pub(super) fn announce(&self, announcement: Announcement) -> bool {
        let mut now = self
            .announcement
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let changed = now.as_ref().is_none_or(|now| is_news(now, &announcement));
        *now = Some(announcement);
        changed
    }

    fn own_announcement(&self) -> Option<Announcement> {
        let now = self.announcement.lock();
        now.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether a change below `peer/` is worth a read before the next one is due.
    pub(super) fn is_news(&self, parent: &[u8], key: &[u8], value: &[u8]) -> bool {
        let Some(name) = Keys::name_in(parent, key) else {
            return false;
        };
        let Ok(text) = codec::parse::<PeerText>(key, value) else {
            return true;
        };
        let known = self.known();
        let before = known.get(&name).and_then(|known| known.text.as_ref());
        before.is_none_or(|before| is_news(&before.announcement, &text.announcement))
    }

    /// Notifies after a node has joined, was declared dead or was forgotten.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// The parts of the fabric's pool that nodes hold.
    pub(super) fn held_parts(&self) -> watch::Receiver<Arc<HeldParts>> {
        self.parts.subscribe()
    }

    fn take_parts(&self, parts: HeldParts) {
        self.parts.send_if_modified(|known| {
            let changed = **known != parts;
            *known = Arc::new(parts);
            changed
        });
    }

    /// Whether an announcement of a node is stored.
    fn is_announced(&self, name: &str) -> bool {
        self.known().get(name).is_some_and(|one| one.text.is_some())
    }

    /// A panic while the lock is held cannot leave a partial change.
    fn known(&self) -> MutexGuard<'_, HashMap<String, KnownNode>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies the result of a read that has ended.
    fn take(&self, now: BootTime, read: Read) {
        let mut known = self.known();
        let same = |(name, read): (&String, &OneRead)| {
            known.get(name).is_some_and(|one| one.record == read.record)
        };
        let changed = known.len() != read.len() || !read.iter().all(same);
        known.retain(|name, _| read.contains_key(name));
        for (name, read) in read {
            let OneRead {
                record,
                fenced_at,
                heartbeat,
                is_announced,
                text,
                odd,
                patience_ms,
            } = read;
            let one = known.entry(name).or_insert_with(|| KnownNode {
                record,
                odd,
                heartbeat,
                heartbeat_at: now,
                fenced_at,
                patience_ms,
                text: None,
                text_revision: 0,
                text_at: BootTime(0),
            });
            if one.heartbeat != heartbeat {
                one.heartbeat = heartbeat;
                one.heartbeat_at = now;
            }
            one.record = record;
            one.fenced_at = fenced_at;
            one.odd = odd;
            one.patience_ms = patience_ms;
            match text {
                Some((_, revision)) if revision == one.text_revision => {}
                Some((text, revision)) => {
                    one.text = Some(text);
                    one.text_revision = revision;
                    one.text_at = now;
                }
                None if is_announced => {}
                None => (one.text, one.text_revision) = (None, 0),
            }
        }
        drop(known);
        if changed {
            self.changes.send_replace(());
        }
    }

    /// The longest takeover delay of all nodes that are not declared dead.
    pub(super) fn longest_patience_ms(&self) -> u64 {
        let known = self.known();
        let live = known
            .values()
            .filter(|one| one.record.state == NodeState::Live);
        live.map(|one| one.patience_ms).max().unwrap_or(0)
    }

    /// Whether this node has the least name of those that are heard from.
    pub(super) fn is_first(&self, me: &str, fence_ms: u64) -> bool {
        let now = boot_time();
        let known = self.known();
        let mut awake = known
            .iter()
            .filter(|(_, one)| standing(one, now, fence_ms) == PeerStanding::Live);
        known.contains_key(me) && awake.all(|(name, _)| me <= name.as_str())
    }

    /// The nodes that this one has to watch.
    fn observed(&self, me: &str, now: BootTime, fence_ms: u64) -> Vec<NodeName> {
        let known = self.known();
        let awake: Vec<&str> = known
            .iter()
            .filter(|(_, one)| standing(one, now, fence_ms) == PeerStanding::Live)
            .map(|(name, _)| name.as_str())
            .collect();
        let live = known
            .iter()
            .filter(|(_, one)| one.record.state == NodeState::Live && !one.odd);
        let mut observed: Vec<NodeName> = live
            .map(|(name, _)| name.as_str())
            .filter(|name| rendezvous::observes(me, name, &awake))
            .map(NodeName::from)
            .collect();
        observed.sort();
        observed
    }
}

/// Whether they differ in more than the node's load.
fn is_news(before: &Announcement, after: &Announcement) -> bool {
    let settled = |one: &Announcement| Announcement {
        load: NodeLoad::default(),
        view: None,
        ..one.clone()
    };
    settled(before) != settled(after)
}

fn standing(known: &KnownNode, now: BootTime, fence_ms: u64) -> PeerStanding {
    match known.record.state {
        NodeState::Fenced => PeerStanding::Fenced,
        NodeState::Live if now.since(known.heartbeat_at) > fence_ms => PeerStanding::Silent,
        NodeState::Live => PeerStanding::Live,
    }
}

/// Like a node that considers itself late: half of its fence timeout has passed. Nodes are read
/// once in each renewal interval.
fn is_late(known: &KnownNode, now: BootTime, timing: &Timing) -> bool {
    let age_ms = now.since(known.heartbeat_at);
    standing(known, now, timing.fence_ms) == PeerStanding::Live
        && age_ms > timing.fence_ms / 2 + timing.renew_ms
}

/// Reads the other nodes and publishes this one, until the runtime ends.
pub(super) async fn run(
    shared: Arc<Shared>,
    membership: Arc<Membership>,
    observed: watch::Sender<Vec<NodeName>>,
    progress: TaskProgress,
) {
    let interval = Duration::from_millis(shared.timing.renew_ms);
    let warnings = RateLimitedLog::new(REPEAT_AFTER);
    let mut announced: Option<(BootTime, PeerText)> = None;
    figures::describe();
    loop {
        progress.beat().await;
        match progress.wait(CALL_BOUND, look(&shared)).await {
            Ok(Found {
                nodes,
                parts,
                oddities,
            }) => {
                let now = boot_time();
                for (key, what) in &oddities {
                    if warnings.allow(key, Duration::from_millis(now.0)).is_some() {
                        tracing::warn!("{what}");
                    }
                }
                membership.take(now, nodes);
                membership.take_parts(parts);
                let fence_ms = shared.timing.fence_ms;
                let mine = membership.observed(&shared.me, now, fence_ms);
                observed.send_if_modified(|watched| {
                    let changed = *watched != mine;
                    *watched = mine;
                    changed
                });
            }
            Err(error) => {
                if warnings
                    .allow("", Duration::from_millis(boot_time().0))
                    .is_some()
                {
                    tracing::warn!(%error, "cannot read the other nodes");
                }
            }
        }
        let telling = tell(&shared, &membership, &mut announced);
        progress.wait(CALL_BOUND, telling).await;
        let pause = async {
            sleep(HURRY_PAUSE).await;
            // A notification without a waiter is stored.
            let _ = timeout(interval, shared.hurry.notified()).await;
        };
        progress.wait(HURRY_PAUSE + interval, pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announcement(label: &str) -> Announcement {
        Announcement {
            templates: vec![label.to_owned()],
            ..Announcement::default()
        }
    }

    #[test]
    fn a_node_is_late_before_it_is_silent() {
        let membership = Membership::default();
        let record = NodeRecord {
            incarnation: 1,
            state: NodeState::Live,
        };
        let read = [("a".to_owned(), OneRead::of(record))].into();
        membership.take(BootTime(0), read);
        let timing = Timing::default();
        let known = membership.known();
        let at = |ms| {
            let (one, now) = (&known["a"], BootTime(ms));
            (
                is_late(one, now, &timing),
                standing(one, now, timing.fence_ms),
            )
        };
        let due = timing.fence_ms / 2 + timing.renew_ms;
        assert_eq!(at(due), (false, PeerStanding::Live));
        assert_eq!(at(due + 1), (true, PeerStanding::Live));
        assert_eq!(at(timing.fence_ms), (true, PeerStanding::Live));
        assert_eq!(at(timing.fence_ms + 1), (false, PeerStanding::Silent));
    }

    #[test]
    fn the_first_is_of_the_least_name_of_those_that_are_heard_of() {
        let membership = Membership::default();
        assert!(!membership.is_first("a", 5_000), "nothing is known yet");
        let is_first = |states: [(&str, NodeState); 3], me| {
            let read = states.map(|(name, state)| {
                let record = NodeRecord {
                    incarnation: 1,
                    state,
                };
                (name.to_owned(), OneRead::of(record))
            });
            membership.take(boot_time(), read.into());
            membership.is_first(me, 5_000)
        };
        let (live, fenced) = (NodeState::Live, NodeState::Fenced);
        let all = [("b", live), ("a", live), ("c", live)];
        assert!(is_first(all, "a"));
        assert!(!is_first(all, "b"));
        let gone = [("b", live), ("a", fenced), ("c", live)];
        assert!(is_first(gone, "b"));
        assert!(!is_first(gone, "c"));
    }

    #[test]
    fn the_longest_that_any_live_node_asks_for_is_what_is_waited_for() {
        let membership = Membership::default();
        let now = BootTime(0);
        let read = |states: [(&str, NodeState, u64); 3]| {
            let one = |(name, state, patience_ms): (&str, NodeState, u64)| {
                let record = NodeRecord {
                    incarnation: 1,
                    state,
                };
                let read = OneRead {
                    patience_ms,
                    ..OneRead::of(record)
                };
                (name.to_owned(), read)
            };
            states.map(one).into()
        };
        let (live, fenced) = (NodeState::Live, NodeState::Fenced);
        membership.take(
            now,
            read([("a", live, 1), ("b", live, 9), ("c", fenced, 99)]),
        );
        assert_eq!(membership.longest_patience_ms(), 9);
        membership.take(
            now,
            read([("a", live, 1), ("b", fenced, 9), ("c", live, 7)]),
        );
        assert_eq!(membership.longest_patience_ms(), 7);
    }

    #[test]
    fn a_node_knows_of_itself_what_it_has_just_said() {
        let membership = Membership::default();
        assert!(membership.peers(("b", 0), &Timing::default()).is_empty());
        let joined = &membership.peers(("b", 7), &Timing::default())[0];
        assert_eq!((joined.name.as_str(), joined.incarnation), ("b", 7));
        assert_eq!(joined.announcement, None);
        assert!(membership.announce(announcement("one")));
        assert!(!membership.announce(announcement("one")));
        let names = |peers: &[Peer]| -> Vec<String> {
            peers.iter().map(|peer| peer.name.clone()).collect()
        };
        let peers = membership.peers(("b", 7), &Timing::default());
        assert_eq!(names(&peers), ["b"]);
        assert_eq!(
            (peers[0].incarnation, peers[0].standing),
            (7, PeerStanding::Live)
        );
        assert_eq!(peers[0].announcement, Some(announcement("one")));

        // The value read back from etcd is older.
        let record = NodeRecord {
            incarnation: 8,
            state: NodeState::Live,
        };
        let text = PeerText {
            incarnation: 8,
            announcement: announcement("one"),
        };
        let read = ["c", "b", "a"].map(|name| {
            let text = Some((text.clone(), 1));
            (
                name.to_owned(),
                OneRead {
                    text,
                    ..OneRead::of(record)
                },
            )
        });
        membership.take(boot_time(), read.into());
        membership.announce(announcement("two"));
        let peers = membership.peers(("b", 8), &Timing::default());
        assert_eq!(names(&peers), ["a", "b", "c"]);
        let labels: Vec<_> = peers.iter().map(|peer| peer.announcement.clone()).collect();
        assert_eq!(
            labels,
            [
                Some(announcement("one")),
                Some(announcement("two")),
                Some(announcement("one"))
            ]
        );
    }
}
