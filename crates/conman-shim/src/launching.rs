//! The shim's side of the launcher: orders out, reports in, and a new launcher when one dies.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use conman_linux::{Features, PidFd, SoleThread};
use serde::{Deserialize, Serialize};

use crate::containers::Container;
use crate::handover::{Handover, KeptStart, number};
use crate::launcher::{self, Order, Report};
use crate::options::ShimOptions;
use crate::protocol::{decode, encode};
use crate::seqpacket;
use crate::sweeper::BoundedLog;

/// Starts of containers that wait or are under way. A start takes about a millisecond, so this is
/// seconds of work; more are refused. As many commands may wait or be under way, apart from them.
pub(crate) const MAX_PENDING: usize = 4_096;

/// Commands of one container that the launcher has at a time. They run in the container's cgroups, so
/// that its limits can hold them for seconds.
const MAX_COMMANDS_UNDER_WAY: usize = 8;

/// Commands of one container that wait or are under way; more are refused.
const MAX_COMMANDS_OF_ONE: usize = 64;

/// Bound on the death of a launcher that may be waiting for a disk.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// A start that has not been answered.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Pending {
    pub(crate) client: u64,
    pub(crate) call: u64,
    pub(crate) name: String,
    pub(crate) cgroup: String,
    /// A container's own; a command has neither.
    pub(crate) own: Option<Own>,
    /// The container of a command.
    pub(crate) exec_in: Option<String>,
    /// To be killed as soon as there is a process.
    #[serde(default)]
    pub(crate) killed: bool,
    /// The answer's, from the moment of its clone.
    #[serde(skip)]
    pub(crate) pidfd: Option<OwnedFd>,
}

impl Pending {
    /// A copy of one that no launcher knows.
    fn unsent(&self) -> Self {
        let own = self.own.as_ref().map(|own| Own {
            ids: own.ids,
            scratch: own.scratch.clone(),
            log: own.log.clone(),
        });
        Self {
            client: self.client,
            call: self.call,
            name: self.name.clone(),
            cgroup: self.cgroup.clone(),
            own,
            exec_in: self.exec_in.clone(),
            killed: self.killed,
            pidfd: None,
        }
    }

    /// What a later shim must know of it before it begins.
    pub(crate) fn container(&self) -> Container {
        let own = self.own.as_ref();
        let ids = own.map(|own| own.ids);
        let scratch = own.map(|own| own.scratch.clone());
        let mut container = Container::starting(&self.cgroup, ids, scratch, self.exec_in.clone());
        container.log = own.and_then(|own| own.log.clone());
        container.doomed = self.killed;
        container
    }
}

/// What is one container's alone.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Own {
    pub(crate) ids: u32,
    pub(crate) scratch: PathBuf,
    pub(crate) log: Option<BoundedLog>,
}

/// What a start may have left that was interrupted or failed, until a launcher has removed it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Left {
    pub(crate) cgroup: String,
    pub(crate) scratch: PathBuf,
    /// Nobody else's as long as a process of it may live.
    #[serde(default)]
    pub(crate) name: Option<String>,
    /// Nobody else's as long as processes or files of it may exist.
    #[serde(default)]
    pub(crate) ids: Option<u32>,
    /// Somebody ordered its death and is to be told of it.
    #[serde(default)]
    pub(crate) killed: bool,
}

/// What the launcher has not been told yet.
#[derive(Debug)]
struct Waiting {
    /// The start's; a sweep has none.
    ticket: Option<u64>,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// One container's commands that have not been answered.
#[derive(Debug, Default)]
struct Commands {
    /// Those that the launcher has, or is about to get.
    under_way: usize,
    /// Those that wait until it has fewer.
    waiting: VecDeque<Waiting>,
}

/// The launcher and what it has been asked.
#[derive(Debug, Default)]
pub(crate) struct Launching {
    process: Option<(PidFd, OwnedFd)>,
    waiting: VecDeque<Waiting>,
    /// By the container; only those that have any.
    commands: BTreeMap<String, Commands>,
    /// Nothing more goes to the launcher, which is to be stopped once it has answered everything.
    held_back: bool,
    pub(crate) pending: BTreeMap<u64, Pending>,
    /// What starts may have left.
    sweeps: BTreeMap<u64, Left>,
    next_ticket: u64,
    /// What the last launcher found that this kernel can do.
    pub(crate) features: Option<Features>,
}

impl Launching {
    /// Forks one when there is none. `true` when its socket is a new one.
    pub(crate) fn ensure(&mut self, sole: &SoleThread, options: &ShimOptions) -> io::Result<bool> {
        if self.process.is_some() {
            return Ok(false);
        }
        let (process, socket) = launcher::start(sole, options)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        self.process = Some((process, socket));
        // Before any start, which may be in the same place.
        self.waiting.retain(|one| one.ticket.is_some());
        for (ticket, left) in &self.sweeps {
            self.waiting.push_front(sweep_order(*ticket, left)?);
        }
        Ok(true)
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(|(process, _)| process.pid())
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(|(_, socket)| socket.as_fd())
    }

    /// Whether a container of this name is being started, or may live though its start failed.
    pub(crate) fn is_starting(&self, name: &str) -> bool {
        self.pending.values().any(|start| start.name == name) || self.left_of(name).is_some()
    }

    /// All of those.
    pub(crate) fn starting(&self) -> HashSet<&str> {
        let left = self.sweeps.values();
        let left = left.filter_map(|left| left.name.as_deref());
        let pending = self.pending.values();
        pending
            .map(|start| start.name.as_str())
            .chain(left)
            .collect()
    }

    /// What a start of this name may have left.
    pub(crate) fn left_of(&self, name: &str) -> Option<&Left> {
        let mut all = self.sweeps.values();
        all.find(|left| left.name.as_deref() == Some(name))
    }

    /// Takes a start, given as what to order by its ticket; the launcher gets it when it reads.
    pub(crate) fn order(
        &mut self,
        start: Pending,
        fds: Vec<OwnedFd>,
        order: impl FnOnce(u64) -> Order,
    ) -> io::Result<()> {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        let waiting = Waiting {
            ticket: Some(ticket),
            bytes: encode(&order(ticket)).map_err(io::Error::other)?,
            fds,
        };
        self.queue(ticket, start, waiting);
        Ok(())
    }

    fn queue(&mut self, ticket: u64, start: Pending, waiting: Waiting) {
        match &start.exec_in {
            None => self.waiting.push_back(waiting),
            Some(container) => {
                let commands = self.commands.entry(container.clone()).or_default();
                if commands.under_way < MAX_COMMANDS_UNDER_WAY {
                    commands.under_way += 1;
                    self.waiting.push_back(waiting);
                } else {
                    commands.waiting.push_back(waiting);
                }
            }
        }
        self.pending.insert(ticket, start);
    }

    /// What there is no room for: one more start of a container, or of a command in this one.
    pub(crate) fn lacks_room(&self, exec_in: Option<&str>) -> Option<&'static str> {
        let of = |commands: &Commands| commands.under_way + commands.waiting.len();
        let all: usize = self.commands.values().map(of).sum();
        match exec_in {
            None => (self.pending.len() - all >= MAX_PENDING).then_some("starts under way"),
            Some(container) => {
                let own = self.commands.get(container).map_or(0, of);
                (own >= MAX_COMMANDS_OF_ONE)
                    .then_some("commands of this container under way")
                    .or((all >= MAX_PENDING).then_some("commands under way"))
            }
        }
    }

    /// A start is over or taken back. A command that waited for its container's share of the launcher
    /// has its turn.
    pub(crate) fn finish(&mut self, ticket: u64) -> Option<Pending> {
        let start = self.pending.remove(&ticket)?;
        if let Some(container) = &start.exec_in
            && let Some(commands) = self.commands.get_mut(container)
        {
            match commands.waiting.pop_front() {
                Some(next) => self.waiting.push_back(next),
                None => commands.under_way -= 1,
            }
            if commands.under_way == 0 {
                self.commands.remove(container);
            }
        }
        Some(start)
    }

    /// Orders that are still here, each of a start.
    fn unsent(&self) -> impl Iterator<Item = &Waiting> {
        let commands = self.commands.values();
        let all = self
            .waiting
            .iter()
            .chain(commands.flat_map(|one| &one.waiting));
        all.filter(|one| one.ticket.is_some())
    }

    /// Has a container's limit of processor time lifted that is being killed.
    pub(crate) fn lift_cpu_limit(&mut self, cgroup: &str) {
        let order = Order::LiftCpuLimit {
            cgroup: cgroup.to_owned(),
        };
        if self.process.is_some()
            && let Ok(bytes) = encode(&order)
        {
            self.waiting.push_back(Waiting {
                ticket: None,
                bytes,
                fds: Vec::new(),
            });
        }
    }

    /// Remembers to remove what a start may have left, and orders it if there is a launcher, as the
    /// next one is told of all; its number.
    pub(crate) fn sweep_later(&mut self, left: Left) -> u64 {
        self.next_ticket += 1;
        if self.process.is_some() {
            match sweep_order(self.next_ticket, &left) {
                Ok(order) => self.waiting.push_back(order),
                Err(error) => tracing::error!(%error, "only a later launcher removes what is left"),
            }
        }
        self.sweeps.insert(self.next_ticket, left);
        self.next_ticket
    }

    /// A launcher has removed it.
    pub(crate) fn swept(&mut self, ticket: u64) -> Option<Left> {
        self.sweeps.remove(&ticket)
    }

    /// Gives nothing more to the launcher, or does so again.
    pub(crate) fn hold_back(&mut self, held_back: bool) {
        self.held_back = held_back;
    }

    /// Whether the launcher has answered every start that it was told of.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending.len() == self.unsent().count()
    }

    /// What is to be named in a handover, once it is idle. Sweeps are ordered anew by whoever
    /// starts the next launcher.
    pub(crate) fn hand_over(&self, handover: &mut Handover) -> io::Result<()> {
        handover.next_ticket = self.next_ticket;
        let sweeps = self.sweeps.iter();
        handover.left = sweeps
            .map(|(ticket, left)| (*ticket, left.clone()))
            .collect();
        for waiting in self.unsent() {
            let Some(ticket) = waiting.ticket else {
                continue;
            };
            let Some(pending) = self.pending.get(&ticket) else {
                continue;
            };
            handover.starts.push(KeptStart {
                ticket,
                pending: pending.unsent(),
                order: String::from_utf8(waiting.bytes.clone()).map_err(io::Error::other)?,
                fds: waiting.fds.iter().map(number).collect(),
            });
        }
        Ok(())
    }

    /// Takes up what an earlier program left, before there is a launcher. `take` turns numbers
    /// into descriptors.
    pub(crate) fn take_over(
        &mut self,
        handover: &mut Handover,
        take: &mut dyn FnMut(RawFd) -> io::Result<OwnedFd>,
    ) -> io::Result<()> {
        self.next_ticket = handover.next_ticket;
        self.sweeps.extend(handover.left.drain(..));
        for start in handover.starts.drain(..) {
            let fds: io::Result<Vec<OwnedFd>> = start.fds.into_iter().map(&mut *take).collect();
            let waiting = Waiting {
                ticket: Some(start.ticket),
                bytes: start.order.into_bytes(),
                fds: fds?,
            };
            self.queue(start.ticket, start.pending, waiting);
        }
        Ok(())
    }

    /// All descriptors that a handover names.
    pub(crate) fn waiting_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.unsent()
            .flat_map(|one| one.fds.iter().map(AsFd::as_fd))
    }

    /// What an earlier shim remembered to remove.
    pub(crate) fn resume_sweep(&mut self, ticket: u64, left: Left) {
        self.next_ticket = self.next_ticket.max(ticket);
        self.sweeps.insert(ticket, left);
    }

    /// What is still to be removed, by tickets.
    pub(crate) fn sweeps(&self) -> impl Iterator<Item = (u64, &Left)> {
        self.sweeps.iter().map(|(ticket, left)| (*ticket, left))
    }

    /// Sends what can be sent. A launcher that has died is noticed by its end, not here.
    pub(crate) fn flush(&mut self) {
        let Some((_, socket)) = &self.process else {
            return;
        };
        if self.held_back {
            return;
        }
        while let Some(one) = self.waiting.front() {
            let fds: Vec<BorrowedFd<'_>> = one.fds.iter().map(AsFd::as_fd).collect();
            if seqpacket::send(socket, &one.bytes, &fds).is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }

    /// Whether the launcher must become writable first.
    pub(crate) fn is_waiting(&self) -> bool {
        self.process.is_some() && !self.held_back && !self.waiting.is_empty()
    }

    /// The next report that has come, if any.
    pub(crate) fn report(&self, buffer: &mut [u8]) -> Option<Report> {
        let (_, socket) = self.process.as_ref()?;
        let received = seqpacket::receive(socket, buffer).ok()??;
        match decode(received.bytes) {
            Ok(report) => Some(report),
            Err(error) => {
                tracing::error!(%error, "the launcher's report is unreadable");
                None
            }
        }
    }

    /// Has every start fail that is under way, by the death of the launcher.
    pub(crate) fn abort(&self) {
        if let (Some((process, _)), false) = (&self.process, self.pending.is_empty())
            && let Err(error) = process.kill()
        {
            tracing::error!(%error, "starts under way cannot be interrupted");
        }
    }

    /// Takes back a start that no launcher has been told of.
    pub(crate) fn withdraw(&mut self, name: &str) -> Option<Pending> {
        let pending = &self.pending;
        let named = |one: &Waiting| {
            let start = one.ticket.and_then(|ticket| pending.get(&ticket));
            start.is_some_and(|start| start.name == name)
        };
        if let Some(at) = self.waiting.iter().position(named) {
            let ticket = self.waiting.remove(at)?.ticket?;
            return self.finish(ticket);
        }
        let commands = self.commands.values_mut();
        let found = commands.filter_map(|one| {
            let at = one.waiting.iter().position(named)?;
            one.waiting.remove(at)
        });
        // It has no share of the launcher to give back.
        let ticket = found.into_iter().next()?.ticket?;
        self.pending.remove(&ticket)
    }

    /// Remembers to kill a container whose start is ordered as soon as it has a process. `false`
    /// when there is no such start.
    pub(crate) fn kill_when_begun(&mut self, name: &str) -> bool {
        let mut starts = self.pending.values_mut();
        let start = starts.find(|start| start.name == name);
        start.map(|start| start.killed = true).is_some()
    }

    /// Remembers to tell of the end of what a start may have left, which is being killed already;
    /// what is to be remembered of it by its number. `None` when nothing is left.
    pub(crate) fn tell_when_swept(&mut self, name: &str) -> Option<(u64, Left)> {
        let mut all = self.sweeps.iter_mut();
        let (ticket, left) = all.find(|(_, left)| left.name.as_deref() == Some(name))?;
        left.killed = true;
        Some((*ticket, left.clone()))
    }

    /// Ends it and reaps it, since the shim ends; what it was doing ends with it.
    pub(crate) fn stop(&mut self) {
        let Some((process, _)) = self.process.take() else {
            return;
        };
        let pid = rustix::process::Pid::from_raw(process.pid());
        if process.kill().is_ok() && process.wait_dead(STOP_TIMEOUT).unwrap_or(false) {
            // It may have been reaped already.
            let _ = rustix::process::waitpid(pid, rustix::process::WaitOptions::NOHANG);
        }
    }

    /// It has died: forgets it and hands over what it was asked.
    pub(crate) fn died(&mut self) -> BTreeMap<u64, Pending> {
        self.process = None;
        self.waiting.clear();
        self.commands.clear();
        std::mem::take(&mut self.pending)
    }
}

fn sweep_order(ticket: u64, left: &Left) -> io::Result<Waiting> {
    let order = Order::Sweep {
        ticket,
        cgroup: left.cgroup.clone(),
        scratch: left.scratch.clone(),
    };
    Ok(Waiting {
        ticket: None,
        bytes: encode(&order).map_err(io::Error::other)?,
        fds: Vec::new(),
    })
}
