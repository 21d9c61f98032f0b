//! True time, the queue of events, and the requests to the fleet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use conman_core::ownership::{
    Event, FenceEvent, Key, NodeName, Request, SessionName, Slot, Stake, Timing, Value,
};

use crate::checker::Checker;
use crate::grey::{GREY_FROM, Grey, Refusal};
use crate::machine::Machine;
use crate::parts::PARTS_FROM;
use crate::preempting::Emergency;
use crate::random::Random;
use crate::{Pauses, Report};

/// Faults until here; then everything is healed.
pub(crate) const HEAL_MS: u64 = 60_000;
/// Long enough for the longest fault still under way, a rejoin and a takeover.
const END_MS: u64 = 110_000;
const TRACE_LINES: usize = 400;
/// Between two looks of the checker at what runs.
const LOOK_MS: u64 = 50;
/// Which seeds of sixteen are of fleets in which who watches whom changes all the time, as it does
/// while nodes come, go and fall silent.
const RESTLESS: [u64; 4] = [7, 10, 11, 14];

/// From this seed on, a fleet's times are derived, for hosts that have stood still for less than so many
/// steps. Earlier seeds have longer times, and are pinned for what they catch.
pub(crate) const DERIVED_FROM: u64 = 1_000_000;
/// From this seed on, notices of preemption are a common fault. In earlier ones, which are pinned as
/// well, the kernel kills everything at once.
pub(crate) const PREEMPTED_FROM: u64 = 2_000_000;
const STALLS: u64 = 3;
const STALL_STEP_MS: u64 = 1_000;

/// Of sixteen seeds, those in which the times of every other node are changed.
const CHANGES_TIMES: [u64; 5] = [7, 8, 10, 11, 14];

#[derive(Debug, Clone)]
pub(crate) enum Ev {
    DaemonTick(usize),
    /// (node, boot)
    ShimTick(usize, u64),
    /// To a daemon: (node, its epoch, its shim's epoch if that matters, event).
    Daemon(usize, u64, Option<u64>, Event),
    /// To a shim: (node, its epoch, event).
    Shim(usize, u64, FenceEvent),
    /// A request reaches the store: (node, daemon's epoch, op, request).
    Arrive(usize, u64, u64, Request),
    Timeout(usize, u64, u64),
    /// In the kernel: (node, boot, slot).
    Appear(usize, u64, Slot),
    /// (node, boot, slot, freeze)
    Frozen(usize, u64, Slot, u64),
    Dead(usize, u64, Slot),
    Exiting(usize, u64, Slot),
    Ask,
    /// A node is asked to delete the record of a session.
    Forget(usize, SessionName),
    /// To a daemon's emergency thread: (node, the daemon's epoch, event).
    Emergency(usize, u64, Emergency),
    /// The machine stops, as it was said that it would.
    MachineStops(usize),
    Look,
    Fault,
    /// A node learns of others whom it has to watch.
    Watches(usize),
    DaemonDies(usize),
    DaemonUp(usize),
    ShimUp(usize),
    DaemonContinues(usize),
    MachineContinues(usize),
    MachineUp(usize),
    /// (node, for how long)
    RequestsLost(usize, u64),
    RequestsPass(usize),
    AnswersPass(usize),
    StoreIsFast,
    StoreAccepts,
    /// Everything has to be thawed: the registry refuses nothing since then.
    Thawed(u64),
    Heal,
}

pub(crate) struct World {
    pub(crate) now: u64,
    sequence: u64,
    queue: BTreeMap<(u64, u64), Ev>,
    pub(crate) random: Random,
    pub(crate) timing: Timing,
    pub(crate) machines: Vec<Machine>,
    pub(crate) names: Vec<NodeName>,
    sessions: Vec<SessionName>,
    /// Asked for until the healing, then deleted for good.
    retired: SessionName,
    pub(crate) store: BTreeMap<Key, Value>,
    pub(crate) store_down_until: u64,
    pub(crate) grey: Grey,
    /// The registry's round trip, besides the network's.
    pub(crate) slow_ms: u64,
    pub(crate) refusal: Option<Refusal>,
    /// Since when it refuses; until everything is thawed again.
    pub(crate) refuses_since: Option<u64>,
    pub(crate) accepts_since: u64,
    /// Percent of the messages to or from the store that are lost.
    pub(crate) lossy: u64,
    /// Nothing but outages of the store goes wrong: nothing may be lost.
    pub(crate) only_outages: bool,
    /// Every other node's daemons have longer times now and then.
    pub(crate) changes_times: bool,
    /// Nothing but deaths of machines goes wrong: each is noticed in time.
    pub(crate) only_deaths: bool,
    /// Nodes are preempted by notices.
    pub(crate) preempts: bool,
    /// Number of parts of the pool of addresses; 0 without one.
    pub(crate) parts: u32,
    pub(crate) pauses: Pauses,
    pub(crate) checker: Checker,
    tracing: bool,
    trace: VecDeque<String>,
}

/// The times of a fleet.
fn times(seed: u64) -> Timing {
    let derived = Timing::default();
    if seed >= DERIVED_FROM {
        return derived.derive_takeover(seed / 16 % STALLS * STALL_STEP_MS);
    }
    Timing {
        fence_ms: 5_000,
        kill_ms: 2_000,
        takeover_ms: 12_000,
        ..derived
    }
}

impl World {
    pub(crate) fn run(seed: u64, pauses: Pauses, tracing: bool) -> Report {
        let mut world = Self::new(seed, pauses, tracing);
        while let Some(((now, _), event)) = world.queue.pop_first() {
            if now > END_MS || world.checker.violation.is_some() {
                break;
            }
            world.now = now;
            world.step(event);
        }
        world.finish();
        Report {
            seed,
            violation: world.checker.violation,
            trace: world.trace.into(),
            takeovers: world.checker.takeovers,
            starts: world.checker.starts,
        }
    }

    fn new(seed: u64, pauses: Pauses, tracing: bool) -> Self {
        let (has_parts, seed) = (seed >= PARTS_FROM, seed % PARTS_FROM);
        let mut random = Random(seed);
        let assumed = pauses == Pauses::Assumed;
        let only_outages = assumed && seed % 16 == 5 && seed < GREY_FROM;
        let only_deaths = assumed && seed % 16 == 15 && seed < GREY_FROM;
        let restless = pauses == Pauses::Assumed && RESTLESS.contains(&(seed % 16));
        let mut timing = times(seed);
        if !only_outages {
            timing.frozen_max_ms = 40_000;
        }
        let count = random.range(2, 5) as usize;
        let drift = i64::try_from(timing.drift_ppm).unwrap_or(0);
        let machines = (0..count).map(|_| Machine::new(&mut random, timing, drift));
        let machines = machines.collect();
        let names = (0..count).map(|i| format!("n{i}").into()).collect();
        let sessions = (0..random.range(1, 4)).map(|i| format!("s{i}").into());
        let sessions = sessions.collect();
        let grey = match pauses {
            Pauses::Assumed => Grey::of(seed),
            Pauses::Beyond => Grey::Never,
        };
        let lossy = match random.range(0, 9) {
            _ if only_outages || only_deaths || grey.is_alone() => 0,
            0..=3 => 0,
            4..=7 => random.range(1, 3),
            _ => random.range(3, 15),
        };
        let mut world = Self {
            now: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            random,
            timing,
            machines,
            names,
            sessions,
            retired: "retired".into(),
            store: BTreeMap::new(),
            store_down_until: 0,
            grey,
            slow_ms: 0,
            refusal: None,
            refuses_since: None,
            accepts_since: 0,
            lossy,
            only_outages,
            changes_times: pauses == Pauses::Assumed && CHANGES_TIMES.contains(&(seed % 16)),
            only_deaths,
            preempts: (PREEMPTED_FROM..GREY_FROM).contains(&seed),
            // One node has to wait until another is lost.
            parts: u32::from(has_parts) * (count as u32 - 1),
            pauses,
            checker: Checker::new(count, timing, only_outages),
            tracing,
            trace: VecDeque::new(),
        };
        for node in 0..count {
            world.at(0, Ev::DaemonUp(node));
            world.at(1, Ev::DaemonTick(node));
            world.at(1, Ev::ShimTick(node, 0));
            if restless {
                world.at(1_000, Ev::Watches(node));
            }
        }
        world.at(500, Ev::Ask);
        // Every fleet of a registry that is only slow has joined by then.
        world.at(if grey.is_alone() { 8_000 } else { 3_000 }, Ev::Fault);
        world.at(LOOK_MS, Ev::Look);
        world.at(HEAL_MS, Ev::Heal);
        world
    }

    pub(crate) fn at(&mut self, delay: u64, event: Ev) {
        self.queue.insert((self.now + delay, self.sequence), event);
        self.sequence += 1;
    }

    pub(crate) fn soon(&mut self, low: u64, high: u64, event: Ev) {
        let delay = self.random.range(low, high);
        self.at(delay, event);
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if self.tracing {
            if self.trace.len() == TRACE_LINES {
                self.trace.pop_front();
            }
            self.trace.push_back(format!("{:>7} {}", self.now, line()));
        }
    }

    fn step(&mut self, event: Ev) {
        match event {
            Ev::DaemonTick(node) => {
                self.daemon(node, Event::Tick);
                self.work_on_parts(node);
                self.soon(60, 140, Ev::DaemonTick(node));
            }
            Ev::ShimTick(node, boot) => {
                if self.machines[node].boot == boot {
                    self.machines[node].ticks_at = None;
                    self.shim(node, FenceEvent::Tick);
                }
            }
            Ev::Daemon(node, epoch, shim, event) => self.deliver(node, epoch, shim, event),
            Ev::Shim(node, epoch, event) => {
                if self.machines[node].shim_epoch == epoch {
                    self.shim(node, event);
                }
            }
            Ev::Arrive(node, epoch, op, request) => self.arrive(node, epoch, op, &request),
            Ev::Timeout(node, epoch, op) => self.time_out(node, epoch, op),
            Ev::Appear(node, boot, slot) => self.appear(node, boot, slot),
            Ev::Frozen(node, boot, slot, freeze) => self.frozen(node, boot, slot, freeze),
            Ev::Exiting(node, boot, slot) => self.exiting(node, boot, &slot),
            Ev::Dead(node, boot, slot) => self.dead(node, boot, slot),
            Ev::Ask => self.ask(),
            Ev::Forget(node, session) => self.forget(node, &session),
            Ev::Emergency(node, epoch, event) => self.emergency(node, epoch, event),
            Ev::MachineStops(node) if self.machines[node].up && self.now < HEAL_MS => {
                self.machine_crashes(node);
            }
            Ev::MachineStops(_) => {}
            Ev::Look => {
                for node in 0..self.machines.len() {
                    let clock = self.clock(node);
                    self.checker.look(node, clock.0);
                    if self.only_deaths && !self.machines[node].up {
                        self.look_for_takeover(node);
                    }
                }
                self.at(LOOK_MS, Ev::Look);
            }
            Ev::Fault => self.fault(),
            Ev::Watches(node) if self.now < HEAL_MS => {
                self.watch_others(node);
                self.soon(100, 6_000, Ev::Watches(node));
            }
            Ev::Watches(_) => {}
            Ev::DaemonDies(node) if self.machines[node].daemon.is_some() => {
                self.daemon_dies(node);
                self.soon(1, 1_000, Ev::DaemonUp(node));
            }
            Ev::DaemonDies(_) => {}
            Ev::DaemonUp(node) => self.daemon_up(node),
            Ev::ShimUp(node) => self.shim_up(node),
            Ev::DaemonContinues(node) => self.daemon_continues(node),
            Ev::MachineContinues(node) => self.machine_continues(node),
            Ev::MachineUp(node) => self.machine_up(node),
            Ev::RequestsLost(node, lasts) if self.now < HEAL_MS => {
                self.machines[node].cut_out = true;
                self.at(lasts, Ev::RequestsPass(node));
            }
            Ev::RequestsLost(..) => {}
            Ev::RequestsPass(node) => self.machines[node].cut_out = false,
            Ev::AnswersPass(node) => self.machines[node].cut_in = false,
            Ev::StoreIsFast => self.slow_ms = 0,
            Ev::StoreAccepts => self.store_accepts(),
            Ev::Thawed(since) => self.is_thawed(since),
            Ev::Heal => self.heal(),
        }
    }

    /// A dead machine is fenced in time if one that watches it lived all along.
    fn look_for_takeover(&mut self, dead: usize) {
        let began = |node: &usize| self.machines[*node].began.filter(|_| *node != dead);
        let began = self.watchers(dead).filter_map(|node| began(&node)).min();
        self.checker.look_for_takeover(dead, self.now, began);
    }

    pub(crate) fn every_session(&self) -> impl Iterator<Item = &SessionName> {
        self.sessions.iter().chain([&self.retired])
    }

    pub(crate) fn any_node(&mut self) -> usize {
        self.random.range(0, self.machines.len() as u64 - 1) as usize
    }

    fn ask(&mut self) {
        let node = self.any_node();
        let healing = self.now < HEAL_MS;
        let which = self.random.range(0, self.sessions.len() as u64) as usize;
        let session = self.sessions.get(which);
        let retires = session.is_none() && !healing;
        let session = session.unwrap_or(&self.retired).clone();
        let stops = healing && !self.only_outages && self.random.percent(6);
        let event = if stops || retires {
            self.checker.asked_to_end(&session);
            if retires || self.random.percent(60) {
                self.soon(1, 3_000, Ev::Forget(node, session.clone()));
            }
            Event::StopAsked(session)
        } else {
            Event::EnsureAsked(session)
        };
        self.daemon(node, event);
        self.soon(50, 300, Ev::Ask);
    }

    fn finish(&mut self) {
        let mut fences = BTreeSet::new();
        let mut daemons = BTreeSet::new();
        for (node, machine) in self.machines.iter().enumerate() {
            let held = machine.fence.iter().flat_map(|fence| fence.view());
            fences.extend(held.map(|view| (node, view.slot)));
            for session in self.sessions.iter().chain([&self.retired]) {
                let stake = machine
                    .daemon
                    .as_ref()
                    .and_then(|daemon| daemon.stake(session));
                if let Some(Stake::Held { generation } | Stake::Ending { generation, .. }) = stake {
                    let session = session.clone();
                    daemons.insert((
                        node,
                        Slot {
                            session,
                            generation,
                        },
                    ));
                }
            }
        }
        self.checker
            .finish(&self.sessions, &self.retired, &fences, &daemons);
    }
}
