//! How long nodes have been lost, by a monotonic clock. Times that other daemons observed, also
//! before this one ran, come from the registry, where this one's are stored in turn.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use conman_core::retention::Age;
use conman_registry::{Peer, PeerStanding};
use tokio::time::Instant;

/// Lost nodes that still have records. A lost node stays lost until it joins again, with a new
/// incarnation. So the time counts on while it cannot be observed, as while etcd elects a leader.
#[derive(Debug, Default)]
pub(super) struct Ages {
    gone: HashMap<String, Gone>,
    /// Those met in the current scan of all records.
    met: HashSet<String>,
}

#[derive(Debug, Clone, Copy)]
struct Gone {
    /// `None` for a node that was forgotten before, until the registry states it.
    incarnation: Option<u64>,
    since: Instant,
    /// How long it had been lost before, as others observed.
    before: Duration,
}

impl Gone {
    fn new(incarnation: Option<u64>, before: Duration) -> Self {
        Self {
            incarnation,
            since: Instant::now(),
            before,
        }
    }

    fn gone_for(&self) -> Duration {
        self.before.saturating_add(self.since.elapsed())
    }

    fn age(&self) -> Option<Age> {
        self.incarnation.map(|incarnation| Age {
            incarnation,
            gone_for: self.gone_for(),
        })
    }

    /// Whether it has not come back since, as far as `known` shows.
    fn is_still(&self, known: Option<&Peer>) -> bool {
        known.is_none_or(|peer| {
            peer.standing == PeerStanding::Fenced && self.incarnation == Some(peer.incarnation)
        })
    }
}

impl Ages {
    /// Removes nodes that are back, or were.
    pub(super) fn see(&mut self, peers: &[Peer]) {
        self.gone
            .retain(|node, gone| gone.is_still(peers.iter().find(|peer| peer.name == *node)));
    }

    /// How long the node of a record has been lost. `known`: its entry, unless it is forgotten.
    pub(super) fn gone_for(&mut self, node: &str, known: Option<&Peer>) -> Duration {
        if !self.met.contains(node) {
            self.met.insert(node.to_owned());
        }
        if let Some(gone) = self.gone.get(node).filter(|gone| gone.is_still(known)) {
            return gone.gone_for();
        }
        let incarnation = known.map(|peer| peer.incarnation);
        let gone = Gone::new(incarnation, Duration::ZERO);
        self.gone.insert(node.to_owned(), gone);
        Duration::ZERO
    }

    /// All records were read: removes nodes without records.
    pub(super) fn all_met(&mut self) {
        let met = std::mem::take(&mut self.met);
        self.gone.retain(|node, _| met.contains(node));
    }

    /// Ages of the nodes that the last scan of all records met.
    pub(super) fn seen(&self) -> BTreeMap<String, Option<Age>> {
        let seen = self.gone.iter();
        seen.map(|(node, gone)| (node.clone(), gone.age()))
            .collect()
    }

    /// Takes over what any daemon observed, including this one. Observations from before a node's
    /// incarnation was known may be of an earlier incarnation.
    pub(super) fn learn(&mut self, ages: &BTreeMap<String, Age>) {
        for (node, gone) in &mut self.gone {
            let Some(age) = ages.get(node) else {
                continue;
            };
            if gone.incarnation != Some(age.incarnation) || gone.gone_for() < age.gone_for {
                *gone = Gone::new(Some(age.incarnation), age.gone_for);
            }
        }
    }

    /// Not all records were read.
    pub(super) fn look_failed(&mut self) {
        self.met.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(standing: PeerStanding, incarnation: u64) -> Peer {
        Peer {
            name: "n".to_owned(),
            incarnation,
            standing,
            is_late: false,
            announcement: None,
            announced_ago_ms: 0,
            seen_ago_ms: 0,
        }
    }

    /// Result for one record of `n`, an hour after the previous one.
    async fn hour(ages: &mut Ages, known: Option<&Peer>) -> u64 {
        tokio::time::advance(Duration::from_secs(3_600)).await;
        ages.see(known.map(std::slice::from_ref).unwrap_or_default());
        let gone_for = ages.gone_for("n", known);
        ages.all_met();
        gone_for.as_secs() / 3_600
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_grows_older_over_looks_that_fail_and_its_being_forgotten() {
        let mut ages = Ages::default();
        let fenced = peer(PeerStanding::Fenced, 3);
        assert_eq!(hour(&mut ages, Some(&fenced)).await, 0);
        assert_eq!(hour(&mut ages, Some(&fenced)).await, 1);
        // Before its records were met, and after.
        ages.look_failed();
        ages.gone_for("n", Some(&fenced));
        ages.look_failed();
        assert_eq!(hour(&mut ages, Some(&fenced)).await, 2);
        assert_eq!(hour(&mut ages, None).await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_was_back_is_gone_anew() {
        let mut ages = Ages::default();
        let fenced = peer(PeerStanding::Fenced, 3);
        let again = peer(PeerStanding::Fenced, 4);
        let returns = [
            peer(PeerStanding::Live, 4),
            peer(PeerStanding::Silent, 4),
            again.clone(),
        ];
        for back in &returns {
            hour(&mut ages, Some(&fenced)).await;
            assert_eq!(hour(&mut ages, Some(&fenced)).await, 1);
            ages.see(std::slice::from_ref(back));
            assert_eq!(hour(&mut ages, Some(&again)).await, 0, "{back:?}");
        }
        // A forgotten node that is known again had come back.
        assert_eq!(hour(&mut Ages::default(), None).await, 0);
        let mut ages = Ages::default();
        hour(&mut ages, None).await;
        assert_eq!(hour(&mut ages, None).await, 1);
        assert_eq!(hour(&mut ages, Some(&again)).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_kept_of_nodes_without_records() {
        let mut ages = Ages::default();
        hour(&mut ages, None).await;
        ages.all_met();
        assert!(ages.gone.is_empty());
    }

    fn hours(incarnation: u64, hours: u64) -> Age {
        Age {
            incarnation,
            gone_for: Duration::from_secs(hours * 3_600),
        }
    }

    fn learn(ages: &mut Ages, age: Age) {
        ages.learn(&[("n".to_owned(), age)].into());
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_is_as_old_as_anybody_saw_it_and_no_time_counts_twice() {
        let fenced = peer(PeerStanding::Fenced, 3);
        let mut first = Ages::default();
        for age in 0..5 {
            assert_eq!(hour(&mut first, Some(&fenced)).await, age);
        }
        let kept = first.seen()["n"].expect("its incarnation is known");
        assert_eq!(kept, hours(3, 4));
        let mut next = Ages::default();
        hour(&mut next, Some(&fenced)).await;
        learn(&mut next, kept);
        assert_eq!(hour(&mut next, Some(&fenced)).await, 5);
        // Its stored time comes back, and less than it has observed.
        for told in [5, 2] {
            learn(&mut next, hours(3, told));
            assert_eq!(next.seen()["n"], Some(hours(3, 5)));
        }
        // The other one has observed more.
        learn(&mut next, hours(3, 7));
        assert_eq!(hour(&mut next, Some(&fenced)).await, 8);
        assert_eq!(hour(&mut next, None).await, 9);
    }

    #[tokio::test(start_paused = true)]
    async fn what_others_saw_of_a_forgotten_node_counts_until_it_is_known_to_have_been_back() {
        let mut ages = Ages::default();
        hour(&mut ages, None).await;
        hour(&mut ages, None).await;
        assert_eq!(ages.seen()["n"], None, "of an unknown incarnation");
        learn(&mut ages, hours(3, 0));
        assert_eq!(ages.seen()["n"], Some(hours(3, 0)), "nor was it known then");
        learn(&mut ages, hours(3, 40));
        assert_eq!(hour(&mut ages, None).await, 41);
        // It was forgotten after another incarnation.
        learn(&mut ages, hours(4, 2));
        assert_eq!(hour(&mut ages, None).await, 3);
        let again = peer(PeerStanding::Fenced, 5);
        assert_eq!(hour(&mut ages, Some(&again)).await, 0);
        assert_eq!(ages.seen()["n"], Some(hours(5, 0)));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_learned_of_nodes_without_records() {
        let mut ages = Ages::default();
        learn(&mut ages, hours(3, 40));
        assert!(ages.seen().is_empty());
    }
}
