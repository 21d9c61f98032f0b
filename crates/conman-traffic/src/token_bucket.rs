//! A token bucket with places: who waits first is served first.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A connection moves at most what the rate allows in this part of a second before others get their turn.
const TURN_PARTS: u64 = 50;
/// Bounds of a turn, in bytes.
const MIN_TURN_BYTES: u64 = 1 << 10;
const MAX_TURN_BYTES: u64 = 64 << 10;

/// A limit that many connections share.
///
/// It is kept as the time at which everything that was reserved so far has passed at the rate, the generic
/// cell rate algorithm: a reservation moves that time forward, and may be used when that is at most the burst away.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    bytes_per_s: u64,
    burst: Duration,
    passed_at: Mutex<Option<Instant>>,
}

impl TokenBucket {
    pub(crate) fn new(bytes_per_s: u64, burst_bytes: u64) -> Self {
        Self {
            bytes_per_s,
            burst: time_of(burst_bytes, bytes_per_s),
            passed_at: Mutex::new(None),
        }
    }

    /// Bytes that are reserved at a time.
    pub(crate) fn turn_bytes(&self) -> usize {
        let bytes = (self.bytes_per_s / TURN_PARTS).clamp(MIN_TURN_BYTES, MAX_TURN_BYTES);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Reserves bytes, and returns how long to wait before they may pass.
    pub(crate) fn reserve(&self, bytes: usize) -> Duration {
        let now = Instant::now();
        let mut passed_at = self.passed_at();
        let queued = passed_at.map_or(now, |at| at.max(now));
        *passed_at = Some(queued + self.time(bytes));
        (queued - now).saturating_sub(self.burst)
    }

    /// Returns reserved bytes that did not pass.
    pub(crate) fn refund(&self, bytes: usize) {
        let mut passed_at = self.passed_at();
        *passed_at = passed_at.and_then(|at| at.checked_sub(self.time(bytes)));
    }

    fn time(&self, bytes: usize) -> Duration {
        time_of(bytes as u64, self.bytes_per_s)
    }

    fn passed_at(&self) -> MutexGuard<'_, Option<Instant>> {
        // No panic can happen while the lock is held.
        self.passed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn time_of(bytes: u64, bytes_per_s: u64) -> Duration {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_at_once_and_the_rest_at_the_rate() {
        let bucket = TokenBucket::new(1_000, 300);
        let waits = [(); 5].map(|()| bucket.reserve(100).as_millis());
        assert_eq!(waits, [0, 0, 0, 0, 100]);
        advance(Duration::from_millis(500)).await;
        assert_eq!(bucket.reserve(100), Duration::ZERO, "all have passed");
        // A long pause saves up no more than the burst.
        advance(Duration::from_secs(3_600)).await;
        let waits = [(); 5].map(|()| bucket.reserve(100).as_millis());
        assert_eq!(waits, [0, 0, 0, 0, 100]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_used_is_there_for_others() {
        let bucket = TokenBucket::new(1_000, 0);
        assert_eq!(bucket.reserve(1_000), Duration::ZERO);
        bucket.refund(900);
        assert_eq!(bucket.reserve(1), Duration::from_millis(100));
    }
}
