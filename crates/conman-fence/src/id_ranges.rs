//! Assigns user and group ids to containers.

use std::collections::BTreeSet;

use conman_shim_protocol::{IdPool, LEAST_ID, RANGE_SIZE};

/// Ranges of user and group ids. A range belongs to one container as long as files of it may exist.
#[derive(Debug, Default)]
pub(crate) struct IdRanges {
    pool: IdPool,
    /// Ranges that were given back; used before new ones.
    free: BTreeSet<u32>,
    /// Ranges given out so far, counted from the first.
    used: u32,
}

impl IdRanges {
    pub(crate) fn new(pool: IdPool) -> Self {
        Self {
            pool,
            ..Self::default()
        }
    }

    /// Returns the first id of an unused range.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let slot = match self.free.pop_first() {
            Some(slot) => slot,
            None if self.used < self.pool.ranges() => {
                self.used += 1;
                self.used - 1
            }
            None => return None,
        };
        Some(self.pool.first() + slot * RANGE_SIZE)
    }

    /// How many ranges there are.
    pub(crate) fn all(&self) -> usize {
        usize::try_from(self.pool.ranges()).unwrap_or(usize::MAX)
    }

    /// How many of them are not given out.
    pub(crate) fn left(&self) -> usize {
        let used = usize::try_from(self.used).unwrap_or(usize::MAX);
        self.all().saturating_sub(used) + self.free.len()
    }

    /// Reserves a range that an earlier shim gave out. `false` when it is no valid range, or another
    /// container has it. The shared range, and ranges of an earlier configuration's pool, are not tracked.
    pub(crate) fn reserve(&mut self, base: u32) -> bool {
        if base < LEAST_ID || !base.is_multiple_of(RANGE_SIZE) || base > u32::MAX - RANGE_SIZE {
            return false;
        }
        let Some(slot) = self.pool.slot(base) else {
            return true;
        };
        if slot < self.used {
            return self.free.remove(&slot);
        }
        self.free.extend(self.used..slot);
        self.used = slot + 1;
        true
    }

    /// Gives a range back, if it is one of the pool's.
    pub(crate) fn give_back(&mut self, base: u32) {
        if let Some(slot) = self.pool.slot(base) {
            debug_assert!(slot < self.used, "{base} was never given out");
            self.free.insert(slot);
        }
    }
}

#[cfg(test)]
mod tests {

    use conman_shim_protocol::SHARED_IDS;

    use super::*;

    const FIRST: u32 = 0x8000_0000;

    #[test]
    fn no_two_containers_share_a_range_and_ranges_come_back() {
        let pool: IdPool = "2147483648-2148007935".parse().expect("eight ranges");
        let mut ranges = IdRanges::new(pool);
        let taken: Vec<u32> = std::iter::from_fn(|| ranges.take()).collect();
        assert_eq!(taken.len(), 8);
        assert!(taken.windows(2).all(|pair| pair[1] - pair[0] == RANGE_SIZE));
        assert_eq!((ranges.all(), ranges.left()), (8, 0));
        ranges.give_back(taken[7]);
        assert_eq!(ranges.left(), 1);
        assert_eq!(ranges.take(), Some(taken[7]));
        ranges.give_back(SHARED_IDS);
        assert_eq!(ranges.take(), None);
    }

    #[test]
    fn a_range_that_an_earlier_shim_gave_out_is_not_given_out_again() {
        let mut ranges = IdRanges::default();
        assert!(ranges.reserve(FIRST + 2 * RANGE_SIZE));
        assert!(ranges.reserve(FIRST));
        assert!(!ranges.reserve(FIRST), "twice");
        assert!(ranges.reserve(SHARED_IDS) && ranges.reserve(SHARED_IDS));
        assert!(!ranges.reserve(FIRST + 1) && !ranges.reserve(7) && !ranges.reserve(u32::MAX));
        assert_eq!(ranges.take(), Some(FIRST + RANGE_SIZE));
        assert_eq!(ranges.take(), Some(FIRST + 3 * RANGE_SIZE));
        ranges.give_back(FIRST + 2 * RANGE_SIZE);
        assert_eq!(ranges.take(), Some(FIRST + 2 * RANGE_SIZE));
    }

    #[test]
    fn a_container_keeps_its_range_when_the_pool_has_become_another_one() {
        let mut ranges = IdRanges::new("1073741824-1073872895".parse().expect("two ranges"));
        let before = FIRST + 5 * RANGE_SIZE;
        assert!(ranges.reserve(before));
        assert_eq!(ranges.take(), Some(LEAST_ID));
        ranges.give_back(before);
        assert_eq!(ranges.take(), Some(LEAST_ID + RANGE_SIZE));
        assert_eq!(ranges.take(), None);
    }
}
