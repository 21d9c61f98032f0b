//! How long nodes have been lost, by a monotonic clock. The registry merges the times that all daemons
//! observed, earlier ones included.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use conman_core::retention::Age;
use conman_registry::{Peer, PeerStanding};
use tokio::time::Instant;

/// Lost nodes that still have records. A lost node stays lost until it joins again, with a new
/// incarnation. So the time counts on while it cannot be observed, as while etcd elects a leader.
#[derive(Debug, Default)]
pub(super) struct LostNodeTimes {
    nodes: HashMap<String, LostNode>,
    /// Those found in the current scan of all records.
    found: HashSet<String>,
}

#[derive(Debug, Clone, Copy)]
struct LostNode {
    /// `None` for a node that was forgotten before, until the registry states it.
    incarnation: Option<u64>,
    since: Instant,
    /// How long it had been lost before, as others observed.
    before: Duration,
}

impl LostNode {
    fn new(incarnation: Option<u64>, before: Duration) -> Self {
        Self {
            incarnation,
            since: Instant::now(),
            before,
        }
    }

    fn lost_for(&self) -> Duration {
        self.before.saturating_add(self.since.elapsed())
    }

    fn age(&self) -> Option<Age> {
        self.incarnation.map(|incarnation| Age {
            incarnation,
            gone_for: self.lost_for(),
        })
    }

    /// Whether it has not come back since, as far as `known` shows.
    fn is_still(&self, known: Option<&Peer>) -> bool {
        known.is_none_or(|peer| {
            peer.standing == PeerStanding::Fenced && self.incarnation == Some(peer.incarnation)
        })
    }
}

impl LostNodeTimes {
    /// Removes nodes that are back, or were.
    pub(super) fn update(&mut self, peers: &[Peer]) {
        self.nodes
            .retain(|node, lost| lost.is_still(peers.iter().find(|peer| peer.name == *node)));
    }

    /// How long the node of a record has been lost. `known`: its entry, unless it is forgotten.
    pub(super) fn lost_for(&mut self, node: &str, known: Option<&Peer>) -> Duration {
        if !self.found.contains(node) {
            self.found.insert(node.to_owned());
        }
        if let Some(lost) = self.nodes.get(node).filter(|lost| lost.is_still(known)) {
            return lost.lost_for();
        }
        let incarnation = known.map(|peer| peer.incarnation);
        let lost = LostNode::new(incarnation, Duration::ZERO);
        self.nodes.insert(node.to_owned(), lost);
        Duration::ZERO
    }

    /// All records were read: removes nodes without records.
    pub(super) fn scan_complete(&mut self) {
        let found = std::mem::take(&mut self.found);
        self.nodes.retain(|node, _| found.contains(node));
    }

    /// The times of the nodes that the last scan of all records found.
    pub(super) fn observed(&self) -> BTreeMap<String, Option<Age>> {
        let seen = self.nodes.iter();
        seen.map(|(node, lost)| (node.clone(), lost.age()))
            .collect()
    }

    /// Takes over what any daemon observed, including this one. Observations from before a node's
    /// incarnation was known may be of an earlier incarnation.
    pub(super) fn merge(&mut self, ages: &BTreeMap<String, Age>) {
        for (node, lost) in &mut self.nodes {
            let Some(age) = ages.get(node) else {
                continue;
            };
            if lost.incarnation != Some(age.incarnation) || lost.lost_for() < age.gone_for {
                *lost = LostNode::new(Some(age.incarnation), age.gone_for);
            }
        }
    }

    /// Not all records were read.
    pub(super) fn scan_failed(&mut self) {
        self.found.clear();
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
    async fn hour(times: &mut LostNodeTimes, known: Option<&Peer>) -> u64 {
        tokio::time::advance(Duration::from_secs(3_600)).await;
        times.update(known.map(std::slice::from_ref).unwrap_or_default());
        let lost_for = times.lost_for("n", known);
        times.scan_complete();
        lost_for.as_secs() / 3_600
    }

    #[tokio::test(start_paused = true)]
    async fn time_continues_while_scans_fail_and_after_a_node_is_forgotten() {
        let mut times = LostNodeTimes::default();
        let fenced = peer(PeerStanding::Fenced, 3);
        assert_eq!(hour(&mut times, Some(&fenced)).await, 0);
        assert_eq!(hour(&mut times, Some(&fenced)).await, 1);
        // Before its records were met, and after.
        times.scan_failed();
        times.lost_for("n", Some(&fenced));
        times.scan_failed();
        assert_eq!(hour(&mut times, Some(&fenced)).await, 2);
        assert_eq!(hour(&mut times, None).await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn time_starts_again_for_a_node_that_was_back() {
        let mut times = LostNodeTimes::default();
        let fenced = peer(PeerStanding::Fenced, 3);
        let again = peer(PeerStanding::Fenced, 4);
        let returns = [
            peer(PeerStanding::Live, 4),
            peer(PeerStanding::Silent, 4),
            again.clone(),
        ];
        for back in &returns {
            hour(&mut times, Some(&fenced)).await;
            assert_eq!(hour(&mut times, Some(&fenced)).await, 1);
            times.update(std::slice::from_ref(back));
            assert_eq!(hour(&mut times, Some(&again)).await, 0, "{back:?}");
        }
        // A forgotten node that is known again had come back.
        assert_eq!(hour(&mut LostNodeTimes::default(), None).await, 0);
        let mut times = LostNodeTimes::default();
        hour(&mut times, None).await;
        assert_eq!(hour(&mut times, None).await, 1);
        assert_eq!(hour(&mut times, Some(&again)).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_kept_of_nodes_without_records() {
        let mut times = LostNodeTimes::default();
        hour(&mut times, None).await;
        times.scan_complete();
        assert!(times.nodes.is_empty());
    }

    fn hours(incarnation: u64, hours: u64) -> Age {
        Age {
            incarnation,
            gone_for: Duration::from_secs(hours * 3_600),
        }
    }

    fn merge(times: &mut LostNodeTimes, age: Age) {
        times.merge(&[("n".to_owned(), age)].into());
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_observed_time_counts_and_no_time_counts_twice() {
        let fenced = peer(PeerStanding::Fenced, 3);
        let mut first = LostNodeTimes::default();
        for age in 0..5 {
            assert_eq!(hour(&mut first, Some(&fenced)).await, age);
        }
        let kept = first.observed()["n"].expect("its incarnation is known");
        assert_eq!(kept, hours(3, 4));
        let mut next = LostNodeTimes::default();
        hour(&mut next, Some(&fenced)).await;
        merge(&mut next, kept);
        assert_eq!(hour(&mut next, Some(&fenced)).await, 5);
        // Its stored time comes back, and less than it has observed.
        for told in [5, 2] {
            merge(&mut next, hours(3, told));
            assert_eq!(next.observed()["n"], Some(hours(3, 5)));
        }
        // The other one has observed more.
        merge(&mut next, hours(3, 7));
        assert_eq!(hour(&mut next, Some(&fenced)).await, 8);
        assert_eq!(hour(&mut next, None).await, 9);
    }

    #[tokio::test(start_paused = true)]
    async fn times_observed_by_others_count_for_a_forgotten_node_until_it_was_back() {
        let mut times = LostNodeTimes::default();
        hour(&mut times, None).await;
        hour(&mut times, None).await;
        assert_eq!(times.observed()["n"], None, "of an unknown incarnation");
        merge(&mut times, hours(3, 0));
        assert_eq!(
            times.observed()["n"],
            Some(hours(3, 0)),
            "nor was it known then"
        );
        merge(&mut times, hours(3, 40));
        assert_eq!(hour(&mut times, None).await, 41);
        // It was forgotten after another incarnation.
        merge(&mut times, hours(4, 2));
        assert_eq!(hour(&mut times, None).await, 3);
        let again = peer(PeerStanding::Fenced, 5);
        assert_eq!(hour(&mut times, Some(&again)).await, 0);
        assert_eq!(times.observed()["n"], Some(hours(5, 0)));
    }

    #[tokio::test(start_paused = true)]
    async fn times_of_nodes_without_records_are_ignored() {
        let mut times = LostNodeTimes::default();
        merge(&mut times, hours(3, 40));
        assert!(times.observed().is_empty());
    }
}
