//! Clients' requests, other than those to the fence.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use conman_core::ownership::FenceEvent;
use conman_linux::Signal;
use rustix::io::Errno;

use super::{Control, full, host_error, open_child, spec_error};
use crate::containers::{Container, MAX_CONTAINERS};
use crate::fence::slot;
use crate::ids::SHARED_IDS;
use crate::launcher::{Command, Order, Start};
use crate::launching::{Own, Pending};
use crate::protocol::{Call, CallError, LaunchError, Message, Reply, Request, VERSION};
use crate::spec::{ExecSpec, LOG_BYTES, LaunchSpec, check_name};
use crate::sweeper::BoundedLog;

impl Control {
    /// Descriptors that the request does not use are closed.
    pub(super) fn answer(&mut self, client: u64, call: Call, fds: Vec<OwnedFd>) {
        let outcome = match call.request {
            Request::Hello { version } => self.greet(client, version),
            _ if !self.clients.is_greeted(client) => Err(CallError::NoHello),
            Request::Launch(spec) => match self.begin_launch(client, call.id, *spec, fds) {
                // Answered when it has begun.
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::Exec(spec) => match self.begin_exec(client, call.id, *spec, fds) {
                // Answered when it has begun.
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::Hold { name } => match self.hold(&name) {
                Ok((pid, fd)) => {
                    self.reply(client, call.id, Reply::Held { pid }, Some(fd));
                    return;
                }
                Err(error) => Err(error),
            },
            Request::Attach { name, size, quiet } => {
                match self.terminals.attach(&self.poller, &name, size, quiet) {
                    Ok(fd) => {
                        self.reply(client, call.id, Reply::Attached, Some(fd));
                        return;
                    }
                    Err(error) => Err(error),
                }
            }
            Request::Appeared { name, pid } => self.appeared(&name, pid, fds),
            Request::Replace { program } => {
                match self.begin_replacing(Some((client, call.id)), program) {
                    // Answered by the new program.
                    Ok(()) => return,
                    Err(error) => Err(error),
                }
            }
            Request::Subscribe => {
                self.subscribe(client, call.id);
                return;
            }
            other => self.carry_out(other),
        };
        let reply = outcome.unwrap_or_else(|error| Reply::Failed { error });
        self.reply(client, call.id, reply, None);
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
            version: VERSION,
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            features: self.launching.features.clone(),
            replacements: self.replacements,
            unprotected: self.unprotected.clone(),
            freeze_ms: self.fence.freeze_ms(),
        })
    }

    fn carry_out(&mut self, request: Request) -> Result<Reply, CallError> {
        match request {
            Request::List { after } => {
                let (containers, more) = self.containers.page(after.as_deref());
                Ok(Reply::Containers { containers, more })
            }
            Request::Find { name } => Ok(self.find(&name)),
            Request::Acknowledge { names } => self.acknowledge(&names),
            Request::Kill { name } => self.kill_one(name),
            Request::KillAll => self.kill_all(),
            Request::Signal { name, signal } => self.signal(&name, signal),
            Request::Freeze { name } => self.freeze(&name),
            Request::Thaw { name } => self.thaw(&name),
            Request::ExtendDeadline { until_boottime_ns } => {
                Ok(self.extend_deadline(until_boottime_ns))
            }
            Request::FreezePatience { freeze_ms } => Ok(self.set_freeze_patience(freeze_ms)),
            Request::Disarm => self.disarm(),
            Request::FreezeAll => Ok(self.freeze_all()),
            Request::Unfence {
                until_boottime_ns,
                names,
            } => self.unfence(until_boottime_ns, names.as_deref()),
            Request::Resize { name, size } => {
                self.terminals.resize(&name, size)?;
                Ok(Reply::Done)
            }
            Request::Guard { name, cgroup } => self.guard(&name, &cgroup),
            Request::NotStarted { name } => self.not_started(&name),
            Request::Fence => Ok(self.fence_reply()),
            // Answered elsewhere.
            Request::Hello { .. }
            | Request::Launch(_)
            | Request::Exec(_)
            | Request::Hold { .. }
            | Request::Appeared { .. }
            | Request::Attach { .. }
            | Request::Replace { .. }
            | Request::Subscribe => Err(CallError::NoHello),
        }
    }

    fn subscribe(&mut self, client: u64, id: u64) {
        self.clients.subscribe(client);
        self.reply(client, id, Reply::Done, None);
        for (name, container) in self.containers.iter() {
            if !container.is_alive() {
                let container = container.view(name);
                let message = Message::Ended { container };
                self.clients.send(&self.poller, client, &message, None);
            }
        }
    }

    pub(super) fn begin_launch(
        &mut self,
        client: u64,
        call: u64,
        spec: LaunchSpec,
        binds: Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let checked = spec.check().and_then(|()| spec.check_binds(binds.len()));
        checked.map_err(spec_error)?;
        let below = spec.cgroup.strip_prefix(&self.options.fence_cgroup);
        if !below.is_some_and(|rest| rest.starts_with('/')) {
            return Err(host_error("launch", &spec.name)(io::Error::other(
                "its cgroup is not below the fence's",
            )));
        }
        self.admit(&spec.name, None)?;
        let name = spec.name.clone();
        if !self.change(FenceEvent::Open(slot(&name))) {
            return Err(CallError::Fenced);
        }
        let begun = self.begin_admitted(client, call, spec, binds);
        if let Err((_, name)) = &begun {
            let name = || name.clone();
            self.change(FenceEvent::StartOver(slot(&name())));
            self.change(FenceEvent::Forget(slot(&name())));
        }
        begun.map_err(|(error, _)| error)
    }

    /// The fence has opened its slot. An error comes with the name.
    fn begin_admitted(
        &mut self,
        client: u64,
        call: u64,
        spec: LaunchSpec,
        binds: Vec<OwnedFd>,
    ) -> Result<(), (CallError, String)> {
        let ids = if spec.root.shared_ids {
            Some(SHARED_IDS)
        } else {
            self.ids.take()
        };
        let ids = ids.ok_or_else(|| (full("ranges of ids"), spec.name.clone()))?;
        let mut fds = binds;
        if let Some(size) = spec.terminal {
            let owner = (ids + spec.program.uid, ids + spec.program.gid);
            match self
                .terminals
                .open(&self.poller, &spec.name, size, Some(owner))
            {
                Ok(slave) => fds.insert(0, slave),
                Err(error) => {
                    self.ids.give_back(ids);
                    return Err((error, spec.name));
                }
            }
        }
        let own = Own {
            ids,
            scratch: spec.root.scratch.clone(),
            log: spec.terminal.is_none().then(|| BoundedLog {
                path: spec.log.clone(),
                bytes: spec.log_bytes.unwrap_or(LOG_BYTES),
            }),
        };
        let name = spec.name.clone();
        let pending = Pending {
            client,
            call,
            name: name.clone(),
            cgroup: spec.cgroup.clone(),
            own: Some(own),
            exec_in: None,
            killed: false,
            pidfd: None,
        };
        let order = |ticket| Order::Launch(Box::new(Start { ticket, ids, spec }));
        // If the shim dies during the start, its successor must find the record.
        let taken = self
            .keep_start(&pending)
            .and_then(|()| self.launching.order(pending, fds, order));
        if let Err(error) = taken {
            self.ids.give_back(ids);
            self.forget(&name);
            return Err((host_error("launch", &name)(error), name));
        }
        Ok(())
    }

    pub(super) fn begin_exec(
        &mut self,
        client: u64,
        call: u64,
        mut spec: ExecSpec,
        mut streams: Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let checked = spec
            .check()
            .and_then(|()| spec.check_streams(streams.len()));
        checked.map_err(spec_error)?;
        self.admit(&spec.name, Some(&spec.container))?;
        let container = self.container(&spec.container)?;
        if container.frozen {
            // The process that enters it would freeze.
            return Err(host_error("execute", &spec.name)(io::Error::other(
                "its container is frozen",
            )));
        }
        let cgroup = container.cgroup.clone();
        let owner = container.ids;
        let owner = owner.map(|ids| (ids + spec.program.uid, ids + spec.program.gid));
        let (_, init) = self.hold(&spec.container)?;
        let name = spec.name.clone();
        if let Some(size) = spec.kept_terminal {
            let slave = self.terminals.open(&self.poller, &name, size, owner)?;
            spec.terminal = true;
            let copies = [slave.try_clone(), slave.try_clone()];
            streams.push(slave);
            for copy in copies {
                streams.push(copy.map_err(host_error("open a terminal for", &name))?);
            }
        }
        let pending = Pending {
            client,
            call,
            name: name.clone(),
            cgroup: cgroup.clone(),
            own: None,
            exec_in: Some(spec.container.clone()),
            killed: false,
            pidfd: None,
        };
        let fds = std::iter::once(init).chain(streams).collect();
        let order = |ticket| {
            Order::Exec(Box::new(Command {
                ticket,
                cgroup,
                owner,
                spec,
            }))
        };
        let taken = self.launching.order(pending, fds, order);
        if taken.is_err() {
            self.terminals.close(&name);
        }
        taken.map_err(host_error("execute", &name))
    }

    /// Checks that a container of this name may begin, or a command in a container.
    pub(super) fn admit(&mut self, name: &str, exec_in: Option<&str>) -> Result<(), CallError> {
        if self.fence.is_closed() {
            return Err(CallError::Fenced);
        }
        if self.containers.get(name).is_some() || self.launching.is_starting(name) {
            return Err(CallError::Exists {
                name: name.to_owned(),
            });
        }
        if let Some(what) = self.launching.lacks_room(exec_in) {
            return Err(full(what));
        }
        if self.containers.len() >= MAX_CONTAINERS {
            return Err(full("containers"));
        }
        self.ensure_launcher().map_err(host_error("launch", name))
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
        let container = self.containers.get(name).map(|one| one.view(name));
        Reply::Found {
            starting: container.is_none() && self.launching.is_starting(name),
            container,
        }
    }

    pub(super) fn hold(&self, name: &str) -> Result<(i32, OwnedFd), CallError> {
        let pid = self.living(name)?.pid;
        let fd = match &self.living(name)?.held {
            Some(process) => process.as_fd().try_clone_to_owned(),
            // A child that has not been reaped keeps its PID.
            None => open_child(pid),
        };
        Ok((pid, fd.map_err(host_error("hold", name))?))
    }

    pub(super) fn kill(&self, container: &Container) -> io::Result<()> {
        if container.may_appear() {
            // A process that appears in it later never runs.
            let frozen = self.freezer.freeze(&container.cgroup);
            let killed = frozen.and_then(|()| self.freezer.kill_frozen(&container.cgroup));
            return killed.and(self.kill_strays(container));
        }
        // A frozen process dies only once thawed, and must not run then.
        let by_cgroup = !self.freezer.dies_frozen()
            && container.exec_in.is_none()
            && (container.frozen
                || self.fence.is_armed()
                || self.freezer.is_frozen(&container.cgroup).unwrap_or(true));
        if by_cgroup || container.foreign {
            // A new process may not have joined its cgroup, and a foreign container's may never have.
            let signalled = container.signal(Signal::KILL);
            return self.freezer.kill(&container.cgroup).and(signalled);
        }
        container.signal(Signal::KILL)
    }

    /// Kills it, and while the fence is armed repeats that until it is dead.
    pub(super) fn kill_one(&mut self, name: String) -> Result<Reply, CallError> {
        if let Some(mut start) = self.launching.withdraw(&name) {
            start.killed = true;
            let killed = io::Error::other("it was killed before it began");
            self.fail(start, LaunchError::step("begin", &killed));
            return Ok(Reply::Done);
        }
        if self.containers.get(&name).is_none()
            && (self.launching.kill_when_begun(&name) || self.tell_when_swept(&name))
        {
            self.change(FenceEvent::Condemn(slot(&name)));
            self.set_timer();
            return Ok(Reply::Done);
        }
        if self.containers.get(&name).is_none() {
            self.condemn_early(&name);
        }
        let container = self.living(&name)?;
        let killed = self.kill(container);
        self.lift_limit_later(&name);
        self.doom(&name);
        killed.map_err(host_error("kill", &name))?;
        let container = self.living(&name)?;
        if container.exec_in.is_none() {
            self.change(FenceEvent::Condemn(slot(&name)));
            self.set_timer();
        }
        Ok(Reply::Done)
    }

    /// Its start may have been ordered already and may arrive later. Another node may own the session then,
    /// so it must never begin, even if a later shim gets the order. A name is used for only one start. With
    /// an unarmed fence there is no other owner.
    fn condemn_early(&mut self, name: &str) {
        if !self.fence.is_armed()
            || check_name(name).is_err()
            || self.condemned_early.contains(name)
        {
            return;
        }
        if let Some(oldest) = self.condemned_early.add(name.to_owned()) {
            self.change(FenceEvent::Forget(slot(&oldest)));
        }
        self.keep_condemned(name);
        self.change(FenceEvent::Condemn(slot(name)));
    }

    pub(super) fn kill_all(&mut self) -> Result<Reply, CallError> {
        let mut failed = None;
        let (mut appearing, mut killed) = (Vec::new(), Vec::new());
        for (name, container) in self.containers.iter() {
            if container.is_alive() {
                if let Err(error) = self.kill(container) {
                    failed = Some(host_error("kill", name)(error));
                }
                killed.push(name.clone());
            }
            if container.may_appear() {
                appearing.push(name.clone());
            }
        }
        for name in killed {
            self.lift_limit_later(&name);
        }
        for name in appearing {
            self.doom(&name);
        }
        failed.map_or(Ok(Reply::Done), Err)
    }

    pub(super) fn signal(&mut self, name: &str, signal: i32) -> Result<Reply, CallError> {
        let container = self.living(name)?;
        let known = Signal::from_named_raw(signal);
        let signal = known.ok_or_else(|| host_error("signal", name)(Errno::INVAL.into()))?;
        let sent = container.signal(signal);
        sent.map_err(host_error("signal", name))?;
        Ok(Reply::Done)
    }

    pub(super) fn freeze(&mut self, name: &str) -> Result<Reply, CallError> {
        let cgroup = self.container(name)?.cgroup.clone();
        let error = |error| host_error("freeze", name)(error);
        self.freezer.freeze(&cgroup).map_err(error)?;
        if let Some(container) = self.containers.get_mut(name) {
            container.frozen = true;
        }
        self.keep(name);
        let verified = self.freezer.is_frozen(&cgroup).map_err(error)?;
        Ok(Reply::Frozen { verified })
    }

    pub(super) fn thaw(&mut self, name: &str) -> Result<Reply, CallError> {
        let cgroup = self.container(name)?.cgroup.clone();
        if self.fence.is_closed() {
            return Err(CallError::Fenced);
        }
        self.freezer
            .thaw(&cgroup)
            .map_err(host_error("thaw", name))?;
        if let Some(container) = self.containers.get_mut(name) {
            container.frozen = false;
        }
        self.keep(name);
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
            }
        }
        Ok(Reply::Done)
    }

    pub(super) fn give_back(&mut self, ids: Option<u32>) {
        if let Some(ids) = ids {
            self.ids.give_back(ids);
        }
    }
}
