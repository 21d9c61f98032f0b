//! Writes a directory as a tar archive.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat, readlinkat};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

use super::tree::{MAX_DEPTH, READ, entries, refuse_procfs, too_deep};

/// Writes a directory's content as an archive, with names relative to it. Follows no link, also while they
/// are exchanged. FIFOs, sockets, devices and procfs are left out; what disappears meanwhile, too.
pub(super) fn pack(directory: &OwnedFd, to: impl Write) -> io::Result<()> {
    let mut archive = Builder::new(to);
    let stat = fstat(directory)?;
    archive.append_data(
        &mut header(&stat, EntryType::Directory),
        Path::new("./"),
        io::empty(),
    )?;
    pack_entries(&mut archive, directory.as_fd(), Path::new(""), MAX_DEPTH)?;
    archive.into_inner()?.flush()
}

fn pack_entries<W: Write>(
    archive: &mut Builder<W>,
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
            Ok(opened) => pack_opened(archive, opened, &path, depth),
            Err(Errno::LOOP) => pack_link(archive, directory, name, &path),
            // Removed meanwhile, or a socket or a device without a driver.
            Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Ok(()),
            Err(errno) => Err(named(&path, errno.into())),
        }
    })
}

fn pack_opened<W: Write>(
    archive: &mut Builder<W>,
    opened: OwnedFd,
    path: &Path,
    depth: usize,
) -> io::Result<()> {
    let stat = fstat(&opened)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            let content = File::from(opened).take(size);
            // A file that becomes shorter is filled up: the archive states its size first.
            let content = content.chain(io::repeat(0)).take(size);
            archive.append_data(&mut header(&stat, EntryType::Regular), path, content)
        }
        FileType::Directory => {
            if refuse_procfs(&opened).is_err() {
                return Ok(());
            }
            archive.append_data(&mut header(&stat, EntryType::Directory), path, io::empty())?;
            pack_entries(archive, opened.as_fd(), path, depth - 1)
        }
        _ => Ok(()),
    }
}

fn pack_link<W: Write>(
    archive: &mut Builder<W>,
    directory: BorrowedFd<'_>,
    name: &std::ffi::CStr,
    path: &Path,
) -> io::Result<()> {
    let target = match readlinkat(directory, name, Vec::new()) {
        Ok(target) => PathBuf::from(std::ffi::OsString::from_vec(target.into_bytes())),
        // Replaced meanwhile.
        Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(named(path, errno.into())),
    };
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Symlink);
    header.set_mode(0o777);
    header.set_size(0);
    archive.append_link(&mut header, path, target)
}

fn header(stat: &Stat, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    let size = match kind {
        EntryType::Regular => u64::try_from(stat.st_size).unwrap_or(0),
        _ => 0,
    };
    header.set_size(size);
    header
}

fn named(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
