//! Clients' requests, other than starts and those to the fence.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use conman_core::ownership::FenceEvent;
use conman_linux::SignalNumber;
use conman_shim_protocol::{
    COMMANDS_PAGE, Call, CallError, LaunchError, Message, Reply, Request, VERSION, check_name,
};

use super::{Control, boottime_ns, open_child};
use crate::containers::Container;
use crate::fence::slot;

/// How a request is answered.
enum Answer {
    Now(Reply),
    WithFd(Reply, OwnedFd),
    /// It is answered already, or when it is done.
    Elsewhere,
}

impl Control {
    /// Descriptors that the request does not use are closed.
    pub(super) fn answer(&mut self, client: u64, call: Call, fds: Vec<OwnedFd>) {
        let id = call.id;
        let (reply, fd) = match self.carry_out_request(client, call, fds) {
            Ok(Answer::Now(reply)) => (reply, None),
            Ok(Answer::WithFd(reply, fd)) => (reply, Some(fd)),
            Ok(Answer::Elsewhere) => return,
            Err(error) => (Reply::Failed { error }, None),
        };
        self.reply(client, id, reply, fd);
    }

    fn carry_out_request(
        &mut self,
        client: u64,
        call: Call,
        fds: Vec<OwnedFd>,
    ) -> Result<Answer, CallError> {
        let id = call.id;
        let reply = match call.request {
            Request::Hello { version } => self.greet(client, version)?,
            _ if !self.clients.is_greeted(client) => return Err(CallError::NoHello),
            Request::Launch(spec) => {
                self.begin_launch(client, id, *spec, fds)?;
                return Ok(Answer::Elsewhere);
            }
            Request::Exec(spec) => {
                self.begin_exec(client, id, *spec, fds)?;
                return Ok(Answer::Elsewhere);
            }
            Request::Replace { program } => {
                self.begin_replacing(Some((client, id)), program)?;
                return Ok(Answer::Elsewhere);
            }
            Request::Subscribe => {
                self.subscribe(client, id);
                return Ok(Answer::Elsewhere);
            }
            Request::Hold { name } => {
                let (pid, fd) = self.hold(&name)?;
                return Ok(Answer::WithFd(Reply::Held { pid }, fd));
            }
            Request::Commands { container, after } => self.commands(&container, after.as_deref()),
            Request::Attach {
                name,
                size,
                after,
                quiet,
            } => {
                let fd = self.streams.attach(&name, size, after, quiet)?;
                return Ok(Answer::WithFd(Reply::Attached, fd));
            }
            Request::List { after } => {
                let (containers, more) = self.containers.page(after.as_deref());
                Reply::Containers { containers, more }
            }
            Request::Find { name } => self.find(&name),
            Request::Acknowledge { names } => self.acknowledge(&names)?,
            Request::Kill { name } => self.kill_one(name)?,
            Request::Signal { name, signal } => self.signal(&name, signal)?,
            Request::Freeze { name } => self.freeze(&name)?,
            Request::Thaw { name } => self.thaw(&name)?,
            Request::Guard { name, cgroup } => self.guard(&name, &cgroup)?,
            Request::Appeared { name, pid } => self.appeared(&name, pid, fds)?,
            Request::NotStarted { name } => self.not_started(&name)?,
            Request::Fence => self.fence_reply(),
            Request::ExtendDeadline { until_boottime_ns } => {
                self.extend_deadline(until_boottime_ns)
            }
            Request::FreezePatience { freeze_ms } => self.set_freeze_patience(freeze_ms),
            Request::FreezeAll => self.freeze_all(),
            Request::Unfence {
                until_boottime_ns,
                names,
            } => self.unfence(until_boottime_ns, names.as_deref())?,
        };
        Ok(Answer::Now(reply))
    }

    fn greet(&mut self, client: u64, version: u32) -> Result<Reply, CallError> {
        if version != VERSION {
            return Err(CallError::Version {
                ours: VERSION,
                theirs: version,
            });
        }
        self.clients.greet(client);
        Ok(Reply::Hello {
            pid: nix::unistd::getpid().as_raw(),
            features: self.launching.features.clone(),
            freeze_ms: self.fence.freeze_ms(),
        })
    }

    fn subscribe(&mut self, client: u64, id: u64) {
        self.clients.subscribe(client);
        self.reply(client, id, Reply::Done, None);
        for (name, container) in self.containers.iter() {
            if !container.is_alive() && !container.ahead {
                let container = container.view(name);
                let message = Message::Ended { container };
                self.clients.send(&self.poller, client, &message, None);
            }
        }
    }

    /// A living container, not a command in one.
    pub(super) fn container(&self, name: &str) -> Result<&Container, CallError> {
        match self.living(name) {
            Ok(container) if container.exec_in.is_some() => Err(CallError::NoSuchContainer {
                name: name.to_owned(),
            }),
            other => other,
        }
    }

    pub(super) fn living(&self, name: &str) -> Result<&Container, CallError> {
        match self.containers.get(name) {
            Some(container) if container.is_alive() => Ok(container),
            Some(_) => Err(CallError::Ended {
                name: name.to_owned(),
            }),
            None => Err(CallError::NoSuchContainer {
                name: name.to_owned(),
            }),
        }
    }

    pub(super) fn find(&self, name: &str) -> Reply {
        let found = self.containers.get(name);
        Reply::Found {
            starting: found.is_none() && self.launching.is_starting(name),
            container: found.map(|one| one.view(name)),
            command: found.and_then(|one| one.command_view(name, self.streams.output_end(name))),
        }
    }

    fn commands(&self, container: &str, after: Option<&str>) -> Reply {
        let kept = self.containers.kept_in(container);
        let mut rest = kept
            .skip_while(|(name, _)| after.is_some_and(|after| name.as_str() <= after))
            .filter_map(|(name, one)| one.command_view(name, self.streams.output_end(name)));
        let commands = rest.by_ref().take(COMMANDS_PAGE).collect();
        let more = rest.next().is_some();
        Reply::Commands { commands, more }
    }

    pub(super) fn hold(&self, name: &str) -> Result<(i32, OwnedFd), CallError> {
        let pid = self.living(name)?.pid;
        let fd = match &self.living(name)?.held {
            Some(process) => process.as_fd().try_clone_to_owned(),
            // A child that has not been reaped keeps its PID.
            None => open_child(pid),
        };
        Ok((pid, fd.map_err(CallError::host("hold", name))?))
    }

    pub(super) fn kill(&self, container: &Container) -> io::Result<()> {
        self.cgroups.kill(container, self.fence.is_armed())
    }

    /// Kills it, and while the fence is armed repeats that until it is dead.
    pub(super) fn kill_one(&mut self, name: String) -> Result<Reply, CallError> {
        self.about_to_kill(&name);
        if let Some(mut start) = self.launching.withdraw(&name) {
            start.killed = true;
            let killed = io::Error::other("it was killed before it began");
            self.fail(start, LaunchError::step("begin", &killed));
            return Ok(Reply::Done);
        }
        if self.containers.get(&name).is_none()
            && (self.launching.kill_when_begun(&name) || self.report_when_swept(&name))
        {
            self.change(FenceEvent::Condemn(slot(&name)));
            return Ok(Reply::Done);
        }
        if self.containers.get(&name).is_none() {
            self.forbid_start(&name);
        }
        let container = self.living(&name)?;
        let killed = self.kill(container);
        self.containers.kill_sent(&name, boottime_ns());
        self.kill_ordered(&name);
        killed.map_err(CallError::host("kill", &name))?;
        let container = self.living(&name)?;
        if container.exec_in.is_none() {
            self.change(FenceEvent::Condemn(slot(&name)));
        }
        Ok(Reply::Done)
    }

    /// Kills the commands that end with a client's connection.
    pub(super) fn end_commands_of(&mut self, client: u64) {
        let running = self.containers.with_client(client);
        let all = running.chain(self.launching.with_client(client));
        let names: BTreeSet<String> = all.map(str::to_owned).collect();
        for name in names {
            tracing::info!(name, "killing what ends with its client, which has gone");
            self.end_with_client(name);
        }
    }

    /// Kills a command that ends with its client, or a container made ahead.
    pub(super) fn end_with_client(&mut self, name: String) {
        self.about_to_kill(&name);
        let killed = match self.containers.get(&name) {
            Some(one) => one.kill_group().map_err(CallError::host("kill", &name)),
            None => self.kill_one(name).map(drop),
        };
        if let Err(error) = killed {
            tracing::warn!(%error, "cannot kill what ends with its client");
        }
    }

    /// Its start may have been ordered already and may arrive later. Another node may own the session then,
    /// so it must never begin, even if a later shim gets the order. A name is used for only one start. With
    /// an unarmed fence there is no other owner.
    fn forbid_start(&mut self, name: &str) {
        if !self.fence.is_armed()
            || check_name(name).is_err()
            || self.forbidden_starts.contains(name)
        {
            return;
        }
        if let Some(oldest) = self.forbidden_starts.add(name.to_owned()) {
            self.change(FenceEvent::Forget(slot(&oldest)));
        }
        self.record_forbidden(name);
        self.change(FenceEvent::Condemn(slot(name)));
    }

    /// Records that it must be killed, by the fence or as its processes appear.
    fn kill_ordered(&mut self, name: &str) {
        if self.containers.kill_ordered(name, self.fence.is_armed()) {
            self.record(name);
        }
    }

    pub(super) fn signal(&mut self, name: &str, signal: i32) -> Result<Reply, CallError> {
        let container = self.living(name)?;
        let signal = SignalNumber::new(signal);
        let signal = signal
            .ok_or_else(|| CallError::host("signal", name)(io::ErrorKind::InvalidInput.into()))?;
        let sent = container.signal(signal);
        sent.map_err(CallError::host("signal", name))?;
        Ok(Reply::Done)
    }

    pub(super) fn freeze(&mut self, name: &str) -> Result<Reply, CallError> {
        let cgroup = self.container(name)?.cgroup.clone();
        let error = |error| CallError::host("freeze", name)(error);
        self.cgroups.freezer.freeze(&cgroup).map_err(error)?;
        if let Some(container) = self.containers.get_mut(name) {
            container.frozen = true;
        }
        self.record(name);
        let verified = self.cgroups.freezer.is_frozen(&cgroup).map_err(error)?;
        Ok(Reply::Frozen { verified })
    }

    pub(super) fn thaw(&mut self, name: &str) -> Result<Reply, CallError> {
        let cgroup = self.container(name)?.cgroup.clone();
        if self.fence.is_closed() {
            return Err(CallError::Fenced);
        }
        self.cgroups
            .freezer
            .thaw(&cgroup)
            .map_err(CallError::host("thaw", name))?;
        if let Some(container) = self.containers.get_mut(name) {
            container.frozen = false;
        }
        self.record(name);
        Ok(Reply::Done)
    }

    pub(super) fn acknowledge(&mut self, names: &[String]) -> Result<Reply, CallError> {
        let starting = self.launching.starting();
        for name in names {
            // If it ends before its start is answered, that answer reports it.
            if self.containers.get(name).is_some_and(Container::is_alive)
                || starting.contains(name.as_str())
            {
                return Err(CallError::StillAlive { name: name.clone() });
            }
        }
        for name in names {
            if check_name(name).is_ok()
                && let Some(container) = self.containers.forget(name)
            {
                self.give_back(container.ids);
                self.forget(name);
                self.change(FenceEvent::Forget(slot(name)));
                let kept = self.containers.kept_in(name);
                let kept: Vec<_> = kept.map(|(command, _)| command.clone()).collect();
                for command in kept {
                    self.forget_kept(&command);
                }
            }
        }
        Ok(Reply::Done)
    }
}
