//! Connections that wait for a session to start, bounded for each session and in all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{RouteError, Waiting};
use crate::options::NodeLimits;
use crate::session::SessionHandle;

/// Counts held connections up to a limit.
#[derive(Debug, Default)]
pub(crate) struct HeldCount(AtomicUsize);

impl HeldCount {
    fn add(&self, limit: usize) -> bool {
        let next = |held: usize| (held < limit).then_some(held + 1);
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .is_ok()
    }

    fn subtract(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A held connection, which counts for its session and for the node until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    node: Arc<HeldCount>,
    session: Arc<HeldCount>,
}

impl Held {
    pub(crate) fn begin(
        node: &Arc<HeldCount>,
        session: &SessionHandle,
        limits: &NodeLimits,
    ) -> Result<Self, RouteError> {
        if !session.held.add(limits.max_held_per_session) {
            return Err(RouteError::TooManyWaiting {
                what: Waiting::Session(session.id.clone()),
                limit: limits.max_held_per_session,
            });
        }
        if !node.add(limits.max_held) {
            session.held.subtract();
            return Err(RouteError::TooManyWaiting {
                what: Waiting::Node,
                limit: limits.max_held,
            });
        }
        Ok(Self {
            node: Arc::clone(node),
            session: Arc::clone(&session.held),
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.node.subtract();
        self.session.subtract();
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
        let node = Arc::new(HeldCount::default());
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
        assert_eq!((node.get(), alice.held.get(), bob.held.get()), (0, 0, 0));
    }
}
