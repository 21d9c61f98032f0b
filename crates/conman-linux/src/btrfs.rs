//! Subvolumes of BTRFS: snapshots, and limits on what each of them takes.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Requests of linux/btrfs.h: `_IOC` of a direction, a size, 0x94 and a number.
const RESIZE: libc::c_ulong = 0x5000_9403;
const SYNC: libc::c_ulong = 0x9408;
const CREATE_SNAPSHOT: libc::c_ulong = 0x5000_9417;
const CREATE_SUBVOLUME: libc::c_ulong = 0x5000_9418;
const GET_FLAGS: libc::c_ulong = 0x8008_9419;
const SET_FLAGS: libc::c_ulong = 0x4008_941A;
const CONTROL_QUOTAS: libc::c_ulong = 0xC010_9428;
const LIMIT: libc::c_ulong = 0x8030_942B;
const DESTROY: libc::c_ulong = 0x5000_943F;

/// `BTRFS_SUBVOL_RDONLY`.
const READ_ONLY: u64 = 2;

/// `BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA`.
const ENABLE_SIMPLE: u64 = 4;

/// `BTRFS_QGROUP_LIMIT_MAX_RFER`.
const MAX_REFERENCED: u64 = 1;

/// Longest name of a subvolume that is made here.
const MAX_NAME: usize = 255;

/// `struct btrfs_ioctl_vol_args`, and `struct btrfs_ioctl_vol_args_v2` with its unused fields as bytes.
#[repr(C)]
struct Volume<const HEAD: usize, const NAME: usize> {
    fd: i64,
    head: [u64; HEAD],
    name: [u8; NAME],
}

type Named = Volume<0, 4088>;
type NamedV2 = Volume<6, 4040>;

impl<const HEAD: usize, const NAME: usize> Volume<HEAD, NAME> {
    fn new(fd: i64, name: &str) -> io::Result<Self> {
        if name.is_empty() || name.len() > MAX_NAME || name.contains(['/', '\0']) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut volume = Self {
            fd,
            head: [0; HEAD],
            name: [0; NAME],
        };
        volume.name[..name.len()].copy_from_slice(name.as_bytes());
        Ok(volume)
    }
}

/// `struct btrfs_ioctl_quota_ctl_args`.
#[repr(C)]
struct QuotaControl {
    command: u64,
    status: u64,
}

/// `struct btrfs_ioctl_qgroup_limit_args`.
#[repr(C)]
struct Limit {
    /// 0 is that of the file's subvolume.
    group: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved: [u64; 2],
}

/// Makes an empty subvolume.
pub fn create_subvolume(parent: impl AsFd, name: &str) -> io::Result<()> {
    control(parent, CREATE_SUBVOLUME, &mut NamedV2::new(0, name)?)
}

/// Makes a writable snapshot of the subvolume `source`. Returns when the kernel has committed the file system's
/// present transaction.
pub fn create_snapshot(source: impl AsFd, parent: impl AsFd, name: &str) -> io::Result<()> {
    let source = i64::from(source.as_fd().as_raw_fd());
    control(parent, CREATE_SNAPSHOT, &mut NamedV2::new(source, name)?)
}

/// Removes a subvolume with everything in it, except one that contains other subvolumes. The kernel frees its space
/// in the background. A missing one is not an error; Linux 5.7.
pub fn destroy_subvolume(parent: impl AsFd, name: &str) -> io::Result<()> {
    match control(parent, DESTROY, &mut NamedV2::new(0, name)?) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes the kernel begin to free the space of subvolumes that were destroyed, which it does every half minute
/// otherwise.
pub fn free_destroyed_subvolumes(directory: impl AsFd) -> io::Result<()> {
    control(directory, SYNC, &mut ())
}

/// Makes a subvolume read-only for everybody.
pub fn make_subvolume_read_only(subvolume: impl AsFd) -> io::Result<()> {
    control(subvolume, SET_FLAGS, &mut { READ_ONLY })
}

/// Whether [`make_subvolume_read_only`] was called for it.
pub fn is_subvolume_read_only(subvolume: impl AsFd) -> io::Result<bool> {
    let mut flags = 0_u64;
    control(subvolume, GET_FLAGS, &mut flags)?;
    Ok(flags & READ_ONLY != 0)
}

/// Makes a new file system count what each subvolume allocates; Linux 6.7.
pub fn enable_simple_quotas(directory: impl AsFd) -> io::Result<()> {
    let mut order = QuotaControl {
        command: ENABLE_SIMPLE,
        status: 0,
    };
    control(directory, CONTROL_QUOTAS, &mut order)
}

/// Limits the bytes that a subvolume allocates, those of its file names and inodes included. A snapshot begins
/// with none.
pub fn limit_subvolume(subvolume: impl AsFd, bytes: u64) -> io::Result<()> {
    let mut limit = Limit {
        group: 0,
        flags: MAX_REFERENCED,
        max_referenced: bytes,
        max_exclusive: 0,
        reserved: [0; 2],
    };
    control(subvolume, LIMIT, &mut limit)
}

/// Makes the file system as large as its device.
pub fn grow_to_device(directory: impl AsFd) -> io::Result<()> {
    control(directory, RESIZE, &mut Named::new(0, "max")?)
}

#[expect(unsafe_code, reason = "these ioctls have no safe wrappers")]
fn control<T>(file: impl AsFd, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: each request above is passed the struct that it is defined for, if any, which the kernel reads,
    // and overwrites for some; `argument` is that long and lives until it returns.
    let done = unsafe {
        libc::ioctl(
            file.as_fd().as_raw_fd(),
            request,
            std::ptr::from_mut(argument),
        )
    };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size that a request names.
    fn size(request: libc::c_ulong) -> usize {
        usize::try_from((request >> 16) & 0x3FFF).expect("small")
    }

    #[test]
    fn what_goes_to_the_kernel_has_the_size_that_the_request_names() {
        assert_eq!(size(RESIZE), size_of::<Named>());
        for request in [CREATE_SNAPSHOT, CREATE_SUBVOLUME, DESTROY] {
            assert_eq!(size(request), size_of::<NamedV2>());
        }
        assert_eq!(size(GET_FLAGS), size_of::<u64>());
        assert_eq!(size(SET_FLAGS), size_of::<u64>());
        assert_eq!(size(CONTROL_QUOTAS), size_of::<QuotaControl>());
        assert_eq!(size(LIMIT), size_of::<Limit>());
    }

    #[test]
    fn only_one_component_of_a_path_is_a_name() {
        for name in ["", "a/b", "a\0", &"x".repeat(256)] {
            assert!(NamedV2::new(0, name).is_err(), "{name}");
        }
    }
}
