//! Look-ups that cannot leave a directory.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

/// Attempts while a rename elsewhere keeps the kernel from deciding whether a path stayed below
/// (openat2(2), EAGAIN).
const ATTEMPTS: usize = 32;

/// Opens `path` below `root`; symbolic links, `..` out of it and other file systems are refused.
pub(crate) fn open(root: impl AsFd, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    for _ in 0..ATTEMPTS {
        match openat2(&root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            outcome => return outcome,
        }
    }
    Err(Errno::AGAIN)
}

/// Opens a regular file below `root` for reading. Anything else is refused; a FIFO does not
/// block.
pub(crate) fn open_file(root: impl AsFd, path: &Path) -> io::Result<File> {
    let file = File::from(open(root, path, OFlags::RDONLY | OFlags::NONBLOCK)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    Ok(file)
}

/// Reads at most `limit` bytes; a longer stream is an error of kind `FileTooLarge`.
pub(crate) fn read_bounded(source: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("longer than {limit} bytes"),
        ));
    }
    Ok(bytes)
}
