//! Freezes, thaws and kills whole cgroups.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use crate::cgroup_mounts::{CgroupLayout, Hierarchy};
use crate::cgroup_proof::place_in;
use crate::cgroups::{is_at_or_below, is_plain};
use crate::exit_scan::threads_of;
use crate::pidfd::is_gone;
use crate::{Cgroups, PidFd};

/// Rounds of killing processes one by one; processes that fork faster are caught by freezing first.
const KILL_ROUNDS: usize = 16;

/// Freezes, thaws and kills whole cgroups, in the unified hierarchy where there is one and in the
/// v1 freezer otherwise.
///
/// No method waits for a disk, or waits without a bound.
#[derive(Debug)]
pub struct Freezer {
    hierarchy: Hierarchy,
    cgroups: Cgroups,
    /// Whether `cgroup.kill` is tried.
    kills_at_once: bool,
}

impl Freezer {
    /// Finds the mounted hierarchies. `NotFound` when this host cannot freeze.
    pub fn detect() -> io::Result<Self> {
        Self::of(&CgroupLayout::detect()?)
    }

    /// Uses only these hierarchies. `NotFound` when none of them can freeze.
    pub fn of(layout: &CgroupLayout) -> io::Result<Self> {
        let found = layout.hierarchies();
        let hierarchy = found
            .iter()
            .find(|hierarchy| hierarchy.unified)
            .or_else(|| found.iter().find(|hierarchy| hierarchy.controls("freezer")));
        let hierarchy = hierarchy.cloned().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "this host has neither the unified cgroup hierarchy nor the v1 freezer",
            )
        })?;
        Ok(Self {
            hierarchy,
            cgroups: Cgroups::of(layout),
            kills_at_once: true,
        })
    }

    /// Kills process by process even where the kernel kills whole cgroups, as it does from Linux 5.14 on; for
    /// testing the fallback.
    #[must_use]
    pub fn killing_one_by_one(self) -> Self {
        Self {
            kills_at_once: false,
            ..self
        }
    }

    /// Creates the cgroup if missing, so that it can be frozen.
    pub fn ensure(&self, path: &str) -> io::Result<()> {
        std::fs::create_dir_all(self.directory(path)?)
    }

    /// The cgroups directly below, by their paths.
    pub fn children(&self, path: &str) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(self.directory(path)?)?;
        let directories = entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok());
        Ok(directories.map(|name| format!("{path}/{name}")).collect())
    }

    /// Whether frozen processes die without being thawed, as in the unified hierarchy.
    #[must_use]
    pub fn dies_frozen(&self) -> bool {
        self.hierarchy.unified
    }

    /// The name of the hierarchy that it uses, for people.
    #[must_use]
    pub fn means(&self) -> &'static str {
        match self.hierarchy.unified {
            true => "the unified cgroup hierarchy (v2)",
            false => "the v1 freezer",
        }
    }

    /// The cgroup of a process in the freezing hierarchy; `None` if it is in none.
    pub fn place_of(&self, pid: i32) -> io::Result<Option<String>> {
        let text = std::fs::read(format!("/proc/{pid}/cgroup"))?;
        let controller = (!self.hierarchy.unified).then_some("freezer");
        Ok(place_in(&String::from_utf8_lossy(&text), controller))
    }

    /// Whether a process freezes with the cgroup: it is there or below, in the hierarchy that is used for
    /// freezing. `true` also for a process that is dead, or about to be, since it runs no more code; v1 shows
    /// such a process in the root. It is about to be dead when all of its threads are: a leader that has left
    /// shows nothing of the others.
    pub fn reaches(&self, path: &str, pid: i32) -> io::Result<bool> {
        let unless_gone = |error: io::Error| match is_gone(&error) {
            true => Ok(true),
            false => Err(error),
        };
        match self.place_of(pid) {
            Ok(Some(place)) if is_plain(path) && is_at_or_below(&place, path) => Ok(true),
            Ok(_) => {
                let threads = threads_of(pid)?;
                Ok(threads.iter().all(|thread| thread.exiting))
            }
            Err(error) => unless_gone(error),
        }
    }

    /// Every process in the cgroup and below, in any hierarchy, as a proof
    /// ([`Cgroups::try_pids_below`]).
    pub fn pids_below(&self, path: &str) -> io::Result<Vec<i32>> {
        self.cgroups.try_pids_below(path)
    }

    /// The cgroup's processes in another hierarchy that do not freeze with it here.
    pub fn strays(&self, path: &str) -> io::Result<Vec<PidFd>> {
        let mut strays = Vec::new();
        for pid in self.cgroups.try_pids_below(path)? {
            if self.reaches(path, pid)? {
                continue;
            }
            match PidFd::open(pid) {
                // The PID may have been reused between listing and opening it.
                Ok(process) if self.cgroups.try_contains(path, pid)? => strays.push(process),
                Ok(_) => {}
                Err(error) if error.proves_death() => {}
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(strays)
    }

    /// Orders the cgroup and everything below it to freeze. Processes that join later freeze too. Only
    /// [`Freezer::is_frozen`] proves it.
    pub fn freeze(&self, path: &str) -> io::Result<()> {
        if self.hierarchy.unified {
            self.write(path, "cgroup.freeze", "1")
        } else {
            self.write(path, "freezer.state", "FROZEN")
        }
    }

    /// Cancels the order.
    pub fn thaw(&self, path: &str) -> io::Result<()> {
        if self.hierarchy.unified {
            self.write(path, "cgroup.freeze", "0")
        } else {
            self.write(path, "freezer.state", "THAWED")
        }
    }

    /// Whether no process of the cgroup runs now, nor will before it is thawed.
    pub fn is_frozen(&self, path: &str) -> io::Result<bool> {
        if self.hierarchy.unified {
            let text = std::fs::read_to_string(self.file(path, "cgroup.events")?)?;
            Ok(text.lines().any(|line| line == "frozen 1"))
        } else {
            let text = std::fs::read_to_string(self.file(path, "freezer.state")?)?;
            Ok(text.trim() == "FROZEN")
        }
    }

    /// Whether the cgroup itself is ordered to freeze, independently of those above it: then thawing those lets
    /// nothing run here.
    pub fn is_ordered(&self, path: &str) -> io::Result<bool> {
        let file = if self.hierarchy.unified {
            "cgroup.freeze"
        } else {
            "freezer.self_freezing"
        };
        Ok(std::fs::read_to_string(self.file(path, file)?)?.trim() == "1")
    }

    /// Sends SIGKILL to every process of the cgroup and below, frozen or not. Frozen ones run no more of
    /// their instructions. Returns once the signals are sent.
    pub fn kill(&self, path: &str) -> io::Result<()> {
        if self.hierarchy.unified && self.kills_at_once {
            match self.write(path, "cgroup.kill", "1") {
                // Before Linux 5.14.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => return other,
            }
        }
        for _ in 0..KILL_ROUNDS {
            // A process that was missed would run once it is thawed.
            let alive = self.signal_all(path)?;
            if !alive {
                break;
            }
        }
        if self.hierarchy.unified {
            return Ok(());
        }
        // Only now: processes that were killed while frozen die when they are thawed.
        self.thaw(path)
    }

    /// Like [`Freezer::kill`], for a cgroup that must stay frozen, since more processes may appear in it.
    /// Where frozen processes do not die, they are moved to the cgroup above, which is not frozen.
    pub fn kill_frozen(&self, path: &str) -> io::Result<()> {
        if self.hierarchy.unified {
            return self.kill(path);
        }
        for _ in 0..KILL_ROUNDS {
            if !self.signal_all(path)? {
                break;
            }
        }
        let above = path.rsplit_once('/').map_or("", |(above, _)| above);
        for pid in self.cgroups.pids_below(path) {
            if is_being_killed(pid)? && self.cgroups.contains(path, pid) {
                // A process that has died meanwhile needs nothing more.
                let _ = self.write(above, "cgroup.procs", &pid.to_string());
            }
        }
        Ok(())
    }

    /// Returns whether there was a process that had not been killed yet. After an error one may be left; all
    /// others were killed.
    fn signal_all(&self, path: &str) -> io::Result<bool> {
        let (pids, mut outcome) = match self.cgroups.try_pids_below(path) {
            Ok(pids) => (pids, Ok(false)),
            Err(error) => (self.cgroups.pids_below(path), Err(error)),
        };
        for pid in pids {
            match self.signal(path, pid) {
                Ok(fresh) => outcome = outcome.map(|before| before || fresh),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    /// Kills a process. Returns whether it is the cgroup's and had not been killed yet.
    fn signal(&self, path: &str, pid: i32) -> io::Result<bool> {
        let process = match PidFd::open(pid) {
            Err(error) if error.proves_death() => return Ok(false),
            process => process.map_err(io::Error::other)?,
        };
        // The PID may have been reused between listing and opening it.
        if !self.cgroups.try_contains(path, pid)? || is_being_killed(pid)? {
            return Ok(false);
        }
        process.kill().map_err(io::Error::other)
    }

    fn write(&self, path: &str, file: &str, text: &str) -> io::Result<()> {
        let file = self.file(path, file)?;
        // Never `create`: cgroupfs would answer EACCES instead of NotFound.
        let mut file = File::options().write(true).open(file)?;
        io::Write::write_all(&mut file, text.as_bytes())
    }

    fn file(&self, path: &str, file: &str) -> io::Result<PathBuf> {
        Ok(self.directory(path)?.join(file))
    }

    fn directory(&self, path: &str) -> io::Result<PathBuf> {
        let directory = Some(path)
            .filter(|path| is_plain(path))
            .and_then(|path| self.hierarchy.directory(path));
        directory.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("`{path}` is not a plain absolute path of a cgroup"),
            )
        })
    }
}

/// Whether SIGKILL is pending for the process: bit 8 of `SigPnd` or `ShdPnd`. `true` for a dead process.
fn is_being_killed(pid: i32) -> io::Result<bool> {
    // The process's name, which the file contains, may be any bytes.
    let text = match std::fs::read(format!("/proc/{pid}/status")) {
        Err(error) if is_gone(&error) => return Ok(true),
        text => text?,
    };
    Ok(String::from_utf8_lossy(&text)
        .lines()
        .filter(|line| line.starts_with("SigPnd:") || line.starts_with("ShdPnd:"))
        .filter_map(|line| line.split_ascii_whitespace().nth(1))
        .filter_map(|mask| u64::from_str_radix(mask, 16).ok())
        .any(|mask| mask & (1 << 8) != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_seen_is_not_thawed() {
        let mounted = tempfile::tempdir().expect("a directory");
        let point = mounted.path().display();
        let line = format!("37 31 0:34 / {point} rw - cgroup cgroup rw,freezer\n");
        let freezer = Freezer::of(&CgroupLayout::parse(line.as_bytes())).expect("a v1 freezer");
        let cgroup = mounted.path().join("conman-x/a.1");
        // It opens, and cannot be read.
        std::fs::create_dir_all(cgroup.join("cgroup.procs")).expect("made");
        let state = || std::fs::read_to_string(cgroup.join("freezer.state")).expect("read");
        std::fs::write(cgroup.join("freezer.state"), "FROZEN").expect("written");
        assert!(freezer.kill("/conman-x/a.1").is_err());
        assert_eq!(state(), "FROZEN");
        std::fs::remove_dir(cgroup.join("cgroup.procs")).expect("removed");
        std::fs::write(cgroup.join("cgroup.procs"), "").expect("written");
        freezer.kill("/conman-x/a.1").expect("it is empty");
        assert_eq!(state(), "THAWED");
    }
}
