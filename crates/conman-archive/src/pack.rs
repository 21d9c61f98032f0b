//! Writes a directory as a tar archive.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat, readlinkat};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

use crate::sparse::SparseMap;
use crate::walk::{MAX_DEPTH, READ, entries, refuse_procfs, too_deep};
use crate::{PERMISSIONS, SKIPPED_COMMENT, attributes};

/// Maximum number of files whose further hard links are found. Links to others become files.
const MAX_LINKED: usize = 100_000;

/// Bytes of a unit of `st_blocks`, whatever the file system's block size (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// Writes a directory's content as an archive, with names relative to it. What disappears meanwhile is left out.
///
/// # Errors
/// A file cannot be read, with its path, or the archive cannot be written.
pub fn pack(directory: &OwnedFd, to: impl Write) -> io::Result<()> {
    let mut packing = Packing {
        archive: Builder::new(to),
        linked: HashMap::new(),
        skipped: 0,
    };
    let root = header(&fstat(directory)?, EntryType::Directory);
    packing.append(root, Path::new("./"), io::empty())?;
    packing.entries(directory.as_fd(), Path::new(""), MAX_DEPTH)?;
    packing.finish()
}

struct Packing<W: Write> {
    archive: Builder<W>,
    /// The first path of files with several links, by device and inode.
    linked: HashMap<(u64, u64), PathBuf>,
    skipped: u64,
}

impl<W: Write> Packing<W> {
    fn append(&mut self, mut header: Header, path: &Path, data: impl Read) -> io::Result<()> {
        self.archive.append_data(&mut header, path, data)
    }

    fn entries(
        &mut self,
        directory: BorrowedFd<'_>,
        prefix: &Path,
        depth: usize,
    ) -> io::Result<()> {
        if depth == 0 {
            return Err(too_deep());
        }
        entries(directory, |name| {
            let path = prefix.join(OsStr::from_bytes(name.to_bytes()));
            match openat(directory, name, READ | OFlags::NOFOLLOW, Mode::empty()) {
                Ok(opened) => self.opened(opened, &path, depth),
                Err(Errno::LOOP) => self.symlink(directory, name, &path),
                // A socket, or a device without a driver.
                Err(Errno::NXIO | Errno::NODEV) => {
                    self.skipped += 1;
                    Ok(())
                }
                // Removed meanwhile.
                Err(Errno::NOENT) => Ok(()),
                Err(errno) => Err(named(&path, errno.into())),
            }
        })
    }

    fn opened(&mut self, opened: OwnedFd, path: &Path, depth: usize) -> io::Result<()> {
        let stat = fstat(&opened)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.file(opened, &stat, path),
            FileType::Directory if refuse_procfs(&opened).is_ok() => {
                self.attributes(&opened)?;
                self.append(header(&stat, EntryType::Directory), path, io::empty())?;
                self.entries(opened.as_fd(), path, depth - 1)
            }
            _ => {
                self.skipped += 1;
                Ok(())
            }
        }
    }

    fn file(&mut self, opened: OwnedFd, stat: &Stat, path: &Path) -> io::Result<()> {
        if stat.st_nlink > 1 {
            let file = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.linked.get(&file) {
                let mut header = header(stat, EntryType::Link);
                return self.archive.append_link(&mut header, path, first);
            }
            if self.linked.len() < MAX_LINKED {
                self.linked.insert(file, path.to_owned());
            }
        }
        self.attributes(&opened)?;
        let size = size(stat);
        let file = File::from(opened);
        let mut header = header(stat, EntryType::Regular);
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        if blocks * BLOCK_BYTES < size
            && let Some(map) = SparseMap::of(&file, size)?
        {
            let content = map.entry(&mut header, file)?;
            return self.append(header, path, content);
        }
        // A file that becomes shorter is filled up: the archive states its size first.
        let content = file.take(size).chain(io::repeat(0)).take(size);
        self.append(header, path, content)
    }

    fn symlink(&mut self, directory: BorrowedFd<'_>, name: &CStr, path: &Path) -> io::Result<()> {
        let target = match readlinkat(directory, name, Vec::new()) {
            Ok(target) => PathBuf::from(OsString::from_vec(target.into_bytes())),
            // Replaced meanwhile.
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(named(path, errno.into())),
        };
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_mode(0o777);
        header.set_size(0);
        self.archive.append_link(&mut header, path, target)
    }

    /// Writes the attributes of the file whose entry is next.
    fn attributes(&mut self, opened: &OwnedFd) -> io::Result<()> {
        let records = attributes::read(opened)?;
        let records = records.iter().map(|(name, value)| (&**name, &**value));
        self.archive.append_pax_extensions(records)
    }

    fn finish(mut self) -> io::Result<()> {
        if self.skipped > 0 {
            let text = format!("comment={SKIPPED_COMMENT}{}\n", self.skipped);
            // The record's length counts itself, of two digits, and a space.
            let record = format!("{} {text}", text.len() + 3);
            let mut header = Header::new_ustar();
            header.set_entry_type(EntryType::XGlobalHeader);
            header.set_mode(0o644);
            header.set_size(record.len() as u64);
            self.archive
                .append_data(&mut header, "pax_global_header", record.as_bytes())?;
        }
        self.archive.into_inner()?.flush()
    }
}

fn header(stat: &Stat, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & PERMISSIONS);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(match kind {
        EntryType::Regular => size(stat),
        _ => 0,
    });
    header
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

fn named(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
