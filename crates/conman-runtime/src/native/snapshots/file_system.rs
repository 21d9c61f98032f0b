//! The file with the file system of the snapshots.
//!
//! Its content is not needed after a reboot, so it is made again then, and BTRFS never waits until something is on the
//! disk (`nobarrier`): each snapshot commits a transaction. After the death of a daemon it is as it was, since the
//! kernel has it. Its whole size is allocated at once, so that a full disk below it cannot break it.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use conman_linux::{
    LoopDevice, Mount, MountAttributes, NewFilesystem, boot_id, enable_simple_quotas,
    grow_to_device, replace_file,
};
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, fstatvfs, mkdirat, openat, statvfs};
use rustix::io::Errno;

use crate::RuntimeError;
use crate::shared::container_files::host_error;

/// Its name in the runtime's directory.
pub const FILE: &str = "snapshots.btrfs";

/// The boot that the file is of.
const BOOT: &str = "snapshots.boot";

const MAKE: &str = "mkfs.btrfs";

pub(super) const IMAGES: &str = "images";
pub(super) const SESSIONS: &str = "sessions";

/// Fewest bytes of a file system with a few small sessions.
const LEAST_BYTES: u64 = 256 << 20;

/// The part of it that no image's root takes.
const SESSIONS_PART: u64 = 16;

/// It is short of room if less than this part is free.
const SHORT_PART: u64 = 4;

/// What a person can do about a damaged one.
const WAY_OUT: &str = "it holds only copies of images and what sessions wrote: end the sessions of this node and \
    remove the file, or set `images.store = \"overlay\"`";

/// The file system, mounted as long as this lives; containers have mounts of their own.
#[derive(Debug)]
pub(super) struct FileSystem {
    file: PathBuf,
    mount: Mount,
}

impl FileSystem {
    /// Blocks.
    pub(super) fn open(directory: &Path, bytes: Option<u64>) -> Result<Self, RuntimeError> {
        let file = directory.join(FILE);
        let failed = |action, source| host_error(action, &file, source);
        let mark = directory.join(BOOT);
        let boot = boot_id().map_err(|source| failed("find the boot of", source))?;
        let is_of_this_boot = fs::read_to_string(&mark).is_ok_and(|marked| marked == boot);
        let is_new = !is_of_this_boot || !file.exists();
        let size = |bytes: Option<u64>| bytes.map_or_else(|| half_of_free(directory), Ok);
        if is_new {
            // What is made halfway is not of this boot.
            match fs::remove_file(&mark) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(host_error("remove", &mark, source));
                }
                _ => {}
            }
            size(bytes)
                .and_then(|bytes| make(&file, bytes))
                .map_err(|source| failed("make the file system of sessions' roots in", source))?;
            replace_file(&mark, boot.as_bytes())
                .map_err(|source| host_error("write", &mark, source))?;
        }
        let mount = mount(&file, if is_new { None } else { bytes })
            .map_err(|source| failed("mount", io::Error::other(format!("{source}; {WAY_OUT}"))))?;
        let opened = Self { file, mount };
        opened.set_up().map_err(opened.failed("set up"))?;
        let (free, all) = opened.room().map_err(opened.failed("measure"))?;
        tracing::info!(
            file = %opened.file.display(), free_bytes = free, bytes = all, made = is_new,
            "roots of sessions are BTRFS snapshots"
        );
        Ok(opened)
    }

    pub(super) fn directory(&self, name: &str) -> io::Result<OwnedFd> {
        directory(&self.mount, name)
    }

    /// Bytes that one image's root may take: the rest of the room is for sessions.
    pub(super) fn room_for_image(&self) -> io::Result<u64> {
        let (free, all) = self.room()?;
        Ok(free.saturating_sub(all / SESSIONS_PART))
    }

    /// Whether what is removed is needed before the kernel frees it anyway.
    pub(super) fn is_short(&self) -> bool {
        self.room().is_ok_and(|(free, all)| free < all / SHORT_PART)
    }

    /// Free and all bytes.
    fn room(&self) -> io::Result<(u64, u64)> {
        let found = fstatvfs(&self.mount)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok((bytes(found.f_bavail), bytes(found.f_blocks)))
    }

    /// The error of an action on it, with what to do if it is full or damaged.
    pub(super) fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> RuntimeError {
        move |error| {
            let explained = match error.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::NOSPC | Errno::DQUOT) => {
                    let (free, all) = self.room().unwrap_or_default();
                    io::Error::other(format!(
                        "the file system is full ({free} of {all} bytes are free): remove sessions or images, or \
                         raise `images.btrfs_bytes` and restart conman"
                    ))
                }
                Some(Errno::ROFS | Errno::IO | Errno::UCLEAN) => {
                    io::Error::other(format!("{error}; the kernel's log says why; {WAY_OUT}"))
                }
                _ => error,
            };
            host_error(action, &self.file, explained)
        }
    }

    /// Completes a new file system.
    fn set_up(&self) -> io::Result<()> {
        if self.directory(IMAGES).is_ok() {
            return Ok(());
        }
        enable_simple_quotas(self.directory(".")?).map_err(|error| {
            io::Error::other(format!(
                "the kernel has no simple quotas, which Linux 6.7 has ({error}); set `images.store = \"overlay\"`"
            ))
        })?;
        // A copy of a mount that is attached nowhere.
        Mount::copy_of(&self.mount, Path::new("")).map_err(|error| {
            io::Error::other(format!(
                "the kernel cannot copy a detached mount, which Linux 6.15 can ({error}); set `images.store = \
                 \"overlay\"`"
            ))
        })?;
        // The last one says that it is complete.
        for name in [SESSIONS, IMAGES] {
            match mkdirat(&self.mount, name, Mode::from_raw_mode(0o700)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

fn directory(mount: &Mount, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(mount, name, flags, Mode::empty())?)
}

fn half_of_free(directory: &Path) -> io::Result<u64> {
    let found = statvfs(directory)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize) / 2)
}

fn make(path: &Path, bytes: u64) -> io::Result<()> {
    if bytes < LEAST_BYTES {
        return Err(io::Error::other(format!(
            "{bytes} bytes are too few: set `images.btrfs_bytes` to {LEAST_BYTES} or more"
        )));
    }
    if LoopDevice::find(path).is_ok_and(|device| device.is_some()) {
        return Err(io::Error::other("it is in use"));
    }
    // A new one: what is there may have holes, and another size.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    allocate(&file, bytes)?;
    // One copy of the metadata: there is one disk, and nothing is kept.
    let made = Command::new(MAKE)
        .args(["--quiet", "--force", "--nodiscard"])
        .args(["--metadata", "single", "--data", "single"])
        .arg(path)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::other(format!(
                "there is no {MAKE}: install the package btrfs-progs, or set `images.store = \"overlay\"`"
            )),
            _ => error,
        })?;
    if made.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&made.stderr);
    Err(io::Error::other(format!("{MAKE}: {}", said.trim())))
}

fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    fallocate(file, FallocateFlags::empty(), 0, bytes).map_err(|errno| {
        io::Error::other(format!(
            "cannot allocate {bytes} bytes ({errno}): make room, or set `images.btrfs_bytes` to less"
        ))
    })
}

/// `bytes`: the size that one that exists grows to; it never shrinks.
fn mount(path: &Path, bytes: Option<u64>) -> io::Result<Mount> {
    if let Some(bytes) = bytes
        && fs::metadata(path)?.len() < bytes
    {
        allocate(&File::options().write(true).open(path)?, bytes)?;
    }
    let device = LoopDevice::attach(path)?;
    // Also of a file that grew just before an earlier process died.
    device.update_size()?;
    let file_system = NewFilesystem::open("btrfs")?;
    file_system.set("source", &device.node().to_string_lossy())?;
    // Its room stays allocated. Threads of the kernel, which no session's `cpus` limits, would compute checksums and
    // compress: files that are not copied on write have neither, unless a program sets their flags, which the system
    // call filter refuses.
    for flag in ["nobarrier", "nodiscard", "nodatacow"] {
        file_system.set_flag(flag)?;
    }
    // Otherwise reading a file would write, and no two containers would share a directory's blocks.
    let attributes = MountAttributes::MOUNT_ATTR_NODEV | MountAttributes::MOUNT_ATTR_NOATIME;
    let mount = file_system.mount(attributes)?;
    grow_to_device(directory(&mount, ".")?)?;
    Ok(mount)
}
