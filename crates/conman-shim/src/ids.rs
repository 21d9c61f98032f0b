use std::collections::BTreeSet;

/// Ids that a container has: all that a 16-bit id can name.
pub const RANGE_SIZE: u32 = 65_536;

/// First id of the first range: beyond what adduser, systemd and subuid files give out.
const FIRST: u32 = 0x4000_0000;

/// First id of the one range that containers share whose layers' owners cannot be mapped.
pub const SHARED_IDS: u32 = FIRST - RANGE_SIZE;

/// Ranges below 2^31, beyond which some programs take an id for a negative number.
pub const RANGES: u32 = 16_384;

/// Ranges of user and group ids, each one container's as long as files of it may exist.
#[derive(Debug, Default)]
pub(crate) struct IdRanges {
    /// Given back, to be used before a new one.
    free: BTreeSet<u32>,
    /// Given out so far, counted from the first.
    used: u32,
}

impl IdRanges {
    /// The first id of a range that nobody has.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let slot = match self.free.pop_first() {
            Some(slot) => slot,
            None if self.used < RANGES => {
                self.used += 1;
                self.used - 1
            }
            None => return None,
        };
        Some(FIRST + slot * RANGE_SIZE)
    }

    /// Takes this one, which an earlier shim gave out. `false` when it is none or somebody's. The
    /// shared one is nobody's.
    pub(crate) fn reserve(&mut self, base: u32) -> bool {
        if base == SHARED_IDS {
            return true;
        }
        let Some(offset) = base.checked_sub(FIRST) else {
            return false;
        };
        let slot = offset / RANGE_SIZE;
        if offset % RANGE_SIZE != 0 || slot >= RANGES {
            return false;
        }
        if slot < self.used {
            return self.free.remove(&slot);
        }
        self.free.extend(self.used..slot);
        self.used = slot + 1;
        true
    }

    /// Takes it back, unless it is the shared one.
    pub(crate) fn give_back(&mut self, base: u32) {
        if base == SHARED_IDS {
            return;
        }
        let slot = base.saturating_sub(FIRST) / RANGE_SIZE;
        debug_assert!(slot < self.used, "{base} was never given out");
        self.free.insert(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_containers_share_a_range_and_ranges_come_back() {
        let mut ranges = IdRanges::default();
        let taken: Vec<u32> = std::iter::from_fn(|| ranges.take()).collect();
        assert_eq!(taken.len(), RANGES as usize);
        assert!(taken.windows(2).all(|pair| pair[1] - pair[0] == RANGE_SIZE));
        assert!(taken.iter().all(|base| {
            base.checked_add(RANGE_SIZE)
                .is_some_and(|end| end <= 1 << 31)
        }));
        ranges.give_back(taken[7]);
        assert_eq!(ranges.take(), Some(taken[7]));
        assert!(!taken.contains(&SHARED_IDS));
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
}
