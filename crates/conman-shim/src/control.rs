//! The shim's one thread of control.
//!
//! It waits in one epoll for: clients, the launcher, deaths of children, the fence's timer. It
//! writes to sockets that do not block, to cgroupfs, and to nothing else; whatever may wait on a
//! disk or on rtnl is the launcher's.

mod adopting;
mod children;
mod fencing;
mod foreign;
mod keeping;
mod logs;
mod recovering;
mod replacing;
mod requests;
mod terminals;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use conman_linux::{
    Capabilities, CgroupLayout, Ended, Freezer, Interface, SoleThread, boot_id, inherited_fd,
};
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
use crate::containers::Containers;
use crate::fence::DeadMan;
use crate::handover::Sealed;
use crate::ids::IdRanges;
use crate::launching::Launching;
use crate::ledger::Ledger;
use crate::options::ShimOptions;
use crate::protocol::{
    Call, CallError, FenceState, LaunchError, Message, Reply, Request, VERSION, decode,
};
use crate::seqpacket;
use crate::spec::SpecError;
use crate::sweeper::Sweeper;
use crate::terminal::{Terminal, Watcher};

/// Clients at a time: the daemon, its successor during an upgrade, the command line.
const MAX_CLIENTS: usize = 32;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Events taken from the kernel in one call.
const BATCH: usize = 64;

/// Messages of one client that are answered before others have their turn.
const MESSAGES_A_TURN: usize = 64;

/// The first is never chosen by the OOM killer (proc_pid_oom_score_adj(5)); then what comes next.
const OOM_SCORES: [i32; 4] = [-1000, -900, -500, -1];

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const LAUNCHER: u64 = 2;
const TIMER: u64 = 3;
/// The program that is asked whether it can take over.
const CANDIDATE: u64 = 4;
const SWEEPER: u64 = 5;
const FIRST_CLIENT: u64 = 16;
/// Holds on containers that are no children. Clients never become so many.
const FIRST_ADOPTED: u64 = 1 << 32;
const FIRST_TERMINAL: u64 = 2 << 32;
const FIRST_WATCHER: u64 = 3 << 32;

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
    fence: DeadMan,
    /// Whose freezing is ordered and not proven.
    unverified: BTreeSet<String>,
    /// Names of others' starts of which everything is to be killed that appears.
    doomed: BTreeSet<String>,
    /// What subscribers were told last.
    told_fence: FenceState,
    ids: IdRanges,
    containers: Containers,
    launching: Launching,
    sweeper: Sweeper,
    clients: BTreeMap<u64, Connection>,
    /// Given up to turn a client away when there is no other.
    spare: Option<File>,
    next_client: u64,
    buffer: Vec<u8>,
    lock: File,
    ledger: Ledger,
    /// Names by the tokens of their holds.
    adopted: BTreeMap<u64, String>,
    next_adopted: u64,
    /// Those that are dead, whose status is not to be had yet, and since when.
    unexplained: BTreeMap<String, adopting::Unexplained>,
    /// By the name of what they are the terminal of, with their tokens.
    terminals: BTreeMap<String, (u64, Terminal)>,
    terminal_names: BTreeMap<u64, String>,
    next_terminal: u64,
    watchers: BTreeMap<u64, Watcher>,
    next_watcher: u64,
    /// What its path was at its start; the file may be another one since.
    program: PathBuf,
    replacing: Option<replacing::Replacing>,
    replacements: u32,
    /// What could not be done for the fence to work when memory is short.
    unprotected: Vec<String>,
}

impl Control {
    /// Binds the socket, adopts what an earlier shim left, and starts the launcher. The calling
    /// process has one thread.
    pub(crate) fn new(options: ShimOptions) -> io::Result<Self> {
        let lock = Ledger::lock(&options.state_file)?;
        let (kept, doubt) = Ledger::read(&options.state_file, &boot_id()?)?;
        let listener = listen(&options)?;
        let mut control = Self::build(options, lock, listener)?;
        control.adopt(kept)?;
        if let Some(doubt) = doubt {
            control.recover(&doubt);
        }
        control.begin()?;
        Ok(control)
    }

    /// Goes on where the program that this one replaces left off, in the same process.
    pub(crate) fn take_over(options: ShimOptions, mut sealed: Sealed) -> io::Result<Self> {
        let handover = &mut sealed.handover;
        let lock = File::from(inherited_fd(handover.lock)?);
        let listener = inherited_fd(handover.listener)?;
        let mut control = Self::build(options, lock, listener)?;
        control.resume(handover)?;
        control.resume_terminals(handover, &sealed.blobs)?;
        control.begin()?;
        if let Some((client, call)) = handover.asked_by {
            let replacements = control.replacements;
            control.reply(client, call, Reply::Replaced { replacements }, None);
        }
        tracing::info!(
            replacements = control.replacements,
            "the shim goes on as a new program"
        );
        Ok(control)
    }

    fn build(options: ShimOptions, lock: File, listener: OwnedFd) -> io::Result<Self> {
        let sole = SoleThread::prove()?;
        let mut mask = SigSet::empty();
        mask.add(NixSignal::SIGCHLD);
        mask.add(NixSignal::SIGTERM);
        mask.add(NixSignal::SIGHUP);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(
            TimerfdClockId::Boottime,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        let freezer = Freezer::of(&CgroupLayout::detect()?.part(options.cgroups))?;
        let freezer = if options.do_without.contains(&Interface::CgroupKill) {
            freezer.killing_one_by_one()
        } else {
            freezer
        };
        freezer.ensure(&options.fence_cgroup)?;
        let ledger = Ledger::at(&options.state_file);
        Ok(Self {
            fence: DeadMan::new(options.freeze_patience),
            unverified: BTreeSet::new(),
            doomed: BTreeSet::new(),
            told_fence: FenceState::Unarmed,
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
            sweeper: Sweeper::default(),
            clients: BTreeMap::new(),
            spare: spare(),
            next_client: FIRST_CLIENT,
            buffer: seqpacket::buffer(),
            lock,
            ledger,
            adopted: BTreeMap::new(),
            next_adopted: FIRST_ADOPTED,
            unexplained: BTreeMap::new(),
            terminals: BTreeMap::new(),
            terminal_names: BTreeMap::new(),
            next_terminal: FIRST_TERMINAL,
            watchers: BTreeMap::new(),
            next_watcher: FIRST_WATCHER,
            program: std::env::current_exe()?,
            replacing: None,
            replacements: 0,
            unprotected: Vec::new(),
        })
    }

    /// Everything that is known is in place.
    fn begin(&mut self) -> io::Result<()> {
        // The fence first, which may be due.
        self.hold_if_closed();
        self.on_time();
        self.release_parent();
        self.rewrite_ledger()?;
        for token in [LISTENER, SIGNALS, TIMER] {
            self.watch(token)?;
        }
        self.ensure_launcher()?;
        self.ensure_sweeper()?;
        self.launching.flush();
        self.update_interest(LAUNCHER);
        self.unprotected = protect();
        // Children that ended in between have sent their signal to nobody.
        self.reap_all()
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
                    TIMER => self.on_time(),
                    SWEEPER => self.serve_sweeper(),
                    CANDIDATE => self.hear_candidate(),
                    watcher if watcher >= FIRST_WATCHER => self.serve_watcher(watcher, flags),
                    terminal if Self::is_terminal(terminal) => self.serve_terminal(terminal),
                    adopted if adopted >= FIRST_ADOPTED => self.adopted_died(adopted),
                    client => self.serve(client, flags),
                }
            }
            self.replace_when_idle();
            self.update_interest(LAUNCHER);
        }
    }

    /// Carries out what is due, and sets the timer for what comes next.
    fn on_time(&mut self) {
        // A timer that has run off stays readable until it is set or read.
        let mut count = [0_u8; 8];
        let _ = rustix::io::read(&self.timer, &mut count);
        self.fence_on_time();
        self.kill_doomed();
        self.explain_deaths();
        self.give_up_replacing_in_time();
        self.set_timer();
    }

    fn set_timer(&self) {
        let now = boottime_ns();
        let next = [
            self.next_fence_ns(now),
            self.next_kill_ns(now),
            self.next_look_ns(),
            self.replacing.as_ref().map(replacing::Replacing::until_ns),
        ];
        // Zero would be no time at all.
        let at = next.into_iter().flatten().min().map_or(0, |at| at.max(1));
        let value = Itimerspec {
            it_interval: timespec(0),
            it_value: timespec(at),
        };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &value) {
            tracing::error!(%error, "the timer cannot be set");
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

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE) => {
                // It would be told of again and again, and wait for ever.
                self.spare = None;
                drop(rustix::net::accept_with(&self.listener, flags));
                self.spare = spare();
                tracing::error!("a client is turned away: no descriptor is left (see nofile)");
                return;
            }
            // A client that has gone meanwhile is no error of ours.
            Err(_) => return,
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
            Request::Attach { name, size, quiet } => match self.attach(&name, size, quiet) {
                Ok(fd) => {
                    self.reply(client, call.id, Reply::Attached, Some(fd));
                    return;
                }
                Err(error) => Err(error),
            },
            Request::Appeared { name, pid } => self.appeared(&name, pid, fds),
            Request::Replace { program } => {
                match self.begin_replacing(Some((client, call.id)), program) {
                    // Answered by the program that goes on.
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
        if let Some(connection) = self.clients.get_mut(&client) {
            connection.greeted = true;
        }
        Ok(Reply::Hello {
            version: VERSION,
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            features: self.launching.features.clone(),
            replacements: self.replacements,
            unprotected: self.unprotected.clone(),
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
            Request::Disarm => self.disarm(),
            Request::FreezeAll => Ok(self.freeze_all()),
            Request::Unfence {
                until_boottime_ns,
                names,
            } => self.unfence(until_boottime_ns, names.as_deref()),
            Request::Resize { name, size } => self.resize(&name, size),
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
}

impl Drop for Control {
    fn drop(&mut self) {
        self.launching.stop();
        self.sweeper.stop();
        // A later shim at the same path may have replaced it; then it is gone already or renewed.
        let _ = std::fs::remove_file(&self.options.socket);
    }
}

/// The fence must work when memory is short. What is not permitted is done without, and told.
fn protect() -> Vec<String> {
    let mut missing = Vec::new();
    // As low as is permitted: without the capability no lower than it once was.
    let score = OOM_SCORES.into_iter().find(|score| {
        let text = score.to_string();
        std::fs::write("/proc/self/oom_score_adj", text).is_ok()
    });
    if score != OOM_SCORES.first().copied() {
        missing.push("the OOM killer may choose the shim (it lacks CAP_SYS_RESOURCE)".to_owned());
    }
    // Without the capability a limit holds, at which allocations would fail.
    let capable = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(Capabilities::IPC_LOCK));
    // Pages as they are used: a large program is not brought into memory whole.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if !capable || mlockall(flags).is_err() {
        missing.push("the shim's memory may be swapped out (it lacks CAP_IPC_LOCK)".to_owned());
    }
    for what in &missing {
        tracing::warn!("{what}");
    }
    missing
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

fn host_error(action: &str, name: &str) -> impl FnOnce(io::Error) -> CallError + use<> {
    let (action, name) = (action.to_owned(), name.to_owned());
    move |error| CallError::Host {
        action,
        name,
        reason: error.to_string(),
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
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
