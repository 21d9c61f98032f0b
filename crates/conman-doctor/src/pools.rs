//! Pools of the host that no limit of a session bounds, and whose exhaustion by one session others notice.

use crate::advice::{advised, advised_setting};
use crate::checks::setting;
use crate::diagnosis::{Check, Remedy};
use crate::footprint::Footprint;
use crate::host::Host;
use crate::limit::Limit;
use crate::site::Site;

/// The least memory that an open file takes, in bytes: `struct file` of Linux 6.12 and its slab.
const FILE_BYTES: u64 = 192;

/// A compiled system call filter of usual length, in bytes.
const FILTER_BYTES: u64 = 8 * 1_024;

/// `net.ipv4.tcp_tw_reuse` for all connections; 2, the kernel's default, is for those to loopback only.
const REUSE: u64 = 1;

/// While this pool is exhausted, no system call filter can be installed, so no session starts.
pub(crate) fn compiled_filters(host: &Host, footprint: &Footprint, site: &Site<'_>) -> Limit {
    let each = footprint.filter_bytes;
    // The kernel does not report how much is used: the daemon's sessions, or else the filters that programs have.
    let used = match site.alive {
        Some(alive) => Some(alive * u64::from(each)),
        None => host.filters().map(|count| count * FILTER_BYTES),
    };
    setting(
        host,
        "net.core.bpf_jit_limit",
        "bytes of compiled filters: a system call filter for each session and each command in it",
        used,
        f64::from(each),
    )
}

/// With a limit above what all memory can hold, the memory limits of sessions bound their open files.
pub(crate) fn open_files(host: &Host) -> Option<Check> {
    let needed = host.total_memory()? / FILE_BYTES;
    advised_setting(
        host,
        "fs.file-max",
        needed,
        "open files, those that sessions may open included",
        |present| present < needed,
        "one session can open as many files as its memory holds; with less than the whole memory holds, \
         one can take them from all others",
    )
}

/// Without the controller, `limits.io_*` cannot be enforced.
pub(crate) fn disk_bandwidth(host: &Host) -> Check {
    let bounds = "whether the disk's bandwidth of a session can be limited (`limits.io_*`)";
    advised(
        Check::of("io controller", bounds, None),
        !host.limits_io(),
        Remedy::Manual {
            what: "mount cgroup v2 with its `io` controller, or v1's `blkio`".to_owned(),
        },
        "a session may take all of the disk's bandwidth",
    )
}

/// A connection that was closed keeps its local port for a minute.
pub(crate) fn local_ports(host: &Host) -> Option<Check> {
    let key = "net.ipv4.tcp_tw_reuse";
    let present = host.sysctl(key)?;
    let bounds = "whether local ports of closed connections are used again at once";
    Some(advised(
        Check::of(key, bounds, Some(present)),
        present != REUSE,
        // It is no limit, so `--fix`, which only raises limits, leaves it.
        Remedy::Manual {
            what: format!("sysctl -w {key}={REUSE}, and the same in /etc/sysctl.d"),
        },
        "the egress proxy connects from this host, whose 28,000 ports to one target two sessions can use up",
    ))
}
