//! Each node's share of the fleet's sessions, in proportion to its `max_sessions`.

use super::NodeView;

/// A node has clearly more than its share, compared with another one, if it has this multiple of the
/// other's …
const SHARE_RATIO: f64 = 1.25;
/// … and this many sessions more: few sessions on a large node are noise.
const FEW_SESSIONS: f64 = 8.0;

/// Whether `one` has clearly more sessions for its size than `other`, even if both have much room. So a node
/// that has joined, or has come back, gets new sessions until it has its share.
pub(super) fn exceeds(one: &NodeView, other: &NodeView) -> bool {
    let size = |node: &NodeView| f64::from(node.max_sessions.max(1));
    let fair = f64::from(other.load.sessions) * size(one) / size(other);
    f64::from(one.load.sessions) > fair * SHARE_RATIO + FEW_SESSIONS
}
