//! The terminals of a container's own programs: a devpts at `/dev/pts`.
//!
//! It is a superblock, for which every memory cgroup of the host pays, and few containers open terminals. So it is
//! mounted at the start where the spec wants it, and else with the first command that has a terminal.

use std::io;
use std::os::fd::OwnedFd;

use conman_linux::{Mount, MountAttributes, NewFilesystem};
use rustix::fs::{CWD, FlockOperation, FsWord, Mode, OFlags, flock, fstatfs, openat};
use rustix::io::Errno;

/// Where it is mounted.
const PTS: &str = "/dev/pts";

/// The group of terminals: `tty` in every common distribution.
const TTY_GROUP: &str = "5";

/// `DEVPTS_SUPER_MAGIC` (include/uapi/linux/magic.h).
const DEVPTS: FsWord = 0x1cd1;

/// Mounts it for at most so many terminals. The calling process is in the container.
pub(super) fn mount(most: u32) -> io::Result<()> {
    devpts(most)?.attach(&directory()?, c"")
}

/// The same unless it is there already. Commands that begin at the same time do not wait for each other; all but one
/// may begin a moment before it is there.
pub(super) fn mount_if_missing(most: u32) -> io::Result<()> {
    let below = directory()?;
    if is_devpts(&below)? {
        return Ok(());
    }
    match flock(&below, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        // Another command, or a program of the container, which then does without.
        Err(Errno::WOULDBLOCK) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    }
    match is_devpts(&directory()?)? {
        true => Ok(()),
        false => devpts(most)?.attach(&below, c""),
    }
}

/// With the ownership that C libraries expect. All users may open `ptmx`.
fn devpts(most: u32) -> io::Result<Mount> {
    let devpts = NewFilesystem::open("devpts")?;
    devpts.set("ptmxmode", "0666")?;
    devpts.set("mode", "0620")?;
    devpts.set("gid", TTY_GROUP)?;
    devpts.set("max", &most.to_string())?;
    devpts.mount(MountAttributes::MOUNT_ATTR_NOSUID | MountAttributes::MOUNT_ATTR_NOEXEC)
}

/// A directory of /dev, which no program of the container can change.
fn directory() -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(CWD, PTS, flags, Mode::empty())?)
}

fn is_devpts(directory: &OwnedFd) -> io::Result<bool> {
    Ok(fstatfs(directory)?.f_type == DEVPTS)
}
