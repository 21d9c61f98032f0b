//! Counters of what all sessions of a host share: their noise, and what moves beyond it.

use std::fs;
use std::time::Duration;

use crate::world::{MEMORY_BYTES, wait_for};

/// Pages and kibibytes of a session's whole memory limit.
const PAGES: u64 = MEMORY_BYTES / 4_096;
const KIBIBYTES: u64 = MEMORY_BYTES / 1_024;

/// Least memory of an open file in bytes: as many of them are explained by a session's memory.
const FILE_BYTES: u64 = 192;

/// Longest wait for what the kernel frees after a death.
const SETTLED: Duration = Duration::from_secs(5);

/// One counter of the host.
struct Counter {
    name: &'static str,
    read: fn() -> Option<u64>,
    /// What a session's 64 processes, its memory, and 4,096 signals and timers explain.
    explained: u64,
}

const fn counter(name: &'static str, read: fn() -> Option<u64>, explained: u64) -> Counter {
    Counter {
        name,
        read,
        explained,
    }
}

/// The values of all counters at one time.
pub(crate) type Values = Vec<Option<u64>>;

#[rustfmt::skip]
static COUNTERS: &[Counter] = &[
    counter("compiled programs", programs, 64),
    counter("open files", || number_in("/proc/sys/fs/file-nr", 0), MEMORY_BYTES / FILE_BYTES),
    counter("inodes", || number_in("/proc/sys/fs/inode-nr", 0), 100_000),
    counter("asynchronous requests", || number_in("/proc/sys/fs/aio-nr", 0), 0),
    counter("terminals", || number_in("/proc/sys/kernel/pty/nr", 0), 16),
    counter("keys of root", || lines("/proc/keys"), 16),
    counter("locks", || lines("/proc/locks"), 256),
    counter("mounts", || lines("/proc/1/mountinfo"), 16),
    counter("tasks", tasks, 512),
    counter("memory cgroups", || named("/proc/cgroups", "memory", 2), 256),
    counter("network namespaces", || slab("net_namespace"), 256),
    counter("huge pages reserved", || named("/proc/meminfo", "HugePages_Rsvd:", 1), 0),
    counter("kibibytes of unreclaimable slabs", || named("/proc/meminfo", "SUnreclaim:", 1), KIBIBYTES),
    counter("kibibytes of kernel stacks", || named("/proc/meminfo", "KernelStack:", 1), 8_192),
    counter("kibibytes of page tables", || named("/proc/meminfo", "PageTables:", 1), KIBIBYTES),
    counter("kibibytes for each processor", || named("/proc/meminfo", "Percpu:", 1), 65_536),
    counter("kibibytes of the kernel's mappings", || named("/proc/meminfo", "VmallocUsed:", 1), KIBIBYTES),
    counter("kibibytes of shared memory", || named("/proc/meminfo", "Shmem:", 1), KIBIBYTES),
    counter("kibibytes of locked memory", || named("/proc/meminfo", "Mlocked:", 1), KIBIBYTES),
    counter("TCP sockets", || named("/proc/net/sockstat", "TCP:", 8), 65_536),
    counter("pages of TCP", || named("/proc/net/sockstat", "TCP:", 10), PAGES),
    counter("orphaned sockets", || named("/proc/net/sockstat", "TCP:", 4), 256),
    counter("pages of UDP", || named("/proc/net/sockstat", "UDP:", 4), PAGES),
    counter("neighbours", || lines("/proc/net/arp"), 16),
    // Entries outlive their connections by two minutes.
    counter("tracked connections", || number_in("/proc/sys/net/netfilter/nf_conntrack_count", 0), 262_144),
    counter("inotify marks", || slab("inotify_inode_mark"), 65_536),
    counter("epoll items", || slab("eventpoll_epi"), MEMORY_BYTES / 128),
    counter("queued signals", || slab("sigqueue"), 8_192),
    counter("timers", || slab("posix_timers_cache"), 8_192),
];

fn number_in(path: &str, field: usize) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.split_whitespace().nth(field)?.parse().ok()
}

/// A field of the line whose first field is `line`.
fn named(path: &str, line: &str, field: usize) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let mut lines = text.lines().map(str::split_whitespace);
    let mut found = lines.find(|words| words.clone().next() == Some(line))?;
    found.nth(field)?.parse().ok()
}

/// Objects of a cache of the kernel.
fn slab(name: &str) -> Option<u64> {
    named("/proc/slabinfo", name, 1)
}

fn lines(path: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    u64::try_from(text.lines().count()).ok()
}

/// Processes and threads of the host.
fn tasks() -> Option<u64> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    let field = text.split_whitespace().nth(3)?;
    field.split_once('/')?.1.parse().ok()
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

pub(crate) fn sample() -> Values {
    COUNTERS.iter().map(|counter| (counter.read)()).collect()
}

/// Counters that this host has.
pub(crate) fn available() -> usize {
    sample().iter().flatten().count()
}

/// How much each counter moves at most until this is complete, and its output.
pub(crate) async fn noise_during<T>(work: impl Future<Output = T>) -> (Vec<u64>, T) {
    let first = sample();
    let mut most = vec![0; COUNTERS.len()];
    let mut work = Box::pin(work);
    loop {
        // Dropping the sleep loses nothing, and the work is continued in the next turn.
        let output = tokio::select! {
            output = &mut work => Some(output),
            () = tokio::time::sleep(Duration::from_millis(100)) => None,
        };
        for ((most, now), first) in most.iter_mut().zip(sample()).zip(&first) {
            let (now, first) = (now.unwrap_or_default(), first.unwrap_or_default());
            *most = now.abs_diff(first).max(*most);
        }
        if let Some(output) = output {
            return (most, output);
        }
    }
}

/// What has moved the counters.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cause {
    /// A living session.
    Session,
    /// One that is dead: the kernel frees some of it later.
    DeadSession,
    /// All that are dead after a battery; in all they may leave what a living one takes.
    DeadSessions,
}

impl Cause {
    fn explains(self, counter: &Counter) -> u64 {
        match self {
            Self::Session | Self::DeadSessions => counter.explained,
            Self::DeadSession => counter.explained / 16,
        }
    }
}

/// The counters that are above these values by more than the cause explains.
fn beyond(before: &Values, noise: &[u64], cause: Cause) -> Vec<String> {
    let moved = COUNTERS.iter().zip(sample()).zip(before).zip(noise);
    moved
        .filter_map(|(((counter, now), before), noise)| {
            let more = now?.saturating_sub((*before)?);
            let allowed = 2 * noise + cause.explains(counter);
            let name = counter.name;
            (more > allowed).then(|| format!("{name}: {more} more, {allowed} explained"))
        })
        .collect()
}

/// What a living session takes beyond its limits.
pub(crate) fn taken(before: &Values, noise: &[u64]) -> Vec<String> {
    beyond(before, noise, Cause::Session)
}

/// What dead sessions have left after a while.
pub(crate) async fn left(before: &Values, noise: &[u64], by: Cause) -> Vec<String> {
    let settled = wait_for(SETTLED, async || {
        beyond(before, noise, by).is_empty().then_some(())
    });
    match settled.await {
        Some(()) => Vec::new(),
        None => beyond(before, noise, by),
    }
}
