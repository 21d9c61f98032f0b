//! Containers that an earlier shim started.
//!
//! After the death of that shim they are no children: they are held by pidfds, verified by their
//! start time and boot, and the kernel is asked how they ended. After a replacement of only the
//! program they still are children.

use std::io;
use std::time::Duration;

use conman_linux::{Ended, PidFd, ProcessIdentity, boot_id, ended_unreaped, inherited_fd};
use rustix::event::epoll::EventFlags;

use super::poller::Token;
use super::{Control, boottime_ns};
use crate::containers::Container;
use crate::handover::Handover;
use crate::launching::Left;
use crate::ledger::Kept;
use crate::protocol::ContainerState;

/// Pause before the second check for a status that the new parent has not reaped yet. Each pause is as
/// long as all before together, since ten thousand containers may die at the same time.
const LOOK_NS: u64 = 5_000_000;

/// Bound on the death of an earlier shim's launcher that may be waiting for a disk.
const LAUNCHER_TIMEOUT: Duration = Duration::from_millis(500);

/// Bound on those checks; afterwards the status counts as unknown.
const PATIENCE_NS: u64 = 500_000_000;

/// A death whose status is not available yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unexplained {
    since_ns: u64,
    look_ns: u64,
}

impl Control {
    /// Takes over the containers of an earlier shim that has died.
    pub(super) fn adopt(&mut self, kept: Kept) -> io::Result<()> {
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
            if container.state == ContainerState::Launching && !container.foreign {
                self.end_interrupted(name, container)?;
                continue;
            }
            self.reserve_ids(&name, &mut container);
            if container.is_alive() {
                match hold(&container)? {
                    Some(process) => {
                        self.watch_adopted(&name, &process)?;
                        container.held = Some(process);
                    }
                    None if container.may_appear() => {
                        if container.doomed {
                            self.doomed.insert(name.clone());
                        }
                    }
                    None => container.state = ContainerState::Lost,
                }
            }
            self.containers.adopt(name, container);
        }
        self.condemned_early = kept.condemned;
        self.arm(kept.fence);
        Ok(())
    }

    /// Takes over the state of the program that this one replaces.
    pub(super) fn resume(&mut self, handover: &mut Handover) -> io::Result<()> {
        let mut kept = Kept::default();
        for line in handover.lines.drain(..) {
            kept.take(line);
        }
        for (name, fd) in handover.adopted.drain(..) {
            let fd = inherited_fd(fd)?;
            if let Some(mut container) = kept.containers.remove(&name) {
                let process = PidFd::received(fd, container.pid);
                self.watch_adopted(&name, &process)?;
                container.held = Some(process);
                self.reserve_ids(&name, &mut container);
                self.containers.adopt(name, container);
            }
        }
        for (name, mut container) in kept.containers {
            self.reserve_ids(&name, &mut container);
            if container.doomed {
                self.doomed.insert(name.clone());
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
        self.replacements = handover.replacements;
        for name in handover.condemned.drain(..) {
            self.condemned_early.add(name);
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
                let killed = self.freezer.kill(&container.cgroup);
                let ids = container.ids.filter(|ids| self.ids.reserve(*ids));
                // It may have been interrupted before.
                if self.launching.left_of(&name).is_none() {
                    self.launching.sweep_later(Left {
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
        let number = self.next_adopted;
        self.poller
            .add(Token::Adopted(number), process, EventFlags::IN)?;
        self.adopted.insert(number, name.to_owned());
        self.next_adopted += 1;
        Ok(())
    }

    /// A container that is no child has died.
    pub(super) fn adopted_died(&mut self, number: u64) {
        let Some(name) = self.adopted.remove(&number) else {
            return;
        };
        if let Some(process) = self.containers.get(&name).and_then(|one| one.held.as_ref()) {
            // Remove it: it would stay readable.
            self.poller.remove(process);
        }
        let now = boottime_ns();
        let first = Unexplained {
            since_ns: now,
            look_ns: now,
        };
        if !self.explain(&name, first, now) {
            let look_ns = now.saturating_add(LOOK_NS);
            self.unexplained
                .insert(name, Unexplained { look_ns, ..first });
            self.set_timer();
        }
    }

    /// Checks again how the dead containers that are due ended.
    pub(super) fn explain_deaths(&mut self) {
        if self.unexplained.is_empty() {
            return;
        }
        let now = boottime_ns();
        let due = |(name, one): (&String, &Unexplained)| {
            (one.look_ns <= now).then(|| (name.clone(), *one))
        };
        let due: Vec<_> = self.unexplained.iter().filter_map(due).collect();
        for (name, one) in due {
            if self.explain(&name, one, now) {
                self.unexplained.remove(&name);
            } else if let Some(one) = self.unexplained.get_mut(&name) {
                let pause = now.saturating_sub(one.since_ns).max(LOOK_NS);
                one.look_ns = now.saturating_add(pause);
            }
        }
    }

    /// Asks the kernel how a dead container ended. `false` when it may know later.
    fn explain(&mut self, name: &str, death: Unexplained, now_ns: u64) -> bool {
        let Some(container) = self.containers.get_mut(name) else {
            return true;
        };
        let state = match how_ended(container) {
            Some(ended) => ended.into(),
            // Its new parent may be reaping it now.
            None if now_ns.saturating_sub(death.since_ns) < PATIENCE_NS => return false,
            None => ContainerState::Lost,
        };
        container.state = state;
        container.held = None;
        self.tell_end(name);
        true
    }

    pub(super) fn next_look_ns(&self) -> Option<u64> {
        self.unexplained.values().map(|one| one.look_ns).min()
    }
}

/// Whether a container runs where an interrupted start may have left something. The interrupted start
/// may be recorded too, but no client was told that it runs.
fn has_place_of(container: &Container, left: &Left) -> bool {
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

/// Pidfds for a handover, by name.
pub(super) fn held(control: &Control) -> impl Iterator<Item = (&String, &PidFd)> {
    let all = control.containers.iter();
    all.filter_map(|(name, one)| one.held.as_ref().map(|process| (name, process)))
}
