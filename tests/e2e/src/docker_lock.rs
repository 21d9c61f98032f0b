//! Shares Docker among the tests of a machine.

use std::fs::{File, OpenOptions};

use rustix::fs::{FlockOperation, flock};

/// A share of Docker, or all of it, across the tests of this machine.
///
/// Two files, because flock(2) is not fair: whoever waits for all of Docker holds the gate, so
/// that no new share is given out before.
#[derive(Debug)]
pub(crate) struct DockerLock {
    _held: File,
}

impl DockerLock {
    /// Waits on the calling thread.
    pub(crate) fn shared() -> Self {
        Self::take(FlockOperation::LockShared)
    }

    /// Waits on the calling thread until nobody has a share.
    pub(crate) fn exclusive() -> Self {
        Self::take(FlockOperation::LockExclusive)
    }

    fn take(operation: FlockOperation) -> Self {
        let gate = open("gate");
        flock(&gate, operation).expect("the gate can be locked");
        let held = open("use");
        flock(&held, operation).expect("Docker's use can be locked");
        Self { _held: held }
    }
}

fn open(name: &str) -> File {
    let path = std::env::temp_dir().join(format!("conman-e2e-docker.{name}"));
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .unwrap_or_else(|error| panic!("cannot open {}: {error}", path.display()))
}
