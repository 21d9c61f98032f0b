//! Each node's share of the fleet's sessions, in proportion to its `max_sessions`.

use super::{NodeView, PlacementLimits, takes_none};

/// A node has clearly more than its share, compared with another one, if it has this multiple of the
/// other's …
const SHARE_RATIO: f64 = 1.25;
/// … and this many sessions more: few sessions on a large node are noise.
const FEW_SESSIONS: f64 = 8.0;

/// Whether `one` has clearly more sessions for its size than `other`, even if both have much room.
pub(super) fn exceeds(one: &NodeView, other: &NodeView) -> bool {
    let size = |node: &NodeView| f64::from(node.max_sessions.max(1));
    let fair = f64::from(other.load.sessions) * size(one) / size(other);
    f64::from(one.load.sessions) > fair * SHARE_RATIO + FEW_SESSIONS
}

/// Returns how many sessions node `me` has beyond its share of those of all nodes that take sessions.
#[must_use]
pub fn excess(me: &str, nodes: &[NodeView], limits: &PlacementLimits) -> u32 {
    let (mut sessions, mut places, mut mine) = (0_u64, 0_u64, None);
    for node in nodes {
        let is_me = node.name == me;
        if is_me {
            mine = Some(node);
        }
        if takes_none(node, is_me, limits).is_none() {
            sessions += u64::from(node.load.sessions);
            places += u64::from(node.max_sessions);
        }
    }
    let Some(mine) = mine.filter(|_| places > 0) else {
        return 0;
    };
    let share = (sessions * u64::from(mine.max_sessions)).div_ceil(places);
    let share = u32::try_from(share).unwrap_or(u32::MAX);
    mine.load.sessions.saturating_sub(share)
}
