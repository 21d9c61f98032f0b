//! Assigns a few observers to each node, instead of all nodes: rendezvous hashing, whose result is
//! the same on all nodes that know the same others. Nodes that differ watch too much or too little
//! for a moment, which costs reads or time, but never safety.

use conman_core::placement::turn;

/// Number of observers of a node: one may be slow, another may die at the same time.
const OBSERVERS: usize = 3;

/// Whether `me` watches `node`, when these nodes are awake.
pub(super) fn observes(me: &str, node: &str, awake: &[&str]) -> bool {
    let others: Vec<&str> = awake.iter().copied().filter(|name| *name != node).collect();
    me != node && turn(me, &others, node).is_none_or(|turn| turn < OBSERVERS)
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
