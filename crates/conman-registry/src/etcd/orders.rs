//! What the registry orders the node to end.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_core::ownership::Slot;
use conman_proto::{Generation, SessionId};
use tokio::sync::Notify;

/// An order to the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Kill that container, if there is one, make sure that none can appear, and release it. When
    /// the release is refused as superseded, somebody else owns the session.
    Condemned {
        id: SessionId,
        generation: Generation,
        why: String,
    },
}

/// Orders that wait to be taken. Bounded by the sessions that there are: one order a slot.
#[derive(Debug, Default)]
pub struct Orders {
    waiting: Mutex<BTreeMap<Slot, String>>,
    more: Notify,
}

impl Orders {
    /// The next order. Cancel safe: it is taken when it is returned.
    pub async fn next(&self) -> Order {
        loop {
            if let Some(order) = self.take() {
                return order;
            }
            self.more.notified().await;
        }
    }

    fn take(&self) -> Option<Order> {
        let mut waiting = self.waiting();
        while let Some((slot, why)) = waiting.pop_first() {
            let id = slot.session.parse();
            // Slots that conman did not name are nobody's session.
            if let (Ok(id), Some(generation)) = (id, Generation::new(slot.generation)) {
                return Some(Order::Condemned {
                    id,
                    generation,
                    why,
                });
            }
        }
        None
    }

    pub(super) fn condemn(&self, slot: Slot, why: String) {
        self.waiting().insert(slot, why);
        self.more.notify_one();
    }

    /// It has been dealt with.
    pub(super) fn withdraw(&self, slot: &Slot) {
        self.waiting().remove(slot);
    }

    /// A panic while the lock is held cannot leave half a change: each is one map operation.
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<Slot, String>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
