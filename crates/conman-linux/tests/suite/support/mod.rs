//! Real processes for the tests, each gone when its handle is dropped.

#![allow(dead_code, reason = "every test program takes what it needs")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use conman_linux::{PidFd, ProcessIdentity};

/// Bound on whatever should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// A child process.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    // Open for as long as the process should live: it may read the one and write the other.
    _stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Process {
    /// Runs a command that prints `ready`, of itself or because it copies its input, and waits
    /// until it has done so.
    pub(crate) fn until_ready(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
        let mut stdin = child.stdin.take().expect("piped");
        // One that has ended already shows by what it printed.
        let _ = stdin.write_all(b"ready\n");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut process = Self {
            child,
            _stdin: stdin,
            stdout,
        };
        let mut line = String::new();
        process.stdout.read_line(&mut line).expect("readable");
        assert_eq!(line, "ready\n", "{command:?} ended early");
        process
    }

    /// One that does nothing.
    pub(crate) fn idle() -> Self {
        Self::until_ready(&mut Command::new("cat"))
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a pid")
    }

    pub(crate) fn identity(&self) -> ProcessIdentity {
        ProcessIdentity::of(self.pid()).expect("it lives")
    }

    pub(crate) fn pidfd(&self) -> PidFd {
        PidFd::open(self.pid()).expect("it lives")
    }

    /// Takes its exit status, so that it stops being a zombie.
    pub(crate) fn reap(&mut self) {
        self.child.wait().expect("a child");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Dead already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A PID and network namespace with an init that runs a shell script.
#[derive(Debug)]
pub(crate) struct Namespace {
    _unshare: Process,
    pub(crate) init: i32,
}

impl Namespace {
    /// `script` runs as process 1 and must print `ready`, then wait. Dropping the handle kills the
    /// namespace: `unshare` takes its child along. Panics where the test may not make namespaces.
    pub(crate) fn with_init(script: &str) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--net", "--fork", "--kill-child", "--mount-proc"]);
        let unshare = Process::until_ready(command.args(["--", "sh", "-c", script]));
        let pid = unshare.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.expect("the kernel lists children");
        let init = children.trim().parse().expect("exactly one child");
        Self {
            _unshare: unshare,
            init,
        }
    }

    pub(crate) fn pidfd(&self) -> PidFd {
        PidFd::open(self.init).expect("the init lives")
    }
}
