//! What a container's first process does before it becomes the container's program.

use std::convert::Infallible;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use conman_linux::{
    Capabilities, Features, InitProgram, Interface, Mount, MountAttributes, Namespaces,
    NewFilesystem, SoleThread, become_user, create_dir_in_root, join_cgroups, unshare_namespaces,
};
use conman_shim_protocol::proc_paths::{MASKED, READ_ONLY};
use conman_shim_protocol::{
    Ahead, LaunchError, LaunchSpec, SESSION_ROOT, SESSION_TMP, encode, seqpacket,
};
use nix::unistd::setsid;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::{chroot, fchdir, getcwd, ioctl_tiocsctty};
use serde::{Deserialize, Serialize};

use super::cgroup_view::{self, CgroupView};
use super::child_mounts::{attach_at, bind_target, limit_inotify, shared_memory};
use super::handed::{Finishing, Handed};
use super::init::become_init;
use super::network;
use super::places::{EMPTY_DEVICE_DIRECTORY, no_programs};
use super::program::{Privileges, execute};
use super::steps::{namespace_step, step};
use super::terminals;
use crate::seccomp_filter::Filter;

/// The device that covers files of procfs; below /dev.
const NULL_DEVICE: &str = "null";

/// A step of containers and of commands.
pub(super) const MOUNT_TERMINALS: &str = "mount /dev/pts";

/// The child's messages to the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ChildReport {
    /// The next step is exec.
    Executing,
    /// The command's process, seen from outside; it waits for [`GO`].
    Entered { pid: i32 },
    /// Made ahead, it waits for the rest.
    Waits,
    /// It exits.
    Failed { error: LaunchError },
}

/// The order to a command to continue.
pub(super) const GO: &[u8] = b"go";

/// Which of the paths in /proc this kernel has.
#[derive(Debug)]
pub(super) struct ProcPaths {
    hidden_files: Vec<&'static CStr>,
    hidden_directories: Vec<&'static CStr>,
    read_only: Vec<&'static CStr>,
}

impl ProcPaths {
    pub(super) fn probe() -> Self {
        let kind = |name: &CStr| {
            let name = name.to_str().ok()?;
            std::fs::metadata(Path::new("/proc").join(name)).ok()
        };
        let of = |names: &[&'static CStr], directory: bool| -> Vec<&'static CStr> {
            let wanted = |name: &&&CStr| kind(name).is_some_and(|data| data.is_dir() == directory);
            names.iter().filter(wanted).copied().collect()
        };
        Self {
            hidden_files: of(&MASKED, false),
            hidden_directories: of(&MASKED, true),
            read_only: [of(&READ_ONLY, true), of(&READ_ONLY, false)].concat(),
        }
    }
}

/// Everything that the child needs, in its copy of the launcher's memory.
#[derive(Debug)]
pub(super) struct Child<'a> {
    pub(super) spec: &'a LaunchSpec,
    pub(super) features: &'a Features,
    pub(super) capabilities: Capabilities,
    pub(super) filter: &'a Filter,
    pub(super) proc_paths: &'a ProcPaths,
    pub(super) view: &'a CgroupView,
    pub(super) socket: &'a OwnedFd,
    /// Where the client makes its link.
    pub(super) link: Option<&'a OwnedFd>,
    /// What the process becomes once it has cloned the program's process; otherwise it becomes the program.
    pub(super) init: Option<&'a InitProgram>,
    pub(super) sole: &'a SoleThread,
}

impl Child<'_> {
    /// Returns only when the program could not be executed.
    pub(super) fn run(&self) -> i32 {
        self.report_failure(self.set_up())
    }

    fn report_failure(&self, outcome: Result<Infallible, LaunchError>) -> i32 {
        let Err(error) = outcome;
        // Without a launcher there is no receiver.
        let _ = self.report(&ChildReport::Failed { error });
        1
    }

    fn set_up(&self) -> Result<Infallible, LaunchError> {
        network::set_up(self.spec.network)?;
        let proc = NewFilesystem::open("proc").and_then(|proc| proc.mount(no_programs()));
        let proc = proc.map_err(step("make procfs"))?;
        self.link
            .map_or(Ok(()), |link| network::offer(link, &proc))?;
        let overlay = self.mount_root(&proc)?;
        if self.spec.ahead == Ahead::Make {
            self.report(&ChildReport::Waits)?;
        }
        let finishing = Finishing::receive(self.socket, self.spec)?;
        if let Some(link) = &finishing.link {
            network::offer(link, &proc)?;
        }
        drop(proc);
        self.finish(overlay, finishing)
    }

    /// The container's part that needs nothing of its session. Returns its root.
    fn mount_root(&self, proc: &Mount) -> Result<Mount, LaunchError> {
        let Handed {
            overlay,
            dev,
            runtime,
            sys,
            cgroups,
            entrances,
        } = Handed::receive(self.socket, self.spec)?;
        join_cgroups(entrances).map_err(step("join the cgroups"))?;
        unshare_namespaces(Namespaces::NEWCGROUP).map_err(namespace_step(
            "make a cgroup namespace",
            "user.max_cgroup_namespaces",
        ))?;
        become_user(0, 0, &[]).map_err(step("become root of the container"))?;
        // From here on only the sockets of the launcher's descriptors are open: the following paths are
        // resolved in files of the image and of a bind's other users.
        close_streams(&dev).map_err(step("close the launcher's streams"))?;
        self.enter_root(&overlay, &runtime)?;
        self.mount_all(&dev, proc)?;
        if let Some(sys) = sys {
            self.mount_sys(&sys, &cgroups)
                .map_err(step("show its cgroups to the container"))?;
        }
        Ok(overlay)
    }

    /// The session's part.
    fn finish(&self, overlay: Mount, finishing: Finishing) -> Result<Infallible, LaunchError> {
        let Finishing {
            spec,
            log,
            log_stderr,
            files,
            binds,
            link,
            quota,
        } = finishing;
        let spec = spec.as_deref().unwrap_or(self.spec);
        rustix::system::sethostname(spec.hostname.as_bytes())
            .map_err(|errno| step("set the host name")(errno.into()))?;
        let root = overlay.as_fd();
        self.mount_files(root, &files, spec)?;
        self.mount_binds(root, &binds, spec)?;
        let workdir = &spec.program.workdir;
        create_dir_in_root(root, Path::new(workdir))
            .and_then(|directory| enter_directory(&directory))
            .map_err(workdir_failed(workdir))?;
        if spec.hardening.has_runtime() {
            show_tmp(root).map_err(step("mount the session's /tmp"))?;
        }
        if spec.root.read_only {
            self.restrict(&overlay, MountAttributes::MOUNT_ATTR_RDONLY)
                .map_err(step("make the root read-only"))?;
        }
        let terminal = spec.terminal.is_some();
        let errors = log_stderr.as_ref().unwrap_or(&log);
        connect_streams(&log, errors, terminal).map_err(step("connect the standard streams"))?;
        drop((overlay, log, log_stderr, files, binds));
        let link = link.as_ref().or(self.link);
        match self.init {
            Some(init) => {
                let descriptors = [self.socket].into_iter().chain(link);
                let descriptors = descriptors.chain(quota.as_ref().map(|(file, _)| file));
                let descriptors: Vec<_> = descriptors.map(AsFd::as_fd).collect();
                let run = |executed: &OwnedFd| {
                    let program = self.become_program(spec, link, quota.as_ref(), Some(executed));
                    self.report_failure(program)
                };
                Err(become_init(init, self.sole, &descriptors, run))
            }
            None => self.become_program(spec, link, quota.as_ref(), None),
        }
    }

    /// `quota`: the file of its limit of processor time, and what to write there. `init_executed`: a pipe that ends
    /// when the program may run.
    fn become_program(
        &self,
        spec: &LaunchSpec,
        link: Option<&OwnedFd>,
        quota: Option<&(OwnedFd, String)>,
        init_executed: Option<&OwnedFd>,
    ) -> Result<Infallible, LaunchError> {
        setsid().map_err(|errno| step("make a session")(errno.into()))?;
        if spec.terminal.is_some() {
            ioctl_tiocsctty(rustix::stdio::stdin())
                .map_err(|errno| step("take the terminal")(errno.into()))?;
        }
        link.map_or(Ok(()), network::wait_for_link)?;
        Privileges {
            program: &spec.program,
            hardening: &spec.hardening,
            capabilities: self.capabilities,
            filter: self.filter,
        }
        .apply()?;
        if let Some(pipe) = init_executed {
            rustix::io::retry_on_intr(|| rustix::io::read(pipe, &mut [0]))
                .map_err(|errno| step("wait for the init")(errno.into()))?;
        }
        // The last step, so that it throttles only the program, and before the program looks at its limits.
        if let Some((file, text)) = quota {
            rustix::io::write(file, text.as_bytes())
                .map_err(|errno| step("set the limit of processor time")(errno.into()))?;
        }
        self.report(&ChildReport::Executing)?;
        Err(execute(&spec.program))
    }

    fn report(&self, report: &ChildReport) -> Result<(), LaunchError> {
        let bytes = encode(report).map_err(|error| step("report")(io::Error::other(error)))?;
        seqpacket::send(self.socket, &bytes, &[]).map_err(step("report"))
    }

    /// Makes the overlay the root, or that of an OCI runtime, which has the overlay below it.
    fn enter_root(&self, overlay: &Mount, runtime: &[Mount]) -> Result<(), LaunchError> {
        let root = runtime.first().unwrap_or(overlay);
        root.attach(CWD, c"/").map_err(step("mount the root"))?;
        fchdir(root.as_fd())
            .and_then(|()| chroot("."))
            .map_err(|errno| step("enter the root")(errno.into()))?;
        let [_, files @ ..] = runtime else {
            return Ok(());
        };
        attach_at(overlay, SESSION_ROOT).map_err(step("mount the session's root"))?;
        let attributes = MountAttributes::MOUNT_ATTR_RDONLY
            | MountAttributes::MOUNT_ATTR_NODEV
            | MountAttributes::MOUNT_ATTR_NOSUID;
        for (mount, path) in files.iter().zip(&self.spec.hardening.runtime_files) {
            bind_target(root.as_fd(), mount, Path::new(path))
                .and_then(|target| mount.attach(&target, c""))
                .and_then(|()| self.restrict(mount, attributes))
                .map_err(step("show the OCI runtime its files"))?;
        }
        Ok(())
    }

    fn mount_all(&self, dev: &Mount, proc: &Mount) -> Result<(), LaunchError> {
        let shm = shared_memory().map_err(step("make /dev/shm"))?;
        attach_at(dev, "/dev").map_err(step("mount /dev"))?;
        attach_at(&shm, "/dev/shm").map_err(step("mount /dev/shm"))?;
        attach_at(proc, "/proc").map_err(step("mount /proc"))?;
        self.restrict(&shm, no_programs())
            .map_err(step("restrict /dev/shm"))?;
        network::open_ports(self.spec, proc)?;
        network::allow_ping(self.spec, proc)?;
        limit_inotify(proc).map_err(step("limit its inotify instances"))?;
        if self.spec.hardening.masked_proc {
            self.mask(proc, dev).map_err(step("mask paths in /proc"))?;
        }
        if self.spec.ptys > 0 && !self.spec.ptys_when_asked {
            terminals::mount(self.spec.ptys).map_err(step(MOUNT_TERMINALS))?;
        }
        Ok(())
    }

    fn mount_sys(&self, sys: &Mount, cgroups: &[(usize, Mount)]) -> io::Result<()> {
        attach_at(sys, "/sys")?;
        for (number, mount) in cgroups {
            self.view.attach(sys, *number, mount)?;
            self.restrict(mount, cgroup_view::attributes())?;
        }
        Ok(())
    }

    fn mount_files(
        &self,
        root: BorrowedFd<'_>,
        files: &[Mount],
        spec: &LaunchSpec,
    ) -> Result<(), LaunchError> {
        for (mount, (path, _)) in files.iter().zip(&spec.files) {
            bind_target(root, mount, Path::new(path))
                .and_then(|target| mount.attach(&target, c""))
                .and_then(|()| {
                    self.restrict(mount, no_programs() | MountAttributes::MOUNT_ATTR_RDONLY)
                })
                .map_err(step(&format!("show {path} to the container")))?;
        }
        Ok(())
    }

    fn mount_binds(
        &self,
        root: BorrowedFd<'_>,
        binds: &[Mount],
        spec: &LaunchSpec,
    ) -> Result<(), LaunchError> {
        for (mount, bind) in binds.iter().zip(&spec.binds) {
            let failed = |error| LaunchError::step(&format!("bind at {}", bind.target), &error);
            let mut attributes =
                MountAttributes::MOUNT_ATTR_NODEV | MountAttributes::MOUNT_ATTR_NOSUID;
            if bind.read_only {
                attributes |= MountAttributes::MOUNT_ATTR_RDONLY;
            }
            bind_target(root, mount, Path::new(&bind.target))
                .and_then(|target| mount.attach(&target, c""))
                .and_then(|()| self.restrict(mount, attributes))
                .map_err(failed)?;
        }
        Ok(())
    }

    fn mask(&self, proc: &Mount, dev: &Mount) -> io::Result<()> {
        for name in &self.proc_paths.hidden_files {
            Mount::copy_of(dev, Path::new(NULL_DEVICE))?.attach(proc, name)?;
        }
        for name in &self.proc_paths.hidden_directories {
            Mount::copy_of(dev, Path::new(EMPTY_DEVICE_DIRECTORY))?.attach(proc, name)?;
        }
        for name in &self.proc_paths.read_only {
            let path = Path::new(std::ffi::OsStr::new(name.to_str().unwrap_or_default()));
            let copy = Mount::copy_of(proc, path)?;
            copy.attach(proc, name)?;
            self.restrict(&copy, MountAttributes::MOUNT_ATTR_RDONLY)?;
        }
        Ok(())
    }

    /// For a mount that is attached, including /proc. Only this process can see it yet.
    fn restrict(&self, mount: &Mount, attributes: MountAttributes) -> io::Result<()> {
        if self.features.has(Interface::MountAttributes) {
            mount.set_attributes(attributes)
        } else {
            mount.set_attributes_when_attached(attributes)
        }
    }
}

/// Waits for [`GO`] without descriptors.
pub(super) fn wait_to_go_on(socket: &OwnedFd) -> Result<(), LaunchError> {
    let mut buffer = [0_u8; 16];
    match seqpacket::receive(socket, &mut buffer).map_err(step("wait"))? {
        Some(received) if received.bytes == GO => Ok(()),
        _ => Err(LaunchError::LauncherDied),
    }
}

/// Replaces the launcher's standard streams by /dev/null.
fn close_streams(dev: &Mount) -> io::Result<()> {
    let null = openat(
        dev,
        NULL_DEVICE,
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(rustix::stdio::dup2_stderr(&null)?)
}

/// Shows an OCI runtime the session's `/tmp`, with the binds there, by a path on which the session has no symbolic link.
fn show_tmp(session: BorrowedFd<'_>) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let tmp = match openat(session, "tmp", flags, Mode::empty()) {
        Ok(tmp) => tmp,
        // Without one, or with something else there, the session's `/tmp` is empty.
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => {
            return Ok(());
        }
        Err(errno) => return Err(errno.into()),
    };
    attach_at(&Mount::copy_of_tree(&tmp, Path::new(""))?, SESSION_TMP)
}

/// Makes a directory of the container's the working directory.
pub(super) fn enter_directory(directory: &OwnedFd) -> io::Result<()> {
    fchdir(directory)?;
    // A directory outside the root has no absolute path.
    if getcwd(Vec::new())?.as_bytes().starts_with(b"/") {
        return Ok(());
    }
    Err(io::Error::other("it is outside the container"))
}

pub(super) fn workdir_failed(path: &str) -> impl FnOnce(io::Error) -> LaunchError {
    move |error| LaunchError::step(&format!("{} {path}", LaunchError::WORKDIR_STEP), &error)
}

/// With a terminal, standard input is the terminal; otherwise it is /dev/null already.
fn connect_streams(log: &OwnedFd, errors: &OwnedFd, terminal: bool) -> io::Result<()> {
    if terminal {
        rustix::stdio::dup2_stdin(log)?;
    }
    rustix::stdio::dup2_stdout(log)?;
    Ok(rustix::stdio::dup2_stderr(errors)?)
}
