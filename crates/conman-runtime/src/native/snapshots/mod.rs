//! Roots as snapshots: each image's root is a read-only subvolume of a BTRFS file system, each container's a snapshot
//! of it. Other than an overlay, a snapshot is no superblock.
//!
//! ```text
//! images/<id>.<base layer>     read-only as soon as it is complete
//! sessions/<session>.<generation>
//! ```
//! All of it is a copy of what is in the image store, or was written by a container, and neither is needed after a
//! reboot. So the file system is made again after each ([`file_system`]), and never waits for the disk.
//!
//! It is mounted nowhere: the runtime holds a detached mount, and each container one of its snapshot. When the last
//! one is gone, whichever way, the kernel unmounts the file system and detaches its loop device.

mod file_system;
mod image_root;

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use conman_image::{Image, ImageId};
use conman_linux::{
    Mount, create_snapshot, create_subvolume, destroy_subvolume, free_destroyed_subvolumes,
    is_subvolume_read_only, limit_subvolume, make_subvolume_read_only,
};
use rustix::fs::{Dir, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;

use crate::RuntimeError;
pub use file_system::FILE as SNAPSHOTS_FILE;
use file_system::FileSystem;

/// The subvolumes of all images and containers.
#[derive(Debug)]
pub(super) struct Snapshots {
    file_system: FileSystem,
    images: OwnedFd,
    sessions: OwnedFd,
    /// Held while an image's root is made or removed, with a lock of `images` against another daemon, which is there
    /// during an upgrade.
    making: Mutex<()>,
}

/// Nobody else makes or removes an image's root.
struct Making<'a> {
    images: &'a OwnedFd,
    _alone: MutexGuard<'a, ()>,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        if let Err(error) = flock(self.images, FlockOperation::Unlock) {
            tracing::warn!(%error, "cannot unlock the directory of images' roots");
        }
    }
}

impl Snapshots {
    /// Mounts the file system, and makes it if there is none of this boot. `bytes`: its size; half of what is free
    /// if absent. Blocks.
    pub(super) fn open(directory: &Path, bytes: Option<u64>) -> Result<Self, RuntimeError> {
        let file_system = FileSystem::open(directory, bytes)?;
        let opened = |name| {
            file_system
                .directory(name)
                .map_err(file_system.failed("open"))
        };
        Ok(Self {
            images: opened(file_system::IMAGES)?,
            sessions: opened(file_system::SESSIONS)?,
            making: Mutex::default(),
            file_system,
        })
    }

    /// Makes the root of the container `name`, in which it may allocate `limit` bytes. `base` is the layer below
    /// every image. The first container of an image waits for a copy of the image.
    pub(super) fn make(
        &self,
        name: &str,
        image: &Image,
        base: Option<&Path>,
        limit: Option<u64>,
    ) -> Result<(), RuntimeError> {
        let failed = || self.file_system.failed("make a session's root in");
        let source = self.image_root(image, base).map_err(failed())?;
        let limited = create_snapshot(&source, &self.sessions, name).and_then(|()| match limit {
            Some(bytes) => limit_subvolume(hold(&self.sessions, name)?, bytes),
            None => Ok(()),
        });
        limited.map_err(|error| {
            self.destroy(name);
            failed()(error)
        })
    }

    /// A detached mount of a container's root.
    pub(super) fn mount(&self, name: &str) -> Result<Mount, RuntimeError> {
        let mounted = Mount::copy_of(&self.sessions, Path::new(name));
        mounted.map_err(self.file_system.failed("mount a session's root of"))
    }

    pub(super) fn has(&self, name: &str) -> bool {
        hold(&self.sessions, name).is_ok()
    }

    /// Removes a container's root, which no process uses. The kernel frees its space in the background, within half a
    /// minute. Waits for a commit that is under way. One that
    /// cannot be removed is removed by the next [`Self::remove_orphans`].
    pub(super) fn destroy(&self, name: &str) {
        if let Err(error) = destroy_subvolume(&self.sessions, name) {
            tracing::warn!(name, %error, "cannot remove a session's root");
        }
    }

    /// Removes the roots that an earlier process made, except those of the containers `known`. For one caller, before
    /// any other container is made.
    pub(super) fn remove_orphans(&self, known: &HashSet<String>) -> Result<(), RuntimeError> {
        let names = names(&self.sessions).map_err(self.file_system.failed("list"))?;
        for name in names.iter().filter(|name| !known.contains(*name)) {
            self.destroy(name);
        }
        Ok(())
    }

    /// Removes the roots of images that the store does not have any more, and incomplete ones. Frees their space, and
    /// that of sessions' roots if room is short: it writes all that waits to be written, and commits.
    pub(super) fn collect_images(&self, is_stored: impl Fn(&ImageId) -> bool) {
        let collected = self.remove_images(is_stored);
        let freed = collected.and_then(|removed| match removed || self.file_system.is_short() {
            true => free_destroyed_subvolumes(&self.images),
            false => Ok(()),
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "cannot remove roots of images");
        }
    }

    /// Returns whether there were any. Removes nothing if an image's root is being made at the moment.
    fn remove_images(&self, is_stored: impl Fn(&ImageId) -> bool) -> io::Result<bool> {
        let alone = match self.making.try_lock() {
            Ok(alone) => alone,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        let _alone = match self.lock_images(alone, FlockOperation::NonBlockingLockExclusive) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            alone => alone?,
        };
        let mut removed = false;
        for name in names(&self.images)? {
            let id = name.split_once('.').map_or(&*name, |(id, _)| id);
            let stored = ImageId::from_hex(id).is_ok_and(|id| is_stored(&id));
            if !stored || self.complete(&name)?.is_none() {
                destroy_subvolume(&self.images, &name)?;
                removed = true;
            }
        }
        Ok(removed)
    }

    /// The root of an image; made if it is missing.
    fn image_root(&self, image: &Image, base: Option<&Path>) -> io::Result<OwnedFd> {
        let below = base.and_then(Path::file_name).unwrap_or_default();
        let name = format!("{}.{}", image.id.hex(), below.to_string_lossy());
        if let Some(root) = self.complete(&name)? {
            return Ok(root);
        }
        let alone = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let _alone = self.lock_images(alone, FlockOperation::LockExclusive)?;
        if let Some(root) = self.complete(&name)? {
            return Ok(root);
        }
        destroy_subvolume(&self.images, &name)?;
        create_subvolume(&self.images, &name)?;
        let mut layers = image.lower_directories();
        layers.extend(base);
        let root = hold(&self.images, &name)?;
        let room = self.file_system.room_for_image();
        let made = room
            .and_then(|bytes| limit_subvolume(&root, bytes))
            .and_then(|()| image_root::copy(&layers, &root))
            .and_then(|()| make_subvolume_read_only(&root));
        match made {
            Ok(()) => Ok(root),
            Err(error) => {
                destroy_subvolume(&self.images, &name)?;
                free_destroyed_subvolumes(&self.images)?;
                Err(error)
            }
        }
    }

    fn lock_images<'a>(
        &'a self,
        alone: MutexGuard<'a, ()>,
        operation: FlockOperation,
    ) -> io::Result<Making<'a>> {
        flock(&self.images, operation)?;
        Ok(Making {
            images: &self.images,
            _alone: alone,
        })
    }

    fn complete(&self, name: &str) -> io::Result<Option<OwnedFd>> {
        match hold(&self.images, name) {
            Ok(root) if is_subvolume_read_only(&root)? => Ok(Some(root)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn hold(parent: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(parent, name, flags, Mode::empty())?)
}

fn names(directory: &OwnedFd) -> io::Result<Vec<String>> {
    let entries = Dir::read_from(directory)?.map(|entry| {
        let name = entry?.file_name().to_owned();
        Ok::<_, Errno>(name.into_string().unwrap_or_default())
    });
    let names: Result<Vec<_>, _> = entries.collect();
    let is_entry = |name: &String| !name.is_empty() && name != "." && name != "..";
    Ok(names?.into_iter().filter(is_entry).collect())
}
