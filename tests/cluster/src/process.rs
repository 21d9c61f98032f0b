//! Processes by the namespaces and programs that they are in.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use conman_linux::{PidFd, Signal};

/// Bound on the death of a process that was killed, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A process as others see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resident {
    pub(crate) pid: i32,
    /// Its command line.
    pub(crate) words: Vec<String>,
}

impl Resident {
    /// Whether it is `conman` with this command.
    pub(crate) fn is_conman(&self, command: &str) -> bool {
        let program = self.words.first().map(Path::new);
        program
            .and_then(Path::file_name)
            .is_some_and(|name| name == "conman")
            && self.words.get(1).is_some_and(|word| word == command)
    }
}

/// The processes in a network namespace, zombies excluded. Sessions are not among them: they have
/// namespaces of their own.
pub(crate) fn residents(namespace: &Path) -> Vec<Resident> {
    let Ok(inode) = fs::metadata(namespace).map(|data| data.ino()) else {
        return Vec::new();
    };
    let is_there = |pid: &i32| {
        fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|data| data.ino() == inode)
    };
    pids().filter(is_there).filter_map(resident).collect()
}

/// All processes of the machine.
pub(crate) fn all() -> Vec<Resident> {
    pids().filter_map(resident).collect()
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
}

fn resident(pid: i32) -> Option<Resident> {
    let text = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = text
        .split(|byte| *byte == 0)
        .filter(|word| !word.is_empty());
    let words = words.map(|word| String::from_utf8_lossy(word).into_owned());
    Some(Resident {
        pid,
        words: words.collect(),
    })
}

/// Sends a signal; `false` when the process is gone.
pub(crate) fn signal(pid: i32, signal: Signal) -> Result<bool> {
    let Ok(process) = PidFd::open(pid) else {
        return Ok(false);
    };
    process
        .signal(signal)
        .with_context(|| format!("cannot send {signal:?} to process {pid}"))
}

/// Kills all in a network namespace, until nobody is there: a daemon that is about to die may have
/// begun its shim anew, which nobody has seen yet.
pub(crate) fn kill_residents(namespace: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = residents(namespace);
        if found.is_empty() {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "processes begin in {} faster than they are killed: {found:?}",
            namespace.display()
        );
        kill(found.into_iter().map(|one| one.pid))?;
    }
}

/// Kills processes and waits until they are dead, their parents having reaped them or not.
pub(crate) fn kill(pids: impl IntoIterator<Item = i32>) -> Result<()> {
    let mut held = Vec::new();
    for pid in pids {
        if let Ok(process) = PidFd::open(pid) {
            process
                .kill()
                .with_context(|| format!("cannot kill process {pid}"))?;
            held.push(process);
        }
    }
    for process in held {
        let dead = process
            .wait_dead(PATIENCE)
            .context("cannot wait for a death")?;
        anyhow::ensure!(dead, "process {} does not die", process.pid());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::process::Command;

    use super::*;

    /// Goes on making processes, a bounded number of them that end by themselves.
    const BREEDER: &str = "n=0; while [ $n -lt 2000 ]; do sleep 30 & n=$((n+1)); done; wait";

    #[test]
    fn nobody_is_left_of_those_who_begin_others_while_they_are_killed() -> Result<()> {
        let own = fs::metadata("/proc/self/ns/net")?.ino();
        let mut breeder = Command::new("unshare")
            .args(["--net", "sh", "-c", BREEDER])
            .spawn()?;
        let namespace = format!("/proc/{}/ns/net", breeder.id());
        let opened = loop {
            let file = fs::File::open(&namespace)?;
            if file.metadata()?.ino() != own {
                break file;
            }
            std::thread::yield_now();
        };
        let held = format!("/proc/self/fd/{}", opened.as_raw_fd());
        let held = Path::new(&held);
        while residents(held).len() < 10 {
            std::thread::yield_now();
        }

        let result = kill_residents(held);

        let left = residents(held);
        breeder.kill()?;
        breeder.wait()?;
        result?;
        assert_eq!(left, []);
        Ok(())
    }
}
