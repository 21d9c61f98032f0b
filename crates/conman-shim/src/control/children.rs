//! The shim's children: their deaths, the launcher and what it reports.

use std::io;

use conman_core::ownership::FenceEvent;
use conman_linux::{ChildEvent, Ended, ProcessIdentity, Signal, next_child_event};
use nix::sys::signal::Signal as NixSignal;
use rustix::event::epoll::EventFlags;

use super::poller::Token;
use super::{Control, open_child};
use crate::containers::{Container, Reaped, signal_child};
use crate::fence::slot;
use crate::launcher::Report;
use crate::launching::{Left, Pending};
use crate::protocol::{CallError, ContainerState, ContainerView, LaunchError, Message, Reply};

impl Control {
    /// Returns `true` when the shim must end at once.
    pub(super) fn take_signals(&mut self) -> io::Result<bool> {
        let (mut end, mut replace) = (false, false);
        while let Some(signal) = self.signals.read_signal()? {
            end |= signal.ssi_signo == NixSignal::SIGTERM as u32;
            replace |= signal.ssi_signo == NixSignal::SIGHUP as u32;
        }
        self.reap_all()?;
        if replace
            && !end
            && let Err(error) = self.begin_replacing(None, None)
        {
            tracing::error!(%error, "cannot replace the shim's program");
        }
        Ok(end && self.begin_ending())
    }

    pub(super) fn reap_all(&mut self) -> io::Result<()> {
        while let Some(event) = next_child_event()? {
            let (pid, ended) = match event {
                ChildEvent::Ended { pid, ended } => (pid, ended),
                ChildEvent::Traced { pid } => {
                    self.kill_traced(pid);
                    continue;
                }
            };
            if self.launching.pid() == Some(pid) {
                tracing::error!(pid, ?ended, "the launcher has died");
                self.launcher_died();
            } else if self.sweeper.pid() == Some(pid) {
                tracing::error!(pid, ?ended, "the sweeper of logs has died");
                self.sweeper_died();
            } else {
                self.child_died(pid, ended);
            }
        }
        Ok(())
    }

    /// Kills a container or command that has made the shim its tracer. The kernel refuses that where the
    /// shim lacks CAP_SYS_PTRACE in the container's user namespace. No legitimate program does it, and
    /// nothing else would let the process run again.
    fn kill_traced(&self, pid: i32) {
        tracing::warn!(pid, "a process has made the shim its tracer; killing it");
        let killed = match self.containers.by_pid(pid) {
            Some(container) => self.kill(container),
            // A thread, or a process that is not known yet. Its parent has not reaped it, so the PID is
            // not reused.
            None => signal_child(pid, Signal::KILL),
        };
        if let Err(error) = killed {
            tracing::error!(pid, %error, "cannot kill a process that has made the shim its tracer");
        }
    }

    pub(super) fn child_died(&mut self, pid: i32, ended: Ended) {
        let mut whose = self.containers.reaped(pid, ended);
        if whose == Reaped::Unknown {
            // The launcher reports a child before it lets it run, so the report is there already.
            self.take_reports();
            whose = self.containers.reaped(pid, ended);
        }
        match whose {
            Reaped::Container(name) => self.tell_end(&name),
            Reaped::Doomed => {}
            Reaped::Unknown => {
                if !self.launching.pending.is_empty() {
                    self.containers.keep_unclaimed(pid, ended);
                }
            }
        }
    }

    pub(super) fn tell_end(&mut self, name: &str) {
        self.bound_log(name);
        self.keep(name);
        self.change(FenceEvent::Died(slot(name)));
        if let Some(container) = self.containers.get(name) {
            let container = container.view(name);
            self.publish(&Message::Ended { container });
        }
    }

    pub(super) fn ensure_launcher(&mut self) -> io::Result<()> {
        if self.launching.ensure(&self.sole, &self.options)?
            && let Some(socket) = self.launching.socket()
        {
            self.poller.add(Token::Launcher, socket, EventFlags::IN)?;
            self.keep_launcher();
        }
        Ok(())
    }

    pub(super) fn take_reports(&mut self) {
        self.launching.flush();
        let mut buffer = std::mem::take(&mut self.buffer);
        while let Some(report) = self.launching.report(&mut buffer) {
            self.take_report(report);
        }
        self.buffer = buffer;
        // A failed start may have left something to be removed.
        self.launching.flush();
        if self.launching.pending.is_empty() {
            self.containers.forget_unclaimed();
        }
    }

    pub(super) fn take_report(&mut self, report: Report) {
        match report {
            Report::Ready { features } => self.launching.features = Some(features),
            Report::Broken { error } => tracing::error!(%error, "the launcher cannot work"),
            Report::Helper { pid } => self.containers.helper(pid),
            Report::Swept { ticket } => self.swept(ticket),
            Report::Cloned { ticket, pid } => self.cloned(ticket, pid),
            Report::Running { ticket, phases } => {
                let Some(start) = self.launching.finish(ticket) else {
                    return;
                };
                if let Some(container) = self.containers.get_mut(&start.name) {
                    if container.state == ContainerState::Launching {
                        container.state = ContainerState::Running;
                    }
                    let pid = container.pid;
                    self.keep(&start.name);
                    let reply = Reply::Launched { pid, phases };
                    self.reply(start.client, start.call, reply, start.pidfd);
                }
            }
            Report::Failed {
                ticket,
                error,
                left,
            } => {
                if let Some(start) = self.launching.finish(ticket) {
                    if left {
                        self.interrupted(start, error);
                    } else {
                        self.fail(start, error);
                    }
                }
            }
        }
    }

    pub(super) fn cloned(&mut self, ticket: u64, pid: i32) {
        let Some(start) = self.launching.pending.get_mut(&ticket) else {
            return;
        };
        // It is not reaped yet, unless it died at once; then there is nothing to open.
        start.pidfd = open_child(pid).ok();
        let name = start.name.clone();
        let is_command = start.own.is_none();
        let killed = start.killed;
        // Not needed for one that has been reaped already.
        let start_ticks = ProcessIdentity::of(pid).map_or(0, |found| found.start_time_ticks);
        let container = start.container().begun(pid, start_ticks);
        if let Some(ended) = self.containers.begin(name.clone(), container) {
            let _ = self.containers.reaped(pid, ended);
        }
        if !is_command {
            self.change(FenceEvent::Appeared(slot(&name)));
            self.bound_log(&name);
        }
        if killed
            && let Some(container) = self.containers.get(&name)
            && container.is_alive()
            && let Err(error) = self.kill(container)
        {
            tracing::error!(name, %error, "cannot kill a condemned start");
        }
        if is_command {
            // A container whose start is interrupted is found by its cgroup, a command by this record.
            self.keep(&name);
        }
    }

    /// Answers a failed start, and forgets the container.
    pub(super) fn fail(&mut self, start: Pending, error: LaunchError) {
        if start.own.is_none()
            && let Some(command) = self.containers.get(&start.name)
            && command.is_alive()
            && let Err(error) = self.kill(command)
        {
            tracing::error!(name = start.name, %error, "cannot kill a failed command");
        }
        let to_be_told = self.awaits_end(&start);
        self.containers.discard(&start.name);
        self.forget(&start.name);
        if let Some(own) = start.own {
            self.give_back(Some(own.ids));
            self.start_failed(start.name, start.cgroup, to_be_told);
        }
        let error = CallError::Launch { error };
        self.reply(start.client, start.call, Reply::Failed { error }, None);
    }

    /// Whether a client ordered its death and waits for a notification.
    fn awaits_end(&self, start: &Pending) -> bool {
        let container = self.containers.get(&start.name);
        start.killed && container.is_none_or(Container::is_alive)
    }

    /// Nothing of a start exists or can appear any more. The client that ordered it gets the failure; a
    /// client that ordered its death gets a notification.
    pub(super) fn start_failed(&mut self, name: String, cgroup: String, to_be_told: bool) {
        for event in [
            FenceEvent::StartOver(slot(&name)),
            FenceEvent::Died(slot(&name)),
            FenceEvent::Forget(slot(&name)),
        ] {
            self.change(event);
        }
        if to_be_told {
            let container = ContainerView {
                name,
                cgroup,
                pid: 0,
                state: ContainerState::Lost,
                exec_in: None,
                foreign: false,
                fenced: false,
            };
            self.publish(&Message::Ended { container });
        }
    }

    /// Ends everything of a start that has begun; it may have reached its program.
    fn interrupted(&mut self, mut start: Pending, error: LaunchError) {
        let Some(own) = start.own.take() else {
            self.fail(start, error);
            return;
        };
        let killed = match self.containers.get(&start.name) {
            // It may not have joined its cgroup yet.
            Some(container) if container.is_alive() => self.kill(container),
            _ => self.freezer.kill(&start.cgroup),
        };
        if let Err(error) = killed
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::error!(name = start.name, %error, "cannot kill an interrupted start");
        }
        // First, so that a record of it exists at all times.
        self.sweep_later(Left {
            cgroup: start.cgroup.clone(),
            scratch: own.scratch,
            name: Some(start.name.clone()),
            ids: Some(own.ids),
            killed: self.awaits_end(&start),
        });
        self.containers.discard(&start.name);
        self.forget(&start.name);
        let error = CallError::Launch { error };
        self.reply(start.client, start.call, Reply::Failed { error }, None);
    }

    /// Fails the starts under way: no launcher can answer them.
    pub(super) fn interrupt_starts(&mut self) {
        for start in self.launching.died().into_values() {
            self.interrupted(start, LaunchError::LauncherDied);
        }
    }

    pub(super) fn launcher_died(&mut self) {
        // Its reports so far count.
        self.take_reports();
        self.interrupt_starts();
        if let Err(error) = self.ensure_launcher() {
            tracing::error!(%error, "cannot start a launcher; the next start tries again");
        }
        self.launching.flush();
    }
}
