//! Number of records per read. Most records are small, and some as large as etcd allows: a read
//! that was too large or too slow is repeated in parts, and so are the next ones like it.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use super::client::MAX_BULK_BYTES;

/// For records of the usual size of specs.
const MOST: i64 = 512;

/// Few enough for a first try with large records.
const FIRST: i64 = 64;

/// Divisor of the timeout: an answer within that part of it doubles the size. So the size grows
/// again after an election or a hanging endpoint has reduced it, however far away etcd is.
const SOON: u32 = 4;

#[derive(Debug)]
pub(super) struct PageSize {
    records: AtomicI64,
    soon: Duration,
}

impl PageSize {
    /// `patience` is the timeout of a read.
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            records: AtomicI64::new(FIRST),
            soon: patience / SOON,
        }
    }

    pub(super) fn get(&self) -> i64 {
        self.records.load(Ordering::Relaxed)
    }

    /// A read of so many records was too large or too slow.
    pub(super) fn was_too_much(&self, records: i64) {
        let half = (records / 2).max(1);
        self.records.fetch_min(half, Ordering::Relaxed);
    }

    /// So many records were received.
    pub(super) fn came(&self, records: usize, bytes: usize, took: Duration) {
        if took <= self.soon && bytes <= MAX_BULK_BYTES / 4 {
            let twice = i64::try_from(records).unwrap_or(MOST).saturating_mul(2);
            self.records.fetch_max(twice.min(MOST), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_too_much_is_halved_down_to_one_and_grows_again_where_it_comes_easily() {
        let size = PageSize::new(Duration::from_secs(1));
        assert_eq!(size.get(), 64);
        for expected in [32, 16, 8, 4, 2, 1, 1] {
            size.was_too_much(size.get());
            assert_eq!(size.get(), expected);
        }
        for expected in [2, 4, 8, 16, 32, 64, 128, 256, 512, 512] {
            let records = usize::try_from(size.get()).expect("a size");
            size.came(records, 1_000, Duration::ZERO);
            assert_eq!(size.get(), expected);
        }
        // A request from before that was known does not make it larger.
        size.was_too_much(8);
        size.was_too_much(64);
        assert_eq!(size.get(), 4);
        size.came(2, 1_000, Duration::ZERO);
        size.came(4, MAX_BULK_BYTES / 2, Duration::ZERO);
        size.came(4, 1_000, Duration::from_secs(1));
        assert_eq!(size.get(), 4);
    }
    #[test]
    fn what_was_made_small_grows_again_however_far_away_etcd_is() {
        let size = PageSize::new(Duration::from_secs(1));
        for _ in 0..9 {
            size.was_too_much(size.get());
        }
        for expected in [2, 4, 8] {
            let records = usize::try_from(size.get()).expect("a size");
            size.came(records, 1_000, Duration::from_millis(200));
            assert_eq!(size.get(), expected);
        }
    }
}
