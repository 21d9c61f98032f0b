//! Names in /proc that sessions on the host's kernel do not see, or cannot change.

use std::ffi::CStr;

/// Hidden from containers where the kernel has them: files by /dev/null, directories by an empty one. The
/// same as Docker's, except for /sys, which is not mounted. In addition, files that show other
/// containers' activity (disks, locks, pressure) or the kernel's configuration.
/// `pressure` also takes triggers, each of which costs a grace period of the kernel when its writer dies.
pub const MASKED: [&CStr; 15] = [
    c"acpi",
    c"asound",
    c"cmdline",
    c"config.gz",
    c"diskstats",
    c"kcore",
    c"keys",
    c"latency_stats",
    c"locks",
    c"pressure",
    c"sched_debug",
    c"scsi",
    c"timer_list",
    c"timer_stats",
    c"interrupts",
];

/// Readable only.
pub const READ_ONLY: [&CStr; 5] = [c"bus", c"fs", c"irq", c"sys", c"sysrq-trigger"];
