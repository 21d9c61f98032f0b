//! Signals, deaths of children, the launcher and what it reports.

use std::io;
use std::rc::Rc;

use conman_linux::{ChildEvent, Ended, Signal, next_child_event, signal_process};
use conman_shim_protocol::{ContainerState, Reply};
use nix::sys::signal::Signal as NixSignal;
use rustix::event::epoll::EventFlags;

use super::Control;
use super::token::Token;
use crate::containers::Reaped;
use crate::launcher_messages::Report;

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
            None => signal_process(pid, Signal::SIGKILL),
        };
        if let Err(error) = killed {
            tracing::error!(pid, %error, "cannot kill a process that has made the shim its tracer");
        }
    }

    pub(super) fn child_died(&mut self, pid: i32, ended: Ended) {
        let mut reaped = self.containers.reaped(pid, ended);
        if reaped == Reaped::Unknown {
            // The launcher reports a child before it lets it run, so the report is there already.
            self.take_reports();
            reaped = self.containers.reaped(pid, ended);
        }
        match reaped {
            Reaped::Container(name) => self.report_end(&name),
            Reaped::Ignored => {}
            Reaped::Unknown => {
                if self.launching.is_under_way() {
                    self.containers.keep_unclaimed(pid, ended);
                }
            }
        }
    }

    pub(super) fn ensure_launcher(&mut self) -> io::Result<()> {
        if self.launching.ensure(&self.sole, &self.options)?
            && let Some(socket) = self.launching.socket()
        {
            self.poller.add(Token::Launcher, socket, EventFlags::IN)?;
            self.record_launcher();
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
        if !self.launching.is_under_way() {
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
            Report::Waits { ticket, phases } => self.waits(ticket, phases),
            Report::Running { ticket, phases } => {
                let Some(start) = self.launching.finish(ticket) else {
                    return;
                };
                if let Some(container) = self.containers.get_mut(&start.name) {
                    if container.state == ContainerState::Launching {
                        container.state = ContainerState::Running;
                    }
                    // From now on its end is reported. It may have come first.
                    let was_ahead = std::mem::take(&mut container.ahead);
                    let has_ended = was_ahead && !container.is_alive();
                    let pid = container.pid;
                    self.record(&start.name);
                    let reply = Reply::Launched { pid, phases };
                    let pidfd = start.pidfd.and_then(Rc::into_inner);
                    self.reply(start.client, start.call, reply, pidfd);
                    if has_ended {
                        self.report_end(&start.name);
                    }
                }
            }
            Report::Failed {
                ticket,
                error,
                left,
            } => {
                if let Some(start) = self.launching.finish(ticket) {
                    self.start_ended(start, error, left);
                }
            }
            Report::NotTaken {
                ticket,
                error,
                left,
            } => self.not_taken(ticket, error, left),
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
