//! Connections that wait for a session to start, bounded for each session and in all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use conman_proto::SessionId;

use crate::error::{RouteError, Waiting};

/// Counts waiting connections up to a limit.
#[derive(Debug, Default)]
pub(crate) struct Seats {
    taken: AtomicUsize,
}

impl Seats {
    fn take(&self, limit: usize) -> bool {
        let next = |taken: usize| (taken < limit).then_some(taken + 1);
        self.taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .is_ok()
    }

    fn leave(&self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

/// A connection's place in both counts; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Seat {
    node: Arc<Seats>,
    session: Arc<Seats>,
}

impl Seat {
    pub(crate) fn take(
        id: &SessionId,
        (node, max_held): (&Arc<Seats>, usize),
        (session, max_held_per_session): (&Arc<Seats>, usize),
    ) -> Result<Self, RouteError> {
        if !session.take(max_held_per_session) {
            let what = Waiting::Session(id.clone());
            return Err(RouteError::TooManyWaiting {
                what,
                limit: max_held_per_session,
            });
        }
        if !node.take(max_held) {
            session.leave();
            return Err(RouteError::TooManyWaiting {
                what: Waiting::Node,
                limit: max_held,
            });
        }
        Ok(Self {
            node: Arc::clone(node),
            session: Arc::clone(session),
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.node.leave();
        self.session.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_session_leaves_room_for_others_until_the_node_is_full() {
        let (alice, bob): (SessionId, SessionId) =
            ("alice".parse().expect("id"), "bob".parse().expect("id"));
        let (node, of_alice, of_bob) = <(Arc<Seats>, Arc<Seats>, Arc<Seats>)>::default();
        let sit = |id: &SessionId, seats: &Arc<Seats>| Seat::take(id, (&node, 3), (seats, 2));

        let first = sit(&alice, &of_alice).expect("room");
        let second = sit(&alice, &of_alice).expect("room");
        let refused = sit(&alice, &of_alice).expect_err("alice is full");
        assert!(refused.to_string().contains("session alice"), "{refused}");
        let third = sit(&bob, &of_bob).expect("room for bob");
        let refused = sit(&bob, &of_bob).expect_err("the node is full");
        assert!(refused.to_string().contains("this node"), "{refused}");

        drop((first, second, third));
        assert_eq!((node.taken(), of_alice.taken(), of_bob.taken()), (0, 0, 0));
    }
}
