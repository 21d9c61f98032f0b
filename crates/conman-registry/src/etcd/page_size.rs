//! How many records are asked for at a time. Most are small, and some as large as etcd takes: what was
//! too much, or did not come in time, is asked for again in parts, and the next ones like it.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use super::client::MAX_BULK_BYTES;

/// Of records of the size that specs have.
const MOST: i64 = 512;

/// Few enough for a first try with large ones.
const FIRST: i64 = 64;

/// The part of the time that an answer is waited for: one that comes within it bears twice as much.
/// What an election or an endpoint that hung has made small grows again by that, however far away
/// etcd is.
const SOON: u32 = 4;

#[derive(Debug)]
pub(super) struct PageSize {
    records: AtomicI64,
    soon: Duration,
}

impl PageSize {
    /// `patience` is how long an answer is waited for.
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            records: AtomicI64::new(FIRST),
            soon: patience / SOON,
        }
    }

    pub(super) fn get(&self) -> i64 {
        self.records.load(Ordering::Relaxed)
    }

    /// So many were too many.
    pub(super) fn was_too_much(&self, records: i64) {
        let half = (records / 2).max(1);
        self.records.fetch_min(half, Ordering::Relaxed);
    }

    /// So many have come.
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
        // What was asked for before that was known makes it no larger.
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
