//! A process's origin and its place in PID namespaces.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::pidfd::is_gone;
use crate::proc_files::{Stat, read_proc};

/// Set by fork(2), cleared by execve(2): `PF_FORKNOEXEC` of the kernel.
const FORKED_ONLY: u32 = 0x40;

/// A process's origin. Ids are of the PID namespace of the `/proc` that this program sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lineage {
    pub parent: i32,
    /// See setsid(2).
    pub session: i32,
    /// Whether it has executed a program since it was forked.
    pub has_executed: bool,
}

impl Lineage {
    /// Reads it for the process that has this PID now; a zombie still has one.
    pub fn of(pid: i32) -> io::Result<Self> {
        let stat: Stat = read_proc(format!("/proc/{pid}/stat"))?;
        Ok(Self {
            parent: stat.ppid,
            session: stat.session,
            has_executed: stat.flags & FORKED_ONLY == 0,
        })
    }
}

/// Whether the process with this PID is process 1 of a PID namespace directly below this one. `false` also
/// if that cannot be read ([`try_is_namespace_init`]).
#[must_use]
pub fn is_namespace_init(pid: i32) -> bool {
    try_is_namespace_init(pid).unwrap_or(false)
}

/// Like [`is_namespace_init`]; only a dead process is not an init for that reason, any other failure to
/// read is an error.
pub fn try_is_namespace_init(pid: i32) -> io::Result<bool> {
    match namespace_pids(pid) {
        Err(error) if is_gone(&error) => Ok(false),
        pids => Ok(matches!(pids?[..], [_, 1])),
    }
}

/// The PID that a process has in the PID namespace it lives in; `None` if that cannot be read.
#[must_use]
pub fn inner_pid(pid: i32) -> Option<i32> {
    namespace_pids(pid).ok()?.last().copied()
}

/// The PID that a process has in the PID namespace directly below this one; `None` if it is in none, or that cannot be
/// read.
#[must_use]
pub fn pid_below(pid: i32) -> Option<i32> {
    namespace_pids(pid).ok()?.get(1).copied()
}

/// The PIDs of a process, in this PID namespace first.
fn namespace_pids(pid: i32) -> io::Result<Vec<i32>> {
    // The process's name, which the file contains, may be any bytes.
    let status = std::fs::read(format!("/proc/{pid}/status"))?;
    let status = String::from_utf8_lossy(&status);
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let pids = pids.unwrap_or_default().split_ascii_whitespace();
    Ok(pids.filter_map(|pid| pid.parse().ok()).collect())
}

/// Raises the soft limit of open descriptors to the hard one and returns both, soft first;
/// `u64::MAX` stands for no limit.
pub fn raise_nofile() -> io::Result<(u64, u64)> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft != hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(getrlimit(Resource::RLIMIT_NOFILE)?)
}

/// Sets soft and hard limit, unless they are lower.
///
/// # Errors
/// When the kernel refuses the limit.
pub fn lower_limit(resource: Resource, limit: u64) -> io::Result<()> {
    let (_, most) = getrlimit(resource)?;
    let limit = limit.min(most);
    Ok(setrlimit(resource, limit, limit)?)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Bound on what happens at once.
    const SOON: Duration = Duration::from_secs(20);

    fn own_pid() -> i32 {
        i32::try_from(std::process::id()).expect("a pid")
    }

    #[test]
    fn a_child_is_known_by_its_parent_its_session_and_its_program() {
        let own = Lineage::of(own_pid()).expect("own lineage");
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .expect("a child");
        let pid = i32::try_from(child.id()).expect("a pid");
        // The parent may continue before the kernel has recorded the exec.
        let deadline = Instant::now() + SOON;
        let mut lineage = Lineage::of(pid);
        while Instant::now() < deadline && lineage.as_ref().is_ok_and(|one| !one.has_executed) {
            std::thread::yield_now();
            lineage = Lineage::of(pid);
        }
        child.kill().expect("it lives");
        child.wait().expect("it is a child");
        let expected = Lineage {
            parent: own_pid(),
            session: own.session,
            has_executed: true,
        };
        assert_eq!(lineage.expect("its lineage"), expected);
        assert!(Lineage::of(pid).is_err());
    }

    #[test]
    fn the_soft_limit_of_descriptors_reaches_the_hard_one() {
        let (soft, hard) = raise_nofile().expect("raising to the hard limit is always allowed");
        assert_eq!(soft, hard);
    }
}
