//! Removes directories that containers wrote into.
//!
//! What is in them is hostile: as deep, as wide and as full as somebody liked to make it. So a
//! directory is first moved away by one rename, which is all that anybody waits for, and emptied
//! later by one thread. It goes down a few levels only: what lies deeper is moved up into the trash
//! and emptied in its turn, so that neither the stack nor the number of descriptors depends on
//! depth.

use std::collections::hash_map::RandomState;
use std::ffi::{CStr, CString};
use std::fs::{self, DirBuilder};
use std::hash::BuildHasher;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::TryLockError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

/// Levels that are gone down, each of which takes a descriptor: deeper than images usually are.
const MAX_DEPTH: usize = 24;

/// Root's alone, like what was moved into it.
const MODE: u32 = 0o700;

/// A directory full of what is to go.
#[derive(Debug)]
pub(super) struct Trash {
    path: PathBuf,
    /// No name of an earlier process comes up again.
    prefix: u64,
    next: AtomicU64,
    /// Something was thrown in that no emptying has begun to look for.
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

    /// Moves a directory of the same file system in. One that is not there is gone already.
    pub(super) fn discard(&self, path: &Path) -> io::Result<()> {
        match fs::rename(path, self.path.join(self.fresh_name())) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Empties it, unless somebody does already, who then goes on. Blocks for as long as that
    /// takes. What cannot be removed is logged and left to the next time.
    pub(super) fn empty(&self) {
        self.filled.store(true, Ordering::SeqCst);
        while self.filled.load(Ordering::SeqCst) {
            match self.emptying.try_lock() {
                Ok(_alone) => self.empty_alone(),
                Err(TryLockError::Poisoned(poisoned)) => {
                    let _alone = poisoned.into_inner();
                    self.empty_alone();
                }
                // It looks again before it ends.
                Err(TryLockError::WouldBlock) => return,
            }
        }
    }

    fn empty_alone(&self) {
        while self.filled.swap(false, Ordering::SeqCst) {
            if let Err(error) = self.remove_all() {
                tracing::warn!(path = %self.path.display(), %error, "files of removed containers stay");
            }
        }
    }

    /// Goes on after an error and returns the last.
    fn remove_all(&self) -> io::Result<()> {
        let trash = open_directory(CWD, &self.path)?;
        loop {
            let mut outcome = Ok(());
            let mut removed = false;
            for (name, is_directory) in entries(&trash)? {
                let result = if is_directory {
                    self.remove_directory(&trash, &trash, &name, 1)
                } else {
                    gone(unlinkat(&trash, &name, AtFlags::empty()))
                };
                match result {
                    Ok(()) => removed = true,
                    Err(error) => outcome = Err(error),
                }
            }
            if !removed {
                return outcome;
            }
        }
    }

    /// Its files go, and so do its directories, those too deep by way of the trash.
    fn remove_directory(
        &self,
        trash: &OwnedFd,
        parent: &OwnedFd,
        name: &CStr,
        depth: usize,
    ) -> io::Result<()> {
        let directory = open_directory(parent, name)?;
        for (entry, is_directory) in entries(&directory)? {
            if !is_directory {
                gone(unlinkat(&directory, &entry, AtFlags::empty()))?;
            } else if depth < MAX_DEPTH {
                self.remove_directory(trash, &directory, &entry, depth + 1)?;
            } else {
                renameat(&directory, &entry, trash, self.fresh_name())?;
            }
        }
        gone(unlinkat(parent, name, AtFlags::REMOVEDIR))
    }

    fn fresh_name(&self) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}.{number}", self.prefix)
    }
}

fn open_directory(at: impl std::os::fd::AsFd, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, name, flags, Mode::empty())?)
}

/// What is in a directory now, and whether each is one itself.
fn entries(directory: &OwnedFd) -> io::Result<Vec<(CString, bool)>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                let data = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(data.st_mode)
            }
            known => known,
        };
        found.push((name.to_owned(), kind.is_dir()));
    }
    Ok(found)
}

fn gone(result: Result<(), Errno>) -> io::Result<()> {
    match result {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::mkdirat;

    use super::*;

    #[test]
    fn a_tree_deeper_than_any_stack_goes_and_nothing_beside_it() {
        let root = tempfile::tempdir().expect("a directory");
        let precious = root.path().join("precious");
        fs::create_dir(&precious).expect("made");
        fs::write(precious.join("file"), "x").expect("written");
        let doomed = root.path().join("doomed");
        fs::create_dir(&doomed).expect("made");
        symlink(&precious, doomed.join("link")).expect("linked");
        let mut at = open_directory(CWD, &doomed).expect("opened");
        for depth in 0..5_000 {
            mkdirat(&at, "d", Mode::from_raw_mode(0o700)).expect("made");
            at = open_directory(&at, "d").expect("opened");
            if depth % 1_000 == 0 {
                rustix::fs::symlinkat(&precious, &at, "link").expect("linked");
            }
        }
        drop(at);
        let trash = Trash::open(root.path().join("trash")).expect("made");
        trash.discard(&doomed).expect("moved");
        assert!(!doomed.exists());
        trash.discard(&doomed).expect("it is gone already");
        trash.empty();
        let left = fs::read_dir(root.path().join("trash")).expect("readable");
        assert_eq!(left.count(), 0);
        assert!(precious.join("file").exists());
    }
}
