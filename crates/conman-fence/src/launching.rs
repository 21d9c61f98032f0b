//! The shim's side of the launcher: sends orders, reads reports, and replaces a launcher that dies.

mod ahead;
mod sending;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::rc::Rc;

use conman_linux::{Features, SoleThread};
use conman_shim_protocol::encode;
use serde::{Deserialize, Serialize};

use crate::containers::{Container, KeptCommand};
use crate::handover::{Handover, KeptStart, number};
use crate::helper::Helper;
use crate::launcher_messages::{Order, Sweep};
use crate::log_bounds::BoundedLog;
use crate::options::ShimOptions;
pub(crate) use ahead::{MAX_AHEAD, MadeAhead, UsualStart};

/// Containers' starts that wait or are under way. A start takes about a millisecond, so this is seconds
/// of work; more are refused. The same number of commands may wait or be under way in addition.
pub(crate) const MAX_PENDING: usize = 4_096;

/// Commands of one container that the launcher has at a time. They run in the container's cgroups, so
/// that its limits can delay them by seconds.
const MAX_COMMANDS_UNDER_WAY: usize = 8;

/// Commands of one container that wait or are under way; more are refused.
const MAX_COMMANDS_OF_ONE: usize = 64;

/// A start that has not been answered.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Pending {
    pub(crate) client: u64,
    pub(crate) call: u64,
    pub(crate) name: String,
    pub(crate) cgroup: String,
    /// A container's own resources; `None` for a command.
    pub(crate) own: Option<OwnResources>,
    /// The container of a command.
    pub(crate) exec_in: Option<String>,
    /// Of a command that is kept.
    pub(crate) kept: Option<KeptCommand>,
    /// Of a command that is killed when the client's connection ends.
    #[serde(default)]
    pub(crate) with_client: bool,
    /// Kill it as soon as there is a process.
    pub(crate) killed: bool,
    /// Of a container made ahead. None is handed over.
    #[serde(skip)]
    pub(crate) ahead: Option<MadeAhead>,
    /// Of a start that has taken one, until the start is answered.
    #[serde(skip)]
    pub(crate) taken: Option<Rc<UsualStart>>,
    /// For the answer; set when it is cloned.
    #[serde(skip)]
    pub(crate) pidfd: Option<Rc<OwnedFd>>,
}

impl Pending {
    /// The record for a later shim, written before it begins.
    pub(crate) fn container(&self) -> Container {
        let own = self.own.as_ref();
        let ids = own.map(|own| own.ids);
        let scratch = own.map(|own| own.scratch.clone());
        let mut container = Container::starting(&self.cgroup, ids, scratch, self.exec_in.clone());
        container.logs = own.map_or_else(Vec::new, |own| own.logs.clone());
        container.kill_pending = self.killed;
        container.client = Some(self.client).filter(|_| self.with_client);
        container.kept.clone_from(&self.kept);
        container.ahead = self.ahead.is_some() || self.taken.is_some();
        container
    }
}

/// Resources that belong to one container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OwnResources {
    pub(crate) ids: u32,
    pub(crate) scratch: PathBuf,
    pub(crate) logs: Vec<BoundedLog>,
}

/// What an interrupted or failed start may have left, until a launcher has removed it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StartRemains {
    pub(crate) cgroup: String,
    pub(crate) scratch: PathBuf,
    /// Not reusable while a process of it may live.
    pub(crate) name: Option<String>,
    /// Not reusable while processes or files of it may exist.
    pub(crate) ids: Option<u32>,
    /// A client ordered its death and waits for a notification.
    pub(crate) killed: bool,
}

/// An order that was not sent to the launcher yet.
#[derive(Debug)]
struct Waiting {
    /// The start's ticket, if it can be withdrawn or handed over; `None` for a sweep.
    ticket: Option<u64>,
    /// It finishes a container made ahead, which no other program can do.
    finishes: bool,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// One container's commands that have not been answered.
#[derive(Debug, Default)]
struct Commands {
    /// Commands that the launcher has, or is about to get.
    under_way: usize,
    /// Commands that wait until the launcher has fewer.
    waiting: VecDeque<Waiting>,
}

/// The launcher and its orders.
#[derive(Debug)]
pub(crate) struct Launching {
    /// What the launcher does.
    serve: fn(&OwnedFd, &ShimOptions) -> io::Result<()>,
    process: Option<Helper>,
    waiting: VecDeque<Waiting>,
    /// By container; only containers with commands.
    commands: BTreeMap<String, Commands>,
    /// Nothing more is sent to the launcher, which is stopped once it has answered everything.
    held_back: bool,
    pub(crate) pending: BTreeMap<u64, Pending>,
    /// What starts may have left.
    sweeps: BTreeMap<u64, StartRemains>,
    next_ticket: u64,
    /// The kernel's features, as the last launcher reported them.
    pub(crate) features: Option<Features>,
}

impl Launching {
    pub(crate) fn new(serve: fn(&OwnedFd, &ShimOptions) -> io::Result<()>) -> Self {
        Self {
            serve,
            process: None,
            waiting: VecDeque::new(),
            commands: BTreeMap::new(),
            held_back: false,
            pending: BTreeMap::new(),
            sweeps: BTreeMap::new(),
            next_ticket: 0,
            features: None,
        }
    }

    /// Forks a launcher when there is none. `true` when its socket is a new one.
    pub(crate) fn ensure(&mut self, sole: &SoleThread, options: &ShimOptions) -> io::Result<bool> {
        if self.process.is_some() {
            return Ok(false);
        }
        let serve = self.serve;
        let launcher = Helper::start(sole, c"shim-launcher", |socket| serve(socket, options))?;
        self.process = Some(launcher);
        // Before any start, which may use the same place.
        self.waiting.retain(|one| one.ticket.is_some());
        for (ticket, left) in &self.sweeps {
            self.waiting.push_front(sweep_order(*ticket, left)?);
        }
        Ok(true)
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(Helper::pid)
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(AsFd::as_fd)
    }

    /// Whether a container of this name is being started, or may live after a failed start.
    pub(crate) fn is_starting(&self, name: &str) -> bool {
        self.pending.values().any(|start| start.name == name) || self.left_of(name).is_some()
    }

    /// The names of all of those.
    pub(crate) fn starting(&self) -> HashSet<&str> {
        let left = self.sweeps.values();
        let left = left.filter_map(|left| left.name.as_deref());
        let pending = self.pending.values();
        pending
            .map(|start| start.name.as_str())
            .chain(left)
            .collect()
    }

    /// How many commands that are to be kept in this container are being started.
    pub(crate) fn kept_in(&self, container: &str) -> usize {
        let is_its =
            |start: &&Pending| start.kept.is_some() && start.exec_in.as_deref() == Some(container);
        self.pending.values().filter(is_its).count()
    }

    /// The names of commands under start that end with this client's connection.
    pub(crate) fn with_client(&self, client: u64) -> impl Iterator<Item = &str> {
        let pending = self.pending.values();
        let with_it = pending.filter(move |start| start.with_client && start.client == client);
        with_it.map(|start| start.name.as_str())
    }

    /// What a start of this name may have left.
    pub(crate) fn left_of(&self, name: &str) -> Option<&StartRemains> {
        let mut all = self.sweeps.values();
        all.find(|left| left.name.as_deref() == Some(name))
    }

    /// Queues a start, given as what to order by its ticket.
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
            finishes: false,
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

    /// What is full for one more start of a container, or of a command in this one, if anything.
    pub(crate) fn lacks_room(&self, exec_in: Option<&str>) -> Option<&'static str> {
        let of = |commands: &Commands| commands.under_way + commands.waiting.len();
        let all: usize = self.commands.values().map(of).sum();
        match exec_in {
            None => {
                // What is made ahead is no start to any limit.
                let starts = self.pending.len() - all - self.ahead().count();
                (starts >= MAX_PENDING).then_some("starts under way")
            }
            Some(container) => {
                let own = self.commands.get(container).map_or(0, of);
                (own >= MAX_COMMANDS_OF_ONE)
                    .then_some("commands of this container under way")
                    .or((all >= MAX_PENDING).then_some("commands under way"))
            }
        }
    }

    /// A start is finished or withdrawn. A command that waited for its container's share of the launcher is
    /// sent next.
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

    /// Orders of starts that were not sent yet.
    fn unsent(&self) -> impl Iterator<Item = &Waiting> {
        let commands = self.commands.values();
        let all = self
            .waiting
            .iter()
            .chain(commands.flat_map(|one| &one.waiting));
        all.filter(|one| one.ticket.is_some())
    }

    /// Lifts the CPU limit of a container that is being killed.
    pub(crate) fn lift_cpu_limit(&mut self, cgroup: &str) {
        let order = Order::LiftCpuLimit {
            cgroup: cgroup.to_owned(),
        };
        if self.process.is_some()
            && let Ok(bytes) = encode(&order)
        {
            self.waiting.push_back(Waiting {
                ticket: None,
                finishes: false,
                bytes,
                fds: Vec::new(),
            });
        }
    }

    /// Remembers to remove what a start may have left, and orders it if there is a launcher (a new launcher
    /// gets all). Returns its ticket.
    pub(crate) fn sweep_later(&mut self, left: StartRemains) -> u64 {
        self.next_ticket += 1;
        if self.process.is_some() {
            match sweep_order(self.next_ticket, &left) {
                Ok(order) => self.waiting.push_back(order),
                Err(error) => tracing::error!(%error, "the next launcher removes what is left"),
            }
        }
        self.sweeps.insert(self.next_ticket, left);
        self.next_ticket
    }

    /// A launcher has removed it.
    pub(crate) fn swept(&mut self, ticket: u64) -> Option<StartRemains> {
        self.sweeps.remove(&ticket)
    }

    /// Adds its state to a handover, once it is idle. The next launcher gets the sweeps again.
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
                pending: pending.clone(),
                order: String::from_utf8(waiting.bytes.clone()).map_err(io::Error::other)?,
                fds: waiting.fds.iter().map(number).collect(),
            });
        }
        Ok(())
    }

    /// Takes over the state of an earlier program, before there is a launcher. `take` turns numbers into
    /// descriptors.
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
                finishes: false,
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

    /// A removal that an earlier shim recorded.
    pub(crate) fn resume_sweep(&mut self, ticket: u64, left: StartRemains) {
        self.next_ticket = self.next_ticket.max(ticket);
        self.sweeps.insert(ticket, left);
    }

    /// All pending removals, by ticket.
    pub(crate) fn sweeps(&self) -> impl Iterator<Item = (u64, &StartRemains)> {
        self.sweeps.iter().map(|(ticket, left)| (*ticket, left))
    }

    /// Makes every start under way fail, by killing the launcher.
    pub(crate) fn abort(&self) {
        if let (Some(launcher), false) = (&self.process, self.pending.is_empty())
            && let Err(error) = launcher.kill()
        {
            tracing::error!(%error, "cannot interrupt the starts under way");
        }
    }

    /// Withdraws a start that was not sent to a launcher.
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
        // The launcher did not have it, so its container's share does not change.
        let ticket = found.into_iter().next()?.ticket?;
        self.pending.remove(&ticket)
    }

    /// Remembers to kill a container under start as soon as it has a process. `false` when there is no such
    /// start.
    pub(crate) fn kill_when_begun(&mut self, name: &str) -> bool {
        let mut starts = self.pending.values_mut();
        let start = starts.find(|start| start.name == name);
        start.map(|start| start.killed = true).is_some()
    }

    /// Remembers to notify clients about the end of what a start may have left, which is being killed
    /// already. Returns what to record for it, with its ticket; `None` when nothing is left.
    pub(crate) fn report_when_swept(&mut self, name: &str) -> Option<(u64, StartRemains)> {
        let mut all = self.sweeps.iter_mut();
        let (ticket, left) = all.find(|(_, left)| left.name.as_deref() == Some(name))?;
        left.killed = true;
        Some((*ticket, left.clone()))
    }

    /// Kills and reaps the launcher because the shim ends; its work ends with it.
    pub(crate) fn stop(&mut self) {
        if let Some(launcher) = self.process.take() {
            launcher.stop();
        }
    }

    /// The launcher has died: forgets it and returns its unanswered starts.
    pub(crate) fn died(&mut self) -> BTreeMap<u64, Pending> {
        self.process = None;
        self.waiting.clear();
        self.commands.clear();
        std::mem::take(&mut self.pending)
    }
}

fn sweep_order(ticket: u64, left: &StartRemains) -> io::Result<Waiting> {
    let order = Order::Sweep(Sweep {
        ticket,
        cgroup: left.cgroup.clone(),
        scratch: left.scratch.clone(),
    });
    Ok(Waiting {
        ticket: None,
        finishes: false,
        bytes: encode(&order).map_err(io::Error::other)?,
        fds: Vec::new(),
    })
}
