//! A container's root, with owners mapped to its ids: its layers, and its own directory as the top; or a snapshot that
//! its client made.

use std::ffi::CString;
use std::fs::{DirBuilder, File, create_dir};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use conman_linux::{Features, Interface, Mount, MountAttributes, NewFilesystem};
use conman_shim_protocol::{LaunchError, RootKind, RootSpec};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, StatVfsMountFlags, openat2};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::chdir;

use super::places::{LAYERS, OVERLAY};

/// Directories below `scratch`.
const UPPER: &str = "upper";
const WORK: &str = "work";

/// A session's directory is not needed after a reboot, so it is not synced: without this option the end of
/// every container writes back the whole filesystem below. With it, fsync(2) on the container's root does not wait
/// for the disk ([`RootSpec::durable`]).
const VOLATILE: &str = "volatile";

/// The launcher's descriptors, by number.
const OPEN_FILES: &str = "/proc/self/fd";

/// The root of an OCI runtime, and its directories: the session's root, its state, and what the child mounts
/// on.
const RUNTIME_ROOT: &str = "runtime";
const RUNTIME_DIRECTORIES: [&str; 7] = [
    "rootfs",
    "session-tmp",
    "state",
    "proc",
    "dev",
    "tmp",
    "etc",
];

/// Directories that the child mounts on, and their modes, parents first.
const MOUNT_POINTS: [(&str, u32); 4] = [
    ("proc", 0o755),
    ("sys", 0o755),
    ("dev", 0o755),
    (SHARED_MEMORY, 0o1777),
];
const SHARED_MEMORY: &str = "dev/shm";

/// The directories that a container writes into, empty; those of an overlay.
#[derive(Debug)]
pub(super) struct Scratch {
    path: PathBuf,
    /// Its file system and inode.
    identity: (u64, u64),
}

impl Scratch {
    /// Creates them. Refuses a directory that exists.
    pub(super) fn make(root: &RootSpec) -> Result<Self, LaunchError> {
        let step = |error| LaunchError::step("make the container's own directory", &error);
        DirBuilder::new()
            .mode(0o700)
            .create(&root.scratch)
            .map_err(step)?;
        let scratch = Self {
            path: root.scratch.clone(),
            identity: identity(&root.scratch).map_err(step)?,
        };
        let filled = match root.kind {
            RootKind::Overlay => {
                create_dir(scratch.upper()).and_then(|()| create_dir(scratch.path.join(WORK)))
            }
            RootKind::Snapshot => Ok(()),
        };
        match filled {
            Ok(()) => Ok(scratch),
            Err(error) => {
                scratch.take_back();
                Err(step(error))
            }
        }
    }

    /// The client has moved it to the place of its container.
    pub(super) fn moved(&mut self, root: &RootSpec) -> Result<(), LaunchError> {
        let step = |error| LaunchError::step("find the container's own directory", &error);
        if identity(&root.scratch).map_err(step)? != self.identity {
            return Err(step(io::Error::other("another one is in its place")));
        }
        self.path.clone_from(&root.scratch);
        Ok(())
    }

    /// Makes the root of an OCI runtime, for the container's root `ids`, and returns it.
    pub(super) fn runtime_root(&self, ids: u32) -> io::Result<Mount> {
        let root = self.path.join(RUNTIME_ROOT);
        own_directory(&root, 0o755, ids)?;
        for name in RUNTIME_DIRECTORIES {
            own_directory(&root.join(name), 0o755, ids)?;
        }
        Mount::copy_of(CWD, &root)
    }

    fn upper(&self) -> PathBuf {
        self.path.join(UPPER)
    }

    /// Removes it with all files that the container may have written.
    pub(super) fn take_back(&self) {
        if let Err(error) = conman_linux::remove_tree(&self.path) {
            tracing::warn!(
                path = %self.path.display(),
                %error,
                "cannot remove a failed start's files"
            );
        }
    }
}

fn identity(directory: &Path) -> io::Result<(u64, u64)> {
    let data = std::fs::symlink_metadata(directory)?;
    Ok((data.dev(), data.ino()))
}

/// A container's root.
#[derive(Debug)]
pub(super) struct Root {
    /// Detached.
    pub(super) mount: Mount,
    /// Detached mounts that it was made of. Closing one waits for a grace period of the kernel, so they are kept until
    /// nothing waits for the launcher.
    _parts: Vec<Mount>,
}

/// Creates the root; `snapshot` came with the order of one.
pub(super) fn make(
    features: &Features,
    root: &RootSpec,
    snapshot: Option<Mount>,
    scratch: &Scratch,
    user_namespace: BorrowedFd<'_>,
    ids: u32,
) -> Result<Root, LaunchError> {
    match snapshot {
        None => overlay(features, root, scratch, user_namespace, ids),
        Some(mount) => {
            let mapped = mount.map_owners(user_namespace);
            mapped.map_err(|error| {
                LaunchError::step("map the owners of the snapshot's files", &error)
            })?;
            Ok(Root {
                mount,
                _parts: Vec::new(),
            })
        }
    }
}

fn overlay(
    features: &Features,
    root: &RootSpec,
    scratch: &Scratch,
    user_namespace: BorrowedFd<'_>,
    ids: u32,
) -> Result<Root, LaunchError> {
    let step = |name: &'static str| move |error: io::Error| LaunchError::step(name, &error);
    let store = Mount::copy_of(CWD, &root.store).map_err(step("open the store of layers"))?;
    if !root.shared_ids {
        let map = "map the owners of the layers' files";
        if !features.has(Interface::MappedLayers) {
            let reason = "this needs Linux 5.19, or layers that were unpacked for the shared range \
                          of ids";
            return Err(step(map)(io::Error::new(
                io::ErrorKind::Unsupported,
                reason,
            )));
        }
        store.map_owners(user_namespace).map_err(step(map))?;
    }
    // Attached only where the overlay needs a path; detached again below.
    let attached = if features.has(Interface::OverlayFdLayers) {
        None
    } else {
        Some(Attached::new(&store).map_err(step("attach the layers"))?)
    };
    let layers: Result<Vec<OwnedFd>, LaunchError> = root
        .layers
        .iter()
        .map(|layer| open_layer(&store, layer).map_err(step("open a layer")))
        .collect();
    let layers = layers?;
    own_top(&layers, &scratch.upper(), ids)
        .and_then(|()| make_mount_points(&layers, &scratch.upper(), ids))
        .map_err(step("prepare the top layer"))?;
    let mut parts = Vec::new();
    let made = match &attached {
        None => by_descriptors(&layers, scratch, root.durable, &mut parts),
        Some(_) => by_paths(&layers, scratch, root.durable),
    };
    let overlay = made
        .and_then(|overlay| must_be_writable(overlay, scratch))
        .map_err(step("make the overlay"))?;
    drop(attached);
    parts.push(store);
    Ok(Root {
        mount: overlay,
        _parts: parts,
    })
}

/// An overlay that cannot create its working directory is read-only, and reports that only to the
/// kernel's log.
fn must_be_writable(overlay: Mount, scratch: &Scratch) -> io::Result<Mount> {
    let flags = rustix::fs::fstatvfs(&overlay)?.f_flag;
    if !flags.contains(StatVfsMountFlags::RDONLY) {
        return Ok(overlay);
    }
    // Reproduces the error.
    create_dir(scratch.path.join(WORK).join("attempt"))?;
    Err(io::Error::from_raw_os_error(Errno::ROFS.raw_os_error()))
}

fn open_layer(store: &Mount, layer: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat2(store, layer, flags, Mode::empty(), resolve)?)
}

/// The container's `/` gets the mode of the topmost layer, and the container's root as the owner.
fn own_top(layers: &[OwnedFd], upper: &Path, ids: u32) -> io::Result<()> {
    let mode = match layers.first() {
        Some(layer) => File::from(layer.try_clone()?).metadata()?.mode() & 0o7777,
        None => 0o755,
    };
    std::fs::set_permissions(upper, std::fs::Permissions::from_mode(mode))?;
    chown(upper, Some(ids), Some(ids))
}

/// Creates the directories that the child mounts on, with their modes, where no layer has them so. Done
/// here, since it costs ten times as much in the overlay.
fn make_mount_points(layers: &[OwnedFd], upper: &Path, ids: u32) -> io::Result<()> {
    for (name, mode) in MOUNT_POINTS {
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        let found = layers
            .iter()
            .find_map(|layer| rustix::fs::statat(layer, name, flags).ok());
        match found.map(|data| data.st_mode) {
            Some(found)
                if FileType::from_raw_mode(found).is_dir()
                    && (name != SHARED_MEMORY || found & 0o7777 == mode) =>
            {
                continue;
            }
            // A directory of the top layer hides any other file in a lower one.
            _ => {}
        }
        for parent in Path::new(name).ancestors().skip(1) {
            if !parent.as_os_str().is_empty() {
                own_directory(&upper.join(parent), 0o755, ids)?;
            }
        }
        own_directory(&upper.join(name), mode, ids)?;
    }
    Ok(())
}

fn own_directory(path: &Path, mode: u32, ids: u32) -> io::Result<()> {
    match create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        other => other?,
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    chown(path, Some(ids), Some(ids))
}

/// Through its own mount the container's directory has no path, so that the container, which may read its
/// mount table, cannot see its path on the host.
fn by_descriptors(
    layers: &[OwnedFd],
    scratch: &Scratch,
    durable: bool,
    parts: &mut Vec<Mount>,
) -> io::Result<Mount> {
    let overlay = NewFilesystem::open("overlay")?;
    for layer in layers {
        overlay.set_fd("lowerdir+", layer)?;
    }
    // Needed until the overlay is created.
    let own = Mount::copy_of(CWD, &scratch.path)?;
    overlay.set_fd("upperdir", hold(&own, UPPER)?)?;
    overlay.set_fd("workdir", hold(&own, WORK)?)?;
    parts.push(own);
    if !durable {
        overlay.set_flag(VOLATILE)?;
    }
    overlay.mount(MountAttributes::MOUNT_ATTR_NODEV)
}

/// The same for an overlay that takes only paths: those of its directories in procfs as open files. They
/// are numbers, so that 128 of them fit into the page for all options, they contain no colon or comma,
/// and the container learns nothing from them.
///
/// Uses mount(2), since an option of fsconfig(2) takes at most 255 bytes.
fn by_paths(layers: &[OwnedFd], scratch: &Scratch, durable: bool) -> io::Result<Mount> {
    let numbers: Vec<String> = layers
        .iter()
        .map(|layer| layer.as_raw_fd().to_string())
        .collect();
    let own = hold(CWD, &scratch.path)?;
    let (upper, work) = (hold(&own, UPPER)?, hold(&own, WORK)?);
    let volatile = if durable { "" } else { ",volatile" };
    let options = format!(
        "lowerdir={},upperdir={},workdir={}{volatile}",
        numbers.join(":"),
        upper.as_raw_fd(),
        work.as_raw_fd()
    );
    let options = CString::new(options)?;
    chdir(OPEN_FILES)?;
    let mounted = mount("none", OVERLAY, "overlay", MountFlags::NODEV, &*options);
    chdir("/")?;
    mounted?;
    let overlay = Mount::copy_of(CWD, Path::new(OVERLAY));
    unmount(OVERLAY, UnmountFlags::DETACH)?;
    overlay
}

fn hold(directory: impl AsFd, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?)
}

/// The store, attached to the workshop while an overlay is created.
#[derive(Debug)]
struct Attached;

impl Attached {
    fn new(store: &Mount) -> io::Result<Self> {
        let directory = hold(CWD, LAYERS)?;
        store.attach(directory.as_fd(), c"")?;
        Ok(Self)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Err(error) = unmount(LAYERS, UnmountFlags::DETACH) {
            tracing::warn!(%error, "cannot detach layers from the launcher's namespace");
        }
    }
}
