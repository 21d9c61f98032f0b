//! Removes directory trees of hostile programs, whatever their depth, width and size.
//!
//! The removal descends only a few levels; a deeper directory is moved up to the top and emptied later. So
//! the stack, the number of descriptors and the memory do not depend on the tree, and a removal can be done
//! in steps, each of which starts at the top.

use std::collections::hash_map::RandomState;
use std::ffi::CStr;
use std::hash::BuildHasher;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

/// Levels to descend, each of which takes two descriptors: deeper than images usually are.
const MAX_DEPTH: usize = 24;

/// Removes a directory with everything in it. A missing one is not an error. Blocks as long as needed;
/// continues after a failure and returns one of them.
///
/// Follows no symbolic link below `path`. No process may write there meanwhile.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    remove_tree_partly(path, usize::MAX).map(|_| ())
}

/// Like [`remove_tree`], but visits at most this many entries. `false` when some may be left; then call it
/// again to continue.
pub fn remove_tree_partly(path: &Path, entries: usize) -> io::Result<bool> {
    let top = match open_directory(CWD, path) {
        Err(Errno::NOENT) => return Ok(true),
        other => other?,
    };
    if !Removal::new(&top, entries).empty(&top, 0)? {
        return Ok(false);
    }
    gone(unlinkat(CWD, path, AtFlags::REMOVEDIR))?;
    Ok(true)
}

/// Like [`remove_tree`], but leaves the directory itself.
pub fn empty_directory(path: &Path) -> io::Result<()> {
    let top = open_directory(CWD, path)?;
    Removal::new(&top, usize::MAX).empty(&top, 0).map(|_| ())
}

struct Removal<'a> {
    /// The directory that too deep directories are moved to.
    top: &'a OwnedFd,
    /// A random number, so that no entry of the tree can have the same name.
    prefix: u64,
    moved: u64,
    /// Entries that may still be visited.
    left: usize,
}

/// What one reading of a directory found.
#[derive(Default)]
struct Pass {
    seen: bool,
    progress: bool,
    failure: Option<io::Error>,
}

impl<'a> Removal<'a> {
    fn new(top: &'a OwnedFd, entries: usize) -> Self {
        Self {
            top,
            prefix: RandomState::new().hash_one(()),
            moved: 0,
            left: entries,
        }
    }

    /// Returns `false` when it has visited as many entries as it may.
    fn empty(&mut self, directory: &OwnedFd, depth: usize) -> io::Result<bool> {
        loop {
            let mut pass = Pass::default();
            // Removing entries, or adding them to the top, may make the listing miss others.
            for entry in Dir::read_from(directory)? {
                let entry = entry?;
                let name = entry.file_name();
                if name == c"." || name == c".." {
                    continue;
                }
                if self.left == 0 {
                    // The next step would only find the entries that cannot be removed.
                    return match pass.failure {
                        Some(error) if !pass.progress => Err(error),
                        _ => Ok(false),
                    };
                }
                self.left -= 1;
                pass.seen = true;
                match self.remove(directory, name, entry.file_type(), depth) {
                    Ok(true) => pass.progress = true,
                    Ok(false) => return Ok(false),
                    Err(error) => pass.failure = Some(error),
                }
            }
            match pass.failure {
                Some(error) if !pass.progress => return Err(error),
                _ if !pass.seen => return Ok(true),
                _ => {}
            }
        }
    }

    fn remove(
        &mut self,
        parent: &OwnedFd,
        name: &CStr,
        kind: FileType,
        depth: usize,
    ) -> io::Result<bool> {
        let kind = match kind {
            FileType::Unknown => {
                let data = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(data.st_mode)
            }
            known => known,
        };
        if !kind.is_dir() {
            gone(unlinkat(parent, name, AtFlags::empty()))?;
            return Ok(true);
        }
        // A directory that was moved up is usually empty now.
        match unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            other => {
                gone(other)?;
                return Ok(true);
            }
        }
        if depth >= MAX_DEPTH {
            self.moved += 1;
            let name_there = format!("{:016x}.{}", self.prefix, self.moved);
            renameat(parent, name, self.top, name_there)?;
            return Ok(true);
        }
        let directory = open_directory(parent, name)?;
        if !self.empty(&directory, depth + 1)? {
            return Ok(false);
        }
        gone(unlinkat(parent, name, AtFlags::REMOVEDIR))?;
        Ok(true)
    }
}

fn open_directory(
    at: impl std::os::fd::AsFd,
    name: impl rustix::path::Arg,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

fn gone(result: Result<(), Errno>) -> io::Result<()> {
    match result {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::mkdirat;

    use super::*;

    /// Creates a deep tree with files and links.
    fn deep_tree(path: &Path, depth: usize, precious: &Path) {
        fs::create_dir(path).expect("made");
        symlink(precious, path.join("link")).expect("linked");
        let mut at = open_directory(CWD, path).expect("opened");
        for depth in 0..depth {
            mkdirat(&at, "d", Mode::from_raw_mode(0o700)).expect("made");
            at = open_directory(&at, "d").expect("opened");
            if depth % 1_000 == 0 {
                rustix::fs::symlinkat(precious, &at, "link").expect("linked");
                mkdirat(&at, "side", Mode::from_raw_mode(0o700)).expect("made");
            }
        }
    }

    fn precious(root: &Path) -> std::path::PathBuf {
        let precious = root.join("precious");
        fs::create_dir(&precious).expect("made");
        fs::write(precious.join("file"), "x").expect("written");
        precious
    }

    #[test]
    fn a_tree_deeper_than_any_stack_goes_and_nothing_beside_it() {
        let root = tempfile::tempdir().expect("a directory");
        let precious = precious(root.path());
        let doomed = root.path().join("doomed");
        deep_tree(&doomed, 20_000, &precious);
        remove_tree(&doomed).expect("removed");
        assert!(!doomed.exists());
        remove_tree(&doomed).expect("it is gone already");
        assert!(precious.join("file").exists());
    }

    #[test]
    fn a_directory_that_is_emptied_stays() {
        let root = tempfile::tempdir().expect("a directory");
        let precious = precious(root.path());
        let kept = root.path().join("kept");
        fs::create_dir(&kept).expect("made");
        deep_tree(&kept.join("deep"), 2_000, &precious);
        fs::create_dir_all(kept.join("a/b/c")).expect("made");
        fs::write(kept.join("a/b/file"), "x").expect("written");
        empty_directory(&kept).expect("emptied");
        assert_eq!(fs::read_dir(&kept).expect("readable").count(), 0);
        assert!(precious.join("file").exists());
    }

    #[test]
    fn steps_of_a_few_entries_come_to_the_end() {
        let root = tempfile::tempdir().expect("a directory");
        let doomed = root.path().join("doomed");
        for number in 0..300 {
            fs::create_dir_all(doomed.join(format!("{}/{number}", number % 7))).expect("made");
        }
        let mut steps = 0;
        while !remove_tree_partly(&doomed, 50).expect("removed") {
            steps += 1;
            assert!(steps < 100, "it does not get on");
        }
        assert!(steps >= 5, "a step does too much");
        assert!(!doomed.exists());
    }

    #[test]
    fn what_is_no_directory_is_not_removed_as_one() {
        let root = tempfile::tempdir().expect("a directory");
        let precious = precious(root.path());
        let link = root.path().join("link");
        symlink(&precious, &link).expect("linked");
        assert!(remove_tree(&link).is_err());
        assert!(remove_tree(&precious.join("file")).is_err());
        assert!(precious.join("file").exists());
    }
}
