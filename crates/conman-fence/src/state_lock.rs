//! One shim at a time: a lock next to the state file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::{Errno, retry_on_intr};

/// How long the lock may outlive a shim that was killed: a helper process that it has just forked holds
/// the lock until it runs and closes what it inherited.
const INHERITED_TIMEOUT: Duration = Duration::from_millis(200);
const RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// How the lock was acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Acquired {
    Immediately,
    /// Another shim had it.
    AfterWaiting,
}

/// Makes sure that one shim at a time uses the state file; with `standby` waits for another's end. The
/// lock is released with the descriptor.
pub(crate) fn acquire(state_file: &Path, standby: bool) -> io::Result<(File, Acquired)> {
    let path = state_file.with_extension("lock");
    let mut acquired = Acquired::Immediately;
    loop {
        let (file, this) = acquire_once(&path, standby)?;
        acquired = acquired.max(this);
        // A shim that ended regularly has removed the file that was waited for.
        let held = file.metadata()?;
        let is_current = fs::symlink_metadata(&path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (held.dev(), held.ino()));
        if is_current {
            return Ok((file, acquired));
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the shim has no runtime, and serves no client yet"
)]
fn acquire_once(path: &Path, standby: bool) -> io::Result<(File, Acquired)> {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
        .map_err(|error| {
            // A shim that ends regularly removes the directory, even while another one waits.
            let what = format!("cannot open {}: {error}", path.display());
            io::Error::new(error.kind(), what)
        })?;
    let until = Instant::now() + INHERITED_TIMEOUT;
    let mut taken = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
    while taken == Err(Errno::WOULDBLOCK) && !standby && Instant::now() < until {
        std::thread::sleep(RETRY_INTERVAL);
        taken = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
    }
    match taken {
        Ok(()) => Ok((file, Acquired::Immediately)),
        Err(Errno::WOULDBLOCK) if standby => {
            tracing::info!(lock = %path.display(), "another shim runs; waiting to succeed it");
            retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive))?;
            Ok((file, Acquired::AfterWaiting))
        }
        Err(Errno::WOULDBLOCK) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!(
                "another shim uses {}; end it first, or ask it to replace itself",
                path.display()
            ),
        )),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_shims_do_not_share_a_state() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        let lock = acquire(&path, false).expect("the first");
        let error = acquire(&path, false).expect_err("the second");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(lock);
        acquire(&path, false).expect("after the first");
    }
}
