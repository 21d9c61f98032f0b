//! An observer of processes that shares no code with the rest of conman: it only reads `/proc`.
//! Benchmarks and tests use it to check which processes are alive instead of trusting a report.

use std::os::unix::fs::MetadataExt;

use crate::cgroups::{is_at_or_below, parse_proc_cgroup};
use crate::proc_stat::ProcStat;

/// One process at the moment of a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcEntry {
    pub pid: i32,
    /// Field 22 of `/proc/PID/stat`, in clock ticks since boot.
    pub start_time_ticks: u64,
    /// `R`, `S`, `D`, `Z`, … as in proc_pid_stat(5).
    pub state: char,
    /// Inode of its PID namespace; `None` when it could not be read.
    pub pid_namespace: Option<u64>,
    /// Its cgroups in all hierarchies, each path once.
    pub cgroups: Vec<String>,
}

impl ProcEntry {
    /// Dead, but not reaped: it runs nothing and holds no memory.
    #[must_use]
    pub fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Whether it is in this cgroup or below it in any hierarchy.
    #[must_use]
    pub fn is_below(&self, cgroup: &str) -> bool {
        self.cgroups.iter().any(|own| is_at_or_below(own, cgroup))
    }

    fn read(pid: i32, wanted: &mut dyn FnMut(&[String]) -> bool) -> Option<Self> {
        let text = std::fs::read(format!("/proc/{pid}/cgroup")).ok()?;
        let cgroups = parse_proc_cgroup(&String::from_utf8_lossy(&text));
        if !wanted(&cgroups) {
            return None;
        }
        let stat = ProcStat::read(pid).ok()?;
        let pid_namespace = std::fs::metadata(format!("/proc/{pid}/ns/pid")).ok();
        Some(Self {
            pid,
            start_time_ticks: stat.start_time_ticks,
            state: stat.state,
            pid_namespace: pid_namespace.map(|data| data.ino()),
            cgroups,
        })
    }
}

/// Every process that passes the filter, including zombies. One that ends during the scan may be missing;
/// one that lives throughout is not.
pub fn scan(filter: impl Fn(&ProcEntry) -> bool) -> Vec<ProcEntry> {
    let mut found = read_all(&mut |_| true);
    found.retain(|entry| filter(entry));
    found
}

/// The processes in a cgroup and below it that still run, that is, are no zombies. Reads little of the
/// others, so that it may be called in a tight loop on a busy host.
#[must_use]
pub fn alive_below(cgroup: &str) -> Vec<ProcEntry> {
    let mut found = read_all(&mut |own| own.iter().any(|path| is_at_or_below(path, cgroup)));
    found.retain(|entry| !entry.is_zombie());
    found
}

fn read_all(wanted: &mut dyn FnMut(&[String]) -> bool) -> Vec<ProcEntry> {
    let Ok(directory) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    directory
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| ProcEntry::read(pid, wanted))
        .collect()
}
