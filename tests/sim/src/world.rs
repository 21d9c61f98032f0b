//! The simulated fleet: true time, drifting clocks, a store, containers, and what goes wrong.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use conman_core::ownership::{
    Action, Answer, BootTime, Event, Fence, FenceAction, FenceEvent, Key, NodeName, NodeProtocol,
    Request, Slot, Timing, Value,
};

use crate::checker::{Checker, Container};
use crate::random::Random;

/// Faults until here; then everything is healed.
const HEAL_MS: u64 = 70_000;
const END_MS: u64 = 130_000;
const STORE_TIMEOUT_MS: u64 = 1_000;
const TRACE_LINES: usize = 60;

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    pub seed: u64,
    pub violation: Option<String>,
    /// The last events before the end.
    pub trace: Vec<String>,
    pub starts: u64,
    pub takeovers: u64,
}

#[derive(Debug, Clone)]
enum Ev {
    DaemonTick(usize),
    ShimTick(usize),
    Daemon(usize, u64, Event),
    Shim(usize, FenceEvent),
    /// A request reaches the store: (node, daemon epoch, op, request).
    Arrive(usize, u64, u64, Request),
    Timeout(usize, u64, u64),
    Appear(usize, u64, Slot),
    Frozen(usize, u64, Slot, u64),
    Dead(usize, u64, Slot),
    Ask,
    Fault,
    DaemonUp(usize),
    ShimUp(usize),
    Resume(usize),
    VmResume(usize),
    MachineUp(usize),
    Heal,
}

#[derive(Debug, Clone, Default)]
struct Held {
    exists: bool,
    frozen: bool,
    unfreezable: bool,
    uninterruptible_until: u64,
    killed: bool,
    failed_kills: u64,
    epoch: u64,
}

struct Node {
    offset: u64,
    drift_ppm: i64,
    boot: u64,
    daemon: Option<NodeProtocol>,
    epoch: u64,
    open: BTreeSet<u64>,
    paused: bool,
    inbox: Vec<Event>,
    fence: Fence,
    shim_up: bool,
    shim_inbox: Vec<FenceEvent>,
    vm_paused: bool,
    machine_up: bool,
    cut_out: bool,
    cut_in: bool,
    boxes: BTreeMap<Slot, Held>,
}

struct World {
    now: u64,
    sequence: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<(u64, u64), Ev>,
    random: Random,
    timing: Timing,
    nodes: Vec<Node>,
    names: Vec<NodeName>,
    sessions: Vec<String>,
    store: BTreeMap<Key, Value>,
    store_down_until: u64,
    lossy: u64,
    /// Nothing but outages of the store go wrong: no node may lose anything.
    outages_only: bool,
    checker: Checker,
    trace: VecDeque<String>,
}

/// One fleet's life from `seed`.
#[must_use]
pub fn simulate(seed: u64) -> Report {
    let mut world = World::new(seed);
    world.run();
    Report {
        seed,
        violation: world.checker.violation,
        trace: world.trace.into(),
        starts: world.checker.starts,
        takeovers: world.checker.takeovers,
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let timing = Timing {
            frozen_max_ms: 40_000,
            ..Timing::default()
        };
        let count = random.range(2, 5) as usize;
        let names: Vec<NodeName> = (0..count).map(|i| format!("n{i}").into()).collect();
        let nodes = (0..count)
            .map(|_| Node {
                offset: random.range(1, 1_000_000),
                drift_ppm: random.range(0, 18_000) as i64 - 9_000,
                boot: 0,
                daemon: None,
                epoch: 0,
                open: BTreeSet::new(),
                paused: false,
                inbox: Vec::new(),
                fence: Fence::new(timing),
                shim_up: true,
                shim_inbox: Vec::new(),
                vm_paused: false,
                machine_up: true,
                cut_out: false,
                cut_in: false,
                boxes: BTreeMap::new(),
            })
            .collect();
        let sessions = (0..random.range(1, 4)).map(|i| format!("s{i}")).collect();
        let lossy = if random.percent(50) {
            random.range(1, 15)
        } else {
            0
        };
        let outages_only = seed % 16 == 5;
        let lossy = if outages_only { 0 } else { lossy };
        let mut world = Self {
            now: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            random,
            timing,
            nodes,
            names,
            sessions,
            store: BTreeMap::new(),
            store_down_until: 0,
            lossy,
            outages_only,
            checker: Checker::default(),
            trace: VecDeque::new(),
        };
        for node in 0..count {
            world.at(0, Ev::DaemonUp(node));
            world.at(1, Ev::DaemonTick(node));
            world.at(1, Ev::ShimTick(node));
        }
        world.at(500, Ev::Ask);
        world.at(3_000, Ev::Fault);
        world.at(HEAL_MS, Ev::Heal);
        world
    }

    fn at(&mut self, delay: u64, event: Ev) {
        let key = (self.now + delay, self.sequence);
        self.sequence += 1;
        self.queue.push(Reverse(key));
        self.events.insert(key, event);
    }

    fn soon(&mut self, low: u64, high: u64, event: Ev) {
        let delay = self.random.range(low, high);
        self.at(delay, event);
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        if self.trace.len() == TRACE_LINES {
            self.trace.pop_front();
        }
        self.trace.push_back(format!("{:>7} {}", self.now, line()));
    }

    fn clock(&self, node: usize) -> BootTime {
        let node = &self.nodes[node];
        let drift = (self.now as i64 * node.drift_ppm) / 1_000_000;
        BootTime((node.offset + self.now).saturating_add_signed(drift))
    }

    fn run(&mut self) {
        while let Some(Reverse(key)) = self.queue.pop() {
            if key.0 > END_MS || self.checker.violation.is_some() {
                break;
            }
            self.now = key.0;
            if let Some(event) = self.events.remove(&key) {
                self.step(event);
            }
        }
        if self.outages_only && self.checker.takeovers > 0 {
            let what = "takeover after nothing but outages of the store";
            self.checker.violation.get_or_insert(what.into());
        }
        if self.checker.violation.is_none() {
            self.checker.finish(&self.sessions, &self.store);
        }
    }

    fn step(&mut self, event: Ev) {
        if !matches!(
            event,
            Ev::DaemonTick(_) | Ev::ShimTick(_) | Ev::Ask | Ev::Timeout(..)
        ) {
            self.note(|| format!("{event:?}"));
        }
        match event {
            Ev::DaemonTick(node) => {
                self.daemon(node, Event::Tick);
                self.soon(60, 140, Ev::DaemonTick(node));
            }
            Ev::ShimTick(node) => {
                self.shim(node, FenceEvent::Tick);
                self.at(40, Ev::ShimTick(node));
            }
            Ev::Daemon(node, epoch, event) => {
                if let Event::StoreAnswer { op, answer } = event {
                    self.daemon_answer(node, epoch, op, answer);
                } else if self.nodes[node].epoch == epoch {
                    self.daemon(node, event);
                }
            }
            Ev::Shim(node, event) => self.shim(node, event),
            Ev::Arrive(node, epoch, op, request) => self.arrive(node, epoch, op, &request),
            Ev::Timeout(node, epoch, op) => {
                self.daemon_answer(node, epoch, op, Answer::Ambiguous);
            }
            Ev::Appear(node, boot, slot) => self.appear(node, boot, slot),
            Ev::Frozen(node, boot, slot, epoch) => self.frozen(node, boot, slot, epoch),
            Ev::Dead(node, boot, slot) => {
                if self.nodes[node].boot == boot {
                    self.nodes[node].boxes.remove(&slot);
                    self.checker.gone(&container(node, &slot));
                    self.shim(node, FenceEvent::Died(slot));
                }
            }
            Ev::Ask => self.ask(),
            Ev::Fault => self.fault(),
            Ev::DaemonUp(node) => self.daemon_up(node),
            Ev::ShimUp(node) => self.shim_up(node),
            Ev::Resume(node) => self.resume(node),
            Ev::VmResume(node) => self.vm_resume(node),
            Ev::MachineUp(node) => {
                self.nodes[node].machine_up = true;
                self.daemon_up(node);
            }
            Ev::Heal => self.heal(),
        }
    }

    fn daemon(&mut self, node: usize, event: Event) {
        let now = self.clock(node);
        let n = &mut self.nodes[node];
        if n.daemon.is_none() || !n.machine_up {
            return;
        }
        if n.paused || n.vm_paused {
            if !matches!(event, Event::Tick) {
                n.inbox.push(event);
            }
            return;
        }
        let actions = n.daemon.as_mut().map_or(Vec::new(), |d| d.on(now, event));
        for action in actions {
            if !matches!(action, Action::Store { .. }) {
                self.note(|| format!("n{node} {action:?}"));
            }
            self.act(node, action);
        }
    }

    fn act(&mut self, node: usize, action: Action) {
        let epoch = self.nodes[node].epoch;
        let order = match action {
            Action::Store { op, request } => {
                self.nodes[node].open.insert(op);
                self.at(STORE_TIMEOUT_MS, Ev::Timeout(node, epoch, op));
                let lost = self.nodes[node].cut_out || self.random.percent(self.lossy);
                if !lost {
                    let late = self.lossy > 0 && self.random.percent(4);
                    let most = if late { 9_000 } else { 30 };
                    self.soon(1, most, Ev::Arrive(node, epoch, op, request));
                }
                return;
            }
            Action::Forward { session, owner } => {
                if let Some(to) = self.names.iter().position(|name| *name == owner) {
                    let epoch = self.nodes[to].epoch;
                    self.soon(1, 20, Ev::Daemon(to, epoch, Event::EnsureAsked(session)));
                }
                return;
            }
            // The slot is opened in the same instant; only the create itself takes time.
            Action::Start(slot) => return self.shim(node, FenceEvent::Open(slot)),
            Action::Kill(slot) => FenceEvent::Condemn(slot),
            Action::Forget(slot) => return self.shim(node, FenceEvent::Forget(slot)),
            Action::SetDeadline(deadline) => FenceEvent::Extend(deadline),
            Action::Thaw { deadline, slots } => FenceEvent::Thaw { deadline, slots },
            Action::FreezeAll => FenceEvent::FreezeAll,
        };
        self.at(1, Ev::Shim(node, order));
    }

    fn shim(&mut self, node: usize, event: FenceEvent) {
        let now = self.clock(node);
        let n = &mut self.nodes[node];
        if !n.machine_up {
            return;
        }
        if !n.shim_up || n.vm_paused {
            match event {
                FenceEvent::Tick | FenceEvent::Extend(_) | FenceEvent::Thaw { .. } => {}
                FenceEvent::Open(slot) => self.tell(node, Event::StartRefused(slot)),
                event => n.shim_inbox.push(event),
            }
            return;
        }
        let actions = n.fence.on(now, event);
        for action in actions {
            self.note(|| format!("n{node} shim {action:?}"));
            self.enforce(node, action);
        }
    }

    fn tell(&mut self, node: usize, event: Event) {
        let epoch = self.nodes[node].epoch;
        self.at(1, Ev::Daemon(node, epoch, event));
    }

    fn enforce(&mut self, node: usize, action: FenceAction) {
        let boot = self.nodes[node].boot;
        match action {
            FenceAction::Opened(slot) => {
                self.checker.may_exist(container(node, &slot));
                let faulty = self.now < HEAL_MS && self.random.percent(20);
                let new = Held {
                    unfreezable: faulty && self.random.percent(40),
                    ..Held::default()
                };
                self.nodes[node].boxes.insert(slot.clone(), new);
                if faulty && self.random.percent(30) {
                    self.nodes[node].boxes.remove(&slot);
                    self.checker.gone(&container(node, &slot));
                    self.soon(5, 300, Ev::Shim(node, FenceEvent::StartOver(slot)));
                } else {
                    let most = if faulty { 15_000 } else { 200 };
                    self.soon(5, most, Ev::Appear(node, boot, slot));
                }
            }
            FenceAction::Refused(slot) => self.tell(node, Event::StartRefused(slot)),
            FenceAction::Certificate(slot) => self.tell(node, Event::DeathCertificate(slot)),
            FenceAction::Fired => self.tell(node, Event::FenceFired),
            FenceAction::Freeze(slot) => {
                let Some(held) = self.nodes[node].boxes.get(&slot) else {
                    return;
                };
                if !(held.unfreezable && held.exists) && held.uninterruptible_until <= self.now {
                    let epoch = held.epoch;
                    self.soon(1, 100, Ev::Frozen(node, boot, slot, epoch));
                }
            }
            FenceAction::Thaw(slot) => {
                if let Some(held) = self.nodes[node].boxes.get_mut(&slot) {
                    held.epoch += 1;
                    held.frozen = false;
                    self.judge(node, &slot);
                }
            }
            FenceAction::Kill(slot) => self.kill(node, boot, slot),
        }
    }

    fn kill(&mut self, node: usize, boot: u64, slot: Slot) {
        let fails = self.random.percent(30);
        let now = self.now;
        let Some(held) = self.nodes[node].boxes.get_mut(&slot) else {
            return;
        };
        if held.killed || !held.exists {
            return;
        }
        if fails && held.failed_kills < 3 {
            held.failed_kills += 1;
            return;
        }
        // A pending SIGKILL ends every instruction in user mode; the certificate may take longer.
        held.killed = true;
        let stuck = held.uninterruptible_until.saturating_sub(now);
        self.judge(node, &slot);
        self.soon(stuck + 1, stuck + 80, Ev::Dead(node, boot, slot));
    }

    /// Tells the checker whether the container runs just now.
    fn judge(&mut self, node: usize, slot: &Slot) {
        let n = &self.nodes[node];
        let runs = n.boxes.get(slot).is_some_and(|held| {
            held.exists && !held.frozen && !held.killed && !n.vm_paused && n.machine_up
        });
        if runs {
            self.checker.runs(container(node, slot));
        } else {
            self.checker.stops(&container(node, slot));
        }
    }

    fn judge_all(&mut self, node: usize) {
        let slots: Vec<_> = self.nodes[node].boxes.keys().cloned().collect();
        for slot in slots {
            self.judge(node, &slot);
        }
    }

    fn appear(&mut self, node: usize, boot: u64, slot: Slot) {
        let n = &mut self.nodes[node];
        if n.boot != boot {
            return;
        }
        if n.vm_paused {
            return self.at(100, Ev::Appear(node, boot, slot));
        }
        if let Some(held) = n.boxes.get_mut(&slot) {
            held.exists = true;
            self.judge(node, &slot);
            self.soon(0, 20, Ev::Shim(node, FenceEvent::Appeared(slot)));
        }
    }

    fn frozen(&mut self, node: usize, boot: u64, slot: Slot, epoch: u64) {
        let n = &mut self.nodes[node];
        if n.boot != boot {
            return;
        }
        if let Some(held) = n.boxes.get_mut(&slot)
            && held.epoch == epoch
        {
            held.frozen = true;
            self.judge(node, &slot);
            self.shim(node, FenceEvent::FreezeVerified(slot));
        }
    }

    fn arrive(&mut self, node: usize, epoch: u64, op: u64, request: &Request) {
        if self.now < self.store_down_until {
            if self.random.percent(50) {
                self.reply(node, epoch, op, Answer::Unavailable);
            }
            return;
        }
        let answer = match request {
            Request::Commit(transaction) => {
                let holds = transaction
                    .compare
                    .iter()
                    .all(|(key, value)| self.store.get(key) == value.as_ref());
                if holds {
                    self.note(|| format!("n{node} commits {:?}", transaction.write));
                    self.checker.committed(transaction);
                    for (key, value) in &transaction.write {
                        match value {
                            Some(value) => self.store.insert(key.clone(), value.clone()),
                            None => self.store.remove(key),
                        };
                    }
                    Answer::Committed
                } else {
                    Answer::Conflict
                }
            }
            Request::Read(keys) => Answer::Values(
                keys.iter()
                    .map(|key| (key.clone(), self.store.get(key).cloned()))
                    .collect(),
            ),
            Request::ReadSessions => Answer::Values(
                self.store
                    .iter()
                    .map(|(key, value)| (key.clone(), Some(value.clone())))
                    .collect(),
            ),
        };
        self.reply(node, epoch, op, answer);
    }

    fn reply(&mut self, node: usize, epoch: u64, op: u64, answer: Answer) {
        if self.nodes[node].cut_in || self.random.percent(self.lossy) {
            return;
        }
        let most = if self.lossy > 0 && self.random.percent(10) {
            900
        } else {
            30
        };
        let delay = self.random.range(1, most);
        // The driver drops what its time-out has already answered; `open` is asked on delivery.
        if self.nodes[node].open.contains(&op) && self.nodes[node].epoch == epoch {
            self.at(
                delay,
                Ev::Daemon(node, epoch, Event::StoreAnswer { op, answer }),
            );
        }
    }

    fn daemon_answer(&mut self, node: usize, epoch: u64, op: u64, answer: Answer) {
        if self.nodes[node].epoch == epoch && self.nodes[node].open.remove(&op) {
            self.daemon(node, Event::StoreAnswer { op, answer });
        }
    }

    fn ask(&mut self) {
        let node = self.random.range(0, self.nodes.len() as u64 - 1) as usize;
        let which = self.random.range(0, self.sessions.len() as u64 - 1) as usize;
        let session = self.sessions[which].as_str().into();
        let event = if self.now < HEAL_MS && self.random.percent(6) {
            Event::StopAsked {
                session,
                delete: self.random.percent(60),
            }
        } else {
            Event::EnsureAsked(session)
        };
        self.daemon(node, event);
        if self.random.percent(2) && self.now < HEAL_MS {
            let peer = self.random.range(0, self.nodes.len() as u64 - 1) as usize;
            let hint = Event::WatchHint {
                node: self.names[peer].clone(),
                deleted: true,
            };
            self.daemon(node, hint);
        }
        self.soon(50, 300, Ev::Ask);
    }

    fn fault(&mut self) {
        if self.now >= HEAL_MS {
            return;
        }
        let node = self.random.range(0, self.nodes.len() as u64 - 1) as usize;
        let kind = if self.outages_only {
            0
        } else {
            self.random.range(0, 10)
        };
        self.note(|| format!("fault {kind} on n{node}"));
        let up = self.nodes[node].machine_up;
        match kind {
            0 => self.store_down_until = self.now + self.random.range(500, 25_000),
            1 => self.nodes[node].cut_out ^= true,
            2 => self.nodes[node].cut_in ^= true,
            3 if up && self.nodes[node].daemon.is_some() => {
                self.nodes[node].paused = true;
                self.soon(100, 25_000, Ev::Resume(node));
            }
            4 if up && !self.nodes[node].vm_paused => {
                self.nodes[node].vm_paused = true;
                self.judge_all(node);
                self.soon(100, 2_000, Ev::VmResume(node));
            }
            5 if up && self.nodes[node].daemon.is_some() => {
                self.nodes[node].daemon = None;
                self.nodes[node].epoch += 1;
                self.soon(100, 20_000, Ev::DaemonUp(node));
            }
            6 if up && self.nodes[node].shim_up => {
                self.nodes[node].shim_up = false;
                self.soon(50, 900, Ev::ShimUp(node));
            }
            7 if up => self.crash(node),
            8 => self.daemon(node, Event::PreemptAsked),
            9 => self.daemon(node, Event::PreemptCancelled),
            _ => {
                let until = self.now + self.random.range(1_000, 15_000);
                if let Some(held) = self.nodes[node].boxes.values_mut().next() {
                    held.uninterruptible_until = until;
                }
            }
        }
        self.soon(500, 9_000, Ev::Fault);
    }

    fn crash(&mut self, node: usize) {
        let timing = self.timing;
        let n = &mut self.nodes[node];
        n.machine_up = false;
        n.boot += 1;
        n.epoch += 1;
        n.daemon = None;
        n.vm_paused = false;
        n.shim_up = true;
        n.shim_inbox.clear();
        n.fence = Fence::new(timing);
        for (slot, _) in std::mem::take(&mut n.boxes) {
            self.checker.gone(&container(node, &slot));
        }
        self.soon(500, 30_000, Ev::MachineUp(node));
    }

    fn daemon_up(&mut self, node: usize) {
        let now = self.clock(node);
        let peers: Vec<_> = self
            .names
            .iter()
            .filter(|n| **n != self.names[node])
            .cloned()
            .collect();
        let name = self.names[node].clone();
        let n = &mut self.nodes[node];
        if n.daemon.is_some() || !n.machine_up {
            return;
        }
        n.epoch += 1;
        n.paused = false;
        n.inbox.clear();
        n.open.clear();
        let view = n.fence.view();
        let first = n.epoch << 32;
        n.daemon = Some(NodeProtocol::new(
            name,
            &peers,
            self.timing,
            now,
            first,
            view,
        ));
    }

    fn shim_up(&mut self, node: usize) {
        let n = &mut self.nodes[node];
        if n.shim_up {
            return;
        }
        n.shim_up = true;
        n.fence = n.fence.clone().restarted();
        self.shim_backlog(node);
        if self.nodes[node].fence.has_fired() {
            self.tell(node, Event::FenceFired);
        }
    }

    fn shim_backlog(&mut self, node: usize) {
        self.shim(node, FenceEvent::Tick);
        for event in std::mem::take(&mut self.nodes[node].shim_inbox) {
            self.shim(node, event);
        }
    }

    fn resume(&mut self, node: usize) {
        self.nodes[node].paused = false;
        for event in std::mem::take(&mut self.nodes[node].inbox) {
            self.daemon(node, event);
        }
    }

    fn vm_resume(&mut self, node: usize) {
        if !self.nodes[node].vm_paused {
            return;
        }
        self.nodes[node].vm_paused = false;
        self.judge_all(node);
        self.shim_backlog(node);
        if self.nodes[node].fence.has_fired() {
            self.tell(node, Event::FenceFired);
        }
        self.resume(node);
    }

    fn heal(&mut self) {
        self.store_down_until = 0;
        self.lossy = 0;
        for node in 0..self.nodes.len() {
            self.nodes[node].cut_in = false;
            self.nodes[node].cut_out = false;
            self.vm_resume(node);
            self.shim_up(node);
            self.resume(node);
            self.daemon(node, Event::PreemptCancelled);
        }
    }
}

fn container(node: usize, slot: &Slot) -> Container {
    (node, slot.session.to_string(), slot.generation)
}
