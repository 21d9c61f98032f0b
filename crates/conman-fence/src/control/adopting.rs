//! Containers that an earlier shim started.
//!
//! After the death of that shim they are no children: they are held by pidfds, verified by their
//! start time and boot, and the kernel is asked how they ended. After a replacement of only the
//! program they still are children.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use conman_linux::{Ended, PidFd, ProcessIdentity, boot_id, ended_unreaped, inherited_fd};
use conman_shim_protocol::ContainerState;
use rustix::event::epoll::EventFlags;

use super::token::Token;
use super::{Control, boottime_ns};
use crate::containers::Container;
use crate::handover::Handover;
use crate::launching::StartRemains;
use crate::ledger::RecordedState;

/// Bound on the death of an earlier shim's launcher that may be waiting for a disk.
const LAUNCHER_TIMEOUT: Duration = Duration::from_millis(500);

impl Control {
    /// Takes over the containers of an earlier shim that has died.
    pub(super) fn adopt(&mut self, kept: RecordedState) -> io::Result<()> {
        if let Some((pid, start_ticks)) = kept.launcher {
            end_launcher(pid, start_ticks)?;
        }
        for (ticket, mut left) in kept.sweeps {
            let mut others = kept.containers.values();
            if let Some(other) = others.find(|other| has_place_of(other, &left)) {
                // Its removal was not written down.
                tracing::warn!(
                    other.cgroup,
                    "a container uses the place of a start that was to be swept"
                );
                continue;
            }
            left.ids = left.ids.filter(|ids| self.ids.reserve(*ids));
            self.launching.resume_sweep(ticket, left);
        }
        for (name, mut container) in kept.containers {
            // The connections of an earlier shim have ended, but not necessarily its clients.
            container.client = None;
            if container.state == ContainerState::Launching && !container.external {
                self.end_interrupted(name, container)?;
                continue;
            }
            self.reserve_ids(&name, &mut container);
            if container.is_alive() {
                match hold(&container)? {
                    Some(process) => {
                        self.watch_adopted(&name, &process)?;
                        container.held = Some(Rc::new(process));
                    }
                    None if container.may_appear() => {
                        if container.kill_pending {
                            self.containers.kill_as_it_appears(&name);
                        }
                    }
                    None => container.state = ContainerState::Lost,
                }
            }
            self.containers.adopt(name, container);
        }
        self.forbidden_starts = kept.condemned;
        self.arm(kept.fence);
        Ok(())
    }

    /// Takes over the state of the program that this one replaces.
    pub(super) fn resume(&mut self, handover: &mut Handover) -> io::Result<()> {
        let mut kept = RecordedState::default();
        for line in handover.lines.drain(..) {
            kept.take(line);
        }
        for (name, fd) in handover.adopted.drain(..) {
            let fd = inherited_fd(fd)?;
            if let Some(mut container) = kept.containers.remove(&name) {
                let process = PidFd::received(fd, container.pid);
                self.watch_adopted(&name, &process)?;
                container.held = Some(Rc::new(process));
                self.reserve_ids(&name, &mut container);
                self.containers.adopt(name, container);
            }
        }
        for (name, mut container) in kept.containers {
            self.reserve_ids(&name, &mut container);
            if container.kill_pending {
                self.containers.kill_as_it_appears(&name);
            }
            self.containers.keep_child(name, container);
        }
        for pid in handover.doomed.drain(..) {
            self.containers.helper(pid);
        }
        self.clients.resume(&self.poller, handover)?;
        for (_, left) in &mut handover.left {
            left.ids = left.ids.filter(|ids| self.ids.reserve(*ids));
        }
        self.launching.take_over(handover, &mut inherited_fd)?;
        for start in self.launching.pending.values() {
            if let Some(own) = &start.own
                && !self.ids.reserve(own.ids)
            {
                tracing::error!(
                    start.name,
                    own.ids,
                    "another container has this start's ids"
                );
            }
        }
        for name in handover.condemned.drain(..) {
            self.forbidden_starts.add(name);
        }
        self.arm(kept.fence);
        Ok(())
    }

    /// A range that cannot be reserved is not given back for this container either.
    fn reserve_ids(&mut self, name: &str, container: &mut Container) {
        if let Some(ids) = container.ids
            && !self.ids.reserve(ids)
        {
            container.ids = None;
            tracing::error!(
                name,
                ids,
                "a container's range of ids is invalid or another container's"
            );
        }
    }

    /// No client was told that this start succeeded, so it failed.
    fn end_interrupted(&mut self, name: String, container: Container) -> io::Result<()> {
        let ended = match container.scratch {
            Some(scratch) => {
                let killed = self.cgroups.freezer.kill(&container.cgroup);
                let ids = container.ids.filter(|ids| self.ids.reserve(*ids));
                // It may have been interrupted before.
                if self.launching.left_of(&name).is_none() {
                    self.launching.sweep_later(StartRemains {
                        cgroup: container.cgroup,
                        scratch,
                        name: Some(name.clone()),
                        ids,
                        killed: true,
                    });
                }
                killed
            }
            None => match hold(&container)? {
                Some(process) => process.kill().map(|_| ()).map_err(io::Error::other),
                None => Ok(()),
            },
        };
        match ended {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::error!(name, %error, "cannot kill an interrupted start");
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn watch_adopted(&mut self, name: &str, process: &PidFd) -> io::Result<()> {
        let token = Token::Adopted(self.containers.number_pidfd(name));
        self.poller.add(token, process, EventFlags::IN)
    }

    /// A container that is no child has died.
    pub(super) fn adopted_died(&mut self, number: u64) {
        if let Some(process) = self.containers.adopted_died(number, boottime_ns()) {
            self.poller.remove(process);
        }
        self.end_adopted();
    }

    /// Asks the kernel how dead containers ended.
    pub(super) fn end_adopted(&mut self) {
        let effects = self.containers.end_adopted(boottime_ns(), how_ended);
        self.carry_out(effects);
    }
}

/// Whether a container runs where an interrupted start may have left something. The interrupted start
/// may be recorded too, but no client was told that it runs.
fn has_place_of(container: &Container, left: &StartRemains) -> bool {
    let same = container.cgroup == left.cgroup || container.scratch.as_ref() == Some(&left.scratch);
    same && container.exec_in.is_none() && container.state == ContainerState::Running
}

/// How a dead container ended, whether its new parent has reaped it or not.
fn how_ended(container: &Container) -> Option<Ended> {
    let unreaped = identity(container)
        .ok()
        .and_then(|one| ended_unreaped(&one));
    let process = container.held.as_ref();
    unreaped.or_else(|| process.and_then(|process| process.ended().ok().flatten()))
}

fn identity(container: &Container) -> io::Result<ProcessIdentity> {
    Ok(ProcessIdentity {
        pid: container.pid,
        start_time_ticks: container.start_ticks,
        boot_id: boot_id()?,
    })
}

/// Opens a pidfd of the process that an earlier shim started; `None` when it is dead.
fn hold(container: &Container) -> io::Result<Option<PidFd>> {
    if container.pid <= 0 || container.start_ticks == 0 {
        return Ok(None);
    }
    hold_identified(&identity(container)?)
}

/// The launcher dies with its shim, but may still finish an operation: what it leaves is known only
/// afterwards.
fn end_launcher(pid: i32, start_time_ticks: u64) -> io::Result<()> {
    let identity = ProcessIdentity {
        pid,
        start_time_ticks,
        boot_id: boot_id()?,
    };
    let Some(process) = hold_identified(&identity)? else {
        return Ok(());
    };
    process.kill().map_err(io::Error::other)?;
    if !process.wait_dead(LAUNCHER_TIMEOUT)? {
        tracing::error!(pid, "the launcher of an earlier shim does not die");
    }
    Ok(())
}

fn hold_identified(identity: &ProcessIdentity) -> io::Result<Option<PidFd>> {
    match PidFd::open_verified(identity) {
        Ok(process) => Ok(Some(process)),
        Err(error) if error.proves_death() => Ok(None),
        // Without a pidfd its end would never be noticed.
        Err(error) => Err(io::Error::other(error)),
    }
}
