//! Mounts by descriptor.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{StatVfsMountFlags, fstatvfs};
pub use rustix::mount::MountAttrFlags as MountAttributes;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_remount,
    move_mount, open_tree,
};

/// The attributes that mount(2) supports, its flags for them, and how a mount shows them.
const CLASSIC: [(MountAttributes, MountFlags, StatVfsMountFlags); 4] = [
    (
        MountAttributes::MOUNT_ATTR_RDONLY,
        MountFlags::RDONLY,
        StatVfsMountFlags::RDONLY,
    ),
    (
        MountAttributes::MOUNT_ATTR_NOSUID,
        MountFlags::NOSUID,
        StatVfsMountFlags::NOSUID,
    ),
    (
        MountAttributes::MOUNT_ATTR_NODEV,
        MountFlags::NODEV,
        StatVfsMountFlags::NODEV,
    ),
    (
        MountAttributes::MOUNT_ATTR_NOEXEC,
        MountFlags::NOEXEC,
        StatVfsMountFlags::NOEXEC,
    ),
];

/// `struct mount_attr` of mount_setattr(2).
#[repr(C)]
#[derive(Debug, Default)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// A mount by descriptor, attached or not. Close-on-exec; a detached one is unmounted with its last
/// descriptor.
#[derive(Debug)]
pub struct Mount {
    fd: OwnedFd,
}

/// A filesystem that is being configured.
#[derive(Debug)]
pub struct NewFilesystem {
    context: OwnedFd,
}

impl NewFilesystem {
    /// Begins a filesystem of this type (`proc`, `overlay`, `tmpfs`).
    pub fn open(kind: &str) -> io::Result<Self> {
        Ok(Self {
            context: fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?,
        })
    }

    /// Sets an option with a value.
    pub fn set(&self, key: &str, value: &str) -> io::Result<()> {
        Ok(fsconfig_set_string(&self.context, key, value)?)
    }

    /// Sets an option without a value.
    pub fn set_flag(&self, key: &str) -> io::Result<()> {
        Ok(fsconfig_set_flag(&self.context, key)?)
    }

    /// Sets an option whose value is a file; overlay layers need about Linux 6.13 for it.
    pub fn set_fd(&self, key: &str, file: impl AsFd) -> io::Result<()> {
        Ok(fsconfig_set_fd(&self.context, key, file)?)
    }

    /// Creates the filesystem and a detached mount of it.
    pub fn mount(self, attributes: MountAttributes) -> io::Result<Mount> {
        fsconfig_create(&self.context)?;
        let fd = fsmount(&self.context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        Ok(Mount { fd })
    }
}

impl Mount {
    /// A detached copy of the mount at `path` (below `directory` when relative), beginning at that file or
    /// directory, without the mounts below it. Symbolic links are followed except as the last component. The
    /// mount must be in the caller's mount namespace.
    pub fn copy_of(directory: impl AsFd, path: &Path) -> io::Result<Self> {
        Self::copied(directory, path, OpenTreeFlags::AT_SYMLINK_NOFOLLOW)
    }

    /// The same with the mounts below it. A symbolic link as the last component is followed, too.
    pub fn copy_of_tree(directory: impl AsFd, path: &Path) -> io::Result<Self> {
        Self::copied(directory, path, OpenTreeFlags::AT_RECURSIVE)
    }

    fn copied(directory: impl AsFd, path: &Path, how: OpenTreeFlags) -> io::Result<Self> {
        let mut flags = how | OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        if path.as_os_str().is_empty() {
            flags |= OpenTreeFlags::AT_EMPTY_PATH;
        }
        Ok(Self {
            fd: open_tree(directory, path, flags)?,
        })
    }

    /// A mount that came through a socket.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Attaches it at `path` below `directory`; an empty path is `directory` itself.
    pub fn attach(&self, directory: impl AsFd, path: &CStr) -> io::Result<()> {
        let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        if path.is_empty() {
            flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        }
        Ok(move_mount(&self.fd, c"", directory, path, flags)?)
    }

    /// Sets attributes of only this mount; Linux 5.12.
    pub fn set_attributes(&self, attributes: MountAttributes) -> io::Result<()> {
        self.change(&MountAttr {
            attr_set: u64::from(attributes.bits()),
            ..MountAttr::default()
        })
    }

    /// The same with mount(2), for the attributes that it supports, on a mount that is attached in the caller's
    /// mount namespace. Needs procfs at /proc.
    pub fn set_attributes_when_attached(&self, attributes: MountAttributes) -> io::Result<()> {
        let has = fstatvfs(&self.fd)?.f_flag;
        let mut unknown = attributes;
        // mount(2) removes attributes that are not named.
        let mut flags = MountFlags::BIND;
        for (attribute, flag, shown) in CLASSIC {
            unknown -= attribute;
            if attributes.contains(attribute) || has.contains(shown) {
                flags |= flag;
            }
        }
        if !unknown.is_empty() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        Ok(mount_remount(path, flags, c"")?)
    }

    /// Maps the owners of its files by a user namespace: files of user `n` on disk belong through this mount to
    /// the user that is `n` inside the namespace. Only for a detached mount that was not mapped yet; Linux
    /// 5.12, and as a layer of an overlay 5.19.
    pub fn map_owners(&self, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
        self.change(&MountAttr {
            attr_set: u64::from(MountAttributes::MOUNT_ATTR_IDMAP.bits()),
            userns_fd: u64::try_from(user_namespace.as_raw_fd()).unwrap_or(u64::MAX),
            ..MountAttr::default()
        })
    }

    /// Whether set-user-id bits of its files have no effect through this mount.
    pub fn is_nosuid(&self) -> io::Result<bool> {
        let flags = fstatvfs(&self.fd)?.f_flag;
        Ok(flags.contains(StatVfsMountFlags::NOSUID))
    }

    /// The number of its superblock, if it is on no device: the kernel gives the lowest number that is free, so
    /// that of a new one is close to the number of all superblocks on the host.
    pub fn superblock_number(&self) -> io::Result<u32> {
        Ok(rustix::fs::minor(rustix::fs::fstat(&self.fd)?.st_dev))
    }

    #[expect(unsafe_code, reason = "mount_setattr(2) has no safe wrapper")]
    fn change(&self, change: &MountAttr) -> io::Result<()> {
        // SAFETY: the path is an empty C string, which AT_EMPTY_PATH makes mean the descriptor
        // itself; `change` is a `mount_attr` of the size passed, alive during the call and only
        // read.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                self.fd.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                std::ptr::from_ref(change),
                std::mem::size_of::<MountAttr>(),
            )
        };
        if result == 0 {
            return Ok(());
        }
        Err(io::Error::last_os_error())
    }
}

impl AsFd for Mount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
