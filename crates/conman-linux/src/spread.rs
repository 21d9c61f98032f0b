//! Asks the filesystem to place directories far from each other.

use std::fs::File;
use std::path::Path;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

/// Asks the filesystem to place the directories in `parent` far from each other, each with its content.
///
/// ext4 without a journal does not reuse an inode for a minute, and checks and skips each of those. Every
/// overlay creates and removes some while it is mounted, every session when it ends, and all directories of
/// one parent are in one group of inodes: at some hundred starts a second, that is most of their time.
/// Filesystems without the flag do not have the problem.
pub fn spread_directories(parent: &Path) {
    let Ok(parent) = File::open(parent) else {
        return;
    };
    if let Ok(flags) = ioctl_getflags(&parent)
        && !flags.contains(IFlags::TOPDIR)
    {
        let _ = ioctl_setflags(&parent, flags | IFlags::TOPDIR);
    }
}
