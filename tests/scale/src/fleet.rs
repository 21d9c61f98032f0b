//! The nodes of a large fleet, and what they ask of etcd.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::{
    Action, Answer, BootTime, Event, Key, NodeName, NodeProtocol, Request, SessionName, Slot, Value,
};
use conman_core::placement::{NodeBusy, NodeView};
use conman_proto::{NodeStanding, RuntimeKind};

use crate::daemon::{ANNOUNCE_AGAIN_MS, CHECK_MS, SCAN_IDLE_MS};
use crate::load::Counts;
use crate::sharing::Sharing;
use crate::{ScaleOptions, ScaleReport};

/// Between two reads of the nodes when something has changed, as `conman-etcd` has it, in milliseconds.
pub(crate) const HURRY_PAUSE_MS: u64 = 100;
/// How often a node looks at its own clock.
const TICK_MS: u64 = 200;
/// From a request to etcd and back on the network.
pub(crate) const ROUND_TRIP_MS: u64 = 1;
/// From a kill to its certificate.
const DEATH_MS: u64 = 100;
/// From a notice to the end of the machine.
pub(crate) const BUDGET_MS: u64 = 25_000;
/// The time before the first notice; its last part counts as quiet.
const WARM_UP_MS: u64 = 10_000;
const QUIET_MS: u64 = 6_000;
/// The end of a simulation in which not everything is served.
const END_MS: u64 = 240_000;

pub(crate) enum Job {
    Answer(usize, u64, Request),
    Nodes(usize),
    Page(usize),
    Announced(usize),
    Delivered { news: bool },
    Other,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Due {
    Tick(usize),
    Look(usize),
    Check(usize),
    Answer(usize, u64, u64),
    Died(usize, Slot),
    Leave(usize),
    Gone(usize),
    Started(usize, usize),
}

pub(crate) struct Member {
    pub(crate) name: NodeName,
    pub(crate) protocol: NodeProtocol,
    pub(crate) up: bool,
    pub(crate) leaving: bool,
    pub(crate) is_reading_nodes: bool,
    pub(crate) hurry: bool,
    pub(crate) looked_ms: u64,
    pub(crate) announced_ms: u64,
    pub(crate) dirty: bool,
    /// Losses that its last read showed, and those that it has scanned for.
    pub(crate) known_losses: usize,
    pub(crate) scanned_losses: usize,
    pub(crate) changed_ms: Option<u64>,
    /// Begin of the scan under way, the pages that are left, and the sessions that it can find.
    pub(crate) scan: Option<(u64, usize, usize)>,
    pub(crate) scanned_ms: u64,
    pub(crate) scan_took_ms: u64,
    /// Released sessions that are this node's to restart.
    pub(crate) to_restart: Vec<usize>,
    /// Sessions that it has begun to start.
    pub(crate) held: Vec<usize>,
    pub(crate) starts_end_ms: u64,
    pub(crate) renewals: BTreeMap<u64, u64>,
    pub(crate) frozen: bool,
}

pub(crate) struct Fleet {
    pub(crate) options: ScaleOptions,
    pub(crate) random: fastrand::Rng,
    pub(crate) now_us: u64,
    pub(crate) due: BinaryHeap<Reverse<(u64, u64, Due)>>,
    pub(crate) number: u64,
    pub(crate) etcd: Sharing<Job>,
    pub(crate) answers: HashMap<(usize, u64), Answer>,
    pub(crate) store: HashMap<Key, Value>,
    pub(crate) sessions_stored: usize,
    pub(crate) members: Vec<Member>,
    pub(crate) views: Vec<NodeView>,
    pub(crate) index: HashMap<NodeName, usize>,
    pub(crate) sessions: HashMap<SessionName, usize>,
    pub(crate) losses: usize,
    pub(crate) counts: Counts,
    pub(crate) lost: usize,
    pub(crate) served: Vec<bool>,
    /// Lost sessions that do not run again yet, and those that do.
    pub(crate) unserved: usize,
    pub(crate) served_count: usize,
    /// Notices that are still to come.
    pub(crate) to_come: usize,
    frozen: usize,
    pub(crate) last_served_ms: u64,
    pub(crate) slowest_renewal_ms: u64,
    pub(crate) placing: (Duration, u32),
    /// Candidates of the latest placement, for those sessions that share it.
    pub(crate) candidates: Vec<usize>,
}

pub(crate) fn session_name(index: usize) -> String {
    format!("s{index}")
}

impl Fleet {
    pub(crate) fn new(options: ScaleOptions) -> Self {
        let mut fleet = Self {
            random: fastrand::Rng::with_seed(options.seed),
            now_us: 0,
            due: BinaryHeap::new(),
            number: 0,
            etcd: Sharing::new(),
            answers: HashMap::new(),
            store: HashMap::new(),
            sessions_stored: options.nodes * options.sessions_each,
            members: Vec::new(),
            views: Vec::new(),
            index: HashMap::new(),
            sessions: HashMap::new(),
            losses: 0,
            counts: Counts::default(),
            lost: 0,
            served: vec![true; options.nodes * options.sessions_each],
            unserved: 0,
            served_count: 0,
            to_come: 0,
            frozen: 0,
            last_served_ms: 0,
            slowest_renewal_ms: 0,
            placing: (Duration::ZERO, 0),
            candidates: Vec::new(),
            options,
        };
        let names: Vec<NodeName> = (0..options.nodes).map(|n| format!("n{n}").into()).collect();
        for (node, name) in names.iter().enumerate() {
            let observed = fleet.observed(&names, node);
            fleet.index.insert(name.clone(), node);
            let protocol = NodeProtocol::new(
                name.clone(),
                &observed,
                options.timing,
                BootTime(1),
                1,
                vec![],
            );
            fleet.members.push(Member::new(name.clone(), protocol));
            fleet.views.push(view(name, options.sessions_each));
        }
        for node in 0..options.nodes {
            fleet.settle(node);
        }
        fleet
    }

    /// The nodes that this one observes: as many as observe it, on the average.
    fn observed(&mut self, names: &[NodeName], node: usize) -> Vec<NodeName> {
        let most = self.options.observers.min(names.len() - 1);
        let mut observed: Vec<NodeName> = Vec::new();
        while observed.len() < most {
            let other = self.random.usize(0..names.len());
            if other != node && !observed.contains(&names[other]) {
                observed.push(names[other].clone());
            }
        }
        observed
    }

    /// Lets a node join and start its sessions, with an etcd that takes no time.
    fn settle(&mut self, node: usize) {
        let each = self.options.sessions_each;
        let own = (node * each..(node + 1) * each).map(|index| {
            let name: SessionName = session_name(index).into();
            (index, name)
        });
        let own: Vec<(usize, SessionName)> = own.collect();
        for (index, name) in &own {
            self.sessions.insert(name.clone(), *index);
            self.members[node].held.push(*index);
        }
        let asked = own.into_iter().map(|(_, name)| Event::EnsureAsked(name));
        let mut events: Vec<Event> = asked.chain([Event::Tick]).collect();
        while let Some(event) = events.pop() {
            let now = BootTime(1);
            for action in self.members[node].protocol.on(now, event) {
                match action {
                    Action::Store { op, request } => {
                        let answer = self.carry_out(node, &request);
                        events.push(Event::StoreAnswer { op, answer });
                    }
                    Action::Start(slot) => events.push(Event::StartSent(slot)),
                    _ => {}
                }
            }
        }
        let phase = self.random.u64(0..=TICK_MS * 1_000);
        self.at_us(phase, Due::Tick(node));
        let phase = self.random.u64(0..=1_000_000 * self.options.intervals);
        self.at_us(phase, Due::Look(node));
        let phase = self.random.u64(0..=CHECK_MS * 1_000);
        self.at_us(phase, Due::Check(node));
        let back = self.random.u64(0..=SCAN_IDLE_MS);
        self.members[node].scanned_ms = SCAN_IDLE_MS - back;
        self.members[node].announced_ms = self.random.u64(0..=ANNOUNCE_AGAIN_MS);
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.now_us / 1_000
    }

    /// Clocks of nodes begin at 1.
    fn clock(&self) -> BootTime {
        BootTime(self.now_ms() + 1)
    }

    pub(crate) fn at_us(&mut self, us: u64, due: Due) {
        self.number += 1;
        self.due.push(Reverse((us, self.number, due)));
    }

    pub(crate) fn after_ms(&mut self, ms: u64, due: Due) {
        self.at_us(self.now_us + ms * 1_000, due);
    }

    pub(crate) fn run(mut self) -> ScaleReport {
        let first_us = WARM_UP_MS * 1_000;
        let lost = self.options.nodes * self.options.lost_percent / 100;
        self.to_come = lost;
        for node in 0..lost {
            let at_us = first_us + self.random.u64(0..=self.options.within_ms * 1_000);
            self.at_us(at_us, Due::Leave(node));
        }
        let (mut quiet_from, mut quiet_to) = (None, None);
        while let Some(next_us) = self.next_us() {
            if next_us > END_MS * 1_000 {
                break;
            }
            for (mark, at_us) in [
                (&mut quiet_from, first_us - QUIET_MS * 1_000),
                (&mut quiet_to, first_us),
            ] {
                if mark.is_none() && next_us >= at_us {
                    self.counts.busy_us = self.etcd.busy_us();
                    *mark = Some((self.counts, next_us));
                }
            }
            self.now_us = next_us;
            self.step();
            if self.is_over() || self.has_frozen() {
                break;
            }
        }
        self.counts.busy_us = self.etcd.busy_us();
        let start = quiet_to.unwrap_or_default();
        let before = quiet_from.unwrap_or_default();
        let is_served = self.is_over();
        ScaleReport {
            nodes: self.options.nodes,
            intervals: self.options.intervals,
            observers: self.options.observers,
            quiet: start.0.since(&before.0, (start.1 - before.1) as f64),
            storm: self.counts.since(&start.0, (self.now_us - start.1) as f64),
            served_after_ms: is_served.then(|| self.last_served_ms.saturating_sub(WARM_UP_MS)),
            lost_sessions: self.lost,
            served_sessions: self.served_count,
            frozen_nodes: self.frozen,
            slowest_renewal_ms: self.slowest_renewal_ms,
            placement_us: self.placing.0.as_secs_f64() * 1e6 / f64::from(self.placing.1.max(1)),
        }
    }

    /// All notices have come, and all sessions run.
    fn is_over(&self) -> bool {
        self.to_come == 0 && self.unserved == 0
    }

    /// A fleet of which a tenth has frozen does not recover: its nodes read all records when they rejoin.
    fn has_frozen(&self) -> bool {
        self.frozen * 10 > self.options.nodes
    }

    fn next_us(&self) -> Option<u64> {
        let due = self.due.peek().map(|Reverse((at, ..))| *at);
        let etcd = self.etcd.next_us().map(|at| at.ceil() as u64);
        due.into_iter().chain(etcd).min()
    }

    fn step(&mut self) {
        let etcd = self.etcd.next_us().map(|at| at.ceil() as u64);
        let due = self.due.peek().map(|Reverse((at, ..))| *at);
        if etcd.is_some_and(|at| due.is_none_or(|due| at <= due)) {
            let done = self.etcd.finish(self.now_us as f64);
            return done.map_or((), |job| self.done(job));
        }
        let Some(Reverse((_, _, due))) = self.due.pop() else {
            return;
        };
        match due {
            Due::Tick(node) => {
                self.tick(node);
            }
            Due::Look(node) => self.look(node),
            Due::Check(node) => self.check(node),
            Due::Answer(node, op, sent_ms) => self.answered(node, op, sent_ms),
            Due::Died(node, slot) => self.on(node, Event::DeathCertificate(slot)),
            Due::Leave(node) => self.leave(node),
            Due::Gone(node) => self.members[node].up = false,
            Due::Started(node, session) => self.started(node, session),
        }
    }

    fn tick(&mut self, node: usize) {
        if !self.members[node].up {
            return;
        }
        let now = self.clock();
        let protocol = &self.members[node].protocol;
        let fires = protocol.is_live() && now >= protocol.deadline();
        if fires {
            self.frozen += usize::from(!std::mem::replace(&mut self.members[node].frozen, true));
            self.on(node, Event::FenceFired);
        }
        self.on(node, Event::Tick);
        self.after_ms(TICK_MS, Due::Tick(node));
    }

    pub(crate) fn on(&mut self, node: usize, event: Event) {
        if !self.members[node].up {
            return;
        }
        let now = self.clock();
        for action in self.members[node].protocol.on(now, event) {
            match action {
                Action::Store { op, request } => self.request(node, op, request),
                Action::Start(slot) => self.start(node, slot),
                Action::Kill(slot) => self.after_ms(DEATH_MS, Due::Died(node, slot)),
                Action::Ended(slot) => self.on(node, Event::DeathCertificate(slot)),
                Action::Forget(_)
                | Action::SetDeadline(_)
                | Action::Thaw { .. }
                | Action::FreezeAll
                | Action::Forward { .. } => {}
            }
        }
    }
}

impl Member {
    pub(crate) fn takes_sessions(&self) -> bool {
        self.up && !self.leaving
    }

    fn new(name: NodeName, protocol: NodeProtocol) -> Self {
        Self {
            name,
            protocol,
            up: true,
            leaving: false,
            is_reading_nodes: false,
            hurry: false,
            looked_ms: 0,
            announced_ms: 0,
            dirty: false,
            known_losses: 0,
            scanned_losses: 0,
            changed_ms: None,
            scan: None,
            scanned_ms: 0,
            scan_took_ms: 0,
            to_restart: Vec::new(),
            held: Vec::new(),
            starts_end_ms: 0,
            renewals: BTreeMap::new(),
            frozen: false,
        }
    }
}

fn view(name: &Arc<str>, sessions: usize) -> NodeView {
    let room = u32::try_from(sessions)
        .unwrap_or(u32::MAX)
        .saturating_mul(4);
    NodeView {
        name: name.to_string(),
        standing: NodeStanding::Live,
        draining: false,
        reachable: true,
        cut_off: false,
        announced_ago_ms: 0,
        labels: BTreeMap::new(),
        templates: Vec::new(),
        max_sessions: room,
        runtime: Some(RuntimeKind::Native),
        runtimes: Some([RuntimeKind::Native].into()),
        ailing: std::collections::BTreeSet::new(),
        load: NodeBusy {
            sessions: room / 4,
            ..NodeBusy::default()
        },
    }
}
