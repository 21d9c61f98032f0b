use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use conman_core::Sparing;
use tokio::time::Instant;

/// Minimum interval between warnings about refused connections from one address.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Rate-limited log of connections that do not come from a node of the fleet.
#[derive(Debug)]
pub(crate) struct Refusals {
    began: Instant,
    sparing: Mutex<Sparing>,
}

impl Refusals {
    pub(crate) fn new() -> Self {
        let every_ms = u64::try_from(WARN_EVERY.as_millis()).unwrap_or(u64::MAX);
        Self {
            began: Instant::now(),
            sparing: Mutex::new(Sparing::new(every_ms)),
        }
    }

    /// Whether to log one from there; the number is of those that were not logged.
    pub(crate) fn say(&self, address: &str) -> Option<u64> {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut sparing = self.sparing.lock().unwrap_or_else(PoisonError::into_inner);
        sparing.say(address, now_ms)
    }
}
