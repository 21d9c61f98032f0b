//! The shim's one thread of control.
//!
//! It waits in one epoll for: clients, the launcher, deaths of children, the fence's timer. It
//! writes to sockets that do not block, to cgroupfs, and to nothing else; whatever may wait on a
//! disk or on rtnl is the launcher's.

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

use crate::condemned::Condemned;
use crate::connection::Connection;
use crate::containers::Containers;
use crate::fence::DeadMan;
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
    condemned_early: Condemned,
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
    /// Containers that were killed, by when their limit of processor time is lifted unless they are
    /// dead.
    lifts: VecDeque<(u64, String)>,
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
    /// It was told to end, and waits until nothing runs, or until then.
    ending_until_ns: Option<u64>,
    /// What could not be done for the fence to work when memory is short.
    unprotected: Vec<String>,
}

impl Control {
    /// Serves until SIGTERM, and until nothing runs if the fence is armed. Containers live on.
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
        // A timer that has run off stays readable until it is set or read.
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
