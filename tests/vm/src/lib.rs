//! A worker machine in an emulator: booted from the disk that the set-up made, given conman on a
//! medium of its own, talked to over SSH, switched off like a real one.
//!
//! Hardware virtualization is not needed. The disk is never written: each machine has its own
//! throw-away layer over it.
#![forbid(unsafe_code)]

mod clock;
mod etcd;
mod installation;
mod machine;
mod medium;
mod programs;
mod shell;

pub use clock::{WATCH_END, longest_gap, positions, seconds};
pub use etcd::{Etcd, etcd};
pub use installation::{INSTALL, MOUNT, installation};
pub use machine::{Kernel, Machine};
pub use medium::Medium;
pub use programs::Programs;
pub use shell::Output;

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Where the set-up put the machine's disk; `None` says on standard error why there is none.
#[must_use]
pub fn worker() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    // <target>/<profile>/deps/<test>
    let directory = test.ancestors().nth(3)?.join("worker-vm");
    let place = directory.display();
    if !directory.join("recipe").exists() {
        match fs::read_to_string(directory.join("none")) {
            Ok(why) => lacks(&format!("no worker machine in {place}: {why}")),
            Err(_) if !cfg!(target_arch = "x86_64") => {
                say("skipped: the worker machine is of x86_64");
            }
            Err(_) => lacks(&format!("no worker machine in {place}")),
        }
        return None;
    }
    if let Err(error) = Command::new(machine::EMULATOR).arg("-version").output() {
        lacks(&format!("{}: {error}", machine::EMULATOR));
        return None;
    }
    Some(directory)
}

/// Whether the tests run at full length, as `cargo xtask acceptance` runs them: an emulator takes minutes
/// for each module of tests.
#[must_use]
pub fn in_full_length() -> bool {
    std::env::var_os("CONMAN_VM_LONG").is_some()
}

/// The test goes without what `cargo xtask test` installs or builds.
///
/// # Panics
/// With `CONMAN_NO_SKIPS` set.
pub(crate) fn lacks(what: &str) {
    assert!(
        std::env::var_os("CONMAN_NO_SKIPS").is_none(),
        "{what}; `cargo xtask test` makes it, and CONMAN_NO_SKIPS is set"
    );
    say(&format!("skipped: {what}; `cargo xtask test` makes it"));
}

/// Says something on standard error, where the test harness keeps what `eprintln!` says to itself.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Polls until `look` finds something.
///
/// # Panics
/// When it does not in time.
pub(crate) fn until<T>(what: &str, patience: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "no {what} in {patience:?}");
        pause();
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "these tests have no async runtime to hold up"
)]
fn pause() {
    std::thread::sleep(Duration::from_millis(250));
}
