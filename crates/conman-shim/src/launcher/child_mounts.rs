//! Mounts and mount points in a container, made by its first process.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use conman_linux::{Mount, create_dir_in_root};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, mkdirat, openat, unlinkat};

/// All users may write, and remove only their own files.
const SHARED_MODE: u32 = 0o1777;

/// inotify instances of the container's user namespace; below /proc.
const INOTIFY_INSTANCES: &str = "sys/user/max_inotify_instances";

/// Each instance with a watch costs a grace period of the kernel when its owner dies, one after the other:
/// 5 to 8 ms.
const MAX_INOTIFY_INSTANCES: &[u8] = b"32";

/// Attaches at a directory of the container, which is created if missing. A symbolic link is refused:
/// otherwise the image would choose what is covered.
pub(super) fn attach_at(mount: &Mount, path: &str) -> io::Result<()> {
    if let Err(error) = std::fs::create_dir(path)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error);
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target = rustix::fs::open(path, flags, Mode::empty())?;
    mount.attach(&target, c"")
}

/// A directory of the container's filesystem for /dev/shm, so that it needs no superblock.
pub(super) fn shared_memory() -> io::Result<Mount> {
    for path in ["/dev", "/dev/shm"] {
        match DirBuilder::new().mode(0o755).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dev = rustix::fs::open("/dev", flags, Mode::empty())?;
    let shm = rustix::fs::openat(&dev, "shm", flags & !OFlags::PATH, Mode::empty())?;
    let shm = File::from(shm);
    // A change, even without effect, would copy the directory up from the image.
    if shm.metadata()?.permissions().mode() & 0o7777 != SHARED_MODE {
        shm.set_permissions(std::fs::Permissions::from_mode(SHARED_MODE))?;
    }
    Mount::copy_of(&shm, Path::new(""))
}

/// By the container's procfs, while the calling process has all capabilities in its user namespace.
pub(super) fn limit_inotify(proc: &Mount) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    match openat(proc, INOTIFY_INSTANCES, flags, Mode::empty()) {
        Ok(file) => Ok(rustix::io::write(file, MAX_INOTIFY_INSTANCES).map(drop)?),
        // A kernel without inotify.
        Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Opens the place where a bind or a file is attached. Creates it if missing; a symbolic link as the last
/// component is replaced for a file and refused for a directory.
pub(super) fn bind_target(
    root: BorrowedFd<'_>,
    mount: &Mount,
    target: &Path,
) -> io::Result<OwnedFd> {
    let kind = |file: BorrowedFd<'_>| -> io::Result<FileType> {
        Ok(FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode))
    };
    let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let parent = create_dir_in_root(root, parent)?;
    let hold = || -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&parent, name, flags, Mode::empty())?)
    };
    if kind(mount.as_fd())?.is_dir() {
        match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => return hold(),
            Err(errno) => return Err(errno.into()),
        }
    }
    match hold() {
        Ok(found) if !kind(found.as_fd())?.is_symlink() => return Ok(found),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    match unlinkat(&parent, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(errno) => return Err(errno.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    openat(&parent, name, flags, Mode::from_raw_mode(0o644))?;
    hold()
}
