//! Decides which nodes are cut off from the fleet, from the peers that each node reports as unreached.
//!
//! ```text
//! probes ──▶ PeerReach, one for each peer ──▶ report ──registry──▶ cut_off ──▶ placement, readiness
//! ```
//! A pair of nodes is connected if neither reports that it does not reach the other. The core is
//! what is left after the nodes with the most broken pairs were removed, while one of them is without
//! a connection to more than half of the others. If the core has most of the nodes, a node outside that is
//! connected to less than half of the core is cut off.
//!
//! While halves of a fleet lose each other, nodes that report before the others may be marked for a moment.
//!
//! Invariants: a report breaks pairs of its own node only, so one bad node alone does not mark others. Only
//! a majority of the nodes marks others: two nodes decide nothing, and neither do parts of a fleet of equal
//! size, or a few nodes that still reach each other.

use std::collections::BTreeSet;

mod peer_reach;

pub use peer_reach::{PeerReach, STEADY_MS};

/// Below this many nodes there is no majority.
const MIN_NODES: usize = 3;

/// What a live node reports.
#[derive(Debug, Clone, Copy)]
pub struct ReachReport<'a> {
    pub node: &'a str,
    /// Peers that it does not reach.
    pub unreached: &'a [String],
}

/// Returns the nodes that do not reach most of the nodes that reach each other; none if those are not a
/// majority. `reports`: one of each live node.
#[must_use]
pub fn cut_off<'a>(reports: &[ReachReport<'a>]) -> BTreeSet<&'a str> {
    let mut core: Vec<ReachReport<'a>> = reports.to_vec();
    while core.len() >= MIN_NODES {
        let broken: Vec<usize> = core.iter().map(|one| broken_pairs(one, &core)).collect();
        let most = broken.iter().copied().max().unwrap_or(0);
        let is_majority = 2 * most > core.len() - 1;
        let kept = broken.iter().filter(|count| **count < most).count();
        if !is_majority || kept < 2 {
            break;
        }
        let mut broken = broken.into_iter();
        core.retain(|_| broken.next().is_some_and(|count| count < most));
    }
    if 2 * core.len() <= reports.len() {
        return BTreeSet::new();
    }
    let is_out = |one: &&ReachReport<'a>| {
        let is_in_core = core.iter().any(|other| other.node == one.node);
        !is_in_core && 2 * broken_pairs(one, &core) > core.len()
    };
    reports.iter().filter(is_out).map(|one| one.node).collect()
}

/// How many of `others` a node has no connection to.
fn broken_pairs(one: &ReachReport<'_>, others: &[ReachReport<'_>]) -> usize {
    let misses = |from: &ReachReport<'_>, to: &str| from.unreached.iter().any(|name| name == to);
    let others = others.iter().filter(|other| other.node != one.node);
    others
        .filter(|other| misses(one, other.node) || misses(other, one.node))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nodes that are cut off, where these nodes report that they do not reach these peers.
    fn verdict(nodes: &str, unreached: &[(&str, &str)]) -> String {
        let names: Vec<String> = nodes.chars().map(String::from).collect();
        let lists: Vec<Vec<String>> = names
            .iter()
            .map(|name| {
                let own = unreached.iter().filter(|(from, _)| from == name);
                own.flat_map(|(_, peers)| peers.chars().map(String::from))
                    .collect()
            })
            .collect();
        let reports: Vec<ReachReport<'_>> = names
            .iter()
            .zip(&lists)
            .map(|(node, unreached)| ReachReport { node, unreached })
            .collect();
        cut_off(&reports).into_iter().collect()
    }

    #[test]
    fn a_node_that_reaches_nobody_or_that_nobody_reaches_is_cut_off() {
        assert_eq!(verdict("abc", &[]), "");
        assert_eq!(verdict("abc", &[("a", "bc")]), "a");
        assert_eq!(verdict("abc", &[("b", "a"), ("c", "a")]), "a");
        assert_eq!(verdict("abcde", &[("a", "bcd")]), "a");
        assert_eq!(verdict("abcde", &[("a", "bc")]), "", "it reaches half");
    }

    #[test]
    fn one_broken_pair_marks_nobody() {
        assert_eq!(verdict("abc", &[("a", "b"), ("b", "a")]), "");
    }

    #[test]
    fn two_nodes_and_parts_of_equal_size_decide_nothing() {
        assert_eq!(verdict("ab", &[("a", "b"), ("b", "a")]), "");
        assert_eq!(verdict("abcd", &[("a", "cd"), ("b", "cd")]), "");
        assert_eq!(verdict("abc", &[("a", "bc"), ("b", "c")]), "");
    }

    #[test]
    fn the_smaller_part_of_a_fleet_is_cut_off() {
        assert_eq!(verdict("abcde", &[("a", "cde"), ("b", "cde")]), "ab");
        // `e` is alone, and the halves of the rest decide nothing about each other.
        let halves = [("a", "cd"), ("b", "cd"), ("e", "abcd")];
        assert_eq!(verdict("abcde", &halves), "e");
    }

    #[test]
    fn several_bad_nodes_are_cut_off_while_most_others_reach_each_other() {
        assert_eq!(verdict("abcde", &[("a", "bcde"), ("b", "acde")]), "ab");
    }

    #[test]
    fn two_nodes_that_reach_each_other_do_not_mark_all_the_others() {
        let names = "abcdefghij";
        let reaches_nobody: Vec<(&str, &str)> = (0..8).map(|at| (&names[at..=at], names)).collect();
        assert_eq!(verdict(names, &reaches_nobody), "");
        assert_eq!(verdict("abcd", &[("a", "bcd"), ("b", "acd")]), "");
    }
}
