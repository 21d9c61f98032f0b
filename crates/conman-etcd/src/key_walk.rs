//! Where each read of many records ends.
//!
//! etcd counts all records of a range, those beyond the limit of a read included. Reads that all end where the last
//! record does take etcd the square of the number of records together. So each read has an end of its own: it returns
//! what begins with the same bytes as its first key, with as many of them as leave little more than a page.

use super::wire::behind;

/// A read returned its limit, and so many times that may be left of its range before the next one is narrower.
const MOST_LIMITS: usize = 8;
/// Ranges that hold less than this part of a limit are followed by wider ones.
const LEAST_PART: usize = 4;
/// Limits below this one count as this one: nearly all ranges would be too wide or too narrow for them.
const LEAST_LIMIT: usize = 64;

/// The reads of all keys below one, in their order.
#[derive(Debug, Clone)]
pub struct KeyWalk {
    /// The first key of the next read.
    from: Vec<u8>,
    /// Behind all keys.
    end: Vec<u8>,
    /// Bytes of the key that `end` belongs to.
    parent_bytes: usize,
    /// Bytes that the keys of the next read share.
    shared_bytes: usize,
    /// Keys of its range that were read before.
    read: usize,
    /// By how many bytes the next range is wider if this one holds nothing.
    step: usize,
    is_done: bool,
}

impl KeyWalk {
    /// Reads what is below `parent`, from the key `from` on. `shared_bytes`: where another walk came to, or 0.
    #[must_use]
    pub fn new(from: Vec<u8>, parent: &[u8], shared_bytes: usize) -> Self {
        Self {
            from,
            end: behind(parent),
            parent_bytes: parent.len(),
            shared_bytes: shared_bytes.max(parent.len()),
            read: 0,
            step: 1,
            is_done: false,
        }
    }

    /// The first key of the next read, and the first one behind it; `None`: all is read.
    #[must_use]
    pub fn range(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        (!self.is_done).then(|| (self.from.clone(), self.range_end()))
    }

    #[must_use]
    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// For [`Self::new`].
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Goes on behind what the read of [`Self::range`] with this limit returned: its first and last key, how many, and
    /// how many etcd counted in the range.
    pub fn advance(
        &mut self,
        keys: Option<(&[u8], &[u8])>,
        returned: usize,
        counted: usize,
        limit: usize,
    ) {
        let limit = limit.max(LEAST_LIMIT);
        let range_end = self.range_end();
        self.read += returned;
        if self.read > 0 {
            self.step = 1;
        }
        match keys {
            Some((first, last)) if counted > returned => {
                self.from = [last, b"\0"].concat();
                if counted > limit.saturating_mul(MOST_LIMITS) {
                    let same = first.iter().zip(last).take_while(|(a, b)| a == b);
                    self.shared_bytes = same.count().max(self.shared_bytes) + 1;
                    self.read = 0;
                }
            }
            _ => {
                // The rest of what begins with these bytes may be little without meaning anything.
                let is_whole = self.from.len() <= self.shared_bytes;
                if is_whole && self.read < limit / LEAST_PART {
                    let wider = self.shared_bytes.saturating_sub(self.step);
                    self.shared_bytes = wider.max(self.parent_bytes);
                    self.step = if self.read == 0 { self.step * 2 } else { 1 };
                }
                self.from = range_end;
                self.is_done = self.from == self.end;
                self.read = 0;
            }
        }
    }

    fn range_end(&self) -> Vec<u8> {
        let shared = self.shared_bytes.min(self.from.len());
        behind(&self.from[..shared])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::ops::Bound;

    use super::*;

    const PARENT: &[u8] = b"/conman/session/";
    const LIMIT: usize = 128;

    /// Walks through a store; returns what was read, the number of reads, and the keys that they counted.
    fn walk(keys: &BTreeSet<Vec<u8>>) -> (Vec<Vec<u8>>, usize, usize) {
        walk_by(LIMIT, keys)
    }

    fn walk_by(limit: usize, keys: &BTreeSet<Vec<u8>>) -> (Vec<Vec<u8>>, usize, usize) {
        let mut walk = KeyWalk::new(PARENT.to_vec(), PARENT, 0);
        let (mut all, mut reads, mut counted) = (Vec::new(), 0, 0);
        while let Some((from, end)) = walk.range() {
            assert!(from < end, "{from:?} {end:?}");
            let range = (Bound::Included(from), Bound::Excluded(end));
            let found: Vec<_> = keys.range(range).cloned().collect();
            let page = &found[..found.len().min(limit)];
            let ends = page.first().zip(page.last());
            let ends = ends.map(|(first, last)| (first.as_slice(), last.as_slice()));
            walk.advance(ends, page.len(), found.len(), limit);
            all.extend_from_slice(page);
            (reads, counted) = (reads + 1, counted + found.len());
            assert!(reads < 100_000, "it does not end");
        }
        (all, reads, counted)
    }

    fn keys(names: impl Iterator<Item = String>) -> BTreeSet<Vec<u8>> {
        names
            .map(|name| [PARENT, name.as_bytes()].concat())
            .collect()
    }

    /// Numbers without an order, as many names have.
    fn mixed(number: u64) -> u64 {
        (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }

    #[test]
    fn all_keys_are_read_once_in_their_order_by_reads_that_count_few_others() {
        const COUNT: u64 = 20_000;
        let long = "a-fleet-of-notebooks-of-a-university-";
        let shapes: [(&str, BTreeSet<Vec<u8>>); 5] = [
            ("numbers", keys((0..COUNT).map(|n| format!("s{n}")))),
            (
                "numbers behind a long name",
                keys((0..COUNT).map(|n| format!("{long}{n:08}"))),
            ),
            (
                "random",
                keys((0..COUNT).map(|n| format!("{:016x}", mixed(n)))),
            ),
            (
                "random behind long names",
                keys((0..COUNT).map(|n| format!("{}{long}{:x}", n % 37, mixed(n)))),
            ),
            (
                "some apart from many",
                keys((0..COUNT).map(|n| match n % 1_000 {
                    0 => format!("{:x}", mixed(n)),
                    _ => format!("room-{n}"),
                })),
            ),
        ];
        for (shape, keys) in shapes {
            let (all, reads, counted) = walk(&keys);
            assert!(all.iter().eq(keys.iter()), "{shape}");
            // Without ends of their own, they count eighty times as many.
            assert!(
                counted < 24 * keys.len(),
                "{shape}: {counted} in {reads} reads"
            );
            assert!(reads < 6 * keys.len() / LIMIT, "{shape}: {reads} reads");
        }
    }

    #[test]
    fn few_keys_take_one_read_and_names_of_any_shape_are_read() {
        let mut few = keys(["a", "a-b", "zz", "\u{7f}"].into_iter().map(str::to_owned));
        few.insert([PARENT, &[0xff, 0xff]].concat());
        few.insert(PARENT.to_vec());
        let (all, reads, _) = walk(&few);
        assert!(all.iter().eq(few.iter()));
        assert_eq!(reads, 1);
        assert_eq!(walk(&BTreeSet::new()), (Vec::new(), 1, 0));
        let lengths = keys((0..5_000).map(|n| "a".repeat(1 + n % 60) + &n.to_string()));
        assert!(walk(&lengths).0.iter().eq(lengths.iter()));
    }

    #[test]
    fn small_limits_take_few_more_reads_than_records() {
        const COUNT: u64 = 2_000;
        let all = keys((0..COUNT).map(|n| format!("{:016x}", mixed(n))));
        for limit in [1, 2, 3] {
            let (read, reads, _) = walk_by(limit, &all);
            assert!(read.iter().eq(all.iter()), "{limit}");
            let least = all.len() / limit;
            assert!(reads < least + least / 2 + 64, "{limit}: {reads} reads");
        }
    }

    #[test]
    fn a_walk_goes_on_where_another_one_ended() {
        let parent = b"/p/";
        let walk = KeyWalk::new(b"/p/room-17\0".to_vec(), parent, 8);
        assert_eq!(
            walk.range(),
            Some((b"/p/room-17\0".to_vec(), b"/p/room.".to_vec()))
        );
        assert!(!walk.is_done());
    }
}
