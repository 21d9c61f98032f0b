//! The helper process that makes containers.
//!
//! The shim forks it; it does whatever may wait on a disk or on rtnl, so that the shim never does.
//! It has one thread and stays small, since a clone copies its page tables. Orders come through one
//! SEQPACKET socket, one after the other; reports go back through it. It clones with CLONE_PARENT:
//! the containers are the *shim's* children, and outlive the launcher.
//!
//! It has two mount namespaces. The *workshop*, in which it works, shows the shim's roots at their
//! own paths, procfs and cgroupfs, and nothing else. The *launchpad*, which it enters only to
//! clone, shows an empty procfs and a small /dev, and nothing of the host; that is what a
//! container's mount namespace begins as.
//!
//! A container is made in this order; `L` is the launcher, `C` the container's first process:
//!
//! ```text
//! L: cgroup to be born in
//! L: clone (user, pid, mount, uts, ipc) ──────▶ C: network namespace, loopback up, host name,
//! L: tell the shim the PID                         procfs, not mounted yet
//! L: other cgroups with limits, scratch
//!    directories, log file; map C's ids and,
//!    by its user namespace, the layers' owners;
//!    make the overlay
//! L: send all that ───────────────────────────▶ C: join v1 cgroups, new cgroup namespace, become
//! L: limit of processor time                       root of its namespace, mount, chroot, files,
//!                                                  limits, privileges, filters, exec
//! L: wait for the socket's end                     files, limits, privileges, filters, exec
//! ```
//! C's end of the socket is close-on-exec: its closing without a complaint is the exec. When the
//! launcher dies C reads the end of the socket instead of its root, and ends.

mod child;
mod exec;
mod launch;
mod places;
mod preparing;
mod rootfs;
mod sweeping;

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use conman_linux::{CloneOptions, Features, PidFd, Signal, SoleThread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::process::{DumpableBehavior, Pid, getppid, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use crate::options::ShimOptions;
use crate::protocol::{LaunchError, Phases, decode, encode};
use crate::seqpacket;
use crate::spec::{ExecSpec, LaunchSpec};

/// What the shim wants done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Order {
    Launch(Box<Start>),
    /// Comes with a pidfd of the container's init and the three streams.
    Exec(Box<Command>),
    /// Remove what a launcher that died in mid-launch may have left, beside everything else.
    Sweep {
        ticket: u64,
        cgroup: String,
        scratch: PathBuf,
    },
}

/// A container to start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) ticket: u64,
    /// First of the container's own ids.
    pub(crate) ids: u32,
    pub(crate) spec: LaunchSpec,
}

/// A command to run in a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Command {
    pub(crate) ticket: u64,
    /// The container's.
    pub(crate) cgroup: String,
    pub(crate) spec: ExecSpec,
}

/// What the launcher tells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// It works; comes once, first.
    Ready {
        features: Features,
    },
    /// It cannot work; comes instead.
    Broken {
        error: LaunchError,
    },
    /// The shim has a new child. Comes before the child can do anything.
    Cloned {
        ticket: u64,
        pid: i32,
    },
    Running {
        ticket: u64,
        phases: Phases,
    },
    /// The shim has a new child of no interest, to be reaped. Comes before it can end.
    Helper {
        pid: i32,
    },
    /// No process of it is left, and what could be removed is.
    Swept {
        ticket: u64,
    },
    /// Nothing of it is left except a zombie where it was cloned.
    Failed {
        ticket: u64,
        error: LaunchError,
    },
}

/// Forks the launcher. The socket is the shim's end.
pub(crate) fn start(sole: &SoleThread, options: &ShimOptions) -> io::Result<(PidFd, OwnedFd)> {
    let (ours, theirs) = seqpacket::pair()?;
    // Nothing else of the shim's: a connection that is open here, too, would not end with it.
    let keep = [theirs.as_fd()];
    let how = CloneOptions {
        keep_only: Some(&keep),
        ..CloneOptions::default()
    };
    let shim = rustix::process::getpid();
    let process =
        conman_linux::clone_process(sole, &how, || match serve(shim, &theirs, options) {
            Ok(()) => 0,
            Err(error) => {
                tracing::error!(%error, "the launcher ends");
                1
            }
        })?;
    Ok((process, ours))
}

fn serve(shim: Pid, socket: &OwnedFd, options: &ShimOptions) -> io::Result<()> {
    prepare_process(shim, c"shim-launcher")?;
    let sole = SoleThread::prove()?;
    let mut preparing = preparing::Preparing::begin(&sole, options);
    let mut launcher = match launch::Launcher::new(sole, options) {
        Ok(launcher) => launcher,
        Err(error) => return report(socket, &Report::Broken { error }),
    };
    let features = launcher.features().clone();
    report(socket, &Report::Ready { features })?;
    let mut buffer = seqpacket::buffer();
    loop {
        if let Some(ticket) = launcher.sweep_a_little() {
            report(socket, &Report::Swept { ticket })?;
        }
        if let Some(idle) = launcher.sweeping.idle_for()
            && !is_readable_within(socket, idle)?
        {
            continue;
        }
        let Some(received) = seqpacket::receive(socket, &mut buffer)? else {
            return Ok(());
        };
        preparing.look();
        let fds = received.fds;
        let cloned = |ticket, pid| report(socket, &Report::Cloned { ticket, pid });
        let (ticket, outcome) = match decode(received.bytes).map_err(io::Error::other)? {
            Order::Launch(start) => {
                let ticket = start.ticket;
                let mut swept = |ticket| report(socket, &Report::Swept { ticket });
                launcher.make_room(&start, &mut swept)?;
                let outcome = launcher.launch(&start, fds, &mut |pid| cloned(ticket, pid));
                (ticket, outcome)
            }
            Order::Exec(command) => {
                let ticket = command.ticket;
                let mut helper = |pid| report(socket, &Report::Helper { pid });
                let outcome =
                    launcher.exec(&command, fds, &mut helper, &mut |pid| cloned(ticket, pid));
                (ticket, outcome)
            }
            Order::Sweep {
                ticket,
                cgroup,
                scratch,
            } => {
                launcher.sweeping.add(sweeping::Sweep {
                    ticket,
                    cgroup,
                    scratch,
                });
                continue;
            }
        };
        let told = match outcome {
            Ok(phases) => Report::Running { ticket, phases },
            Err(error) => Report::Failed { ticket, error },
        };
        report(socket, &told)?;
    }
}

fn is_readable_within(socket: &OwnedFd, patience: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let patience = Timespec::try_from(patience).ok();
    Ok(rustix::io::retry_on_intr(|| poll(&mut fds, patience.as_ref()))? > 0)
}

/// What the launcher, and through it every container, does not take over from the shim.
pub(crate) fn prepare_process(shim: Pid, name: &CStr) -> io::Result<()> {
    rustix::thread::set_name(name)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != Some(shim) {
        return Err(io::Error::other("the shim died before its launcher began"));
    }
    // A process that enters a container is in sight of those in it before it is one of them: they
    // must neither trace it nor reach the program that it still runs.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    conman_linux::reset_signal_actions();
    nix::sys::signal::SigSet::empty().thread_set_mask()?;
    rustix::process::umask(Mode::empty());
    // The shim may be protected from the OOM killer; containers are not.
    let score = std::fs::read_to_string("/proc/self/oom_score_adj")?;
    if score.starts_with('-') {
        std::fs::write("/proc/self/oom_score_adj", "0")?;
    }
    Ok(())
}

fn report(socket: &OwnedFd, report: &Report) -> io::Result<()> {
    let bytes = encode(report).map_err(io::Error::other)?;
    seqpacket::send(socket, &bytes, &[])
}
