//! Processes that do not die: a task in a frozen cgroup of version 1 keeps a SIGKILL pending until
//! it is thawed.

use std::path::{Path, PathBuf};

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
            std::fs::write(frozen.directory.join("cgroup.procs"), pid.to_string()).expect("joined");
        }
        frozen.set("FROZEN");
        super::eventually("the processes to be frozen", || {
            let state = std::fs::read_to_string(frozen.directory.join("freezer.state"));
            (state.expect("readable").trim() == "FROZEN").then_some(())
        });
        Ok(frozen)
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
            std::fs::remove_dir(&self.directory).ok()
        });
    }
}
