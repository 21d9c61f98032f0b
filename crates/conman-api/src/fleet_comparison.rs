//! What is known of a node only by comparing it with the others.

use std::collections::BTreeSet;
use std::sync::Arc;

use conman_fleet::FleetMap;
use conman_registry::{Peer, PeerStanding};
use jiff::Timestamp;

/// Clocks that differ by less are not named: an announcement is a moment old when it is read.
const MAX_CLOCK_AHEAD_MS: i64 = 30_000;

pub(crate) struct FleetComparison {
    pub(crate) cut_off: Arc<BTreeSet<String>>,
    /// How far the clock of the fleet is ahead of this node's: the median of those of all nodes.
    fleet_ahead_ms: i64,
    now: Timestamp,
}

impl FleetComparison {
    pub(crate) fn of(map: &FleetMap, peers: &[Peer]) -> Self {
        let now = Timestamp::now();
        let mut ahead: Vec<i64> = peers
            .iter()
            .filter_map(|peer| ahead_ms(peer, now))
            .collect();
        Self {
            cut_off: map.cut_off(),
            fleet_ahead_ms: median(&mut ahead),
            now,
        }
    }

    /// `None` while the node's clock agrees with the fleet's.
    pub(crate) fn clock_ahead_ms(&self, peer: &Peer) -> Option<i64> {
        let ahead_ms = ahead_ms(peer, self.now)? - self.fleet_ahead_ms;
        (ahead_ms.abs() > MAX_CLOCK_AHEAD_MS).then_some(ahead_ms)
    }
}

/// How far a node's clock is ahead of this node's.
fn ahead_ms(peer: &Peer, now: Timestamp) -> Option<i64> {
    if peer.standing != PeerStanding::Live {
        return None;
    }
    let clock = peer.announcement.as_ref()?.view.as_ref()?.clock?;
    let age_ms = i64::try_from(peer.announced_ago_ms).ok()?;
    Some(clock.as_millisecond() + age_ms - now.as_millisecond())
}

/// Of two nodes, each clock may be wrong: the one that is nearer to this node's counts.
fn median(values: &mut [i64]) -> i64 {
    values.sort_unstable();
    let (low, high) = match values.len() {
        0 => return 0,
        count => (values[(count - 1) / 2], values[count / 2]),
    };
    if low.abs() <= high.abs() { low } else { high }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fleets_clock_is_that_of_most_nodes_and_of_two_this_nodes() {
        const DAY: i64 = 86_400_000;
        assert_eq!(median(&mut [0, DAY, 5]), 5);
        assert_eq!(median(&mut [0, DAY, DAY + 3]), DAY, "this node's is wrong");
        assert_eq!(median(&mut [DAY, 0]), 0);
        assert_eq!(median(&mut [-DAY, 0]), 0);
        assert_eq!(median(&mut []), 0);
    }
}
