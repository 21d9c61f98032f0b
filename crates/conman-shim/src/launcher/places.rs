//! The launcher's two mount namespaces, and the containers' device nodes and own files.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, create_dir_all};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use conman_linux::{
    CloneOptions, Ended, Mount, MountAttributes, Namespaces, NewFilesystem, SoleThread,
    clone_process, reap, unshare_namespaces,
};
use conman_shim_protocol::LaunchError;
use nix::sys::stat::umask;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, linkat, makedev, mkdirat, mknodat, openat, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_change, mount_remount, unmount,
};
use rustix::process::{chdir, pivot_root};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Where the new root is assembled; a directory that every host has.
pub(super) const BENCH: &str = "/tmp";

/// Where the workshop attaches layers for an overlay that takes only paths. No root of the shim is
/// below it.
pub(super) const LAYERS: &str = "/.layers";

/// Where the workshop mounts such an overlay temporarily.
pub(super) const OVERLAY: &str = "/.overlay";

/// Where the workshop shows the device nodes and the containers' own files, read-only.
const DEVICE_TREE: &str = "/.devices";

/// Links that all directories of [`DEVICE_TREE`] have.
const SHARED_LINKS: &str = "links";

/// The directory with what containers see as /sys.
const SYS: &str = "sys";

/// Empty directories in each: mount points.
const DIRECTORIES: [&str; 2] = ["shm", EMPTY_DEVICE_DIRECTORY];

/// A directory of /dev that is empty: a container's terminals are mounted on it only after it has covered
/// hidden directories.
pub(super) const EMPTY_DEVICE_DIRECTORY: &str = "pts";

/// Harmless devices (Documentation/admin-guide/devices.txt): name, major, minor.
const DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// Links in /dev that programs expect.
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// The namespaces, each by a descriptor.
#[derive(Debug)]
pub(super) struct Places {
    workshop: File,
    launchpad: File,
    devices: Devices,
}

impl Places {
    /// Creates both; afterwards the caller is in the workshop.
    pub(super) fn make(sole: &SoleThread, roots: &[PathBuf]) -> Result<Self, LaunchError> {
        let step = |step: &'static str| move |error: io::Error| LaunchError::step(step, &error);
        make_workshop(roots).map_err(step("make the launcher's mount namespace"))?;
        let devices = Devices::new().map_err(step("make the containers' devices"))?;
        let workshop = here().map_err(step("hold the launcher's mount namespace"))?;
        make_launchpad_root(sole).map_err(step("make the launchpad"))?;
        let places = Self {
            launchpad: here().map_err(step("hold the launchpad"))?,
            workshop,
            devices,
        };
        enter_new_root(Path::new(BENCH)).map_err(step("enter the launchpad"))?;
        places
            .enter_workshop()
            .map_err(step("leave the launchpad"))?;
        Ok(places)
    }

    /// Creates /dev of the container with these ids, detached. The caller is in the workshop.
    pub(super) fn devices(&mut self, ids: u32) -> io::Result<Mount> {
        self.devices.of(ids)
    }

    /// Creates the files of the container with these ids: a detached mount of each, in their order. The
    /// caller is in the workshop.
    pub(super) fn files(&self, ids: u32, files: &[(String, String)]) -> io::Result<Vec<Mount>> {
        self.devices.files(ids, files)
    }

    /// An empty /sys with directories for these hierarchies of cgroups, detached. The caller is in the workshop.
    pub(super) fn make_sys(&self, cgroups: &[String]) -> io::Result<()> {
        self.devices.make_sys(cgroups)
    }

    /// A detached, read-only /sys. The caller is in the workshop.
    pub(super) fn sys(&self) -> io::Result<Mount> {
        Mount::copy_of(CWD, &Path::new(DEVICE_TREE).join(SYS))
    }

    /// Moves the caller to the namespace where containers are cloned.
    pub(super) fn enter_launchpad(&self) -> io::Result<()> {
        enter(&self.launchpad)
    }

    /// Moves the caller to the namespace with the host's directories.
    pub(super) fn enter_workshop(&self) -> io::Result<()> {
        enter(&self.workshop)
    }
}

fn enter(namespace: &File) -> io::Result<()> {
    Ok(move_into_link_name_space(
        std::os::fd::AsFd::as_fd(namespace),
        Some(LinkNameSpaceType::Mount),
    )?)
}

fn here() -> io::Result<File> {
    File::open("/proc/self/ns/mnt")
}

/// Creates a mount namespace that shows only `roots`, procfs and cgroupfs at their own paths: any other
/// mount here would keep the host's administrator from unmounting it.
fn make_workshop(roots: &[PathBuf]) -> io::Result<()> {
    unshare_namespaces(Namespaces::NEWNS)?;
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    let shown: Vec<&Path> = [Path::new("/proc"), Path::new("/sys/fs/cgroup")]
        .into_iter()
        .chain(roots.iter().map(PathBuf::as_path))
        .collect();
    // Taken before the bench covers a root that lies below it.
    let copies = shown.iter().map(|path| Mount::copy_of_tree(CWD, path));
    let copies: io::Result<Vec<Mount>> = copies.collect();
    new_tmpfs(BENCH)?;
    for (path, copy) in shown.iter().zip(copies?) {
        let target = Path::new(BENCH).join(path.strip_prefix("/").unwrap_or(path));
        create_dir_all(&target)?;
        attach(&copy, &target)?;
    }
    enter_new_root(Path::new(BENCH))?;
    for name in [LAYERS, OVERLAY] {
        make_directory(Path::new(name))?;
    }
    // The bench of the launchpad.
    create_dir_all(BENCH)
}

/// Creates the initial mount namespace of containers: only what allows a container to mount procfs. The
/// root is at [`BENCH`] when this returns.
fn make_launchpad_root(sole: &SoleThread) -> io::Result<()> {
    unshare_namespaces(Namespaces::NEWNS)?;
    new_tmpfs(BENCH)?;
    let root = Path::new(BENCH);
    let proc = root.join("proc");
    make_directory(&proc)?;
    mount_empty_proc(sole, &proc)?;
    make_read_only(root)
}

/// The containers' device nodes and own files.
///
/// Locks, leases and watches (inotify) belong to a node, so that containers with a common node would
/// notice each other. So each range of ids has its own directory with its own nodes. All are in one
/// filesystem: every further one costs memory in all memory cgroups of the host. The directory is created
/// for the first container with these ids and kept for the next one. A second directory has the files,
/// which are created for each container. Otherwise a container could read in its mount table where such
/// a file is on the host.
#[derive(Debug)]
pub(super) struct Devices {
    writable: Mount,
    made: BTreeSet<u32>,
}

impl Devices {
    /// Begins empty. The caller is in the workshop.
    fn new() -> io::Result<Self> {
        let tree = Path::new(DEVICE_TREE);
        make_directory(tree)?;
        let fresh = NewFilesystem::open("tmpfs")?;
        fresh.set("mode", "700")?;
        // Unlimited: a spec has few files of a page each, and the number of ranges is bounded.
        fresh.set("size", "0")?;
        fresh.set("nr_inodes", "0")?;
        attach(&fresh.mount(MountAttributes::empty())?, tree)?;
        let writable = Mount::copy_of(CWD, tree)?;
        make_read_only(tree)?;
        let links = make_directory_in(&writable, SHARED_LINKS)?;
        for (name, target) in LINKS {
            rustix::fs::symlinkat(target, &links, name)?;
        }
        Ok(Self {
            writable,
            made: BTreeSet::new(),
        })
    }

    fn make_sys(&self, cgroups: &[String]) -> io::Result<()> {
        let mask = rustix::process::umask(Mode::empty());
        let made = self.make_sys_unmasked(cgroups);
        rustix::process::umask(mask);
        made
    }

    fn make_sys_unmasked(&self, cgroups: &[String]) -> io::Result<()> {
        let sys = make_directory_in(&self.writable, SYS)?;
        let fs = make_directory_in(&sys, "fs")?;
        let root = make_directory_in(&fs, "cgroup")?;
        // The unified hierarchy alone has no directory of its own.
        for place in cgroups.iter().filter(|place| !place.is_empty()) {
            make_directory_in(&root, place)?;
        }
        Ok(())
    }

    /// A detached, read-only /dev for the container with these ids.
    pub(super) fn of(&mut self, ids: u32) -> io::Result<Mount> {
        let name = ids.to_string();
        if !self.made.contains(&ids) {
            self.fill(&name)?;
            self.made.insert(ids);
        }
        Mount::copy_of(CWD, &Path::new(DEVICE_TREE).join(name))
    }

    /// A detached, read-only mount of each file for the container with these ids.
    fn files(&self, ids: u32, files: &[(String, String)]) -> io::Result<Vec<Mount>> {
        if files.is_empty() {
            return Ok(Vec::new());
        }
        let name = format!("{ids}.files");
        let directory = make_directory_in(&self.writable, &name)?;
        let shown = Path::new(DEVICE_TREE).join(name);
        let make = |(number, (_, content)): (usize, &(String, String))| {
            let name = number.to_string();
            write_file(&directory, &name, content, ids)?;
            Mount::copy_of(CWD, &shown.join(name))
        };
        files.iter().enumerate().map(make).collect()
    }

    /// Also completes a failed attempt.
    fn fill(&self, name: &str) -> io::Result<()> {
        let mask = umask(nix::sys::stat::Mode::empty());
        let filled = self.fill_unmasked(name);
        umask(mask);
        filled
    }

    fn fill_unmasked(&self, name: &str) -> io::Result<()> {
        let directory = make_directory_in(&self.writable, name)?;
        let device_mode = Mode::from_raw_mode(0o666);
        for (name, major, minor) in DEVICES {
            let kind = FileType::CharacterDevice;
            exists_or(mknodat(
                &directory,
                name,
                kind,
                device_mode,
                makedev(major, minor),
            ))?;
        }
        for (name, _) in LINKS {
            let shared = Path::new(SHARED_LINKS).join(name);
            let linked = linkat(&self.writable, &shared, &directory, name, AtFlags::empty());
            exists_or(linked)?;
        }
        for name in DIRECTORIES {
            exists_or(mkdirat(&directory, name, Mode::from_raw_mode(0o755)))?;
        }
        Ok(())
    }
}

fn exists_or(made: rustix::io::Result<()>) -> io::Result<()> {
    match made {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o755).create(path)
}

fn make_directory_in(parent: impl AsFd, name: &str) -> io::Result<OwnedFd> {
    exists_or(mkdirat(&parent, name, Mode::from_raw_mode(0o755)))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(&parent, name, flags, Mode::empty())?)
}

/// Creates a file that belongs to `owner` and that all users may read. One of the same name is replaced,
/// not changed: containers that share a range of ids may live at the same time.
fn write_file(directory: &OwnedFd, name: &str, content: &str, owner: u32) -> io::Result<()> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file = File::from(openat(directory, name, flags, Mode::from_raw_mode(0o600))?);
    file.write_all(content.as_bytes())?;
    fchown(&file, Some(owner), Some(owner))?;
    // Set separately, so that the umask does not apply.
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

/// A user namespace may mount procfs only where a complete one is visible already. This one belongs to a
/// PID namespace without processes, so it shows none.
fn mount_empty_proc(sole: &SoleThread, target: &Path) -> io::Result<()> {
    let options = CloneOptions {
        namespaces: Some(Namespaces::NEWPID),
        ..CloneOptions::default()
    };
    let process = clone_process(sole, &options, || {
        let mounted = NewFilesystem::open("proc")
            .and_then(|proc| proc.mount(no_programs()))
            .and_then(|proc| attach(&proc, target));
        i32::from(mounted.is_err())
    })?;
    match reap(&process)? {
        Some(Ended::Exited(0)) => Ok(()),
        _ => Err(io::Error::other(
            "procfs of an empty PID namespace cannot be mounted",
        )),
    }
}

/// Mount attributes of procfs and similar file systems.
pub(super) fn no_programs() -> MountAttributes {
    MountAttributes::MOUNT_ATTR_NOSUID
        | MountAttributes::MOUNT_ATTR_NODEV
        | MountAttributes::MOUNT_ATTR_NOEXEC
}

pub(super) fn new_tmpfs(at: &str) -> io::Result<()> {
    let fresh = NewFilesystem::open("tmpfs")?;
    fresh.set("mode", "755")?;
    fresh.set("size", "64k")?;
    attach(&fresh.mount(MountAttributes::empty())?, Path::new(at))
}

fn make_read_only(mount_point: &Path) -> io::Result<()> {
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NOEXEC;
    Ok(mount_remount(mount_point, flags, c"")?)
}

fn attach(mount: &Mount, target: &Path) -> io::Result<()> {
    let directory = File::open(target)?;
    mount.attach(&directory, c"")
}

/// Makes `root`, a mount point, the root of the caller's mount namespace and unmounts the old one. Called
/// twice in the launcher's life, so its walk of all tasks does not slow down starts.
fn enter_new_root(root: &Path) -> io::Result<()> {
    chdir(root)?;
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    Ok(chdir("/")?)
}
