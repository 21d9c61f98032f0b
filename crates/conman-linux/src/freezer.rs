use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::cgroup_mounts::{CgroupLayout, Hierarchy};
use crate::cgroup_proof::place_in;
use crate::cgroups::{is_at_or_below, is_plain};
use crate::pidfd::is_gone;
use crate::proc_stat::ProcStat;
use crate::{Cgroups, PidFd};

/// Times that processes are looked for while they are killed one by one; forks faster than that
/// are caught by freezing first.
const KILL_ROUNDS: usize = 16;

/// Pause between two looks at a v1 freezer, which cannot be waited for.
const V1_LOOK: Duration = Duration::from_micros(500);

/// In `/proc/PID/stat`: the process has begun to end.
const PF_EXITING: u32 = 0x4;

/// Freezes, thaws and kills whole cgroups, in the unified hierarchy where there is one and in the
/// v1 freezer otherwise.
///
/// Nothing here waits for a disk, and nothing waits without a bound.
#[derive(Debug)]
pub struct Freezer {
    hierarchy: Hierarchy,
    cgroups: Cgroups,
    /// Whether `cgroup.kill` is tried.
    kills_at_once: bool,
}

impl Freezer {
    /// Finds what is mounted. `NotFound` when this host cannot freeze.
    pub fn detect() -> io::Result<Self> {
        Self::of(&CgroupLayout::detect()?)
    }

    /// Freezes by these hierarchies alone. `NotFound` when none of them can.
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

    /// Kills process by process even where the kernel kills whole cgroups, as it does from Linux
    /// 5.14 on; to try the one where there is the other.
    #[must_use]
    pub fn killing_one_by_one(self) -> Self {
        Self {
            kills_at_once: false,
            ..self
        }
    }

    /// Makes the cgroup where it is missing, so that there is something to freeze.
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

    /// Whether frozen processes die without being thawed, as they do in the unified hierarchy.
    #[must_use]
    pub fn dies_frozen(&self) -> bool {
        self.hierarchy.unified
    }

    /// What it freezes by, in words.
    #[must_use]
    pub fn means(&self) -> &'static str {
        match self.hierarchy.unified {
            true => "the unified cgroup hierarchy (v2)",
            false => "the v1 freezer",
        }
    }

    /// Where a process is in the hierarchy that is frozen by; `None` where it is in none.
    pub fn place_of(&self, pid: i32) -> io::Result<Option<String>> {
        let text = std::fs::read(format!("/proc/{pid}/cgroup"))?;
        let controller = (!self.hierarchy.unified).then_some("freezer");
        Ok(place_in(&String::from_utf8_lossy(&text), controller))
    }

    /// Whether a process freezes with the cgroup: it is there or below, in the very hierarchy that
    /// is frozen by, whatever others say. So does one that is gone, or about to be, for it runs
    /// nothing of its own any more; v1 shows that in the root.
    pub fn reaches(&self, path: &str, pid: i32) -> io::Result<bool> {
        let unless_gone = |error: io::Error| match is_gone(&error) {
            true => Ok(true),
            false => Err(error),
        };
        match self.place_of(pid) {
            Ok(Some(place)) if is_plain(path) && is_at_or_below(&place, path) => Ok(true),
            Ok(_) => ProcStat::read(pid)
                .map(|stat| stat.flags & PF_EXITING != 0)
                .or_else(unless_gone),
            Err(error) => unless_gone(error),
        }
    }

    /// Every process in the cgroup and below, in any hierarchy, as a proof
    /// ([`Cgroups::try_pids_below`]).
    pub fn pids_below(&self, path: &str) -> io::Result<Vec<i32>> {
        self.cgroups.try_pids_below(path)
    }

    /// Those of the cgroup's processes in another hierarchy that do not freeze with it here.
    pub fn strays(&self, path: &str) -> io::Result<Vec<PidFd>> {
        let mut strays = Vec::new();
        for pid in self.cgroups.try_pids_below(path)? {
            if self.reaches(path, pid)? {
                continue;
            }
            match PidFd::open(pid) {
                // The PID may have passed on to a stranger between the list and the hold.
                Ok(process) if self.cgroups.try_contains(path, pid)? => strays.push(process),
                Ok(_) => {}
                Err(error) if error.proves_death() => {}
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(strays)
    }

    /// Orders the cgroup and everything below it to freeze. What joins later freezes, too. Only
    /// [`Freezer::is_frozen`] proves that it is so.
    pub fn freeze(&self, path: &str) -> io::Result<()> {
        if self.hierarchy.unified {
            self.write(path, "cgroup.freeze", "1")
        } else {
            self.write(path, "freezer.state", "FROZEN")
        }
    }

    /// Takes the order back.
    pub fn thaw(&self, path: &str) -> io::Result<()> {
        if self.hierarchy.unified {
            self.write(path, "cgroup.freeze", "0")
        } else {
            self.write(path, "freezer.state", "THAWED")
        }
    }

    /// Whether nothing in the cgroup runs at this moment nor will before it is thawed.
    pub fn is_frozen(&self, path: &str) -> io::Result<bool> {
        if self.hierarchy.unified {
            let text = std::fs::read_to_string(self.file(path, "cgroup.events")?)?;
            Ok(text.lines().any(|line| line == "frozen 1"))
        } else {
            let text = std::fs::read_to_string(self.file(path, "freezer.state")?)?;
            Ok(text.trim() == "FROZEN")
        }
    }

    /// Whether the cgroup itself is ordered to freeze, whatever is ordered of those above it: then
    /// thawing those lets nothing run here.
    pub fn is_ordered(&self, path: &str) -> io::Result<bool> {
        let file = if self.hierarchy.unified {
            "cgroup.freeze"
        } else {
            "freezer.self_freezing"
        };
        Ok(std::fs::read_to_string(self.file(path, file)?)?.trim() == "1")
    }

    /// Blocks until it is frozen, at most for `timeout`; `false` when it is not by then.
    pub fn wait_frozen(&self, path: &str, timeout: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + timeout;
        let events = if self.hierarchy.unified {
            Some(File::open(self.file(path, "cgroup.events")?)?)
        } else {
            None
        };
        loop {
            // Opened before this look, so a change after it wakes the wait below.
            if self.is_frozen(path)? {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            wait_for_change(events.as_ref(), left)?;
        }
    }

    /// Sends SIGKILL to every process of the cgroup and below, frozen or not, such that none of
    /// them runs another instruction of its own where it was frozen. Returns once it is sent.
    pub fn kill(&self, path: &str) -> io::Result<()> {
        if self.hierarchy.unified && self.kills_at_once {
            match self.write(path, "cgroup.kill", "1") {
                // Before Linux 5.14.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => return other,
            }
        }
        for _ in 0..KILL_ROUNDS {
            // One that was not seen would go on once it is thawed.
            let alive = self.signal_all(path)?;
            if !alive {
                break;
            }
        }
        if self.hierarchy.unified {
            return Ok(());
        }
        // Only now: what was killed while frozen dies on its way out of the freezer.
        self.thaw(path)
    }

    /// As [`Freezer::kill`], for a cgroup that is frozen and is to stay so, since more may yet appear
    /// in it. Where the frozen do not die, its processes leave it for the cgroup above, which is not
    /// frozen.
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
                // One that is gone meanwhile needs nothing more.
                let _ = self.write(above, "cgroup.procs", &pid.to_string());
            }
        }
        Ok(())
    }

    /// Whether there was a process that had not been killed yet. After an error one may be left that
    /// was not; whatever could be was killed all the same.
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

    /// Whether it is one of the cgroup's and had not been killed yet.
    fn signal(&self, path: &str, pid: i32) -> io::Result<bool> {
        let process = match PidFd::open(pid) {
            Err(error) if error.proves_death() => return Ok(false),
            process => process.map_err(io::Error::other)?,
        };
        // The PID may have passed on to a stranger between the list and the hold.
        if !self.cgroups.try_contains(path, pid)? || is_being_killed(pid)? {
            return Ok(false);
        }
        process.kill().map_err(io::Error::other)
    }

    fn write(&self, path: &str, file: &str, text: &str) -> io::Result<()> {
        let file = self.file(path, file)?;
        // Never `create`: cgroupfs would answer EACCES where NotFound is the truth.
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

/// Whether SIGKILL waits to be taken by the process: bit 8 of `SigPnd` or `ShdPnd`. One that is gone
/// needs none.
fn is_being_killed(pid: i32) -> io::Result<bool> {
    // Its name, which is in there, may be any bytes.
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

fn wait_for_change(events: Option<&File>, left: Duration) -> io::Result<()> {
    let result = match events {
        Some(file) => {
            let mut fds = [PollFd::new(file, PollFlags::PRI)];
            poll(&mut fds, Timespec::try_from(left).ok().as_ref())
        }
        None => poll(&mut [], Timespec::try_from(left.min(V1_LOOK)).ok().as_ref()),
    };
    match result {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
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
        freezer.kill("/conman-x/a.1").expect("nobody is there");
        assert_eq!(state(), "THAWED");
    }
}
