//! Processes that do not die: a task in a frozen cgroup of version 1 keeps a SIGKILL pending until
//! it is thawed.

use std::path::{Path, PathBuf};

use rustix::io::Errno;

const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// A frozen cgroup; dropping it thaws what is in it.
pub(crate) struct Frozen {
    directory: PathBuf,
}

impl Frozen {
    /// Freezes these processes, or says why this host cannot.
    pub(crate) fn new(name: &str, pids: &[i32]) -> Result<Self, String> {
        if !Path::new(FREEZER).join("tasks").exists() {
            return Err(format!("no freezer of cgroup v1 at {FREEZER}"));
        }
        let frozen = Self {
            directory: Path::new(FREEZER).join(name),
        };
        std::fs::create_dir(&frozen.directory).expect("made");
        for pid in pids {
            frozen.take(&frozen.directory, *pid);
        }
        frozen.set("FROZEN");
        super::eventually("the processes to be frozen", || {
            let state = std::fs::read_to_string(frozen.directory.join("freezer.state"));
            (state.expect("readable").trim() == "FROZEN").then_some(())
        });
        Ok(frozen)
    }

    fn take(&self, cgroup: &Path, pid: i32) {
        match std::fs::write(cgroup.join("cgroup.procs"), pid.to_string()) {
            Ok(()) => {}
            // A shell's child that is gone by now.
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
            Err(error) => panic!("process {pid} cannot join {}: {error}", cgroup.display()),
        }
    }

    fn set(&self, state: &str) {
        std::fs::write(self.directory.join("freezer.state"), state).expect("written");
    }

    pub(crate) fn thaw(&self) {
        self.set("THAWED");
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.thaw();
        super::eventually("the frozen cgroup to be empty", || {
            let pids = std::fs::read_to_string(self.directory.join("cgroup.procs"));
            for pid in pids.expect("readable").lines() {
                self.take(Path::new(FREEZER), pid.parse().expect("a pid"));
            }
            std::fs::remove_dir(&self.directory).ok()
        });
    }
}
