//! The helper process that creates containers.
//!
//! The shim forks it; it does everything that may wait on a disk or on rtnl, so that the shim never
//! waits. It has one thread and stays small, since a clone copies its page tables. Orders come through
//! one SEQPACKET socket, one after the other; reports go back through it. While a process that it has
//! cloned does its own part, the launcher takes the next order. It clones with CLONE_PARENT: the
//! containers are the *shim's* children, and outlive the launcher.
//!
//! It has two mount namespaces. The *workshop*, in which it works, shows only the shim's roots at their
//! own paths, procfs, cgroupfs and the containers' device nodes. The *launchpad*, which it enters only to
//! clone, shows an empty procfs and nothing of the host; a container's mount namespace begins as a copy
//! of it.
//!
//! How the launcher is protected from sessions:
//! - A process that enters a container, or is created for it, closes every descriptor that it does not
//!   need before it resolves a path that the session influences. It resolves such paths inside the
//!   container's root, without the links of procfs to open files.
//! - Until its exec it cannot be traced, and /proc does not show its open files, root or program: it is
//!   not dumpable, and its memory belongs to the host's user namespace.
//! - The program file that `/proc/self/exe` leads to belongs to the host's root, which is no user of any
//!   container, so that a container can never write to it.
//! - The owner of a container's user namespace is the first of its ids. So the kernel's limits by
//!   user count separately from the host's root, and no process of the host has capabilities in it only
//!   for being the owner.
//!
//! A container is created in this order; `L` is the launcher, `C` the container's first process:
//!
//! ```text
//! L: cgroup to be born in
//! L: clone (user, pid, mount, uts, ipc) ──────▶ C: network namespace, loopback up, host name,
//! L: send the shim the PID                         procfs, not mounted yet
//! L: other cgroups with limits, scratch
//!    directories; map C's ids and, by its user
//!    namespace, the layers' owners; make the
//!    overlay
//! L: send all that ───────────────────────────▶ C: join v1 cgroups, new cgroup namespace, become
//! L: log file, files, binds                        root of its namespace, mount, chroot
//! L: send them ───────────────────────────────▶ C: host name, files, binds, limits, privileges,
//! L: the next order, until the socket's end        filters, limit of processor time, exec
//! ```
//! A container made ahead waits where C has reached its root. Its start's order brings what the second message needs,
//! with which C gets the start's spec.
//!
//! If the container has an init, C clones its program's process once everything is mounted. That process does the
//! rest, and C executes the init.
//!
//! If the container has a link, C sends its network namespace to the client as soon as it has the link's socket, and
//! waits for the link right before it drops its privileges.
//!
//! The CPU limit comes last, so that it throttles the program and not the creation of its container. The kernel visits
//! all cgroups of the host for it, so C writes it, and L does other work. That of a container made ahead is set when it
//! is made, unless it is so small that the start would wait for it.
//! C's end of the socket is close-on-exec: if it closes without an error report, the exec succeeded, that of an init included.
//! When the launcher dies, C reads the end of the socket instead of its root, and exits.

mod bind_owners;
mod cgroup_view;
mod child;
mod child_mounts;
mod completing;
mod exec;
mod handed;
mod init;
mod launch;
mod network;
mod places;
mod preparing;
mod program;
mod relay;
mod rootfs;
mod steps;
mod sweeping;
mod terminals;
mod under_way;

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use conman_fence::{Order, Report, ShimOptions, Start};
use conman_linux::{Capabilities, SoleThread, set_effective};
use conman_shim_protocol::{LaunchError, Phases, decode, encode, seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use under_way::{Failure, UnderWay};

/// Containers in setup; further orders wait. Commands do not count: the shim sends few for each
/// container.
const MAX_UNDER_WAY: usize = 64;

/// Serves the shim until its end of the socket closes.
///
/// # Errors
/// When the socket fails.
pub(crate) fn serve(socket: &OwnedFd, options: &ShimOptions) -> io::Result<()> {
    // To open the namespaces of its clones; the shim does not have it.
    set_effective(Capabilities::SYS_PTRACE, true)?;
    // Sessions inherit it, and wait less for each other.
    if let Err(error) = conman_linux::run_in_short_slices() {
        tracing::warn!(%error, "sessions have the kernel's default time slices");
    }
    let sole = SoleThread::prove()?;
    let launcher = match launch::Launcher::new(sole, options) {
        Ok(launcher) => launcher,
        Err(error) => return report(socket, &Report::Broken { error }),
    };
    // Every clone copies the page tables of this process. Much of its heap is free: what parsed the command
    // line and compiled the filter is gone.
    conman_linux::trim_heap();
    let features = launcher.features().clone();
    report(socket, &Report::Ready { features })?;
    let mut serving = Serving {
        socket,
        launcher,
        under_way: Vec::new(),
        buffer: seqpacket::buffer(),
    };
    let mut preparing = preparing::Preparing::new(options);
    loop {
        preparing.follow(&serving.launcher.sole, serving.launcher.superblocks);
        if !serving.turn()? {
            return Ok(());
        }
    }
}

/// The launcher at work.
#[derive(Debug)]
struct Serving<'a> {
    /// The shim's.
    socket: &'a OwnedFd,
    launcher: launch::Launcher,
    under_way: Vec<UnderWay>,
    buffer: Vec<u8>,
}

impl Serving<'_> {
    /// Waits for an event and handles it. `false` when the shim is dead.
    fn turn(&mut self) -> io::Result<bool> {
        if let Some(ticket) = self.launcher.sweep_a_little() {
            report(self.socket, &Report::Swept { ticket })?;
        }
        let (ordered, reported) = self.wait()?;
        let now = Instant::now();
        // From the end, since finished ones leave the list.
        for index in (0..self.under_way.len()).rev() {
            let start = &mut self.under_way[index];
            let socket = self.socket;
            let outcome = if reported[index] {
                let mut send = |early| report(socket, &early);
                start.receive(&mut self.buffer, &mut send)
            } else if start.left(now).is_some_and(|left| left.is_zero()) {
                Some(Err(UnderWay::timed_out()))
            } else {
                None
            };
            if let Some(outcome) = outcome {
                let start = self.under_way.swap_remove(index);
                self.report_outcome(start, outcome)?;
            }
        }
        if ordered {
            return self.take_order();
        }
        Ok(true)
    }

    /// Returns whether there is an order, and which starts have a report. Neither when it is time for a step
    /// of the sweeps.
    fn wait(&self) -> io::Result<(bool, Vec<bool>)> {
        let containers = self.under_way.iter().filter(|one| one.is_container());
        let orders = if containers.count() < MAX_UNDER_WAY {
            PollFlags::IN
        } else {
            PollFlags::empty()
        };
        let now = Instant::now();
        let left = self.under_way.iter().filter_map(|start| start.left(now));
        let left = left.chain(self.launcher.sweeping.idle_for()).min();
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let sockets = self.under_way.iter().map(UnderWay::socket);
        let mut fds: Vec<PollFd<'_>> = sockets
            .map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN))
            .collect();
        fds.push(PollFd::new(self.socket, orders));
        rustix::io::retry_on_intr(|| poll(&mut fds, left.as_ref()))?;
        let mut ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let ordered = ready.pop().unwrap_or_default();
        Ok((ordered, ready))
    }

    fn take_order(&mut self) -> io::Result<bool> {
        let Some(received) = seqpacket::receive(self.socket, &mut self.buffer)? else {
            return Ok(false);
        };
        let fds = received.fds;
        let (ticket, outcome) = match decode(received.bytes).map_err(io::Error::other)? {
            Order::Launch(start) => {
                let ticket = start.ticket;
                let mut swept = |ticket| report(self.socket, &Report::Swept { ticket });
                self.launcher.make_room(&start, &mut swept)?;
                let mut cloned = |pid| report(self.socket, &Report::Cloned { ticket, pid });
                (ticket, self.launcher.launch(&start, fds, &mut cloned))
            }
            Order::Complete(start) => return self.complete(&start, fds).map(|()| true),
            Order::Exec(command) => {
                let mut helper = |pid| report(self.socket, &Report::Helper { pid });
                let outcome = self.launcher.exec(&command, fds, &mut helper);
                (command.ticket, outcome.map_err(Failure::from))
            }
            Order::Sweep(sweep) => {
                self.launcher.sweeping.add(sweep);
                return Ok(true);
            }
            Order::LiftCpuLimit { cgroup } => {
                self.launcher.lift_cpu_limit(&cgroup);
                return Ok(true);
            }
        };
        match outcome {
            Ok(start) => self.under_way.push(start),
            Err(Failure { error, left }) => {
                let failed = Report::Failed {
                    ticket,
                    error,
                    left,
                };
                report(self.socket, &failed)?;
            }
        }
        Ok(true)
    }

    /// Finishes a container made ahead. One that has ended meanwhile is reported as not taken already.
    fn complete(&mut self, start: &Start, fds: Vec<OwnedFd>) -> io::Result<()> {
        let mut all = self.under_way.iter();
        let Some(index) = all.position(|one| one.ticket == start.ticket) else {
            return Ok(());
        };
        let Err(error) = self
            .launcher
            .complete(start, fds, &mut self.under_way[index])
        else {
            return Ok(());
        };
        let ahead = self.under_way.swap_remove(index);
        self.report_outcome(ahead, Err(error))
    }

    fn report_outcome(
        &self,
        start: UnderWay,
        outcome: Result<Phases, LaunchError>,
    ) -> io::Result<()> {
        let (ticket, waits) = (start.ticket, start.waits());
        let outcome = match outcome {
            Ok(phases) => Report::Running { ticket, phases },
            Err(error) => {
                let left = start.take_back();
                match waits {
                    true => Report::NotTaken {
                        ticket,
                        error,
                        left,
                    },
                    false => Report::Failed {
                        ticket,
                        error,
                        left,
                    },
                }
            }
        };
        report(self.socket, &outcome)
    }
}

fn report(socket: &OwnedFd, report: &Report) -> io::Result<()> {
    let bytes = encode(report).map_err(io::Error::other)?;
    seqpacket::send(socket, &bytes, &[])
}
