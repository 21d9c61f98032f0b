//! Assigns a few observers to each node, instead of all nodes: rendezvous hashing, whose result is
//! the same on all nodes that know the same others. Nodes that differ watch too much or too little
//! for a moment, which costs reads or time, but never safety.

use sha2::{Digest, Sha256};

/// Number of observers of a node: one may be slow, another may die at the same time.
const OBSERVERS: usize = 3;

/// Whether `me` watches `node`, when these nodes are awake.
pub(super) fn observes(me: &str, node: &str, awake: &[&str]) -> bool {
    if me == node {
        return false;
    }
    let mine = score(me, node);
    let before = awake
        .iter()
        .filter(|other| **other != me && **other != node)
        .filter(|other| (score(other, node), **other) > (mine, me))
        .count();
    before < OBSERVERS
}

fn score(observer: &str, node: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(observer.as_bytes());
    // No name contains this byte, so that two pairs never have the same text.
    hash.update([0]);
    hash.update(node.as_bytes());
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observers(names: &[&str], node: &str) -> Vec<String> {
        let observes = |me: &&&str| observes(me, node, names);
        names
            .iter()
            .filter(observes)
            .map(|me| (*me).to_owned())
            .collect()
    }

    #[test]
    fn everybody_is_watched_by_three_others_or_by_all_where_there_are_fewer() {
        let names: Vec<String> = (0..30).map(|index| format!("node-{index}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for node in &names {
            assert_eq!(observers(&names, node).len(), 3);
        }
        assert_eq!(observers(&names[..3], names[0]), ["node-1", "node-2"]);
        assert_eq!(observers(&names[..1], names[0]), [""; 0]);
    }

    #[test]
    fn when_the_observers_fall_silent_others_take_over() {
        let names: Vec<String> = (0..8).map(|index| format!("node-{index}")).collect();
        let mut awake: Vec<&str> = names.iter().map(String::as_str).collect();
        let node = awake[0];
        while awake.len() > 1 {
            let watching = observers(&awake, node);
            assert!(!watching.is_empty(), "{awake:?}");
            awake.retain(|name| *name == node || !watching.contains(&(*name).to_owned()));
        }
    }
}
