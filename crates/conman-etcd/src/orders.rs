//! Orders from the registry to the node to end sessions.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_core::ownership::Slot;
use conman_proto::{Generation, SessionId};
use tokio::sync::Notify;

/// An order to the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Kill that container, if there is one, make sure that none can appear, and release it. If the
    /// release is refused as superseded, another node owns the session.
    Condemned {
        id: SessionId,
        generation: Generation,
        why: String,
    },
    /// Nothing of that container is left, by the fence's certificate: release it with its ending,
    /// unless that is under way.
    Ended {
        id: SessionId,
        generation: Generation,
    },
}

/// Orders that wait to be taken. Bounded by the number of sessions: one order a slot.
#[derive(Debug, Default)]
pub struct Orders {
    /// Why it is to be ended; `None`: it has already ended.
    waiting: Mutex<BTreeMap<Slot, Option<String>>>,
    more: Notify,
    /// An order was taken.
    taken: Notify,
}

impl Orders {
    /// The next order. Cancel safe: it is taken only when it is returned.
    pub async fn next(&self) -> Order {
        loop {
            if let Some(order) = self.take() {
                self.taken.notify_one();
                return order;
            }
            self.more.notified().await;
        }
    }

    fn take(&self) -> Option<Order> {
        let mut waiting = self.waiting();
        while let Some((slot, why)) = waiting.pop_first() {
            let id = slot.session.parse();
            // A slot that conman did not name belongs to no session.
            if let (Ok(id), Some(generation)) = (id, Generation::new(slot.generation)) {
                return Some(match why {
                    Some(why) => Order::Condemned {
                        id,
                        generation,
                        why,
                    },
                    None => Order::Ended { id, generation },
                });
            }
        }
        None
    }

    /// Whether an order to kill is waiting to be taken.
    pub(super) fn are_to_kill(&self) -> bool {
        self.waiting().values().any(Option::is_some)
    }

    /// Returns when an order was taken. Cancel safe: the event is stored as a permit.
    pub(super) async fn taken(&self) {
        self.taken.notified().await;
    }

    pub(super) fn condemn(&self, slot: Slot, why: String) {
        self.waiting().insert(slot, Some(why));
        self.more.notify_one();
    }

    pub(super) fn ended(&self, slot: Slot) {
        self.waiting().entry(slot).or_insert(None);
        self.more.notify_one();
    }

    /// Removes an order that has been dealt with.
    pub(super) fn withdraw(&self, slot: &Slot) {
        self.waiting().remove(slot);
    }

    /// A panic while the lock is held cannot leave a partial change: each is one map operation.
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<Slot, Option<String>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
