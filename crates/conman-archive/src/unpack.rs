//! Unpacks a tar archive into a directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use conman_linux::{create_dir_in_root, open_in_root};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, fchmod, linkat, mkdirat, openat,
    statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};
use thiserror::Error;

use crate::{BUFFER_BYTES, PERMISSIONS, SKIPPED_COMMENT, attributes};

/// Maximum bytes between the archive's end and the input's end: tar fills its last record.
const MAX_PADDING: u64 = 1 << 20;

/// Maximum number of directories that get their own mode and time. Others stay open to their owner.
const MAX_DIRECTORIES: usize = 100_000;

/// Maximum size of a sparse file: its holes are read, which takes a minute for each some hundred gigabytes.
const MAX_SPARSE_BYTES: u64 = 2 << 40;

/// The prefix of PAX records of sparse files, whose content is in a form that would be written as it is.
const PAX_SPARSE: &str = "GNU.sparse.";

/// Maximum bytes of a global header that is read.
const MAX_COMMENT_BYTES: u64 = 4_096;

/// Whether set-user-id and set-group-id bits are kept. They are dropped where the archive is less trusted than
/// the user who will own its files; directories that were there keep their modes then, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialBits {
    Keep,
    Drop,
}

/// The numbers of an archive's entries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpacked {
    pub written: u64,
    /// Those of a kind that is not unpacked.
    pub skipped: u64,
    /// Files that are not in the archive because [`pack()`](crate::pack()) skipped them.
    pub not_packed: u64,
}

/// Why an archive was not unpacked. What was written before stays.
#[derive(Debug, Error)]
pub enum UnpackError {
    #[error("the archive, or the request, ended early")]
    Truncated,
    #[error("{0}")]
    Unreadable(io::Error),
    #[error("{} leads out of the directory", .0.display())]
    Outside(PathBuf),
    #[error("more than padding follows the archive's end")]
    Trailing,
    #[error("{}: {source}", path.display())]
    Entry { path: PathBuf, source: io::Error },
}

/// Unpacks an archive into a directory.
///
/// The directory is the root for the archive's paths, and for links on the way: nothing is written outside
/// of it. What is there already is replaced, except for directories. Everything belongs to the user that the
/// process has.
///
/// # Errors
/// The archive is damaged, or one of its entries cannot be written.
pub fn unpack(
    directory: OwnedFd,
    input: impl Read,
    special_bits: SpecialBits,
) -> Result<Unpacked, UnpackError> {
    let mut unpacking = Unpacking {
        root: directory,
        permissions: match special_bits {
            SpecialBits::Keep => PERMISSIONS,
            SpecialBits::Drop => PERMISSIONS & !0o6000,
        },
        replaces_modes: special_bits == SpecialBits::Keep,
        directories: Vec::new(),
    };
    let mut done = Unpacked::default();
    let mut archive = Archive::new(io::BufReader::with_capacity(BUFFER_BYTES, input));
    for entry in archive.entries().map_err(unreadable)? {
        let mut entry = entry.map_err(unreadable)?;
        if entry.header().entry_type() == EntryType::XGlobalHeader {
            let not_packed = not_packed(&mut entry).map_err(unreadable)?;
            done.not_packed = done.not_packed.saturating_add(not_packed);
            continue;
        }
        let Some(path) = plain_path(&entry)? else {
            continue;
        };
        match unpacking.entry(&path, &mut entry) {
            Ok(true) => done.written += 1,
            Ok(false) => done.skipped += 1,
            Err(source) => return Err(UnpackError::Entry { path, source }),
        }
    }
    let mut rest = archive.into_inner().take(MAX_PADDING + 1);
    let padding = io::copy(&mut rest, &mut io::sink()).map_err(unreadable)?;
    if padding > MAX_PADDING {
        return Err(UnpackError::Trailing);
    }
    unpacking.finish_directories()?;
    Ok(done)
}

fn unreadable(error: io::Error) -> UnpackError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => UnpackError::Truncated,
        _ => UnpackError::Unreadable(error),
    }
}

/// The number in a comment of [`pack()`](crate::pack()).
fn not_packed(entry: &mut Entry<'_, impl Read>) -> io::Result<u64> {
    let mut text = Vec::new();
    entry.take(MAX_COMMENT_BYTES).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let number = text
        .split_once(SKIPPED_COMMENT)
        .map(|(_, number)| number.trim_end());
    Ok(number.and_then(|number| number.parse().ok()).unwrap_or(0))
}

/// The entry's path in the directory; `None` for the directory itself.
fn plain_path(entry: &Entry<'_, impl Read>) -> Result<Option<PathBuf>, UnpackError> {
    let path = entry.path().map_err(unreadable)?;
    inside(&path)
        .ok_or_else(|| UnpackError::Outside(path.to_path_buf()))
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

struct Unpacking {
    root: OwnedFd,
    /// The permissions that are kept.
    permissions: u32,
    /// Whether directories that were there get the archive's modes, times and attributes.
    replaces_modes: bool,
    /// Directories with their modes and times, which are set once they are filled.
    directories: Vec<(PathBuf, u32, u64)>,
}

impl Unpacking {
    /// `false` for a type that is skipped.
    fn entry(&mut self, path: &Path, entry: &mut Entry<'_, impl Read>) -> io::Result<bool> {
        let records = records(entry)?;
        let (parent, name) = self.parent(path)?;
        let mode = entry.header().mode().unwrap_or(0o644) & self.permissions;
        let time = entry.header().mtime().unwrap_or(0);
        match entry.header().entry_type() {
            EntryType::Directory => {
                let is_new = stat_of(&parent, name).is_none();
                if let Some(directory) = make_directory(&parent, name)?
                    && (is_new || self.replaces_modes)
                {
                    // So that its own entries can be written whatever its mode is.
                    set_mode(&directory, mode | 0o700)?;
                    set_attributes(&directory, &records)?;
                    if self.directories.len() < MAX_DIRECTORIES {
                        self.directories.push((path.to_owned(), mode, time));
                    }
                }
                Ok(true)
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                make_room(&parent, name)?;
                let file = new_file(&parent, name, entry)?;
                set_attributes(&file, &records)?;
                fchmod(&file, Mode::from_raw_mode(mode))?;
                set_time(&parent, name, time)?;
                Ok(true)
            }
            EntryType::Symlink => {
                let target = entry.link_name()?.ok_or(io::ErrorKind::InvalidData)?;
                make_room(&parent, name)?;
                symlinkat(&*target, &parent, name)?;
                Ok(true)
            }
            EntryType::Link => self.hard_link(&parent, name, entry),
            _ => Ok(false),
        }
    }

    fn hard_link(
        &self,
        parent: &OwnedFd,
        name: &OsStr,
        entry: &Entry<'_, impl Read>,
    ) -> io::Result<bool> {
        let target = entry.link_name()?.ok_or(io::ErrorKind::InvalidData)?;
        let target = inside(&target).filter(|target| !target.as_os_str().is_empty());
        let target = target.ok_or(io::ErrorKind::InvalidData)?;
        let linked = target.file_name().ok_or(io::ErrorKind::InvalidData)?;
        let from = open_in_root(&self.root, &above(&target), OFlags::DIRECTORY)?;
        let stat = statat(&from, linked, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other(
                "a hard link to something that is not a file",
            ));
        }
        let is_other = |there: Stat| (there.st_dev, there.st_ino) != (stat.st_dev, stat.st_ino);
        if stat_of(parent, name).is_none_or(is_other) {
            make_room(parent, name)?;
            linkat(&from, linked, parent, name, AtFlags::empty())?;
        }
        Ok(true)
    }

    /// The directory of an entry, which is made if missing.
    fn parent<'p>(&self, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidData)?;
        Ok((create_dir_in_root(&self.root, &above(path))?, name))
    }

    /// Filling a directory changes its time and needs a mode that allows it. The deepest first: one above may
    /// be closed afterwards.
    fn finish_directories(self) -> Result<(), UnpackError> {
        for (path, mode, time) in self.directories.iter().rev() {
            let finished = self.parent(path).and_then(|(parent, name)| {
                if let Some(directory) = open_directory(&parent, name)? {
                    set_mode(&directory, *mode)?;
                    set_time(&parent, name, *time)?;
                }
                Ok(())
            });
            finished.map_err(|source| UnpackError::Entry {
                path: path.clone(),
                source,
            })?;
        }
        Ok(())
    }
}

fn above(path: &Path) -> PathBuf {
    Path::new("/").join(path.parent().unwrap_or(Path::new("")))
}

/// Makes a directory, or opens the one that is there. `None` for a link to a directory, which stays: it may be
/// one of the image's.
fn make_directory(parent: &OwnedFd, name: &OsStr) -> io::Result<Option<OwnedFd>> {
    match mkdirat(parent, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => open_directory(parent, name),
        Err(errno) => Err(errno.into()),
    }
}

/// `None` if it is something else than a directory.
fn open_directory(parent: &OwnedFd, name: &OsStr) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(parent, name, flags, Mode::empty()) {
        Ok(directory) => Ok(Some(directory)),
        Err(Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Writes a file that does not exist yet. The holes of a sparse one stay holes.
fn new_file(parent: &OwnedFd, name: &OsStr, entry: &mut Entry<'_, impl Read>) -> io::Result<File> {
    let is_sparse = entry.header().entry_type() == EntryType::GNUSparse;
    if is_sparse && entry.size() > MAX_SPARSE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "a sparse file of more than 2 TiB; copy what it holds by a command in the session",
        ));
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(parent, name, flags, Mode::from_raw_mode(0o600))?);
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let read = entry.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        let piece = &buffer[..read];
        if is_sparse && piece.iter().all(|byte| *byte == 0) {
            file.seek(SeekFrom::Current(i64::try_from(read).unwrap_or(i64::MAX)))?;
        } else {
            file.write_all(piece)?;
        }
    }
    if is_sparse {
        let end = file.stream_position()?;
        file.set_len(end)?;
    }
    Ok(file)
}

/// The PAX records of an entry. Those that are damaged are left out.
fn records(entry: &mut Entry<'_, impl Read>) -> io::Result<Vec<(String, Vec<u8>)>> {
    let Some(records) = entry.pax_extensions()? else {
        return Ok(Vec::new());
    };
    let records = records.flatten().filter_map(|record| {
        let name = record.key().ok()?.to_owned();
        Some((name, record.value_bytes().to_vec()))
    });
    let records: Vec<_> = records.collect();
    if records.iter().any(|(name, _)| name.starts_with(PAX_SPARSE)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a sparse file in PAX form; pack it with `tar --format=gnu`, or without --sparse",
        ));
    }
    Ok(records)
}

fn set_attributes(file: impl AsFd, records: &[(String, Vec<u8>)]) -> io::Result<()> {
    for (name, value) in records {
        attributes::write(&file, name, value)?;
    }
    Ok(())
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

fn set_mode(directory: &OwnedFd, mode: u32) -> io::Result<()> {
    match fchmod(directory, Mode::from_raw_mode(mode)) {
        // Another user's directory that was there already.
        Ok(()) | Err(Errno::PERM) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
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
