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
mod poller;
mod recovering;
mod renewing;
mod replacing;
mod requests;
mod setting_up;
mod terminals;
mod timer;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use conman_linux::{Freezer, SoleThread};
use nix::sys::signalfd::SignalFd;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, clock_gettime};

use crate::containers::Containers;
use crate::fence::DeadMan;
use crate::forbidden_starts::ForbiddenStarts;
use crate::ids::IdRanges;
use crate::launching::Launching;
use crate::ledger::Ledger;
use crate::options::ShimOptions;
use crate::protocol::{CallError, FenceState, LaunchError, Message, Reply};
use crate::spec::SpecError;
use crate::sweeper::Sweeper;
use clients::Clients;
use poller::{Poller, Token};
use terminals::Terminals;
use timer::Timer;

/// Messages of one client that are answered before the next client's turn.
const MESSAGES_A_TURN: usize = 64;

/// The shim's whole state.
#[derive(Debug)]
pub(crate) struct Control {
    options: ShimOptions,
    sole: SoleThread,
    poller: Poller,
    listener: OwnedFd,
    signals: SignalFd,
    timer: Timer,
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
    clients: Clients,
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
    terminals: Terminals,
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
            for (token, flags) in self.poller.wait()? {
                match token {
                    Token::Listener => self.clients.accept(&self.poller, &self.listener),
                    Token::Signals => {
                        if self.take_signals()? {
                            return Ok(());
                        }
                    }
                    Token::Timer => self.on_time(),
                    Token::Launcher => self.take_reports(),
                    Token::Sweeper => self.serve_sweeper(),
                    Token::Candidate => self.hear_candidate(),
                    Token::Client(client) => self.serve(client, flags),
                    Token::Adopted(number) => self.adopted_died(number),
                    Token::Terminal(number) => self.terminals.serve(&self.poller, number),
                    Token::Watcher(number) => {
                        self.terminals.serve_watcher(&self.poller, number, flags);
                    }
                }
            }
            if self.has_ended() {
                return Ok(());
            }
            self.replace_when_idle();
            self.update_launcher();
        }
    }

    /// Carries out what is due, and sets the timer for what comes next.
    fn on_time(&mut self) {
        self.timer.clear();
        self.fence_on_time();
        self.kill_doomed();
        self.explain_deaths();
        self.lift_due_limits();
        self.give_up_replacing_in_time();
        self.set_timer();
    }

    fn set_timer(&mut self) {
        let now = boottime_ns();
        let next = [
            self.next_fence_ns(now),
            self.next_kill_ns(now),
            self.next_look_ns(),
            self.next_lift_ns(),
            self.replacing.as_ref().map(replacing::Replacing::until_ns),
            self.ending_until_ns,
        ];
        self.timer.set(next.into_iter().flatten().min());
    }

    /// Polls the launcher for writability only while orders wait.
    fn update_launcher(&self) {
        if let Some(socket) = self.launching.socket() {
            let mut flags = EventFlags::IN;
            flags.set(EventFlags::OUT, self.launching.is_waiting());
            self.poller.change(Token::Launcher, socket, flags);
        }
    }

    /// A client has sent requests, or takes messages again.
    fn serve(&mut self, client: u64, flags: EventFlags) {
        if flags.contains(EventFlags::OUT) {
            self.clients.flush(&self.poller, client);
        }
        for _ in 0..MESSAGES_A_TURN {
            let Some((call, fds)) = self.clients.receive(client, &mut self.buffer) else {
                break;
            };
            self.answer(client, call, fds);
        }
        self.launching.flush();
    }

    fn reply(&mut self, client: u64, id: u64, reply: Reply, fd: Option<OwnedFd>) {
        self.clients.reply(&self.poller, client, id, reply, fd);
    }

    fn publish(&mut self, message: &Message) {
        self.clients.publish(&self.poller, message);
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
