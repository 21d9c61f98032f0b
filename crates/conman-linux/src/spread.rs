use std::fs::File;
use std::path::Path;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

/// Asks the filesystem to put the directories in `parent` far from each other, each with what will
/// be in it.
///
/// ext4 without a journal does not give an inode away again for a minute, and looks at each of
/// those to pass it over. Every overlay makes and removes some while it is mounted, every session
/// when it ends, and all directories of one parent lie in one group of inodes: at some hundred
/// starts a second, that is most of their time. Filesystems that do not know the flag do not have
/// the trouble.
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
