//! Settings that bind no number of sessions, but are advised for many.

use crate::checks::HIGHEST_SETTING;
use crate::diagnosis::{Check, Remedy, Verdict};
use crate::footprint::Footprint;
use crate::host::Host;
use crate::pools;
use crate::site::Site;

/// Number of memory cgroups from which walking all of them at each reclaim slows down starts: at 2,000
/// sessions it does not yet, at 10,000 it takes half of all processor time.
const MANY_MEMORY_CGROUPS: u64 = 2_000;
/// Greatest `kernel.pty.max`: `NR_UNIX98_PTY_MAX` (include/linux/tty.h).
const HIGHEST_PTY_MAX: u64 = 1 << 20;
/// Connections that a network namespace queues before they are accepted, for many clients that reconnect
/// at once after a preemption.
const BACKLOG: u64 = 4_096;
/// Entries of a neighbour table that are left to the host's networks.
const HOST_NEIGHBOURS: u64 = 1_024;
const TCP_MEMORY: &str = "net.ipv4.tcp_mem";
/// Size of a page, in which the kernel counts TCP memory.
const PAGE_BYTES: u64 = 4_096;
/// The proxies may take one part in so many of the TCP memory.
const TCP_MEMORY_PARTS: u64 = 4;

/// Settings that bind no number of sessions.
pub(crate) fn advice(
    host: &Host,
    footprint: &Footprint,
    target: u64,
    site: &Site<'_>,
) -> Vec<Check> {
    let checks = [
        accept_queue(host),
        neighbours(host, footprint, target, "net.ipv4.neigh.default.gc_thresh3"),
        neighbours(host, footprint, target, "net.ipv6.neigh.default.gc_thresh3"),
        tcp_memory(host, site),
        watermark_boost(host, footprint, target),
        terminals(host, footprint, target),
        pools::open_files(host),
        pools::local_ports(host),
        Some(pools::disk_bandwidth(host)),
        live_restore(host, footprint),
    ];
    checks.into_iter().flatten().collect()
}

fn accept_queue(host: &Host) -> Option<Check> {
    advised_setting(
        host,
        "net.core.somaxconn",
        BACKLOG,
        "connections that wait to be accepted",
        |present| present < BACKLOG,
        "clients that all reconnect at once wait in this queue",
    )
}

/// The tables are shared by the host and all network namespaces. Few sessions take all that they may, so a small
/// table is no reason to refuse a session.
fn neighbours(host: &Host, footprint: &Footprint, target: u64, key: &'static str) -> Option<Check> {
    if footprint.neighbours == 0 {
        return None;
    }
    let needed = target.saturating_mul(footprint.neighbours);
    let needed = needed.saturating_add(HOST_NEIGHBOURS).min(HIGHEST_SETTING);
    advised_setting(
        host,
        key,
        needed,
        "neighbours of the host and of all sessions",
        |present| present < needed,
        "if the table is full, neither the host nor any session finds a new machine on its networks; each session \
         with a link may fill its part",
    )
}

/// What the proxies may buffer is to leave most of the host's TCP memory to others.
fn tcp_memory(host: &Host, site: &Site<'_>) -> Option<Check> {
    let wanted = site.proxy_buffer_bytes.saturating_mul(TCP_MEMORY_PARTS);
    let pages: u64 = host.sysctl_field(TCP_MEMORY, 2)?;
    let check = Check {
        used: host
            .tcp_memory_pages()
            .map(|used| used.saturating_mul(PAGE_BYTES)),
        needed: Some(wanted),
        ..Check::of(
            TCP_MEMORY,
            "bytes of TCP buffers of the host and of all sessions (the setting is in pages)",
            Some(pages.saturating_mul(PAGE_BYTES)),
        )
    };
    let what = format!(
        "lower limits.proxy_buffer_bytes, or raise {TCP_MEMORY} to at least {} pages",
        wanted / PAGE_BYTES
    );
    Some(advised(
        check,
        pages.saturating_mul(PAGE_BYTES) < wanted,
        Remedy::Manual { what },
        "beyond it the kernel drops packets of all connections; the proxies for sessions may hold \
         limits.proxy_buffer_bytes of it",
    ))
}

fn watermark_boost(host: &Host, footprint: &Footprint, target: u64) -> Option<Check> {
    let many_cgroups = footprint.memory_cgroups > 0.0 && target > MANY_MEMORY_CGROUPS;
    if !many_cgroups {
        return None;
    }
    advised_setting(
        host,
        "vm.watermark_boost_factor",
        0,
        "memory that is reclaimed ahead, in 1/10,000 of the high watermark",
        |present| present > 0,
        "after each shortage of large blocks the kernel reclaims although memory is free, and \
         asks every memory cgroup for what it can give: starts slow down with their number",
    )
}

/// Few sessions open all terminals that they may, so a lack of them is no reason to refuse a session.
fn terminals(host: &Host, footprint: &Footprint, target: u64) -> Option<Check> {
    // What `kernel.pty.reserve` holds back for the host, sessions never get.
    let reserve = host.sysctl("kernel.pty.reserve").unwrap_or_default();
    let terminals = (target.saturating_mul(footprint.ptys) + reserve).min(HIGHEST_PTY_MAX);
    let check = advised_setting(
        host,
        "kernel.pty.max",
        terminals,
        "terminals of the host and of all sessions",
        |present| present < terminals,
        "one for each session with `tty`, each kept command, each `exec -it`; and up to `ptys` that \
         the programs of a native session open, 4 by default",
    )?;
    Some(Check {
        used: host.number("/proc/sys/kernel/pty/nr"),
        ..check
    })
}

fn live_restore(host: &Host, footprint: &Footprint) -> Option<Check> {
    if footprint.runtime != "docker" {
        return None;
    }
    let what = "put \"live-restore\": true into /etc/docker/daemon.json and reload Docker \
                (`systemctl reload docker`)";
    let bounds = "whether containers survive a restart of Docker";
    Some(advised(
        Check::of("live-restore", bounds, None),
        !host.docker_restores_containers(),
        Remedy::Manual {
            what: what.to_owned(),
        },
        "without it a restart of Docker stops every session",
    ))
}

/// Advice that a kernel setting should have the value `needed`, if it `lacks` that at present. A kernel
/// without the setting does not need it.
pub(crate) fn advised_setting(
    host: &Host,
    key: &'static str,
    needed: u64,
    bounds: &'static str,
    lacks: impl FnOnce(u64) -> bool,
    note: &str,
) -> Option<Check> {
    let present = host.sysctl(key)?;
    let check = Check {
        needed: Some(needed),
        ..Check::of(key, bounds, Some(present))
    };
    let remedy = Remedy::Sysctl { key, value: needed };
    Some(advised(check, lacks(present), remedy, note))
}

/// The check with the advice to follow `remedy` if it is `needed`.
pub(crate) fn advised(check: Check, needed: bool, remedy: Remedy, note: &str) -> Check {
    Check {
        verdict: if needed {
            Verdict::Advice
        } else {
            Verdict::Enough
        },
        remedy: needed.then_some(remedy),
        note: Some(note.to_owned()),
        ..check
    }
}
