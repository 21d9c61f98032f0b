//! What a session can make the host hold, and make it clean up: each kind of it in a session of its own.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::world::{MEMORY_BYTES, Verdict, World, line_with};

/// The kinds of `BURDENS` in `inside.py`.
const KINDS: [&str; 12] = [
    "sockets",
    "timers",
    "triggers",
    "files",
    "watches",
    "nests",
    "connections",
    "mappings",
    "filters",
    "pipes",
    "terminals",
    "nulls",
];

/// Longest death of a session with a burden, from the order to the release.
const DEATH: Duration = Duration::from_millis(300);

/// The same in multiples of an idle session's, for a machine that is busy.
const DEATH_FACTOR: u32 = 4;

/// Longest wait for what the kernel frees after a death.
const SETTLED: Duration = Duration::from_secs(2);

/// Least memory of an open file in bytes: as many of them are explained by a session's memory.
const FILE_BYTES: u64 = 192;

/// Pages of the whole memory limit.
const PAGES: u64 = MEMORY_BYTES / 4_096;

/// Starts a session with this burden. Returns its id and how much it took.
async fn burdened(world: &World, kind: &str) -> (String, String) {
    let mut spec = world.spec(&["burden", kind]);
    spec["cpus"] = serde_json::json!(1.0);
    let id = world.id(kind);
    let log = world.start_until(&id, &spec, "burdened").await;
    (id, line_with(&log, "burdened").to_owned())
}

/// Where the processes of a dying session wait in the kernel, sampled until the end is reported.
fn watch_wait(pids: Vec<i32>, over: &Arc<AtomicBool>) -> tokio::task::JoinHandle<String> {
    let over = Arc::clone(over);
    tokio::spawn(async move {
        let mut places: BTreeMap<String, u32> = BTreeMap::new();
        while !over.load(Ordering::Relaxed) {
            for pid in &pids {
                let stack = fs::read_to_string(format!("/proc/{pid}/stack")).unwrap_or_default();
                if let Some(place) = stack.lines().next() {
                    *places.entry(place.to_owned()).or_default() += 1;
                }
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let most = places.into_iter().max_by_key(|(_, times)| *times);
        most.map_or_else(|| "nowhere".to_owned(), |(place, _)| place)
    })
}

async fn death(world: &World, id: &str) -> (Duration, String) {
    let pids = world.processes(id).iter().map(|one| one.pid).collect();
    let over = Arc::new(AtomicBool::new(false));
    let watch = watch_wait(pids, &over);
    let begun = Instant::now();
    world.stop(id).await;
    let took = begun.elapsed();
    over.store(true, Ordering::Relaxed);
    (took, watch.await.unwrap_or_default())
}

/// A session with much to clean up dies as fast as one without.
pub(crate) async fn long_deaths(world: &World) -> Verdict {
    let (id, _) = world
        .helper("idle", &["show_first_descriptors"], "descriptors")
        .await;
    let (idle, _) = death(world, &id).await;
    let bound = DEATH.max(idle * DEATH_FACTOR);
    let (mut slow, mut all) = (Vec::new(), Vec::new());
    for kind in KINDS {
        let (id, taken) = burdened(world, kind).await;
        let (took, place) = death(world, &id).await;
        let line = format!("{kind} ({taken}): {took:.0?}");
        if took > bound {
            slow.push(format!("{line} in {place}"));
        }
        all.push(line);
    }
    if slow.is_empty() {
        return Verdict::Held(format!("idle: {idle:.0?}; {}", all.join("; ")));
    }
    Verdict::Reached(format!("bound {bound:.0?}; {}", slow.join("; ")))
}

/// One counter of the host, and what a session's limits explain of it.
struct Counter {
    name: &'static str,
    read: fn() -> Option<u64>,
    explained: u64,
}

fn number_in(path: &str, field: usize) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.split_whitespace().nth(field)?.parse().ok()
}

/// The number after `name` in a line that begins with `line`.
fn named(path: &str, line: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let found = text.lines().find(|one| one.starts_with(line))?;
    let mut words = found.split_whitespace().skip_while(|word| *word != name);
    words.nth(1)?.parse().ok()
}

/// Objects of a cache of the kernel.
fn slab(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/slabinfo").ok()?;
    let found = text
        .lines()
        .find(|one| one.split_whitespace().next() == Some(name))?;
    found.split_whitespace().nth(1)?.parse().ok()
}

fn lines(path: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    u64::try_from(text.lines().count()).ok()
}

/// Programs that the kernel has compiled or loaded: for filters of sockets and of system calls.
fn programs() -> Option<u64> {
    let text = fs::read_to_string("/proc/vmallocinfo").ok()?;
    let count = text
        .lines()
        .filter(|line| line.contains("bpf_prog_alloc"))
        .count();
    u64::try_from(count).ok()
}

/// What the session's 64 processes, its memory, and 4,096 signals and timers explain.
const COUNTERS: [Counter; 20] = [
    Counter {
        name: "compiled programs",
        read: programs,
        explained: 64,
    },
    Counter {
        name: "open files",
        read: || number_in("/proc/sys/fs/file-nr", 0),
        explained: MEMORY_BYTES / FILE_BYTES,
    },
    Counter {
        name: "inodes",
        read: || number_in("/proc/sys/fs/inode-nr", 0),
        explained: 100_000,
    },
    Counter {
        name: "asynchronous requests",
        read: || number_in("/proc/sys/fs/aio-nr", 0),
        explained: 0,
    },
    Counter {
        name: "terminals",
        read: || number_in("/proc/sys/kernel/pty/nr", 0),
        explained: 16,
    },
    Counter {
        name: "keys of root",
        read: || lines("/proc/keys"),
        explained: 16,
    },
    Counter {
        name: "huge pages reserved",
        read: || named("/proc/meminfo", "HugePages_Rsvd", "HugePages_Rsvd:"),
        explained: 0,
    },
    Counter {
        name: "TCP sockets",
        read: || named("/proc/net/sockstat", "TCP:", "alloc"),
        explained: 65_536,
    },
    Counter {
        name: "pages of TCP",
        read: || named("/proc/net/sockstat", "TCP:", "mem"),
        explained: PAGES,
    },
    Counter {
        name: "orphaned sockets",
        read: || named("/proc/net/sockstat", "TCP:", "orphan"),
        explained: 256,
    },
    Counter {
        name: "pages of UDP",
        read: || named("/proc/net/sockstat", "UDP:", "mem"),
        explained: PAGES,
    },
    Counter {
        name: "neighbours",
        read: || lines("/proc/net/arp"),
        explained: 16,
    },
    Counter {
        name: "tracked connections",
        read: || number_in("/proc/sys/net/netfilter/nf_conntrack_count", 0),
        explained: 4_096,
    },
    Counter {
        name: "mounts",
        read: || lines("/proc/1/mountinfo"),
        explained: 8,
    },
    Counter {
        name: "kibibytes of unreclaimable slabs",
        read: || named("/proc/meminfo", "SUnreclaim:", "SUnreclaim:"),
        explained: MEMORY_BYTES / 1_024,
    },
    Counter {
        name: "kibibytes of kernel stacks",
        read: || named("/proc/meminfo", "KernelStack:", "KernelStack:"),
        explained: 8_192,
    },
    Counter {
        name: "kibibytes of memory for each processor",
        read: || named("/proc/meminfo", "Percpu:", "Percpu:"),
        explained: 16_384,
    },
    Counter {
        name: "locks",
        read: || lines("/proc/locks"),
        explained: 256,
    },
    Counter {
        name: "inotify marks",
        read: || slab("inotify_inode_mark"),
        explained: 65_536,
    },
    Counter {
        name: "epoll items",
        read: || slab("eventpoll_epi"),
        explained: MEMORY_BYTES / 128,
    },
];

fn sample() -> Vec<Option<u64>> {
    COUNTERS.iter().map(|counter| (counter.read)()).collect()
}

/// How much each counter moves at most within this time.
async fn noise(time: Duration) -> Vec<u64> {
    let first = sample();
    let mut most = vec![0; COUNTERS.len()];
    let end = Instant::now() + time;
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(100)).await;
        for ((most, now), first) in most.iter_mut().zip(sample()).zip(&first) {
            *most = now
                .unwrap_or_default()
                .abs_diff(first.unwrap_or_default())
                .max(*most);
        }
    }
    most
}

/// The counters that are above these by more than is explained.
fn beyond(before: &[Option<u64>], noise: &[u64], explained: bool) -> Vec<String> {
    let moved = COUNTERS.iter().zip(sample()).zip(before).zip(noise);
    moved
        .filter_map(|(((counter, now), before), noise)| {
            let more = now?.saturating_sub((*before)?);
            let allowed = 2 * noise + counter.explained / if explained { 1 } else { 16 };
            let name = counter.name;
            (more > allowed).then(|| format!("{name}: {more} more, {allowed} explained"))
        })
        .collect()
}

/// No counter of the host moves by more than a session's limits explain, and all return after its death.
pub(crate) async fn shared_pools(world: &World) -> Verdict {
    let noise = noise(Duration::from_secs(2)).await;
    let mut found = Vec::new();
    for kind in KINDS {
        let before = sample();
        let (id, taken) = burdened(world, kind).await;
        let during = beyond(&before, &noise, true);
        world.stop(&id).await;
        let settled = crate::world::wait_for(SETTLED, async || {
            beyond(&before, &noise, false).is_empty().then_some(())
        });
        let after = match settled.await {
            Some(()) => Vec::new(),
            None => beyond(&before, &noise, false),
        };
        found.extend(
            during
                .into_iter()
                .map(|what| format!("{kind} ({taken}): {what}")),
        );
        found.extend(
            after
                .into_iter()
                .map(|what| format!("{kind}, after its death: {what}")),
        );
    }
    let counters = COUNTERS
        .iter()
        .filter(|counter| (counter.read)().is_some())
        .count();
    if found.is_empty() {
        return Verdict::Held(format!(
            "{counters} counters moved within what limits explain"
        ));
    }
    Verdict::Reached(found.join("; "))
}
