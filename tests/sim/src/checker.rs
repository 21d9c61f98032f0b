//! What must hold, judged from true-time container runs and the store's history alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use conman_core::ownership::{
    Heartbeat, Key, NodeRecord, NodeState, OwnedState, Ownership, SessionName, Slot, Timing,
    Transaction, Value,
};

pub use crate::rule::{Rule, Violation};

/// A slot on a node.
pub(crate) type Container = (usize, Slot);

#[derive(Debug, Default)]
struct Node {
    boot: u64,
    /// F of its present daemon.
    fence_ms: u64,
    record: Option<NodeRecord>,
    /// When the heartbeat in the store got there, in true time.
    renewed_at: u64,
    /// Until when the node may act, on its own clock of this boot: counted from the send instant
    /// of the heartbeat in the store.
    until: Option<u64>,
    /// A pause that its clock saw may have kept the fence from acting for so long.
    paused_ms: u64,
    /// When it sent its latest renewals, in true time.
    renewals: VecDeque<u64>,
}

/// Renewals that a node may send within a second.
const MAX_RENEWALS: usize = 5;

#[derive(Debug)]
pub(crate) struct Checker {
    pub(crate) violation: Option<Violation>,
    pub(crate) takeovers: u64,
    pub(crate) starts: u64,
    timing: Timing,
    /// Nothing but outages of the store goes wrong.
    only_outages: bool,
    /// Asked to end.
    ending: BTreeSet<SessionName>,
    nodes: Vec<Node>,
    /// (boot, the node's clock) at which a heartbeat was sent, and F.
    sent: BTreeMap<(usize, u64, u64), (u64, u64, u64)>,
    sessions: BTreeMap<SessionName, Ownership>,
    highest: BTreeMap<SessionName, u64>,
    runnable: BTreeSet<Container>,
    /// Created and not dead, or yet to be created.
    possible: BTreeSet<Container>,
    /// Of those, what never runs again and shares nothing with another node.
    exiting: BTreeSet<Container>,
    /// The parts of which containers have their addresses.
    addresses: BTreeMap<Container, u32>,
}

/// A daemon that begins is live after this, with a store that answers.
const JOIN_MS: u64 = 1_000;
/// A read is sent so late, and so long under way.
const LOOK_DELAY_MS: u64 = 300;

/// `n<index>`
fn index(node: &str) -> usize {
    node[1..].parse().unwrap_or(usize::MAX)
}

impl Checker {
    pub(crate) fn new(nodes: usize, timing: Timing, only_outages: bool) -> Self {
        Self {
            violation: None,
            takeovers: 0,
            starts: 0,
            timing,
            only_outages,
            ending: BTreeSet::new(),
            nodes: (0..nodes).map(|_| Node::default()).collect(),
            sent: BTreeMap::new(),
            sessions: BTreeMap::new(),
            highest: BTreeMap::new(),
            runnable: BTreeSet::new(),
            possible: BTreeSet::new(),
            exiting: BTreeSet::new(),
            addresses: BTreeMap::new(),
        }
    }

    fn fail(&mut self, rule: Rule, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { rule, what: what() });
        }
    }

    /// A daemon begins whose F is this.
    pub(crate) fn times(&mut self, node: usize, fence_ms: u64) {
        self.nodes[node].fence_ms = fence_ms;
    }

    pub(crate) fn booted(&mut self, node: usize, boot: u64) {
        self.nodes[node].boot = boot;
        self.nodes[node].until = None;
        self.nodes[node].paused_ms = 0;
    }

    /// The machine stood still for `ms`, and its clock did not.
    pub(crate) fn paused(&mut self, node: usize, ms: u64) {
        self.nodes[node].paused_ms += ms;
    }

    fn past_deadline(&mut self, node: usize, clock: u64, what: impl FnOnce() -> String) {
        let until = self.nodes[node].until;
        if until.is_none_or(|until| clock >= until) {
            self.fail(Rule::PastDeadline, || {
                let what = what();
                format!("n{node} {what} at {clock} of its clock, its time ended at {until:?}")
            });
        }
    }

    /// A node sends a transaction.
    pub(crate) fn sends(&mut self, node: usize, clock: u64, transaction: &Transaction) {
        let boot = self.nodes[node].boot;
        for (key, value) in &transaction.write {
            match value {
                Some(Value::Heartbeat(Heartbeat {
                    incarnation,
                    attempt,
                })) => {
                    let fence_ms = self.nodes[node].fence_ms;
                    self.sent
                        .insert((node, *incarnation, *attempt), (boot, clock, fence_ms));
                }
                Some(Value::Session(record)) if record.state == OwnedState::Owned => {
                    self.past_deadline(node, clock, || format!("claims {key:?}"));
                }
                _ => {}
            }
        }
    }

    /// The same transaction, in true time: a registry that refuses must not be hammered.
    pub(crate) fn renews(&mut self, node: usize, now: u64, transaction: &Transaction) {
        let renewal = matches!(transaction.write[..], [(Key::Heartbeat(_), _)]);
        if !renewal {
            return;
        }
        let renewals = &mut self.nodes[node].renewals;
        renewals.push_back(now);
        if renewals.len() > MAX_RENEWALS
            && renewals
                .pop_front()
                .is_some_and(|first| now < first + 1_000)
        {
            self.fail(Rule::Hammers, || {
                format!("n{node} sends more than {MAX_RENEWALS} renewals a second")
            });
        }
    }

    /// A daemon takes its ownership for lost, and freezes everything.
    pub(crate) fn gives_up(&mut self, node: usize, incarnation: u64) {
        let state = NodeState::Live;
        let live = Some(NodeRecord { incarnation, state });
        if self.nodes[node].record == live {
            self.fail(Rule::FrozenWithoutNeed, || {
                format!("n{node} gives up incarnation {incarnation}, which is live")
            });
        }
    }

    pub(crate) fn frozen_without_need(&mut self, node: usize, what: &str) {
        self.fail(Rule::FrozenWithoutNeed, || {
            format!("n{node}'s fence has fired through {what}")
        });
    }

    pub(crate) fn thawed_late(&mut self, node: usize, after_ms: u64) {
        self.fail(Rule::ThawedLate, || {
            format!("n{node} is frozen {after_ms} ms after the registry refuses nothing")
        });
    }

    pub(crate) fn asked_to_end(&mut self, session: &SessionName) {
        self.ending.insert(session.clone());
    }

    /// The create is sent.
    pub(crate) fn creates(&mut self, container: Container, clock: u64) {
        self.past_deadline(container.0, clock, || format!("starts {:?}", container.1));
        self.possible.insert(container);
    }

    /// It has an address of this part.
    pub(crate) fn has_address(&mut self, container: Container, part: u32) {
        self.addresses.insert(container, part);
    }

    pub(crate) fn thaws(&mut self, container: &Container, clock: u64) {
        self.past_deadline(container.0, clock, || format!("thaws {:?}", container.1));
    }

    /// It does not exist and never will.
    pub(crate) fn gone(&mut self, container: &Container) {
        self.runnable.remove(container);
        self.exiting.remove(container);
        let asked = self.ending.contains(&container.1.session);
        if self.possible.remove(container) && self.only_outages && !asked {
            self.fail(Rule::LostToOutage, || format!("{container:?} is gone"));
        }
    }

    /// Every thread of it has begun to exit.
    pub(crate) fn exiting(&mut self, container: Container) {
        if self.possible.contains(&container) {
            self.exiting.insert(container);
        }
    }

    pub(crate) fn stops(&mut self, container: &Container) {
        self.runnable.remove(container);
    }

    pub(crate) fn runs(&mut self, container: Container) {
        if self.runnable.insert(container.clone()) {
            self.starts += 1;
            self.examine(&container);
        }
    }

    fn examine(&mut self, container: &Container) {
        let (node, slot) = container;
        let beside = |other: &&Container| other.1.session == slot.session && *other != container;
        if let Some(other) = self.runnable.iter().find(beside).cloned() {
            self.fail(Rule::Overlap, || {
                format!("{container:?} runs beside {other:?}")
            });
        }
        let part = self.addresses.get(container).copied();
        let shares = |other: &&Container| {
            part.is_some() && other.0 != *node && self.addresses.get(other).copied() == part
        };
        if let Some(other) = self.runnable.iter().find(shares).cloned() {
            self.fail(Rule::SharedPart, || {
                format!("{container:?} and {other:?} have addresses of part {part:?}")
            });
        }
        let owner = self.sessions.get(&slot.session);
        let owned = owner.is_some_and(|record| {
            index(&record.owner) == *node
                && record.generation == slot.generation
                && record.state == OwnedState::Owned
        });
        if !owned {
            let owner = format!("{owner:?}");
            self.fail(Rule::Unowned, || {
                format!("{container:?} runs, the registry says {owner}")
            });
        }
        let record = self.nodes[*node].record;
        if record.is_none_or(|record| record.state == NodeState::Fenced) {
            self.fail(Rule::Unowned, || {
                format!("{container:?} runs on a fenced node")
            });
        }
    }

    /// A preemption has ended without it.
    pub(crate) fn spared(&mut self, container: Container) {
        self.fail(Rule::Spared, || format!("{container:?} runs"));
    }

    /// Looks after everything that runs on a node.
    pub(crate) fn look(&mut self, node: usize, clock: u64) {
        let here = &self.nodes[node];
        let spare = self.timing.bound_ms() - self.timing.fence_ms + here.paused_ms;
        if here.until.is_some_and(|until| clock <= until + spare) {
            return;
        }
        if let Some(container) = self.runnable.iter().find(|c| c.0 == node).cloned() {
            let until = here.until;
            self.fail(Rule::PastBound, || {
                format!("{container:?} runs at {clock} of its clock, its time ended at {until:?}")
            });
        }
    }

    /// A dead machine, whose longest-lived watcher began to watch at `began`, in true time.
    pub(crate) fn look_for_takeover(&mut self, node: usize, now: u64, began: Option<u64>) {
        let here = &self.nodes[node];
        let live = here.record.is_some_and(|r| r.state == NodeState::Live);
        let since = began.map(|began| here.renewed_at.max(began + JOIN_MS));
        let timing = &self.timing;
        let patience = timing.takeover_ms * (1_000_000 + timing.drift_ppm) / 1_000_000;
        // Until the watcher sees it for the first time, and until it looks again when T is over.
        let patience = patience + 2 * (timing.renew_ms + LOOK_DELAY_MS);
        if live && since.is_some_and(|since| now > since + patience) {
            self.fail(Rule::TakenLate, || {
                format!("n{node} is silent since {since:?} and not fenced")
            });
        }
    }

    /// A transaction that the store has just made effective.
    pub(crate) fn committed(&mut self, now: u64, transaction: &Transaction) {
        // The nodes first: a rejoin writes its heartbeat beside its record.
        for (key, value) in &transaction.write {
            if let (Key::Node(name), Some(Value::Node(record))) = (key, value) {
                self.node_written(index(name), now, *record);
            }
        }
        for (key, value) in &transaction.write {
            match (key, value) {
                (Key::Heartbeat(name), Some(Value::Heartbeat(heartbeat))) => {
                    self.renewed(index(name), now, *heartbeat);
                }
                (Key::Session(session), Some(Value::Session(record))) => {
                    self.session_written(session, record);
                }
                (Key::Session(session), None) => {
                    let before = self.sessions.remove(session);
                    self.given_up(session, before.as_ref());
                }
                _ => {}
            }
        }
    }

    fn renewed(&mut self, node: usize, now: u64, heartbeat: Heartbeat) {
        let sent = (node, heartbeat.incarnation, heartbeat.attempt);
        let sent = self.sent.get(&sent).copied();
        let node = &mut self.nodes[node];
        node.renewed_at = now;
        node.paused_ms = 0;
        // What an earlier boot sent gives this one nothing. What a daemon of longer times was given
        // before stays given.
        node.until = sent
            .filter(|(boot, _, _)| *boot == node.boot)
            .map(|(_, clock, fence_ms)| clock + fence_ms)
            .max(node.until);
    }

    fn node_written(&mut self, node: usize, now: u64, record: NodeRecord) {
        self.nodes[node].record = Some(record);
        if record.state != NodeState::Fenced {
            return;
        }
        self.takeovers += 1;
        self.nodes[node].until = None;
        if self.only_outages {
            self.fail(Rule::LostToOutage, || format!("n{node} is fenced"));
        }
        let (stood, timing) = (now - self.nodes[node].renewed_at, self.timing);
        if stood * (1_000_000 + timing.drift_ppm) < timing.takeover_ms * 1_000_000 {
            self.fail(Rule::TakenEarly, || {
                format!("n{node} is fenced {stood} ms after a renewal")
            });
        }
        if let Some(container) = self.runnable.iter().find(|c| c.0 == node).cloned() {
            self.examine(&container);
        }
    }

    fn given_up(&mut self, session: &SessionName, before: Option<&Ownership>) {
        let Some(before) = before else {
            return;
        };
        let slot = Slot {
            session: session.clone(),
            generation: before.generation,
        };
        let container = (index(&before.owner), slot);
        if self.possible.contains(&container) && !self.exiting.contains(&container) {
            self.fail(Rule::ReleasedAlive, || {
                format!("{container:?} may run and is given up")
            });
        }
    }

    fn session_written(&mut self, session: &SessionName, record: &Ownership) {
        let before = self.sessions.insert(session.clone(), record.clone());
        let owner = index(&record.owner);
        if record.state == OwnedState::Released {
            return self.given_up(session, Some(record));
        }
        let live = NodeRecord {
            incarnation: record.incarnation,
            state: NodeState::Live,
        };
        if self.nodes[owner].record != Some(live) {
            self.fail(Rule::StaleClaim, || {
                format!("{session} claimed by {record:?}, which is not live")
            });
        }
        if let Some(before) = before.filter(|before| before.state == OwnedState::Owned) {
            let from = index(&before.owner);
            let state = self.nodes[from].record.map(|record| record.state);
            if from == owner {
                self.given_up(session, Some(&before));
            } else if state != Some(NodeState::Fenced) {
                self.fail(Rule::StaleClaim, || {
                    format!("{session} claimed by {record:?} from {before:?}, which is {state:?}")
                });
            }
        }
        let highest = self.highest.entry(session.clone()).or_default();
        let earlier = std::mem::replace(highest, record.generation.max(*highest));
        if record.generation <= earlier {
            self.fail(Rule::Generation, || {
                format!("{session} gets {} after {earlier}", record.generation)
            });
        }
        let runs: Vec<_> = self.runnable.iter().cloned().collect();
        for container in runs.iter().filter(|c| c.1.session == *session) {
            self.examine(container);
        }
    }

    /// After healing: every session runs, `retired` ones are forgotten, and nothing else exists.
    pub(crate) fn finish(
        &mut self,
        sessions: &[SessionName],
        retired: &SessionName,
        fences: &BTreeSet<Container>,
        daemons: &BTreeSet<Container>,
    ) {
        for session in sessions {
            if !self.runnable.iter().any(|c| c.1.session == *session) {
                self.fail(Rule::NotServed, || format!("{session} after healing"));
            }
        }
        if let Some(record) = self.sessions.get(retired) {
            let record = record.clone();
            self.fail(Rule::Leak, || format!("{retired} was deleted: {record:?}"));
        }
        let owned = self.sessions.iter().filter_map(|(session, record)| {
            let slot = Slot {
                session: session.clone(),
                generation: record.generation,
            };
            (record.state == OwnedState::Owned).then(|| (index(&record.owner), slot))
        });
        let owned: BTreeSet<_> = owned.collect();
        let possible = self.possible.clone();
        for (whose, held) in [
            ("the registry", &owned),
            ("the fences", fences),
            ("the daemons", daemons),
        ] {
            if *held != possible {
                self.fail(Rule::Leak, || {
                    format!("{whose} have {held:?}, the machines {possible:?}")
                });
            }
        }
    }
}
