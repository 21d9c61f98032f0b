//! One machine: its clock, its daemon and shim, and what passes between the two.

use std::collections::{BTreeMap, BTreeSet};

use conman_core::ownership::{
    Action, Answer, BootTime, Event, Fence, FenceAction, FenceEvent, Kept, NodeName, NodeProtocol,
    Slot, Timing,
};

use crate::clock::Clock;
use crate::kernel::Process;
use crate::parts::PartHolder;
use crate::preempting::EmergencyThread;
use crate::random::Random;
use crate::world::{Ev, HEAL_MS, World};

/// Each node watches the next two, if there are so many.
const WATCHED: usize = 2;

/// Safe by themselves, and too long for a node that knows of the usual times alone.
const LONG_FENCE_MS: u64 = 25_000;
const LONG_TAKEOVER_MS: u64 = 34_000;

pub(crate) struct Machine {
    clock: Clock,
    pub(crate) boot: u64,
    pub(crate) up: bool,
    /// Since when the whole machine stands still, and whether its clock goes on.
    pub(crate) paused: Option<(u64, bool)>,
    pub(crate) may_pause_at: u64,
    pub(crate) daemon: Option<NodeProtocol>,
    /// When it began.
    pub(crate) began: Option<u64>,
    pub(crate) daemon_epoch: u64,
    /// SIGSTOP
    pub(crate) stopped: bool,
    inbox: Vec<Event>,
    /// Of its daemon.
    pub(crate) emergency: EmergencyThread,
    /// Requests to the store that nothing has answered.
    pub(crate) open: BTreeSet<u64>,
    /// Requests whose answers are late.
    pub(crate) late: BTreeSet<u64>,
    pub(crate) fence: Option<Fence>,
    /// In a file, for the next shim.
    kept: Kept,
    pub(crate) shim_epoch: u64,
    pub(crate) shim_may_crash_at: u64,
    shim_inbox: Vec<FenceEvent>,
    pub(crate) ticks_at: Option<u64>,
    /// When the last message on the socket arrives, each way: no later one overtakes it.
    orders_at: u64,
    news_at: u64,
    pub(crate) cut_out: bool,
    pub(crate) cut_in: bool,
    pub(crate) processes: BTreeMap<Slot, Process>,
    /// Of its daemon.
    pub(crate) part: PartHolder,
}

impl Machine {
    pub(crate) fn new(random: &mut Random, timing: Timing, drift: i64) -> Self {
        let clock = Clock {
            at: 0,
            shows: random.range(1, 1_000_000),
            drift_ppm: random.range(0, 2 * drift.unsigned_abs()) as i64 - drift,
        };
        let fence = Fence::new(timing);
        Self {
            clock,
            boot: 0,
            up: true,
            paused: None,
            may_pause_at: 0,
            daemon: None,
            began: None,
            daemon_epoch: 0,
            stopped: false,
            inbox: Vec::new(),
            emergency: EmergencyThread::default(),
            open: BTreeSet::new(),
            late: BTreeSet::new(),
            kept: fence.kept(),
            fence: Some(fence),
            shim_epoch: 0,
            shim_may_crash_at: 0,
            shim_inbox: Vec::new(),
            ticks_at: None,
            orders_at: 0,
            news_at: 0,
            cut_out: false,
            cut_in: false,
            processes: BTreeMap::new(),
            part: PartHolder::default(),
        }
    }

    /// Whether its daemon can do anything.
    pub(crate) fn is_awake(&self) -> bool {
        self.daemon.is_some() && !self.stopped && self.paused.is_none()
    }
}

impl World {
    pub(crate) fn clock(&self, node: usize) -> BootTime {
        let machine = &self.machines[node];
        let now = match machine.paused {
            Some((since, false)) => since,
            _ => self.now,
        };
        BootTime(machine.clock.read(now))
    }

    /// An event for the daemon, if it is still the one meant, over the connection meant.
    pub(crate) fn deliver(&mut self, node: usize, epoch: u64, shim: Option<u64>, event: Event) {
        let machine = &self.machines[node];
        if machine.daemon_epoch != epoch || shim.is_some_and(|shim| machine.shim_epoch != shim) {
            return;
        }
        if let Event::StoreAnswer { op, .. } = event {
            let machine = &mut self.machines[node];
            if !machine.open.remove(&op) && !machine.late.remove(&op) {
                return;
            }
        }
        let Some(event) = self.part_answered(node, event) else {
            return;
        };
        self.daemon(node, event);
    }

    pub(crate) fn daemon(&mut self, node: usize, event: Event) {
        let now = self.clock(node);
        let machine = &mut self.machines[node];
        let Some(daemon) = &mut machine.daemon else {
            return;
        };
        if machine.stopped || machine.paused.is_some() {
            if !matches!(event, Event::Tick) {
                machine.inbox.push(event);
            }
            return;
        }
        if machine.emergency.closed && matches!(event, Event::EnsureAsked(_)) {
            return;
        }
        let shown = format_unless_idle(&event);
        let actions = daemon.on(now, event);
        if let Some(shown) = shown {
            self.note(|| format!("n{node} daemon hears {}", shown()));
        }
        for action in actions {
            self.act(node, now, action);
        }
    }

    fn act(&mut self, node: usize, now: BootTime, action: Action) {
        let idle = matches!(
            action,
            Action::Store { .. } | Action::SetDeadline(_) | Action::Forward { .. }
        );
        if !idle {
            self.note(|| format!("n{node} daemon {action:?}"));
        }
        let order = match action {
            Action::Store { op, request } => return self.request(node, now, op, request),
            Action::Forward { session, owner } => {
                if let Some(to) = self.names.iter().position(|name| *name == owner) {
                    let epoch = self.machines[to].daemon_epoch;
                    let event = Event::EnsureAsked(session);
                    self.soon(1, 20, Ev::Daemon(to, epoch, None, event));
                }
                return;
            }
            Action::Start(slot) => {
                if !self.may_send(node, &slot) {
                    return;
                }
                self.daemon(node, Event::StartSent(slot.clone()));
                self.take_address(node, &slot);
                FenceEvent::Open(slot)
            }
            Action::Ended(slot) => return self.daemon(node, Event::DeathCertificate(slot)),
            Action::Kill(slot) => FenceEvent::Condemn(slot),
            Action::Forget(slot) => FenceEvent::Forget(slot),
            Action::SetDeadline(deadline) => FenceEvent::Extend(deadline),
            Action::Thaw { deadline, slots } => FenceEvent::Thaw { deadline, slots },
            Action::FreezeAll => {
                let incarnation = self.machines[node].daemon.as_ref();
                let incarnation = incarnation.map_or(0, NodeProtocol::incarnation);
                self.checker.gives_up(node, incarnation);
                FenceEvent::FreezeAll
            }
        };
        if self.machines[node].fence.is_some() {
            let delay = self.socket_delay();
            let machine = &mut self.machines[node];
            machine.orders_at = machine.orders_at.max(self.now + delay);
            let (delay, epoch) = (machine.orders_at - self.now, machine.shim_epoch);
            self.at(delay, Ev::Shim(node, epoch, order));
        }
    }

    fn socket_delay(&mut self) -> u64 {
        match self.random.percent(2) && !self.only_outages {
            true => self.random.range(1, 300),
            false => self.random.range(0, 4),
        }
    }

    /// From the shim to its daemon.
    fn tell(&mut self, node: usize, event: Event) {
        let delay = self.socket_delay();
        let machine = &mut self.machines[node];
        machine.news_at = machine.news_at.max(self.now + delay);
        let (delay, epoch) = (machine.news_at - self.now, machine.daemon_epoch);
        let shim = Some(machine.shim_epoch);
        self.at(delay, Ev::Daemon(node, epoch, shim, event));
    }

    pub(crate) fn shim(&mut self, node: usize, event: FenceEvent) {
        let now = self.clock(node);
        let machine = &mut self.machines[node];
        let Some(fence) = &mut machine.fence else {
            return;
        };
        if machine.paused.is_some() {
            machine.shim_inbox.push(event);
            return;
        }
        let shown = match event {
            FenceEvent::Tick | FenceEvent::Extend(_) => None,
            _ => Some(format!("{event:?}")),
        };
        let actions = fence.on(now, event);
        machine.kept = fence.kept();
        if let Some(shown) = shown {
            self.note(|| format!("n{node} shim hears {shown}"));
        }
        for action in actions {
            self.note(|| format!("n{node} shim {action:?}"));
            match action {
                FenceAction::Opened(slot) => self.create(node, now, slot),
                // A start that was refused has come to nothing.
                FenceAction::Refused(slot) | FenceAction::Certificate(slot) => {
                    self.tell(node, Event::DeathCertificate(slot));
                }
                FenceAction::Fired => {
                    self.fence_fired(node);
                    self.tell(node, Event::FenceFired);
                }
                FenceAction::Freeze(slot) => self.freeze(node, slot),
                FenceAction::Thaw(slot) => self.thaw(node, now, &slot),
                FenceAction::Kill(slot) => self.kill(node, &slot),
            }
        }
        self.set_timer(node);
    }

    /// A tick for the shim when its fence asks for one, and up to 20 ms late.
    fn set_timer(&mut self, node: usize) {
        let late = self.random.range(1, 20);
        let clock = self.clock(node);
        let machine = &mut self.machines[node];
        let Some(wake) = machine.fence.as_ref().and_then(Fence::next_wake) else {
            return;
        };
        let passes = wake.since(clock) as i64;
        let passes = passes - passes * machine.clock.drift_ppm / 1_000_000;
        let at = self.now + passes.unsigned_abs() + late;
        if machine.ticks_at.is_none_or(|ticks| at < ticks) {
            machine.ticks_at = Some(at);
            let boot = machine.boot;
            self.at(at - self.now, Ev::ShimTick(node, boot));
        }
    }

    pub(crate) fn daemon_dies(&mut self, node: usize) {
        self.note(|| format!("n{node} daemon dies"));
        let machine = &mut self.machines[node];
        machine.daemon = None;
        machine.began = None;
        machine.daemon_epoch += 1;
        machine.stopped = false;
        machine.inbox.clear();
        machine.emergency = EmergencyThread::default();
        machine.open.clear();
        machine.late.clear();
        machine.part = PartHolder::default();
    }

    pub(crate) fn watchers(&self, node: usize) -> impl Iterator<Item = usize> + use<> {
        let nodes = self.names.len();
        let others = (1..nodes).take(WATCHED);
        others.map(move |step| (node + nodes - step) % nodes)
    }

    /// Whom a node watches where that does not change.
    pub(crate) fn watched(&self, node: usize) -> Vec<NodeName> {
        let names = &self.names;
        let others = (1..names.len()).take(WATCHED);
        others
            .map(|step| names[(node + step) % names.len()].clone())
            .collect()
    }

    /// The daemon is told whom it watches from now on, if it can hear anything.
    pub(crate) fn watch(&mut self, node: usize, others: &[NodeName]) {
        let now = self.clock(node);
        let machine = &mut self.machines[node];
        if machine.stopped || machine.paused.is_some() {
            return;
        }
        if let Some(daemon) = &mut machine.daemon {
            daemon.set_observed(now, others);
            self.note(|| format!("n{node} watches {others:?}"));
            self.daemon(node, Event::Tick);
        }
    }

    /// The times of a node's next daemon: in some fleets every other node's change again and again.
    fn next_times(&self, node: usize) -> Timing {
        let changes = self.changes_times && node.is_multiple_of(2);
        if changes && self.machines[node].daemon_epoch % 3 != 1 {
            return Timing {
                fence_ms: LONG_FENCE_MS,
                takeover_ms: LONG_TAKEOVER_MS,
                ..self.timing
            };
        }
        self.timing
    }

    /// A daemon begins once its shim has told what it holds.
    pub(crate) fn daemon_up(&mut self, node: usize) {
        let now = self.clock(node);
        let observed = self.watched(node);
        let name = self.names[node].clone();
        let timing = self.next_times(node);
        let machine = &mut self.machines[node];
        if machine.daemon.is_some() || !machine.up {
            return;
        }
        let Some(fence) = machine.fence.as_ref().filter(|_| machine.paused.is_none()) else {
            return self.at(100, Ev::DaemonUp(node));
        };
        machine.daemon_epoch += 1;
        let first_attempt = machine.daemon_epoch << 32;
        let mut view = fence.view();
        // A shim tells them in the order of their names.
        if machine.daemon_epoch % 2 == 1 {
            view.reverse();
        }
        machine.emergency = EmergencyThread::adopting(&view);
        let daemon = NodeProtocol::new(name, &observed, timing, now, first_attempt, view);
        machine.daemon = Some(daemon);
        self.checker.times(node, timing.fence_ms);
        let machine = &mut self.machines[node];
        machine.began = Some(self.now);
        self.note(|| format!("n{node} daemon begins"));
        self.stir_rejoin(node);
    }

    pub(crate) fn shim_dies(&mut self, node: usize) {
        self.note(|| format!("n{node} shim dies"));
        let machine = &mut self.machines[node];
        machine.fence = None;
        machine.shim_epoch += 1;
        machine.shim_inbox.clear();
        machine.ticks_at = None;
    }

    pub(crate) fn shim_up(&mut self, node: usize) {
        let now = self.clock(node);
        let machine = &mut self.machines[node];
        if machine.fence.is_some() || !machine.up {
            return;
        }
        if machine.paused.is_some() {
            return self.at(100, Ev::ShimUp(node));
        }
        let found = machine.processes.iter().map(|(slot, p)| p.seen(slot));
        let fence = Fence::restored(self.timing, machine.kept, now, found.collect());
        let (fired, slots) = (fence.has_fired(), fence.view());
        machine.fence = Some(fence);
        self.note(|| format!("n{node} shim begins"));
        self.tell(node, Event::ShimConnected { fired, slots });
        self.shim(node, FenceEvent::Tick);
    }

    pub(crate) fn daemon_continues(&mut self, node: usize) {
        let machine = &mut self.machines[node];
        machine.stopped = false;
        if machine.paused.is_none() {
            for event in std::mem::take(&mut machine.inbox) {
                self.daemon(node, event);
            }
        }
    }

    pub(crate) fn machine_pauses(&mut self, node: usize, seen: bool) {
        self.note(|| format!("n{node} pauses, seen by its clock: {seen}"));
        self.machines[node].paused = Some((self.now, seen));
        self.judge_all(node);
    }

    pub(crate) fn machine_continues(&mut self, node: usize) {
        let now = self.now;
        let machine = &mut self.machines[node];
        let Some((since, seen)) = machine.paused.take() else {
            return;
        };
        if seen {
            self.checker.paused(node, now - since);
        } else {
            machine.clock = Clock {
                at: now,
                shows: machine.clock.read(since),
                ..machine.clock
            };
        }
        self.note(|| format!("n{node} continues"));
        self.judge_all(node);
        let inbox = std::mem::take(&mut self.machines[node].shim_inbox);
        for event in inbox {
            self.shim(node, event);
        }
        self.machines[node].ticks_at = None;
        self.set_timer(node);
        if !self.machines[node].stopped {
            self.daemon_continues(node);
        }
    }

    pub(crate) fn machine_dies(&mut self, node: usize) {
        self.note(|| format!("n{node} dies"));
        self.daemon_dies(node);
        self.shim_dies(node);
        let machine = &mut self.machines[node];
        machine.up = false;
        machine.paused = None;
        machine.boot += 1;
        let boot = machine.boot;
        self.checker.booted(node, boot);
        for (slot, _) in std::mem::take(&mut self.machines[node].processes) {
            self.checker.gone(&(node, slot));
        }
    }

    pub(crate) fn machine_up(&mut self, node: usize) {
        let (now, timing) = (self.now, self.timing);
        let machine = &mut self.machines[node];
        machine.up = true;
        machine.clock = Clock {
            at: now,
            shows: 1,
            ..machine.clock
        };
        let fence = Fence::new(timing);
        machine.kept = fence.kept();
        machine.fence = Some(fence);
        self.note(|| format!("n{node} boots"));
        self.set_timer(node);
        let slow = if self.now < HEAL_MS { 5_000 } else { 100 };
        self.soon(10, slow, Ev::DaemonUp(node));
    }
}

/// What is worth a line in a trace.
fn format_unless_idle(event: &Event) -> Option<impl FnOnce() -> String + use<>> {
    let idle = matches!(
        event,
        Event::Tick
            | Event::EnsureAsked(_)
            | Event::StopAsked(_)
            | Event::StoreAnswer {
                answer: Answer::Values(_) | Answer::Committed,
                ..
            }
    );
    let event = (!idle).then(|| event.clone());
    event.map(|event| move || format!("{event:?}"))
}
