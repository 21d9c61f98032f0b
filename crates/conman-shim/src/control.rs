//! The shim's one thread of control.
//!
//! It waits in one epoll for: clients, the launcher, deaths of children, the fence's timer. It
//! writes to sockets that do not block, to cgroupfs, and to nothing else; whatever may wait on a
//! disk or on rtnl is the launcher's.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use conman_linux::{Capabilities, Ended, Freezer, Signal, SoleThread};
use nix::sys::signal::{SigSet, Signal as NixSignal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};

use crate::connection::Connection;
use crate::containers::{Container, Containers, Reaped};
use crate::fence::{Fence, FenceStep};
use crate::ids::IdRanges;
use crate::launcher::{Command, Order, Report, Start};
use crate::launching::{Launching, MAX_PENDING, Own, Pending};
use crate::options::ShimOptions;
use crate::protocol::{
    Call, CallError, ContainerState, LaunchError, Message, Reply, Request, VERSION, decode,
};
use crate::seqpacket;
use crate::spec::{ExecSpec, LaunchSpec, SpecError, check_name};

/// Clients at a time: the daemon, its successor during an upgrade, the command line.
const MAX_CLIENTS: usize = 32;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Events taken from the kernel in one call.
const BATCH: usize = 64;

/// Messages of one client that are answered before others have their turn.
const MESSAGES_A_TURN: usize = 64;

/// Containers, living or not acknowledged: as many as there are ranges of ids.
const MAX_CONTAINERS: usize = 16_384;

/// Never chosen by the OOM killer (proc_pid_oom_score_adj(5)).
const OOM_SCORE: &str = "-1000";

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const LAUNCHER: u64 = 2;
const TIMER: u64 = 3;
const FIRST_CLIENT: u64 = 16;

/// Everything the shim knows.
#[derive(Debug)]
pub(crate) struct Control {
    options: ShimOptions,
    sole: SoleThread,
    epoll: OwnedFd,
    listener: OwnedFd,
    signals: SignalFd,
    timer: OwnedFd,
    freezer: Freezer,
    fence: Fence,
    ids: IdRanges,
    containers: Containers,
    launching: Launching,
    clients: BTreeMap<u64, Connection>,
    next_client: u64,
    buffer: Vec<u8>,
}

impl Control {
    /// Binds the socket and starts the launcher. The calling process has one thread.
    pub(crate) fn new(options: ShimOptions) -> io::Result<Self> {
        let sole = SoleThread::prove()?;
        let mut mask = SigSet::empty();
        mask.add(NixSignal::SIGCHLD);
        mask.add(NixSignal::SIGTERM);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(
            TimerfdClockId::Boottime,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        let freezer = Freezer::detect()?;
        freezer.ensure(&options.fence_cgroup)?;
        let listener = listen(&options)?;
        let mut control = Self {
            fence: Fence::new(options.freeze_patience),
            options,
            sole,
            epoll,
            listener,
            signals,
            timer,
            freezer,
            ids: IdRanges::default(),
            containers: Containers::default(),
            launching: Launching::default(),
            clients: BTreeMap::new(),
            next_client: FIRST_CLIENT,
            buffer: seqpacket::buffer(),
        };
        control.watch(LISTENER)?;
        control.watch(SIGNALS)?;
        control.watch(TIMER)?;
        control.ensure_launcher()?;
        protect();
        Ok(control)
    }

    /// Serves until SIGTERM. Containers live on.
    pub(crate) fn run(&mut self) -> io::Result<()> {
        loop {
            let mut space = [MaybeUninit::<Event>::uninit(); BATCH];
            let tokens: Vec<(u64, EventFlags)> = match epoll::wait(&self.epoll, &mut space, None) {
                Ok((events, _)) => events.iter().map(|e| (e.data.u64(), e.flags)).collect(),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            for (token, flags) in tokens {
                match token {
                    LISTENER => self.accept(),
                    SIGNALS => {
                        if self.take_signals()? {
                            return Ok(());
                        }
                    }
                    LAUNCHER => self.take_reports(),
                    TIMER => self.fence_on_time(),
                    client => self.serve(client, flags),
                }
            }
            self.update_interest(LAUNCHER);
        }
    }

    fn watch(&self, token: u64) -> io::Result<()> {
        let fd = match token {
            LISTENER => self.listener.as_fd(),
            SIGNALS => self.signals.as_fd(),
            _ => self.timer.as_fd(),
        };
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(token),
            EventFlags::IN,
        )?)
    }

    /// Whether the launcher or a client is also waited for to become writable.
    fn update_interest(&self, token: u64) {
        let (fd, waiting) = match token {
            LAUNCHER => match self.launching.socket() {
                Some(socket) => (socket, self.launching.is_waiting()),
                None => return,
            },
            client => match self.clients.get(&client) {
                Some(connection) => (connection.as_fd(), connection.is_waiting()),
                None => return,
            },
        };
        let flags = if waiting {
            EventFlags::IN | EventFlags::OUT
        } else {
            EventFlags::IN
        };
        if let Err(error) = epoll::modify(&self.epoll, fd, EventData::new_u64(token), flags) {
            tracing::error!(%error, "epoll refuses a change");
        }
    }

    // ---- Clients.

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // A client that has gone meanwhile is no error of ours.
        let Ok(socket) = rustix::net::accept_with(&self.listener, flags) else {
            return;
        };
        let own = rustix::process::geteuid();
        let allowed = rustix::net::sockopt::socket_peercred(&socket)
            .is_ok_and(|peer| peer.uid == own || peer.uid.is_root());
        if !allowed || self.clients.len() >= MAX_CLIENTS {
            tracing::warn!(allowed, "a client is turned away");
            return;
        }
        let token = self.next_client;
        let data = EventData::new_u64(token);
        if let Err(error) = epoll::add(&self.epoll, &socket, data, EventFlags::IN) {
            tracing::error!(%error, "a client cannot be waited for");
            return;
        }
        self.next_client += 1;
        self.clients.insert(token, Connection::new(socket));
    }

    fn serve(&mut self, client: u64, flags: EventFlags) {
        if flags.contains(EventFlags::OUT)
            && let Some(connection) = self.clients.get_mut(&client)
            && connection.flush().is_err()
        {
            self.clients.remove(&client);
        }
        for _ in 0..MESSAGES_A_TURN {
            let Some(connection) = self.clients.get(&client) else {
                return;
            };
            let mut buffer = std::mem::take(&mut self.buffer);
            let call = match seqpacket::receive(connection, &mut buffer) {
                Ok(Some(received)) => decode::<Call>(received.bytes)
                    .map(|call| (call, received.fds))
                    .map_err(io::Error::other),
                Ok(None) => Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) => Err(error),
            };
            self.buffer = buffer;
            match call {
                Ok((call, fds)) => self.answer(client, call, fds),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    if error.kind() != io::ErrorKind::UnexpectedEof {
                        tracing::warn!(%error, "a client is dropped");
                    }
                    self.clients.remove(&client);
                    return;
                }
            }
        }
        self.launching.flush();
        self.update_interest(client);
    }

    /// Descriptors that the request does not want are closed.
    fn answer(&mut self, client: u64, call: Call, fds: Vec<OwnedFd>) {
        let greeted = self.clients.get(&client).is_some_and(|one| one.greeted);
        let outcome = match call.request {
            Request::Hello { version } => self.greet(client, version),
            _ if !greeted => Err(CallError::NoHello),
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
        if let Some(connection) = self.clients.get_mut(&client) {
            connection.greeted = true;
        }
        Ok(Reply::Hello {
            version: VERSION,
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            features: self.launching.features.clone(),
        })
    }

    fn carry_out(&mut self, request: Request) -> Result<Reply, CallError> {
        match request {
            Request::List { after } => {
                let (containers, more) = self.containers.page(after.as_deref());
                Ok(Reply::Containers { containers, more })
            }
            Request::Acknowledge { names } => self.acknowledge(&names),
            Request::Kill { name } => {
                let container = self.living(&name)?;
                self.kill(container).map_err(host_error("kill", &name))?;
                Ok(Reply::Done)
            }
            Request::KillAll => self.kill_all(),
            Request::Signal { name, signal } => self.signal(&name, signal),
            Request::Freeze { name } => self.freeze(&name),
            Request::Thaw { name } => self.thaw(&name),
            Request::ExtendDeadline { until_boottime_ns } => {
                self.fence.extend(until_boottime_ns);
                self.fence_on_time();
                Ok(self.fence_reply())
            }
            Request::Disarm => {
                self.fence.disarm();
                self.fence_on_time();
                Ok(self.fence_reply())
            }
            Request::Unfence => self.unfence(),
            Request::Fence => Ok(self.fence_reply()),
            // Answered elsewhere.
            Request::Hello { .. }
            | Request::Launch(_)
            | Request::Exec(_)
            | Request::Hold { .. }
            | Request::Subscribe => Err(CallError::NoHello),
        }
    }

    fn reply(&mut self, client: u64, id: u64, reply: Reply, fd: Option<OwnedFd>) {
        self.tell(client, &Message::Reply { id, reply }, fd);
    }

    fn tell(&mut self, client: u64, message: &Message, fd: Option<OwnedFd>) {
        let Some(connection) = self.clients.get_mut(&client) else {
            return;
        };
        if let Err(error) = connection.send(message, fd) {
            tracing::warn!(%error, "a client is dropped");
            self.clients.remove(&client);
            return;
        }
        self.update_interest(client);
    }

    fn tell_subscribers(&mut self, message: &Message) {
        let subscribed = |(token, one): (&u64, &Connection)| one.subscribed.then_some(*token);
        let tokens: Vec<u64> = self.clients.iter().filter_map(subscribed).collect();
        for token in tokens {
            self.tell(token, message, None);
        }
    }

    fn subscribe(&mut self, client: u64, id: u64) {
        if let Some(connection) = self.clients.get_mut(&client) {
            connection.subscribed = true;
        }
        self.reply(client, id, Reply::Done, None);
        let ended: Vec<Message> = self
            .containers
            .iter()
            .filter(|(_, container)| !container.is_alive())
            .map(|(name, container)| Message::Ended {
                container: container.view(name),
            })
            .collect();
        for message in ended {
            self.tell(client, &message, None);
        }
    }

    // ---- Containers.

    fn begin_launch(
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
        self.admit(&spec.name)?;
        let ids = self.ids.take().ok_or_else(|| full("ranges of ids"))?;
        let own = Own {
            ids,
            scratch: spec.root.scratch.clone(),
        };
        let name = spec.name.clone();
        let pending = Pending {
            client,
            call,
            name: name.clone(),
            cgroup: spec.cgroup.clone(),
            own: Some(own),
            exec_in: None,
            pidfd: None,
        };
        let order = |ticket| Order::Launch(Box::new(Start { ticket, ids, spec }));
        if let Err(error) = self.launching.order(pending, binds, order) {
            self.ids.give_back(ids);
            return Err(host_error("launch", &name)(error));
        }
        Ok(())
    }

    fn begin_exec(
        &mut self,
        client: u64,
        call: u64,
        spec: ExecSpec,
        streams: Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let checked = spec
            .check()
            .and_then(|()| spec.check_streams(streams.len()));
        checked.map_err(spec_error)?;
        self.admit(&spec.name)?;
        let container = self.container(&spec.container)?;
        if container.frozen {
            // It would hold the process that enters it, and the launcher with it.
            return Err(host_error("execute", &spec.name)(io::Error::other(
                "its container is frozen",
            )));
        }
        let cgroup = container.cgroup.clone();
        let (_, init) = self.hold(&spec.container)?;
        let name = spec.name.clone();
        let pending = Pending {
            client,
            call,
            name: name.clone(),
            cgroup: cgroup.clone(),
            own: None,
            exec_in: Some(spec.container.clone()),
            pidfd: None,
        };
        let fds = std::iter::once(init).chain(streams).collect();
        let order = |ticket| {
            Order::Exec(Box::new(Command {
                ticket,
                cgroup,
                spec,
            }))
        };
        let taken = self.launching.order(pending, fds, order);
        taken.map_err(host_error("execute", &name))
    }

    /// Whether a container or command of this name may begin.
    fn admit(&mut self, name: &str) -> Result<(), CallError> {
        if self.fence.is_closed() {
            return Err(CallError::Fenced);
        }
        if self.containers.get(name).is_some() || self.launching.is_starting(name) {
            return Err(CallError::Exists {
                name: name.to_owned(),
            });
        }
        if self.launching.pending.len() >= MAX_PENDING {
            return Err(full("starts under way"));
        }
        if self.containers.len() >= MAX_CONTAINERS {
            return Err(full("containers"));
        }
        self.ensure_launcher().map_err(host_error("launch", name))
    }

    /// A living container, not a command in one.
    fn container(&self, name: &str) -> Result<&Container, CallError> {
        match self.living(name) {
            Ok(container) if container.exec_in.is_some() => Err(CallError::NoSuchContainer {
                name: name.to_owned(),
            }),
            other => other,
        }
    }

    fn living(&self, name: &str) -> Result<&Container, CallError> {
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

    fn hold(&self, name: &str) -> Result<(i32, OwnedFd), CallError> {
        let pid = self.living(name)?.pid;
        // A child that has not been reaped keeps its PID.
        let fd = open_child(pid).map_err(host_error("hold", name))?;
        Ok((pid, fd))
    }

    fn kill(&self, container: &Container) -> io::Result<()> {
        if container.frozen && container.exec_in.is_none() && !self.freezer.dies_frozen() {
            return self.freezer.kill(&container.cgroup);
        }
        signal_child(container.pid, Signal::KILL)
    }

    fn kill_all(&mut self) -> Result<Reply, CallError> {
        let mut failed = None;
        for (name, container) in self.containers.iter() {
            if container.is_alive()
                && let Err(error) = self.kill(container)
            {
                failed = Some(host_error("kill", name)(error));
            }
        }
        failed.map_or(Ok(Reply::Done), Err)
    }

    fn signal(&mut self, name: &str, signal: i32) -> Result<Reply, CallError> {
        let pid = self.living(name)?.pid;
        let known = Signal::from_named_raw(signal);
        let signal = known.ok_or_else(|| host_error("signal", name)(Errno::INVAL.into()))?;
        signal_child(pid, signal).map_err(host_error("signal", name))?;
        Ok(Reply::Done)
    }

    fn freeze(&mut self, name: &str) -> Result<Reply, CallError> {
        let cgroup = self.container(name)?.cgroup.clone();
        let error = |error| host_error("freeze", name)(error);
        self.freezer.freeze(&cgroup).map_err(error)?;
        if let Some(container) = self.containers.get_mut(name) {
            container.frozen = true;
        }
        let verified = self.freezer.is_frozen(&cgroup).map_err(error)?;
        Ok(Reply::Frozen { verified })
    }

    fn thaw(&mut self, name: &str) -> Result<Reply, CallError> {
        let cgroup = self.container(name)?.cgroup.clone();
        self.freezer
            .thaw(&cgroup)
            .map_err(host_error("thaw", name))?;
        if let Some(container) = self.containers.get_mut(name) {
            container.frozen = false;
        }
        Ok(Reply::Done)
    }

    fn acknowledge(&mut self, names: &[String]) -> Result<Reply, CallError> {
        for name in names {
            if self.containers.get(name).is_some_and(Container::is_alive) {
                return Err(CallError::StillAlive { name: name.clone() });
            }
        }
        for name in names {
            if check_name(name).is_ok()
                && let Some(container) = self.containers.forget(name)
            {
                self.give_back(container.ids);
            }
        }
        Ok(Reply::Done)
    }

    fn give_back(&mut self, ids: Option<u32>) {
        if let Some(ids) = ids {
            self.ids.give_back(ids);
        }
    }

    // ---- Deaths.

    /// `true` when the shim is to end.
    fn take_signals(&mut self) -> io::Result<bool> {
        let mut end = false;
        while let Some(signal) = self.signals.read_signal()? {
            end |= signal.ssi_signo == NixSignal::SIGTERM as u32;
        }
        while let Some((pid, status)) = reap()? {
            if self.launching.pid() == Some(pid) {
                tracing::error!(pid, ?status, "the launcher has died");
                self.launcher_died();
            } else {
                self.child_died(pid, status);
            }
        }
        Ok(end)
    }

    fn child_died(&mut self, pid: i32, ended: Ended) {
        let mut whose = self.containers.reaped(pid, ended);
        if whose == Reaped::Unknown {
            // The launcher tells of a child before it lets it go on, so the word is there already.
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

    fn tell_end(&mut self, name: &str) {
        if let Some(container) = self.containers.get(name) {
            let container = container.view(name);
            self.tell_subscribers(&Message::Ended { container });
        }
    }

    // ---- The launcher.

    fn ensure_launcher(&mut self) -> io::Result<()> {
        if self.launching.ensure(&self.sole, &self.options)?
            && let Some(socket) = self.launching.socket()
        {
            let data = EventData::new_u64(LAUNCHER);
            epoll::add(&self.epoll, socket, data, EventFlags::IN)?;
        }
        Ok(())
    }

    fn take_reports(&mut self) {
        self.launching.flush();
        let mut buffer = std::mem::take(&mut self.buffer);
        while let Some(report) = self.launching.report(&mut buffer) {
            self.take_report(report);
        }
        self.buffer = buffer;
        if self.launching.pending.is_empty() {
            self.containers.forget_unclaimed();
        }
    }

    fn take_report(&mut self, report: Report) {
        match report {
            Report::Ready { features } => self.launching.features = Some(features),
            Report::Broken { error } => tracing::error!(%error, "the launcher cannot work"),
            Report::Helper { pid } => self.containers.helper(pid),
            Report::Swept { ticket } => self.launching.swept(ticket),
            Report::Cloned { ticket, pid } => self.cloned(ticket, pid),
            Report::Running { ticket, phases } => {
                let Some(start) = self.launching.pending.remove(&ticket) else {
                    return;
                };
                if let Some(container) = self.containers.get_mut(&start.name) {
                    if container.state == ContainerState::Launching {
                        container.state = ContainerState::Running;
                    }
                    let pid = container.pid;
                    let reply = Reply::Launched { pid, phases };
                    self.reply(start.client, start.call, reply, start.pidfd);
                }
            }
            Report::Failed { ticket, error } => {
                if let Some(start) = self.launching.pending.remove(&ticket) {
                    self.fail(start, error);
                }
            }
        }
    }

    fn cloned(&mut self, ticket: u64, pid: i32) {
        let Some(start) = self.launching.pending.get_mut(&ticket) else {
            return;
        };
        // It is not reaped yet, except when it has died at once; then there is nothing to hold.
        start.pidfd = open_child(pid).ok();
        let name = start.name.clone();
        let container = Container {
            cgroup: start.cgroup.clone(),
            pid,
            ids: start.own.as_ref().map(|own| own.ids),
            exec_in: start.exec_in.clone(),
            state: ContainerState::Launching,
            frozen: false,
        };
        if let Some(ended) = self.containers.begin(name, container) {
            let _ = self.containers.reaped(pid, ended);
        }
    }

    /// Nobody hears of this container again.
    fn fail(&mut self, start: Pending, error: LaunchError) {
        if start.own.is_none()
            && let Some(command) = self.containers.get(&start.name)
            && command.is_alive()
            && let Err(error) = self.kill(command)
        {
            tracing::error!(name = start.name, %error, "a command that failed lives on");
        }
        self.containers.discard(&start.name);
        self.give_back(start.own.map(|own| own.ids));
        let error = CallError::Launch { error };
        self.reply(start.client, start.call, Reply::Failed { error }, None);
    }

    fn launcher_died(&mut self) {
        // What it still said counts.
        self.take_reports();
        let orphans = self.launching.died();
        for (ticket, start) in orphans {
            // Whatever of it has begun ends; it may have come as far as its program.
            let ended = match &start.own {
                Some(own) => {
                    self.launching.sweep_later(ticket, &start.cgroup, own);
                    self.freezer.kill(&start.cgroup)
                }
                None => Ok(()),
            };
            if let Err(error) = ended
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::error!(name = start.name, %error, "an interrupted start lives on");
            }
            self.fail(start, LaunchError::LauncherDied);
        }
        if let Err(error) = self.ensure_launcher() {
            tracing::error!(%error, "there is no new launcher; the next start tries again");
        }
        self.launching.flush();
    }

    // ---- The fence.

    fn fence_reply(&self) -> Reply {
        Reply::Fence {
            state: self.fence.state(),
        }
    }

    fn unfence(&mut self) -> Result<Reply, CallError> {
        if !self.fence.lift(boottime_ns()) {
            return Err(CallError::Fenced);
        }
        let cgroup = &self.options.fence_cgroup;
        self.freezer
            .thaw(cgroup)
            .map_err(host_error("thaw", cgroup))?;
        self.fence_on_time();
        Ok(self.fence_reply())
    }

    /// Carries out what is due and sets the timer for what comes next.
    fn fence_on_time(&mut self) {
        // A timer that has run off stays readable until it is set or read.
        let mut count = [0_u8; 8];
        let _ = rustix::io::read(&self.timer, &mut count);
        let before = self.fence.state();
        let step = self.fence.on_time(boottime_ns());
        let cgroup = self.options.fence_cgroup.clone();
        if step == FenceStep::Freeze
            && let Err(error) = self.freezer.freeze(&cgroup)
        {
            tracing::error!(%error, "the fence cannot freeze");
        }
        if step != FenceStep::Nothing {
            // Without its cgroup there is nothing that could run.
            let frozen = self.freezer.is_frozen(&cgroup);
            let none = matches!(&frozen, Err(error) if error.kind() == io::ErrorKind::NotFound);
            if none || matches!(frozen, Ok(true)) {
                self.fence.proven();
            } else if step == FenceStep::KillUnfrozen {
                self.kill_unfrozen(&cgroup);
            }
        }
        if self.fence.state() != before {
            let state = self.fence.state();
            tracing::warn!(?state, "the fence");
            self.tell_subscribers(&Message::Fence { state });
        }
        self.set_timer();
    }

    fn kill_unfrozen(&self, cgroup: &str) {
        let children = self.freezer.children(cgroup).unwrap_or_default();
        for child in children {
            if !self.freezer.is_frozen(&child).unwrap_or(false)
                && let Err(error) = self.freezer.kill(&child)
            {
                tracing::error!(child, %error, "what does not freeze cannot be killed");
            }
        }
    }

    fn set_timer(&self) {
        let at = self.fence.next_wake_ns(boottime_ns()).unwrap_or(0);
        let value = Itimerspec {
            it_interval: timespec(0),
            it_value: timespec(at),
        };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &value) {
            tracing::error!(%error, "the fence's timer cannot be set");
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.launching.stop();
        // A later shim at the same path may have replaced it; then it is gone already or renewed.
        let _ = std::fs::remove_file(&self.options.socket);
    }
}

/// The fence must work when memory is short. What is not permitted is done without.
fn protect() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::warn!(%error, "the OOM killer may choose the shim");
    }
    // Without the capability a limit holds, at which allocations would fail.
    let capable = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(Capabilities::IPC_LOCK));
    // Pages as they are used: a large program is not brought into memory whole.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if !capable || mlockall(flags).is_err() {
        tracing::warn!("the shim's memory may be swapped out");
    }
}

fn listen(options: &ShimOptions) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    match std::fs::remove_file(&options.socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = rustix::net::bind(&socket, &SocketAddrUnix::new(&options.socket)?);
    rustix::process::umask(mask);
    bound?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// One child that has ended, and how.
fn reap() -> io::Result<Option<(i32, Ended)>> {
    loop {
        return match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => {
                let ended = Ended::from_wait_status(status.as_raw());
                Ok(Some((pid.as_raw_nonzero().get(), ended)))
            }
            Ok(None) | Err(Errno::CHILD) => Ok(None),
            Err(Errno::INTR) => continue,
            Err(errno) => Err(errno.into()),
        };
    }
}

fn child_pid(pid: i32) -> io::Result<Pid> {
    let positive = Some(pid).filter(|pid| *pid > 0);
    positive
        .and_then(Pid::from_raw)
        .ok_or_else(|| Errno::SRCH.into())
}

/// Only for a child that has not been reaped: its PID is nobody else's.
fn open_child(pid: i32) -> io::Result<OwnedFd> {
    Ok(pidfd_open(child_pid(pid)?, PidfdFlags::empty())?)
}

/// Only for a child that has not been reaped: its PID is nobody else's.
fn signal_child(pid: i32, signal: Signal) -> io::Result<()> {
    Ok(rustix::process::kill_process(child_pid(pid)?, signal)?)
}

fn spec_error(error: SpecError) -> CallError {
    CallError::Launch {
        error: LaunchError::Spec { error },
    }
}

fn full(what: &str) -> CallError {
    CallError::Full {
        what: what.to_owned(),
    }
}

fn host_error(action: &str, name: &str) -> impl FnOnce(io::Error) -> CallError {
    let (action, name) = (action.to_owned(), name.to_owned());
    move |error| CallError::Host {
        action,
        name,
        reason: error.to_string(),
    }
}

fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

fn timespec(ns: u64) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
    }
}
