//! Ends a test program that has printed nothing for long, and writes where it stood still.
//!
//! Without it a test that never ends blocks the whole suite until the suite is stopped, and its name is not
//! reported.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Several times what the longest test takes on a slow machine.
const LONGEST_SILENCE: Duration = Duration::from_mins(15);
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Waits until a test program has ended, and returns where it stood still if it had to be killed.
pub(super) fn wait(pid: Pid, log: &Path) -> Result<Option<String>> {
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("opening a test program's pidfd")?;
    let every = Timespec::try_from(LOOK_EVERY).context("a time between looks")?;
    let (mut printed, mut since) = (0, Instant::now());
    loop {
        let mut ends = [PollFd::new(&pidfd, PollFlags::IN)];
        if poll(&mut ends, Some(&every)).context("waiting for a test program")? > 0 {
            return Ok(None);
        }
        let length = fs::metadata(log).context("looking at its output")?.len();
        if length > printed {
            (printed, since) = (length, Instant::now());
        } else if since.elapsed() > LONGEST_SILENCE {
            let seen = seen(pid);
            let family = family(pid);
            for process in [pid].into_iter().chain(family) {
                // The error means that it has ended already.
                let _ = end(process);
            }
            return Ok(Some(seen));
        }
    }
}

/// Sends SIGKILL.
fn end(process: Pid) -> nix::Result<()> {
    let process = nix::unistd::Pid::from_raw(process.as_raw_nonzero().get());
    kill(process, Signal::SIGKILL)
}

/// The program's threads, which libtest names by their tests, and its children, and where in the kernel each is.
fn seen(pid: Pid) -> String {
    let mut text = format!(
        "\nnothing printed for {} s; the program was killed; its threads and children were:\n",
        LONGEST_SILENCE.as_secs()
    );
    let threads = format!("/proc/{}/task", pid.as_raw_nonzero());
    let threads = fs::read_dir(threads).into_iter().flatten().flatten();
    for thread in threads.map(|thread| thread.path()) {
        let _ = writeln!(text, "  thread {}", described(&thread));
    }
    for child in family(pid) {
        let directory = format!("/proc/{}", child.as_raw_nonzero());
        let arguments = fs::read(format!("{directory}/cmdline")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&arguments).replace('\0', " ");
        let _ = writeln!(
            text,
            "  child {} {arguments}",
            described(Path::new(&directory))
        );
    }
    text
}

/// Number, name, and innermost kernel function of the process or thread with this directory.
fn described(directory: &Path) -> String {
    let read = |file| fs::read_to_string(directory.join(file)).unwrap_or_default();
    let number = directory.file_name().unwrap_or_default().display();
    format!("{number} {} in {}", read("comm").trim(), read("wchan"))
}

/// The children of a process, their children, and so on.
fn family(pid: Pid) -> Vec<Pid> {
    let mut family = Vec::new();
    let mut parents = vec![pid];
    while let Some(parent) = parents.pop() {
        let threads = format!("/proc/{}/task", parent.as_raw_nonzero());
        for thread in fs::read_dir(threads).into_iter().flatten().flatten() {
            let children = fs::read_to_string(thread.path().join("children"));
            let children = children.unwrap_or_default();
            let children = children
                .split_whitespace()
                .filter_map(|pid| pid.parse().ok());
            let children: Vec<Pid> = children.filter_map(Pid::from_raw).collect();
            parents.extend(&children);
            family.extend(children);
        }
    }
    family
}

/// The tests of a program that was killed: those that ran or had failed, and those that had not begun.
pub(super) fn unfinished<'a>(all: &'a [String], text: &str) -> (Vec<&'a str>, Vec<&'a str>) {
    let mut ended = BTreeSet::new();
    let mut begun = BTreeSet::new();
    for line in text.lines() {
        let Some(line) = line.strip_prefix("test ") else {
            continue;
        };
        if let Some((name, _)) = line.split_once(" has been running for over ") {
            begun.insert(name);
        } else if let Some((name, result)) = line.split_once(" ... ") {
            match result.starts_with("ok") || result.starts_with("ignored") {
                true => ended.insert(name),
                false => begun.insert(name),
            };
        }
    }
    let left = all.iter().map(String::as_str);
    left.filter(|name| !ended.contains(name))
        .partition(|name| begun.contains(name))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn tests_that_ran_or_failed_and_those_that_had_not_begun_are_told_apart() {
        let all = [
            "a::ok",
            "a::late",
            "a::stuck",
            "b::failed",
            "b::left_out",
            "c::next",
        ];
        let all = all.map(str::to_owned);
        let text = "running 6 tests\ntest a::ok ... ok <0.1s>\ntest b::failed ... FAILED <0.2s>\ntest a::stuck \
                    has been running for over 60 seconds\ntest a::late has been running for over 60 seconds\n\
                    test b::left_out ... ignored, why\ntest a::late ... ok <70.1s>\n";
        assert_eq!(
            unfinished(&all, text),
            (vec!["a::stuck", "b::failed"], vec!["c::next"])
        );
    }

    #[test]
    fn children_of_children_belong_to_the_family() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sh -c 'sleep 60 & echo; wait' & wait"]);
        let mut shell = shell
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut line = [0];
        let mut output = shell.stdout.take().expect("its output");
        std::io::Read::read_exact(&mut output, &mut line).expect("it has begun");
        let pid = Pid::from_child(&shell);
        let family = family(pid);
        assert_eq!(family.len(), 2, "{}", seen(pid));
        assert!(seen(pid).contains("sleep 60"), "{}", seen(pid));
        for process in family.into_iter().chain([pid]) {
            end(process).expect("killed");
        }
        shell.wait().expect("ended");
    }
}
