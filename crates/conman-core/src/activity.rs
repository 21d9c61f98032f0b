//! Counts what is open or in flight in a session, to detect idleness.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts a session's open tunnels and requests in flight, without a clock: to detect idleness,
/// compare two readings.
#[derive(Debug, Default)]
pub struct Activity {
    in_flight: AtomicU64,
    begun: AtomicU64,
}

impl Activity {
    /// Counts one tunnel or request until the guard is dropped.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> ActivityGuard {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        ActivityGuard {
            activity: Arc::clone(self),
        }
    }

    /// Tunnels and requests that have begun and not ended.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Tunnels and requests that have ever begun; two equal readings with nothing in flight mean
    /// that nothing happened in between.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }
}

/// One tunnel or request; dropping it ends it.
#[derive(Debug)]
pub struct ActivityGuard {
    activity: Arc<Activity>,
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.activity.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
