//! The shim's main thread.
//!
//! It waits in one epoll for clients, the launcher, deaths of children and the fence's timer. It writes
//! only to non-blocking sockets and to cgroupfs; everything that may wait on a disk or on rtnl is the
//! launcher's work.

mod adopting;
mod children;
mod clients;
mod dying;
mod ending;
mod fence_orders;
mod fencing;
mod foreign;
mod keeping;
mod logs;
mod recovering;
mod renewing;
mod replacing;
mod requests;
mod setting_up;
mod terminals;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use conman_linux::{Freezer, SoleThread};
use nix::sys::signalfd::SignalFd;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{
    ClockId, Itimerspec, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_settime,
};

use crate::connection::Connection;
use crate::containers::Containers;
use crate::fence::DeadMan;
use crate::forbidden_starts::ForbiddenStarts;
use crate::ids::IdRanges;
use crate::launching::Launching;
use crate::ledger::Ledger;
use crate::options::ShimOptions;
use crate::protocol::{CallError, FenceState, LaunchError};
use crate::spec::SpecError;
use crate::sweeper::Sweeper;
use crate::terminal::{Terminal, Watcher};

/// Events taken from the kernel in one call.
const BATCH: usize = 64;

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const LAUNCHER: u64 = 2;
const TIMER: u64 = 3;
/// The program that is checked before it takes over.
const CANDIDATE: u64 = 4;
const SWEEPER: u64 = 5;
const FIRST_CLIENT: u64 = 16;
/// Pidfds of containers that are no children. The number of clients stays below this.
const FIRST_ADOPTED: u64 = 1 << 32;
const FIRST_TERMINAL: u64 = 2 << 32;
const FIRST_WATCHER: u64 = 3 << 32;

/// The shim's whole state.
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
    /// Containers that were ordered to freeze and are not proven frozen.
    unverified: BTreeSet<String>,
    condemned_early: ForbiddenStarts,
    /// Names of starts by other programs; all their processes are killed.
    doomed: BTreeSet<String>,
    /// The state that subscribers got last.
    told_fence: FenceState,
    ids: IdRanges,
    containers: Containers,
    launching: Launching,
    sweeper: Sweeper,
    clients: BTreeMap<u64, Connection>,
    /// Closed to refuse a client when no other descriptor is left.
    spare: Option<File>,
    next_client: u64,
    buffer: Vec<u8>,
    lock: File,
    ledger: Ledger,
    /// Names by the tokens of their pidfds.
    adopted: BTreeMap<u64, String>,
    next_adopted: u64,
    /// Dead containers whose exit status is not available yet, and since when.
    unexplained: BTreeMap<String, adopting::Unexplained>,
    /// Killed containers, and when their CPU limit is lifted unless they are dead.
    lifts: VecDeque<(u64, String)>,
    /// Terminals with their tokens, by the name of their container or command.
    terminals: BTreeMap<String, (u64, Terminal)>,
    terminal_names: BTreeMap<u64, String>,
    next_terminal: u64,
    watchers: BTreeMap<u64, Watcher>,
    next_watcher: u64,
    /// The program's path at its start; the file may have been replaced since.
    program: PathBuf,
    replacing: Option<replacing::Replacing>,
    replacements: u32,
    /// It was ordered to end, and waits until nothing runs, or until this time.
    ending_until_ns: Option<u64>,
    /// Protections of the fence against a shortage of memory that are missing.
    unprotected: Vec<String>,
}

impl Control {
    /// Serves until SIGTERM and, if the fence is armed, until nothing runs. Containers survive.
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
            if self.has_ended() {
                return Ok(());
            }
            self.replace_when_idle();
            self.update_interest(LAUNCHER);
        }
    }

    /// Carries out what is due, and sets the timer for what comes next.
    fn on_time(&mut self) {
        // A timer that has expired stays readable until it is set or read.
        let mut count = [0_u8; 8];
        let _ = rustix::io::read(&self.timer, &mut count);
        self.fence_on_time();
        self.kill_doomed();
        self.explain_deaths();
        self.lift_due_limits();
        self.give_up_replacing_in_time();
        self.set_timer();
    }

    fn set_timer(&self) {
        let now = boottime_ns();
        let next = [
            self.next_fence_ns(now),
            self.next_kill_ns(now),
            self.next_look_ns(),
            self.next_lift_ns(),
            self.replacing.as_ref().map(replacing::Replacing::until_ns),
            self.ending_until_ns,
        ];
        // Zero would disarm the timer.
        let at = next.into_iter().flatten().min().map_or(0, |at| at.max(1));
        let value = Itimerspec {
            it_interval: timespec(0),
            it_value: timespec(at),
        };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &value) {
            tracing::error!(%error, "cannot set the timer");
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

    /// Polls the launcher or a client for writability only while messages wait.
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
            tracing::error!(%error, "cannot change the epoll");
        }
    }
}

fn child_pid(pid: i32) -> io::Result<Pid> {
    let positive = Some(pid).filter(|pid| *pid > 0);
    positive
        .and_then(Pid::from_raw)
        .ok_or_else(|| Errno::SRCH.into())
}

/// Only for a child that has not been reaped: its PID is not reused.
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
