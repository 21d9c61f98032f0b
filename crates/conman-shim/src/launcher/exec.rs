//! A command in a running container.
//!
//! A process enters a PID namespace only by being created in it, so two processes are cloned, both as
//! children of the shim: the *helper*, which joins the container's cgroups and namespaces, and the
//! command, which the helper clones. Each waits until the shim has a report of it. Instead of executing a
//! program, the command's process may carry out an order about files ([`crate::files`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use conman_fence::Command;
use conman_linux::{
    CloneOptions, PidFd, SessionCgroup, SoleThread, become_user, clone_process, open_in_root,
};
use conman_shim_protocol::{LaunchError, SESSION_ROOT, STREAMS, encode, seqpacket};
use nix::unistd::setsid;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::net::{Shutdown, shutdown};
use rustix::process::{chroot, fchdir, ioctl_tiocsctty};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};

use super::child::{ChildReport, MOUNT_TERMINALS, enter_directory, wait_to_go_on, workdir_failed};
use super::launch::{Launcher, cgroup_failed, offer_to_oom_killer};
use super::program::{Privileges, execute};
use super::relay::{Relay, is_socket};
use super::steps::{process_step, step};
use super::terminals;
use super::under_way::{Clock, UnderWay, go_on};

/// All namespaces that every container has.
const NAMESPACES: ThreadNameSpaceType = ThreadNameSpaceType::USER
    .union(ThreadNameSpaceType::PROCESS_ID)
    .union(ThreadNameSpaceType::MOUNT)
    .union(ThreadNameSpaceType::NETWORK)
    .union(ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME)
    .union(ThreadNameSpaceType::CONTROL_GROUP);

/// Where a container has none of its own, it is in the launcher's, and so is the helper.
const IPC: ThreadNameSpaceType = ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION;

impl Launcher {
    /// Carries out the launcher's part of an order. `helper` is called with the helper's PID before the
    /// helper can do anything. `fds`: the init's pidfd and the streams.
    pub(super) fn exec(
        &mut self,
        order: &Command,
        fds: Vec<OwnedFd>,
        helper: &mut dyn FnMut(i32) -> io::Result<()>,
    ) -> Result<UnderWay, LaunchError> {
        let clock = Clock::start();
        let mut fds = fds.into_iter();
        let init = &fds.next().ok_or(LaunchError::EndedEarly)?;
        let (streams, relay) = connect(fds.collect())?;
        let streams = &streams[..];
        if let Some(owner) = order.owner {
            give_pipes(streams, owner).map_err(step("give the standard streams to its user"))?;
        }
        let cgroup = self
            .cgroups
            .existing(&order.cgroup)
            .map_err(cgroup_failed)?;
        if let Some(relay) = &relay {
            relay.start(&self.sole, &cgroup, helper)?;
        }
        let capabilities = order.spec.hardening.capability_set();
        let privileges = Privileges {
            program: &order.spec.program,
            hardening: &order.spec.hardening,
            capabilities: capabilities.map_err(|error| LaunchError::Spec { error })?,
            filter: self.filters.of(&order.spec.hardening),
        };
        let (ours, theirs) = seqpacket::pair().map_err(step("make a socket"))?;
        // Only these enter the container.
        let keep: Vec<_> = [theirs.as_fd(), init.as_fd()]
            .into_iter()
            .chain(streams.iter().map(AsFd::as_fd))
            .chain(cgroup.entrances())
            .collect();
        let options = CloneOptions {
            sibling: true,
            into_cgroup: cgroup.unified(),
            keep_only: Some(&keep),
            ..CloneOptions::default()
        };
        let inside = Inside {
            order,
            init,
            streams,
            cgroup: &cgroup,
            privileges,
            socket: &theirs,
            sole: &self.sole,
        };
        let process = clone_process(&self.sole, &options, || inside.help());
        let process = process.map_err(process_step("clone a helper"))?;
        drop(theirs);
        let reported = helper(process.pid()).map_err(step("report"));
        let begun = reported.and_then(|()| offer_to_oom_killer(&process));
        match begun.and_then(|()| go_on(&ours)) {
            Ok(()) => Ok(UnderWay::command(order.ticket, process, ours, clock)),
            Err(error) => {
                let _ = process.kill();
                Err(error)
            }
        }
    }
}

/// The streams for the command's process, and the relay to them from what came as sockets.
fn connect(streams: Vec<OwnedFd>) -> Result<(Vec<OwnedFd>, Option<Relay>), LaunchError> {
    let failed = |error| step("make pipes")(error);
    match <[OwnedFd; STREAMS]>::try_from(streams) {
        Ok(streams) if is_socket(&streams[1]).map_err(failed)? => {
            let (relay, streams) = Relay::connect(streams).map_err(failed)?;
            Ok((streams, Some(relay)))
        }
        Ok(streams) => Ok((streams.into(), None)),
        Err(_) => Err(LaunchError::EndedEarly),
    }
}

/// Enters a directory of the container that the process is in.
fn enter(workdir: &str) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, "/", flags, Mode::empty())?;
    let directory = open_in_root(&root, Path::new(workdir), OFlags::DIRECTORY)?;
    enter_directory(&directory)
}

/// Makes the session's root the root, in a container whose root is that of an OCI runtime.
fn enter_session_root() -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    fchdir(openat(CWD, SESSION_ROOT, flags, Mode::empty())?)?;
    Ok(chroot(".")?)
}

/// Programs reopen /dev/stdout, so they must own it. A stream that is not a pipe may have other users,
/// and is not changed.
fn give_pipes(streams: &[OwnedFd], (user, group): (u32, u32)) -> io::Result<()> {
    for stream in streams {
        let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(stream)?.st_mode);
        if kind == rustix::fs::FileType::Fifo {
            std::os::unix::fs::fchown(stream, Some(user), Some(group))?;
        }
    }
    Ok(())
}

/// What helper and command need, in their copies of the launcher's memory.
#[derive(Debug)]
struct Inside<'a> {
    order: &'a Command,
    init: &'a OwnedFd,
    streams: &'a [OwnedFd],
    cgroup: &'a SessionCgroup,
    privileges: Privileges<'a>,
    socket: &'a OwnedFd,
    sole: &'a SoleThread,
}

impl Inside<'_> {
    /// The helper's whole run.
    fn help(&self) -> i32 {
        let entered = self.enter();
        let report = match &entered {
            Ok(command) => ChildReport::Entered { pid: command.pid() },
            Err(error) => ChildReport::Failed {
                error: error.clone(),
            },
        };
        self.report(&report);
        i32::from(entered.is_err())
    }

    fn enter(&self) -> Result<PidFd, LaunchError> {
        wait_to_go_on(self.socket)?;
        self.cgroup.join().map_err(step("join the cgroups"))?;
        let namespaces = match self.privileges.hardening.shares_ipc() {
            true => NAMESPACES,
            false => NAMESPACES | IPC,
        };
        // By the pidfd, so that no other container can be entered.
        move_into_thread_name_spaces(self.init.as_fd(), namespaces)
            .map_err(|errno| step("enter the container")(errno.into()))?;
        let keep: Vec<_> = [self.socket.as_fd()]
            .into_iter()
            .chain(self.streams.iter().map(AsFd::as_fd))
            .collect();
        let options = CloneOptions {
            sibling: true,
            keep_only: Some(&keep),
            ..CloneOptions::default()
        };
        clone_process(self.sole, &options, || self.run()).map_err(process_step("clone the command"))
    }

    /// The command's run until its exec.
    fn run(&self) -> i32 {
        self.set_up().unwrap_or_else(|error| {
            self.report(&ChildReport::Failed { error });
            1
        })
    }

    /// Returns only the exit status of an order about files.
    fn set_up(&self) -> Result<i32, LaunchError> {
        wait_to_go_on(self.socket)?;
        let program = self.privileges.program;
        setsid().map_err(|errno| step("make a session")(errno.into()))?;
        // Before any path is resolved that the container may have changed.
        self.connect_streams()
            .map_err(step("connect the standard streams"))?;
        become_user(0, 0, &[]).map_err(step("become root of the container"))?;
        if self.order.spec.files.is_some() && self.privileges.hardening.has_runtime() {
            enter_session_root().map_err(step("enter the session's root"))?;
        }
        if self.order.spec.ptys > 0 {
            terminals::mount_if_missing(self.order.spec.ptys).map_err(step(MOUNT_TERMINALS))?;
        }
        enter(&program.workdir).map_err(workdir_failed(&program.workdir))?;
        self.privileges.apply()?;
        self.report(&ChildReport::Executing);
        match (&self.order.spec.files, self.streams) {
            (Some(order), [input, output, _]) => {
                // As an exec would: its end shows the launcher that this has begun.
                shutdown(self.socket, Shutdown::Both)
                    .map_err(|errno| step("report")(errno.into()))?;
                Ok(crate::files::serve(order, input, output))
            }
            _ => Err(execute(program)),
        }
    }

    fn connect_streams(&self) -> io::Result<()> {
        let [input, output, error] = self.streams else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if self.order.spec.terminal {
            ioctl_tiocsctty(input)?;
        }
        rustix::stdio::dup2_stdin(input)?;
        rustix::stdio::dup2_stdout(output)?;
        Ok(rustix::stdio::dup2_stderr(error)?)
    }

    fn report(&self, report: &ChildReport) {
        // Without a launcher there is no receiver.
        let _ = encode(report).map(|bytes| seqpacket::send(self.socket, &bytes, &[]));
    }
}
