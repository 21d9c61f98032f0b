//! Assigns user and group ids to containers.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Ids of one container: all 16-bit ids.
pub const RANGE_SIZE: u32 = 65_536;

/// Lowest first id of a pool: above those that adduser and subuid files assign.
const LEAST: u32 = 0x4000_0000;

/// First id of the range that all containers share whose layers' owners cannot be mapped. In no pool.
pub const SHARED_IDS: u32 = 0x7fff_0000;

/// The host's user and group ids that containers get, as ranges of [`RANGE_SIZE`].
///
/// Its text form is `FIRST-LAST`, both in decimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdPool {
    first: u32,
    ranges: u32,
}

impl Default for IdPool {
    /// 16,384 ranges from 2^31, which systemd gives to nothing (its documentation lists the ids of
    /// systemd-nspawn below that).
    fn default() -> Self {
        Self {
            first: 0x8000_0000,
            ranges: 16_384,
        }
    }
}

impl IdPool {
    /// Maximum number of concurrent containers with ids from it.
    #[must_use]
    pub fn ranges(&self) -> u32 {
        self.ranges
    }

    /// Every single range that a pool may have, by its first id.
    pub(crate) fn all_ranges() -> impl Iterator<Item = Self> {
        let bases = (LEAST..u32::MAX - RANGE_SIZE).step_by(RANGE_SIZE as usize);
        let ranges = bases.map(|first| Self { first, ranges: 1 });
        ranges.filter(|range| !range.overlaps(SHARED_IDS))
    }

    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    /// How many ids it has.
    pub(crate) fn ids(&self) -> u64 {
        u64::from(self.ranges) * u64::from(RANGE_SIZE)
    }

    /// Adds a pool that begins where this one ends; `false` if it does not.
    pub(crate) fn append(&mut self, next: Self) -> bool {
        let is_next = u64::from(self.first) + self.ids() == u64::from(next.first);
        if is_next {
            self.ranges += next.ranges;
        }
        is_next
    }

    /// Whether one of the [`RANGE_SIZE`] ids from `first` is in it.
    #[must_use]
    pub fn overlaps(&self, first: u32) -> bool {
        let (first, own) = (u64::from(first), u64::from(self.first));
        first < own + self.ids() && own < first + u64::from(RANGE_SIZE)
    }

    /// Returns the index of the range that begins with this id.
    fn slot(&self, base: u32) -> Option<u32> {
        let slot = base.checked_sub(self.first)? / RANGE_SIZE;
        (slot < self.ranges).then_some(slot)
    }
}

impl FromStr for IdPool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rule = "must be FIRST-LAST, for example \"2147483648-3221225471\"";
        let (first, last) = text.split_once('-').ok_or(rule)?;
        let first: u32 = first.parse().map_err(|_| rule)?;
        let end: u32 = last.parse().map_err(|_| rule)?;
        // The highest id means "none".
        let end = end.checked_add(1).ok_or("must end below 4294967295")?;
        if !first.is_multiple_of(RANGE_SIZE) || !end.is_multiple_of(RANGE_SIZE) {
            return Err(format!(
                "must begin at a multiple of {RANGE_SIZE} and end just before one"
            ));
        }
        if first < LEAST || end <= first {
            return Err(format!("must hold ids, from {LEAST} on"));
        }
        let pool = Self {
            first,
            ranges: (end - first) / RANGE_SIZE,
        };
        if pool.overlaps(SHARED_IDS) {
            return Err(format!(
                "must not hold the {RANGE_SIZE} ids from {SHARED_IDS}, which older kernels need"
            ));
        }
        Ok(pool)
    }
}

impl fmt::Display for IdPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = u64::from(self.first) + self.ids() - 1;
        write!(formatter, "{}-{last}", self.first)
    }
}

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
            None if self.used < self.pool.ranges => {
                self.used += 1;
                self.used - 1
            }
            None => return None,
        };
        Some(self.pool.first + slot * RANGE_SIZE)
    }

    /// Reserves a range that an earlier shim gave out. `false` when it is no valid range, or another
    /// container has it. The shared range, and ranges of an earlier configuration's pool, are not tracked.
    pub(crate) fn reserve(&mut self, base: u32) -> bool {
        if base < LEAST || !base.is_multiple_of(RANGE_SIZE) || base > u32::MAX - RANGE_SIZE {
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
    use super::*;

    const FIRST: u32 = 0x8000_0000;

    #[test]
    fn no_two_containers_share_a_range_and_ranges_come_back() {
        let pool: IdPool = "2147483648-2148007935".parse().expect("eight ranges");
        let mut ranges = IdRanges::new(pool);
        let taken: Vec<u32> = std::iter::from_fn(|| ranges.take()).collect();
        assert_eq!(taken.len(), 8);
        assert!(taken.windows(2).all(|pair| pair[1] - pair[0] == RANGE_SIZE));
        ranges.give_back(taken[7]);
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
        assert_eq!(ranges.take(), Some(LEAST));
        ranges.give_back(before);
        assert_eq!(ranges.take(), Some(LEAST + RANGE_SIZE));
        assert_eq!(ranges.take(), None);
    }

    #[test]
    fn a_pool_is_of_whole_ranges_that_nothing_else_has() {
        let default = IdPool::default();
        assert_eq!(default.to_string(), "2147483648-3221225471");
        assert_eq!(default.to_string().parse(), Ok(default));
        assert!(default.overlaps(FIRST) && !default.overlaps(SHARED_IDS));
        assert!(default.overlaps(FIRST - 1) && !default.overlaps(0xc000_0000));
        for text in [
            "",
            "2147483648",
            "2147483648-",
            "2147483649-2147549184",
            "2147483648-2147549184",
            "0-65535",
            "2147483648-2147483647",
            "4294901760-4294967295",
            "1073741824-2147483647",
        ] {
            assert!(text.parse::<IdPool>().is_err(), "{text}");
        }
    }
}
