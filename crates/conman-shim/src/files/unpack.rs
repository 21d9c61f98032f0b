//! Unpacks a tar archive into a directory.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use conman_linux::{create_dir_in_root, open_in_root};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, fchmod, linkat, mkdirat, openat,
    statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};

use super::tree::{Tree, new_file};
use super::{BUFFER_BYTES, Failed, FilesFailure, failed};

/// Most bytes between the archive's end and the input's end: tar fills its last record.
const MAX_PADDING: u64 = 1 << 20;

/// Unpacks an archive into a directory and returns the numbers of entries written and skipped.
///
/// The directory is the root for the archive's paths, and for links on the way: nothing is written outside
/// of it. What is there already is replaced, except for directories. Everything belongs to the user that the
/// process has; the archive's owners are ignored.
pub(super) fn unpack(directory: OwnedFd, input: impl Read) -> Result<(u64, u64), Failed> {
    let tree = Tree::below(directory);
    let mut archive = Archive::new(io::BufReader::with_capacity(BUFFER_BYTES, input));
    let (mut written, mut skipped) = (0, 0);
    for entry in archive.entries().map_err(unreadable)? {
        let mut entry = entry.map_err(unreadable)?;
        let Some(path) = plain_path(&entry)? else {
            continue;
        };
        let shown = path.display().to_string();
        match unpack_entry(&tree, &path, &mut entry) {
            Ok(true) => written += 1,
            Ok(false) => skipped += 1,
            Err(error) => return Err(failed(&shown)(error)),
        }
    }
    let mut rest = archive.into_inner().take(MAX_PADDING + 1);
    let padding = io::copy(&mut rest, &mut io::sink()).map_err(unreadable)?;
    if padding > MAX_PADDING {
        let detail = "more than padding follows the archive's end";
        return Err(Failed::new(FilesFailure::Archive, detail));
    }
    Ok((written, skipped))
}

fn unreadable(error: io::Error) -> Failed {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Failed::new(
            FilesFailure::Archive,
            "the archive, or the request, ended early",
        ),
        _ => Failed::new(FilesFailure::Archive, error.to_string()),
    }
}

/// The entry's path in the directory; `None` for the directory itself.
fn plain_path(entry: &Entry<'_, impl Read>) -> Result<Option<PathBuf>, Failed> {
    let path = entry.path().map_err(unreadable)?;
    inside(&path)
        .ok_or_else(|| {
            let detail = format!("{} leads out of the directory", path.display());
            Failed::new(FilesFailure::Archive, detail)
        })
        .map(|path| (!path.as_os_str().is_empty()).then_some(path))
}

/// Only the plain names of a path; `None` if it has `..` or a NUL.
fn inside(path: &Path) -> Option<PathBuf> {
    if path.as_os_str().as_bytes().contains(&0) {
        return None;
    }
    path.components()
        .filter(|part| !matches!(part, Component::RootDir | Component::CurDir))
        .map(|part| match part {
            Component::Normal(name) => Some(name),
            _ => None,
        })
        .collect()
}

/// `false` for a type that is skipped.
fn unpack_entry(tree: &Tree, path: &Path, entry: &mut Entry<'_, impl Read>) -> io::Result<bool> {
    let (parent, name) = parent(tree, path)?;
    let mode = entry.header().mode().unwrap_or(0o644) & 0o7777;
    match entry.header().entry_type() {
        EntryType::Directory => make_directory(&parent, name, mode)?,
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            make_room(&parent, name)?;
            new_file(&parent, name, mode, entry)?;
        }
        EntryType::Symlink => {
            let target = entry.link_name()?.ok_or(io::ErrorKind::InvalidData)?;
            make_room(&parent, name)?;
            symlinkat(&*target, &parent, name)?;
            return Ok(true);
        }
        EntryType::Link => {
            let target = entry.link_name()?.ok_or(io::ErrorKind::InvalidData)?;
            let target = inside(&target).filter(|target| !target.as_os_str().is_empty());
            let target = target.ok_or(io::ErrorKind::InvalidData)?;
            let linked = target.file_name().ok_or(io::ErrorKind::InvalidData)?;
            let from = open_in_root(tree.root(), &above(&target), OFlags::DIRECTORY)?;
            let stat = statat(&from, linked, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Err(io::Error::other(
                    "a hard link to something that is not a file",
                ));
            }
            let is_other = |there: Stat| (there.st_dev, there.st_ino) != (stat.st_dev, stat.st_ino);
            if stat_of(&parent, name).is_none_or(is_other) {
                make_room(&parent, name)?;
                linkat(&from, linked, &parent, name, AtFlags::empty())?;
            }
            return Ok(true);
        }
        _ => return Ok(false),
    }
    set_time(&parent, name, entry.header().mtime().unwrap_or(0))?;
    Ok(true)
}

/// The directory of an entry, which is made if missing.
fn parent<'p>(tree: &Tree, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidData)?;
    Ok((create_dir_in_root(tree.root(), &above(path))?, name))
}

fn above(path: &Path) -> PathBuf {
    Path::new("/").join(path.parent().unwrap_or(Path::new("")))
}

fn make_directory(parent: &OwnedFd, name: &OsStr, mode: u32) -> io::Result<()> {
    match mkdirat(parent, name, Mode::from_raw_mode(0o700)) {
        Ok(()) => {}
        Err(Errno::EXIST) => {
            let is_directory = stat_of(parent, name)
                .is_some_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir());
            // A link to a directory stays, as one of the image's may.
            if !is_directory {
                return Ok(());
            }
        }
        Err(errno) => return Err(errno.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(parent, name, flags, Mode::empty())?;
    // So that its own entries can be written whatever its mode is.
    Ok(fchmod(&directory, Mode::from_raw_mode(mode | 0o700))?)
}

/// Removes what is in the way, except for a directory.
fn make_room(parent: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn stat_of(parent: &OwnedFd, name: &OsStr) -> Option<Stat> {
    statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok()
}

fn set_time(parent: &OwnedFd, name: &OsStr, seconds: u64) -> io::Result<()> {
    let time = Timespec {
        tv_sec: i64::try_from(seconds).unwrap_or(0),
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    match utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW) {
        // Another user's directory that was there already.
        Ok(()) | Err(Errno::PERM) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
