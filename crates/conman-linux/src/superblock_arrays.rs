//! The arrays over all superblocks that each memory cgroup has.

use std::io;

use crate::cgroup_limits::CgroupLimits;
use crate::cgroup_mounts::CgroupLayout;
use crate::cgroups::Cgroups;
use crate::session_cgroup::CgroupMaker;

/// Superblocks of a part of an array, `SHRINKER_UNIT_BITS` (include/linux/shrinker.h): Linux 6.7 and later.
const PART_SUPERBLOCKS: u64 = 64;
/// What a part of 520 bytes takes.
const PART_BYTES: u64 = 1_024;
/// The kernel's caches for such parts, `kmalloc-1k` or several of similar names, begin and end so.
const CACHES: (&str, &str) = ("kmalloc-", "-1k");

/// Cgroups that are created to see what they take, and how often: other programs use the same caches.
const CGROUPS: u64 = 8;
const ROUNDS: usize = 5;
/// A limit for them, so that they are created where memory is accounted; they never have a process.
const MEMORY_BYTES: u64 = 1 << 20;

/// The array over all superblocks that each memory cgroup has: as long as there were ever superblocks at once since
/// the boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuperblockArray {
    /// About the most superblocks that there were at once.
    pub superblocks: u64,
    /// Kernel memory of the array, for each memory cgroup.
    pub bytes: u64,
}

impl SuperblockArray {
    /// Measures it: creates some memory cgroups and counts the objects that the kernel adds for them, since it reports
    /// the number nowhere. `None` where it cannot be seen so, as before Linux 6.7. Needs root; takes milliseconds.
    pub fn measure() -> io::Result<Option<Self>> {
        let layout = CgroupLayout::detect()?;
        let (maker, cgroups) = (CgroupMaker::of(&layout), Cgroups::of(&layout));
        let top = format!("/conman-measure-{}", std::process::id());
        // The first one makes those above it, too. All are removed at the end: what the kernel frees a while after a
        // removal would disturb the next round.
        let first = make(&maker, &format!("{top}/first"));
        let rounds = first.and_then(|()| {
            let round = |round| parts(&maker, &format!("{top}/{round}"));
            (0..ROUNDS).map(round).collect::<io::Result<Vec<u64>>>()
        });
        let _ = cgroups.remove_tree(&top);
        Ok(Self::from_rounds(&rounds?, memory_nodes()))
    }

    /// The most of the rounds: what other programs free meanwhile hides a part, in some more than in others.
    fn from_rounds(parts: &[u64], nodes: u64) -> Option<Self> {
        let parts = parts.iter().copied().max().filter(|parts| *parts > 1)?;
        Some(Self {
            superblocks: parts / nodes * PART_SUPERBLOCKS,
            bytes: parts * PART_BYTES,
        })
    }
}

/// The number of parts that the kernel adds for one memory cgroup.
fn parts(maker: &CgroupMaker, prefix: &str) -> io::Result<u64> {
    let before = objects()?;
    for number in 0..CGROUPS {
        make(maker, &format!("{prefix}-{number}"))?;
    }
    Ok(objects()?.saturating_sub(before) / CGROUPS)
}

fn make(maker: &CgroupMaker, path: &str) -> io::Result<()> {
    let limits = CgroupLimits {
        memory_bytes: Some(MEMORY_BYTES),
        ..CgroupLimits::default()
    };
    let made = maker
        .begin(path)
        .and_then(|mut cgroup| maker.limit(&mut cgroup, &limits));
    made.map_err(io::Error::other)
}

/// Objects in the caches for parts.
fn objects() -> io::Result<u64> {
    Ok(count_objects(&std::fs::read_to_string("/proc/slabinfo")?))
}

/// Rows are `name active_objects …`.
fn count_objects(slabinfo: &str) -> u64 {
    let rows = slabinfo.lines().filter_map(|row| {
        let mut fields = row.split_ascii_whitespace();
        let name = fields.next()?;
        let counted = name.starts_with(CACHES.0) && name.ends_with(CACHES.1);
        counted.then(|| fields.next()?.parse::<u64>().ok())?
    });
    rows.sum()
}

/// Nodes of memory (NUMA): each has a part of its own.
fn memory_nodes() -> u64 {
    let possible = std::fs::read_to_string("/sys/devices/system/node/possible");
    last_node(&possible.unwrap_or_default()) + 1
}

/// The last of a list such as `0-3`.
fn last_node(list: &str) -> u64 {
    let last = list.trim().rsplit([',', '-']).next();
    last.and_then(|last| last.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_of_all_caches_for_parts_are_counted() {
        let text = "slabinfo - version: 2.1\n# name <active_objs> <num_objs>\n\
            kmalloc-cg-1k 5 16 1024\ndma-kmalloc-1k 7 16 1024\nkmalloc-11k 9 16 1\n\
            kmalloc-1k 91433 91696 1024 16 4\nkmalloc-rnd-03-1k 10 16 1024\n";
        assert_eq!(count_objects(text), 91_448);
        assert_eq!(count_objects("kmalloc-1k many\n"), 0);
    }

    #[test]
    fn a_part_stands_for_its_superblocks_on_every_node_of_memory() {
        let array = |parts: [u64; 3], nodes| SuperblockArray::from_rounds(&parts, nodes);
        let found = array([140, 191, 3], 1).expect("parts");
        assert_eq!((found.superblocks, found.bytes), (12_224, 195_584));
        let found = array([382, 382, 382], 2).expect("parts");
        assert_eq!((found.superblocks, found.bytes), (12_224, 391_168));
        // A kernel that has no such parts.
        assert_eq!(array([1, 0, 1], 1), None);
        assert_eq!(["0\n", "0-3\n", "", "0,2-7"].map(last_node), [0, 3, 0, 7]);
    }
}
