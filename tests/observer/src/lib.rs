//! An observer of processes that shares no code with conman: it only reads `/proc`. Tests and benchmarks
//! use it to check which processes are alive instead of trusting a report. It also measures how slow the
//! machine is, and opens terminals.
#![forbid(unsafe_code)]

mod slowness;
mod terminal;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;

pub use slowness::{slowness, slowness_of};
pub use terminal::open_terminal;

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
        let text = fs::read(format!("/proc/{pid}/cgroup")).ok()?;
        let cgroups = parse_cgroups(&String::from_utf8_lossy(&text));
        if !wanted(&cgroups) {
            return None;
        }
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        // Field 2, the name, may contain anything; no later field has a parenthesis.
        let name_end = stat.iter().rposition(|&byte| byte == b')')?;
        let rest = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        Some(Self {
            pid,
            state: fields.next()?.chars().next()?,
            start_time_ticks: fields.nth(18)?.parse().ok()?,
            pid_namespace: pid_namespace(pid).ok(),
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

/// The inode number that identifies the PID namespace a process lives in.
///
/// # Errors
/// It cannot be read, for example because the process is dead.
pub fn pid_namespace(pid: i32) -> io::Result<u64> {
    Ok(fs::metadata(format!("/proc/{pid}/ns/pid"))?.ino())
}

/// Resident memory of a process in bytes, including shared pages. A zombie has none.
///
/// # Errors
/// It cannot be read, for example because the process is dead.
pub fn resident_bytes(pid: i32) -> io::Result<u64> {
    // The process's name, which the file contains, may be any bytes.
    let status = fs::read(format!("/proc/{pid}/status"))?;
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.unwrap_or(0) * 1_024)
}

fn read_all(wanted: &mut dyn FnMut(&[String]) -> bool) -> Vec<ProcEntry> {
    let Ok(directory) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    directory
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| ProcEntry::read(pid, wanted))
        .collect()
}

/// Lines are `id:controllers:path`; the path of a removed v2 cgroup has a suffix.
fn parse_cgroups(text: &str) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for path in text.lines().filter_map(|line| line.splitn(3, ':').nth(2)) {
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        if !paths.iter().any(|known| known == path) {
            paths.push(path.to_owned());
        }
    }
    paths
}

fn is_at_or_below(cgroup: &str, ancestor: &str) -> bool {
    cgroup
        .strip_prefix(ancestor.trim_end_matches('/'))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
