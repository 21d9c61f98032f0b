//! Connections that wait for a session to start, bounded for each session and in all.

use std::sync::Arc;

use crate::error::{RouteError, Waiting};
use crate::options::NodeLimits;
use crate::session::SessionHandle;

/// Counts held connections: each has a reference, and so has the owner of the count.
pub(crate) type HeldCount = Arc<()>;

/// Returns the number of connections that are held now.
pub(crate) fn held_now(count: &HeldCount) -> usize {
    Arc::strong_count(count) - 1
}

/// A held connection, which counts for its session and for the node until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    _node: HeldCount,
    _session: HeldCount,
}

impl Held {
    /// Of connections that begin at the same moment, each may take the last place.
    pub(crate) fn begin(
        node: &HeldCount,
        session: &SessionHandle,
        limits: &NodeLimits,
    ) -> Result<Self, RouteError> {
        let is_full = |count, limit| held_now(count) >= limit;
        let (what, limit) = if is_full(&session.held, limits.max_held_per_session) {
            let what = Waiting::Session(session.id.clone());
            (what, limits.max_held_per_session)
        } else if is_full(node, limits.max_held) {
            (Waiting::Node, limits.max_held)
        } else {
            return Ok(Self {
                _node: Arc::clone(node),
                _session: Arc::clone(&session.held),
            });
        };
        Err(RouteError::TooManyWaiting { what, limit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::View;

    fn session(id: &str) -> Arc<SessionHandle> {
        let spec = crate::session_table::tests::spec();
        SessionHandle::new(id.parse().expect("id"), spec, View::starting())
    }

    #[test]
    fn a_full_session_leaves_room_for_others_until_the_node_is_full() {
        let (alice, bob) = (session("alice"), session("bob"));
        let node = HeldCount::default();
        let limits = NodeLimits {
            max_held: 3,
            max_held_per_session: 2,
            ..NodeLimits::default()
        };
        let hold = |session: &SessionHandle| Held::begin(&node, session, &limits);

        let first = hold(&alice).expect("room");
        let second = hold(&alice).expect("room");
        let refused = hold(&alice).expect_err("alice is full");
        assert!(refused.to_string().contains("session alice"), "{refused}");
        let third = hold(&bob).expect("room for bob");
        let refused = hold(&bob).expect_err("the node is full");
        assert!(refused.to_string().contains("this node"), "{refused}");

        drop((first, second, third));
        let held = [&node, &alice.held, &bob.held].map(held_now);
        assert_eq!(held, [0, 0, 0]);
    }
}
