//! The user and group ids of the host that containers get.

use std::fmt;
use std::str::FromStr;

/// Ids of one container: all 16-bit ids.
pub const RANGE_SIZE: u32 = 65_536;

/// Lowest first id of a pool: above those that adduser and subuid files assign.
pub const LEAST_ID: u32 = 0x4000_0000;

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
    pub fn all_ranges() -> impl Iterator<Item = Self> {
        let bases = (LEAST_ID..u32::MAX - RANGE_SIZE).step_by(RANGE_SIZE as usize);
        let ranges = bases.map(|first| Self { first, ranges: 1 });
        ranges.filter(|range| !range.overlaps(SHARED_IDS))
    }

    /// Its first id.
    #[must_use]
    pub fn first(&self) -> u32 {
        self.first
    }

    /// How many ids it has.
    #[must_use]
    pub fn ids(&self) -> u64 {
        u64::from(self.ranges) * u64::from(RANGE_SIZE)
    }

    /// Adds a pool that begins where this one ends; `false` if it does not.
    pub fn append(&mut self, next: Self) -> bool {
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
    #[must_use]
    pub fn slot(&self, base: u32) -> Option<u32> {
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
        if first < LEAST_ID || end <= first {
            return Err(format!("must hold ids, from {LEAST_ID} on"));
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

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u32 = 0x8000_0000;

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
