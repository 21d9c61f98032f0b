//! Removes directories that containers wrote into.
//!
//! Their content is hostile: as deep, wide and large as a container could make it. So a directory
//! is first moved away by one rename, which is all that callers wait for. One thread empties it
//! later and does not depend on its structure.

use std::collections::hash_map::RandomState;
use std::fs::{self, DirBuilder};
use std::hash::BuildHasher;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::TryLockError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::shared::container_files::if_present;

/// For root only, like the directories that are moved into it.
const MODE: u32 = 0o700;

/// A directory of removed directories.
#[derive(Debug)]
pub(super) struct Trash {
    path: PathBuf,
    /// Differs from every earlier process, so that names are unique.
    prefix: u64,
    next: AtomicU64,
    /// A directory was added that no emptying has begun to look for.
    filled: AtomicBool,
    emptying: Mutex<()>,
}

impl Trash {
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(MODE).create(&path)?;
        Ok(Self {
            path,
            prefix: RandomState::new().hash_one(()),
            next: AtomicU64::new(0),
            filled: AtomicBool::new(true),
            emptying: Mutex::default(),
        })
    }

    /// Moves a directory of the same file system in. A missing one is fine.
    pub(super) fn discard(&self, path: &Path) -> io::Result<()> {
        if_present(fs::rename(path, self.path.join(self.fresh_name()))).map(drop)
    }

    /// Empties the trash, unless another thread does so already; that thread then continues. Blocks
    /// until it is empty. Errors are logged, and the next call tries again.
    pub(super) fn empty(&self) {
        self.filled.store(true, Ordering::SeqCst);
        while self.filled.load(Ordering::SeqCst) {
            match self.emptying.try_lock() {
                Ok(_alone) => self.empty_alone(),
                Err(TryLockError::Poisoned(poisoned)) => {
                    let _alone = poisoned.into_inner();
                    self.empty_alone();
                }
                // The other thread checks again before it ends.
                Err(TryLockError::WouldBlock) => return,
            }
        }
    }

    fn empty_alone(&self) {
        while self.filled.swap(false, Ordering::SeqCst) {
            if let Err(error) = conman_linux::empty_directory(&self.path) {
                tracing::warn!(path = %self.path.display(), %error, "cannot empty the trash");
            }
        }
    }

    fn fresh_name(&self) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}.{number}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_thrown_in_is_away_at_once_and_gone_later() {
        let root = tempfile::tempdir().expect("a directory");
        let doomed = root.path().join("doomed");
        fs::create_dir_all(doomed.join("deep/down")).expect("made");
        let trash = Trash::open(root.path().join("trash")).expect("made");
        trash.discard(&doomed).expect("moved");
        assert!(!doomed.exists());
        trash.discard(&doomed).expect("it is gone already");
        let left = || fs::read_dir(root.path().join("trash")).expect("readable");
        assert_eq!(left().count(), 1);
        trash.empty();
        assert_eq!(left().count(), 0);
    }
}
