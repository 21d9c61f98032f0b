//! Project quotas: limits on directory trees that the file system enforces (ext4 and XFS).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::DiskUsage;

/// Bit of the project ids that are set here; distinguishes them from those in `/etc/projid`.
const OWN_PROJECTS: u32 = 1 << 31;

/// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR`: `_IOR` and `_IOW` of ('X', 31 and 32, `Attributes`).
const GET_ATTRIBUTES: libc::c_ulong = 0x801C_581F;
const SET_ATTRIBUTES: libc::c_ulong = 0x401C_5820;

/// `FS_XFLAG_PROJINHERIT`: new files in the directory get its project.
const INHERIT_PROJECT: u32 = 0x200;

/// `QCMD(Q_SETQUOTA, PRJQUOTA)` and `QCMD(Q_XGETQSTATV, PRJQUOTA)`.
const SET_QUOTA: libc::c_uint = (0x80_0008 << 8) | 2;
const GET_STATUS: libc::c_uint = (0x5808 << 8) | 2;

/// `QIF_BLIMITS` and `QIF_ILIMITS`.
const BLOCK_LIMITS: u32 = 1;
const INODE_LIMITS: u32 = 4;

/// The unit of `dqb_bhardlimit`.
const QUOTA_BLOCK_BYTES: u64 = 1_024;

/// `FS_QUOTA_PDQ_ENFD`: limits of projects are enforced.
const ENFORCED: u16 = 1 << 5;

/// `struct fsxattr`.
#[repr(C)]
#[derive(Debug, Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    cow_extent_size: u32,
    padding: [u8; 8],
}

/// `struct if_dqblk`.
#[repr(C)]
#[derive(Debug, Default)]
struct Limits {
    block_hard: u64,
    block_soft: u64,
    space: u64,
    inode_hard: u64,
    inode_soft: u64,
    inodes: u64,
    block_time: u64,
    inode_time: u64,
    valid: u32,
}

/// `struct fs_quota_statv`: version, flags, and more that is not used here.
#[repr(C)]
#[derive(Debug)]
struct Status {
    version: i8,
    padding: u8,
    flags: u16,
    rest: [u64; 31],
}

/// A file system that enforces project quotas.
#[derive(Debug, Clone, Copy)]
pub struct ProjectQuotas(());

impl ProjectQuotas {
    /// `None` if the file system of `directory` enforces none, or the kernel does not support quotas by
    /// descriptor (before Linux 5.14).
    #[must_use]
    #[expect(unsafe_code, reason = "this system call has no safe wrapper")]
    pub fn of(directory: &Path) -> Option<Self> {
        let directory = File::open(directory).ok()?;
        let mut status = Status {
            version: 1,
            padding: 0,
            flags: 0,
            rest: [0; 31],
        };
        // SAFETY: quotactl_fd(2) writes a `struct fs_quota_statv` of version 1, which is shorter than
        // `status`, and `status` lives until it returns.
        let done = unsafe {
            libc::syscall(
                libc::SYS_quotactl_fd,
                directory.as_raw_fd(),
                GET_STATUS,
                0,
                &raw mut status,
            )
        };
        (done == 0 && status.flags & ENFORCED != 0).then_some(Self(()))
    }

    /// Limits an empty directory and everything that will be created in it. `false` if its inode number does
    /// not fit into a project id.
    #[expect(unsafe_code, reason = "these system calls have no safe wrappers")]
    pub fn limit(&self, directory: &Path, limits: DiskUsage) -> io::Result<bool> {
        let directory = File::open(directory)?;
        // No two directories of a file system have the same number.
        let number = u32::try_from(directory.metadata()?.ino()).ok();
        let Some(number) = number.filter(|number| *number < OWN_PROJECTS - 1) else {
            return Ok(false);
        };
        let project = OWN_PROJECTS | number;
        // First the limits: until then the project has no files.
        let limits = Limits {
            block_hard: limits.bytes.div_ceil(QUOTA_BLOCK_BYTES),
            inode_hard: limits.inodes,
            valid: BLOCK_LIMITS | INODE_LIMITS,
            ..Limits::default()
        };
        // SAFETY: quotactl_fd(2) reads a `struct if_dqblk`, which lives until it returns.
        let done = unsafe {
            libc::syscall(
                libc::SYS_quotactl_fd,
                directory.as_raw_fd(),
                SET_QUOTA,
                project,
                &raw const limits,
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut attributes = attributes(&directory)?;
        attributes.flags |= INHERIT_PROJECT;
        attributes.project = project;
        // SAFETY: the ioctl reads a `struct fsxattr`, which lives until it returns.
        let done =
            unsafe { libc::ioctl(directory.as_raw_fd(), SET_ATTRIBUTES, &raw const attributes) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(true)
    }

    /// Whether [`Self::limit`] was called for this directory.
    pub fn is_limited(directory: &Path) -> io::Result<bool> {
        let directory = File::open(directory)?;
        match attributes(&directory) {
            Ok(attributes) => Ok(attributes.project & OWN_PROJECTS != 0),
            // This file system has no projects.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EOPNOTSUPP)) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

#[expect(unsafe_code, reason = "this ioctl has no safe wrapper")]
fn attributes(directory: &File) -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: the ioctl writes a `struct fsxattr`, which lives until it returns.
    let done = unsafe { libc::ioctl(directory.as_raw_fd(), GET_ATTRIBUTES, &raw mut attributes) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_to_the_kernel_has_its_sizes() {
        assert_eq!(size_of::<Attributes>(), 28);
        // Including the kernel's padding.
        assert_eq!(size_of::<Limits>(), 72);
        assert!(size_of::<Status>() >= 152);
    }

    #[test]
    fn a_directory_without_a_project_is_not_limited() {
        let directory = tempfile::tempdir().expect("a directory");
        assert!(!ProjectQuotas::is_limited(directory.path()).expect("readable"));
    }
}
