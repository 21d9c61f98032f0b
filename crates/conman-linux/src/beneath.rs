use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2};
use rustix::io::Errno;

/// Tries while a rename elsewhere keeps the kernel from telling whether `..` stayed below the
/// root (openat2(2), EAGAIN).
const ATTEMPTS: usize = 32;

/// Mode of directories that are made, before the umask.
const NEW_DIRECTORY: Mode = Mode::from_raw_mode(0o755);

/// A hold (`O_PATH`, close-on-exec) on a file or directory below `root`, for bind mounts.
///
/// The kernel refuses to leave `root` and to follow any symbolic link below it, whoever renames
/// what meanwhile; `root` itself is the operator's and may be reached through links. `relative`
/// must hold plain names only: an absolute path and `..` are refused with `InvalidInput`, an empty
/// path is `root` itself.
///
/// Errors besides those of open(2): ELOOP for a symbolic link, `Unsupported` before Linux 5.6.
pub fn open_beneath(root: &Path, relative: &Path) -> io::Result<OwnedFd> {
    check_plain(relative)?;
    let root = open_root(root)?;
    if relative.as_os_str().is_empty() {
        return Ok(root);
    }
    open_component(&root, relative, OFlags::empty())
}

/// Like [`open_beneath`] for a directory, which is made, its parents too, where it is missing.
pub fn create_dir_beneath(root: &Path, relative: &Path) -> io::Result<OwnedFd> {
    check_plain(relative)?;
    let mut directory = open_root(root)?;
    for component in relative.components() {
        let name = Path::new(component.as_os_str());
        match mkdirat(&directory, name, NEW_DIRECTORY) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        directory = open_component(&directory, name, OFlags::DIRECTORY)?;
    }
    Ok(directory)
}

fn check_plain(relative: &Path) -> io::Result<()> {
    if relative
        .components()
        .all(|component| matches!(component, Component::Normal(_)))
    {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{} is not made of plain names", relative.display()),
    ))
}

fn open_root(root: &Path) -> io::Result<OwnedFd> {
    Ok(openat(
        CWD,
        root,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

fn open_component(directory: &OwnedFd, relative: &Path, extra: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | extra;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let mut last = Errno::AGAIN;
    for _ in 0..ATTEMPTS {
        match openat2(directory, relative, flags, Mode::empty(), resolve) {
            Ok(fd) => return Ok(fd),
            Err(errno @ (Errno::AGAIN | Errno::INTR)) => last = errno,
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(last.into())
}
