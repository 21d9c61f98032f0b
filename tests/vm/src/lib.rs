//! A worker machine in an emulator: booted from the disk that the set-up made, given conman on a
//! medium of its own, talked to over SSH, switched off like a real one.
//!
//! Hardware virtualization is not needed. The disk is never written: each machine has its own
//! throw-away layer over it.
#![forbid(unsafe_code)]

mod machine;
mod medium;
mod shell;

pub use machine::Machine;
pub use medium::Medium;
pub use shell::Output;

use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Where the set-up put the machine's disk; `None` says on standard error why there is none.
#[must_use]
#[expect(clippy::print_stderr, reason = "a test says why it is skipped")]
pub fn worker() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    // <target>/<profile>/deps/<test>
    let directory = test.ancestors().nth(3)?.join("worker-vm");
    if directory.join("recipe").exists() {
        return Some(directory);
    }
    eprintln!(
        "skipped: no disk of a worker machine in {}; `cargo xtask setup` makes it on x86_64",
        directory.display()
    );
    None
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
