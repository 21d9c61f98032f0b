//! The shim's main thread.
//!
//! It waits in one epoll for clients, the launcher, deaths of children and the timer. It writes only to
//! non-blocking sockets, to the state file in memory and to cgroupfs; everything that may wait on a disk
//! or on rtnl is the launcher's work.
//!
//! ```text
//!                 events                                   effects
//! epoll, timer ───────────▶ a part: clients, containers, ───────────▶ other parts, cgroups,
//!                           fence, streams, replacement               state file
//! ```
//! Each part has its state in one module and reaches into no other; it returns what its change
//! means for the others as [`crate::effect::Effect`]. [`Control`] owns the parts, passes events to them
//! and carries out their effects. What needs several parts, such as a start, is a method of [`Control`].

mod adopting;
mod ahead;
mod cgroup_orders;
mod children;
mod clients;
mod effects;
mod ending;
mod external;
mod fence_orders;
mod fencing;
mod logs;
mod recording;
mod recovering;
mod replacement;
mod replacing;
mod requests;
mod setting_up;
mod starts;
mod timer;
mod token;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use conman_linux::{PidFd, SoleThread};
use conman_shim_protocol::{Message, Reply};
use nix::sys::signalfd::SignalFd;
use rustix::event::epoll::EventFlags;
use rustix::time::{ClockId, clock_gettime};

use crate::containers::Containers;
use crate::fence::DeadManFence;
use crate::forbidden_starts::ForbiddenStarts;
use crate::id_ranges::IdRanges;
use crate::launching::Launching;
use crate::ledger::Ledger;
use crate::log_bounds::Sweeper;
use crate::options::ShimOptions;
use crate::poller::Poller;
use crate::shim_parts::ContainerStreams;
use cgroup_orders::CgroupOrders;
use clients::Clients;
use replacement::Replacement;
use timer::Timer;
use token::Token;

/// Messages of one client that are answered before the next client's turn.
const MESSAGES_A_TURN: usize = 64;

/// The parts, and what they share.
#[derive(Debug)]
pub(crate) struct Control {
    options: ShimOptions,
    sole: SoleThread,
    poller: Poller<Token>,
    timer: Timer,
    listener: OwnedFd,
    signals: SignalFd,
    lock: File,
    buffer: Vec<u8>,
    cgroups: CgroupOrders,
    ledger: Ledger,
    fence: DeadManFence,
    containers: Containers,
    forbidden_starts: ForbiddenStarts,
    ids: IdRanges,
    /// Keeps the pool's ids locked; `None` if another conman has some of them, while containers live.
    id_claim: Option<File>,
    launching: Launching,
    sweeper: Sweeper,
    clients: Clients,
    streams: Box<dyn ContainerStreams>,
    replacement: Replacement,
    /// It was ordered to end, and waits until nothing runs, or until this time.
    ending_until_ns: Option<u64>,
}

impl Control {
    /// Serves until SIGTERM and, if the fence is armed, until nothing runs. Containers survive.
    pub(crate) fn run(&mut self) -> io::Result<()> {
        loop {
            self.set_timer();
            self.update_helpers();
            for (token, flags) in self.poller.wait()? {
                match token {
                    Token::Streams => self.streams.serve()?,
                    Token::Listener => self.clients.accept(&self.poller, &self.listener),
                    Token::Signals => {
                        if self.take_signals()? {
                            return Ok(());
                        }
                    }
                    Token::Timer => self.on_time(),
                    Token::Launcher => self.take_reports(),
                    Token::Sweeper => self.sweeper.flush(),
                    Token::Candidate => {
                        let replacement = &mut self.replacement;
                        let effects =
                            replacement.candidate_answered(&mut self.buffer, boottime_ns());
                        self.carry_out(effects);
                    }
                    Token::Client(client) => self.serve(client, flags),
                    Token::Adopted(number) => self.adopted_died(number),
                }
            }
            for client in self.clients.departed() {
                self.end_commands_of(client);
            }
            if self.has_ended() {
                return Ok(());
            }
            self.replace_when_idle();
        }
    }

    /// Carries out what is due.
    fn on_time(&mut self) {
        self.timer.clear();
        self.fence_on_time();
        let effects = self.containers.continue_kills(boottime_ns());
        self.carry_out(effects);
        self.end_adopted();
        let effects = self.replacement.on_time(boottime_ns());
        self.carry_out(effects);
        self.launching.flush();
    }

    fn set_timer(&mut self) {
        let due = [
            self.fence.next_due_ns(boottime_ns()),
            self.containers.next_due_ns(),
            self.replacement.next_due_ns(),
            self.ending_until_ns,
        ];
        self.timer.set(due.into_iter().flatten().min());
    }

    /// Polls the helpers for writability only while orders wait.
    fn update_helpers(&self) {
        if let Some(socket) = self.launching.socket() {
            let mut flags = EventFlags::IN;
            flags.set(EventFlags::OUT, self.launching.is_waiting());
            self.poller.change(Token::Launcher, socket, flags);
        }
        // It sends nothing; its end is reported by a signal.
        if let Some(socket) = self.sweeper.socket() {
            let mut flags = EventFlags::empty();
            flags.set(EventFlags::OUT, self.sweeper.is_waiting());
            self.poller.change(Token::Sweeper, socket, flags);
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
        let message = Message::Reply { id, reply };
        self.clients.send(&self.poller, client, &message, fd);
    }

    fn publish(&mut self, message: &Message) {
        self.clients.publish(&self.poller, message);
    }
}

/// Only for a child that has not been reaped: its PID is not reused.
fn open_child(pid: i32) -> io::Result<OwnedFd> {
    Ok(PidFd::open(pid).map_err(io::Error::other)?.into())
}

fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
