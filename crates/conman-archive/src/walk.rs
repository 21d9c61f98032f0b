//! Enters directories by descriptors.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{Dir, OFlags, fstatfs};

/// File system type of procfs (statfs(2)).
const PROC_SUPER_MAGIC: u32 = 0x9fa0;

/// For reading, without waiting for the other end of a FIFO or for a device.
pub const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// Levels of directories that are entered.
pub const MAX_DEPTH: usize = 256;

/// Calls `visit` for every name in a directory.
///
/// # Errors
/// Those of `visit` and of readdir(3).
pub fn entries(
    directory: BorrowedFd<'_>,
    mut visit: impl FnMut(&CStr) -> io::Result<()>,
) -> io::Result<()> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            visit(name)?;
        }
    }
    Ok(())
}

/// Files of procfs show the memory of the process that reads them.
///
/// # Errors
/// `PermissionDenied` for a file of procfs.
pub fn refuse_procfs(file: impl AsFd) -> io::Result<()> {
    match u32::try_from(fstatfs(file)?.f_type) {
        Ok(PROC_SUPER_MAGIC) => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "files of /proc are read by a command in the session",
        )),
        _ => Ok(()),
    }
}

/// The error beyond [`MAX_DEPTH`].
#[must_use]
pub fn too_deep() -> io::Error {
    let reason = format!("directories are nested more than {MAX_DEPTH} deep");
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}
