//! A session that was signalled to stop, and has some time for that.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::session::handle::StopOrder;

#[derive(Debug, Default)]
pub(crate) struct Leaving {
    signalled: AtomicBool,
    /// Why an exit in this time counts as ordered, if it does.
    order: OnceLock<StopOrder>,
    shut: AtomicBool,
}

impl Leaving {
    /// It is about to be signalled; the caller decides how its end is reported.
    pub(crate) fn signal(&self) {
        self.signalled.store(true, Ordering::Relaxed);
    }

    /// It is about to be signalled: an exit after that has this reason. The first one counts.
    pub(crate) fn order(&self, order: StopOrder) {
        // A later one changes nothing.
        let _ = self.order.set(order);
        self.signal();
    }

    pub(crate) fn is_signalled(&self) -> bool {
        self.signalled.load(Ordering::Relaxed)
    }

    pub(crate) fn ordered(&self) -> Option<&StopOrder> {
        self.order.get()
    }

    /// It was found to take no more connections: none is sent there from now on.
    pub(crate) fn shut(&self) {
        self.shut.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Relaxed)
    }
}
