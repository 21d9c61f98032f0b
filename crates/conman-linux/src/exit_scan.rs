//! Ends everything in a cgroup for good, and lists its threads with whether they have begun to exit.
//!
//! Why this can prove that nothing runs any more: `conman_core::preemption::ExitProof`.

use std::io;

use crate::pidfd::is_gone;
use crate::thread_stat::ThreadStat;
use crate::{CgroupLayout, Cgroups, Freezer};

/// A thread of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupThread {
    pub process: i32,
    pub thread: i32,
    pub start_time_ticks: u64,
    /// It has begun to exit (`PF_EXITING`), and never returns to user mode.
    pub exiting: bool,
}

/// Scans one cgroup. Its methods may block: the kernel's lock of all cgroups is held while others are
/// made and removed, and the last reader of a process may have to take down its memory.
#[derive(Debug)]
pub struct ExitScan {
    freezer: Freezer,
    cgroups: Cgroups,
    path: String,
}

impl ExitScan {
    /// `NotFound` if this host has no unified hierarchy, in which frozen processes die, or not this
    /// cgroup.
    pub fn of(path: &str) -> io::Result<Self> {
        let layout = CgroupLayout::detect()?;
        let freezer = Freezer::of(&layout)?;
        if !freezer.dies_frozen() {
            return Err(io::ErrorKind::NotFound.into());
        }
        // Reads a file of the cgroup.
        freezer.is_frozen(path)?;
        Ok(Self {
            freezer,
            cgroups: Cgroups::of(&layout),
            path: path.to_owned(),
        })
    }

    /// Orders everything in the cgroup to freeze and to die, and lists its threads. A process or thread
    /// that has ended meanwhile is not listed.
    pub fn end_and_list(&self) -> io::Result<Vec<CgroupThread>> {
        // What appears from here on never runs.
        self.freezer.freeze(&self.path)?;
        self.freezer.kill(&self.path)?;
        let mut threads = Vec::new();
        for process in self.cgroups.try_pids_below(&self.path)? {
            threads.extend(threads_of(process)?);
        }
        Ok(threads)
    }
}

/// The threads of a process; none of one that has ended.
pub(crate) fn threads_of(process: i32) -> io::Result<Vec<CgroupThread>> {
    let entries = match std::fs::read_dir(format!("/proc/{process}/task")) {
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut threads = Vec::new();
    for entry in entries {
        let name = match entry {
            Err(error) if is_gone(&error) => break,
            entry => entry?.file_name(),
        };
        let Some(thread) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let stat = match ThreadStat::read(process, thread) {
            Err(error) if is_gone(&error) => continue,
            stat => stat?,
        };
        threads.push(CgroupThread {
            process,
            thread,
            start_time_ticks: stat.start_time_ticks,
            exiting: stat.is_exiting(),
        });
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;

    /// A program whose first thread has left, while another one runs.
    const LEADER_LEAVES: &str = "import ctypes, threading, time\n\
        threading.Thread(target=time.sleep, args=(600,)).start()\n\
        ctypes.CDLL(None).pthread_exit(None)";

    struct Program(Child);

    impl Drop for Program {
        fn drop(&mut self) {
            // It may have ended.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_leader_that_has_left_says_nothing_of_the_other_threads() {
        let mut python = Command::new("python3");
        let program = Program(python.args(["-c", LEADER_LEAVES]).spawn().expect("python3"));
        let pid = i32::try_from(program.0.id()).expect("a pid");
        let begun = Instant::now();
        while !ThreadStat::read(pid, pid).expect("it runs").is_exiting() {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "its leader stays"
            );
            std::thread::yield_now();
        }
        let threads = threads_of(pid).expect("its threads");
        let exiting: Vec<bool> = threads.iter().map(|thread| thread.exiting).collect();
        assert_eq!(exiting, [true, false], "{threads:?}");
    }
}
