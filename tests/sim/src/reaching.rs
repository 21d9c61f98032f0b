//! Nodes that probe each other through a network that is cut, and which of them are marked as cut off.
//!
//! What must be marked is computed from the cut that the simulation made, not from reports.

use std::collections::BTreeSet;

use conman_core::ownership::BootTime;
use conman_core::reach::{PeerReach, ReachReport, cut_off};

use crate::Report;
use crate::checker::{Rule, Violation};
use crate::random::Random;

/// From this seed on, nodes probe each other, and nothing else happens.
pub(crate) const REACH_FROM: u64 = 4_000_000;

const END_MS: u64 = 240_000;
const TICK_MS: u64 = 500;
const PROBE_EVERY_MS: u64 = 1_000;
const PROBE_TIMEOUT_MS: u64 = 2_000;
/// Time between two changes of the network.
const CHANGE_EVERY_MS: u64 = 40_000;
/// So long after a change, every verdict follows it: two probes that fail, and publishing.
const SETTLED_MS: u64 = 15_000;
/// One probe in so many is lost without a cut; two in a row are a cut.
const LOST_ONE_IN: u64 = 200;

/// What the network does.
#[derive(Debug, Clone)]
enum Cut {
    Nothing,
    /// Nothing passes between this node and the others.
    Alone(usize),
    /// The others do not reach this node, which reaches them.
    Listener(usize),
    /// This node reaches no other, and is reached.
    Outgoing(usize),
    Pair(usize, usize),
    /// Nodes below this one and the rest do not reach each other.
    Parts(usize),
}

impl Cut {
    fn answers(&self, from: usize, to: usize) -> bool {
        match *self {
            Self::Nothing => true,
            Self::Alone(node) => from != node && to != node,
            Self::Listener(node) => to != node,
            Self::Outgoing(node) => from != node,
            Self::Pair(one, other) => (from, to) != (one, other) && (from, to) != (other, one),
            Self::Parts(first) => (from < first) == (to < first),
        }
    }

    fn is_of_halves(&self, nodes: usize) -> bool {
        matches!(self, Self::Parts(first) if 2 * first == nodes)
    }

    /// The nodes that must be marked in a fleet of this size.
    fn marks(&self, nodes: usize) -> BTreeSet<usize> {
        match *self {
            _ if nodes < 3 => BTreeSet::new(),
            Self::Nothing | Self::Pair(..) => BTreeSet::new(),
            Self::Alone(node) | Self::Listener(node) | Self::Outgoing(node) => [node].into(),
            Self::Parts(first) if 2 * first < nodes => (0..first).collect(),
            Self::Parts(first) if 2 * first > nodes => (first..nodes).collect(),
            Self::Parts(_) => BTreeSet::new(),
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Probed {
    reach: PeerReach,
    next: u64,
    was_lost: bool,
}

struct Fleet {
    random: Random,
    now: u64,
    cut: Cut,
    before: Cut,
    changed_at: u64,
    /// By prober and peer.
    reach: Vec<Vec<Probed>>,
    published: Vec<Vec<String>>,
    trace: Vec<String>,
}

pub(crate) fn run(seed: u64) -> Report {
    let mut random = Random(seed);
    let nodes = usize::try_from(random.range(2, 7)).unwrap_or(2);
    let row = vec![Probed::default(); nodes];
    let mut fleet = Fleet {
        random,
        now: 0,
        cut: Cut::Nothing,
        before: Cut::Nothing,
        changed_at: 0,
        reach: vec![row; nodes],
        published: vec![Vec::new(); nodes],
        trace: vec![format!("{nodes} nodes")],
    };
    let mut violation = None;
    while fleet.now < END_MS && violation.is_none() {
        fleet.now += TICK_MS;
        fleet.step();
        violation = fleet.judge();
    }
    Report {
        seed,
        violation,
        trace: fleet.trace,
        takeovers: 0,
        starts: 0,
    }
}

fn name(node: usize) -> String {
    format!("n{node}")
}

impl Fleet {
    fn nodes(&self) -> usize {
        self.published.len()
    }

    fn step(&mut self) {
        if self.now - self.changed_at >= CHANGE_EVERY_MS {
            self.change();
        }
        for node in 0..self.nodes() {
            self.probe(node);
            // A publication takes a moment.
            if self.random.percent(60) {
                let unreached = self.reach[node].iter().enumerate();
                let unreached = unreached.filter(|(_, probed)| probed.reach.is_unreached());
                self.published[node] = unreached.map(|(peer, _)| name(peer)).collect();
            }
        }
    }

    /// Cuts a whole network, or heals a cut one.
    fn change(&mut self) {
        let last = self.nodes() as u64 - 1;
        let mut node = || usize::try_from(self.random.range(0, last)).unwrap_or(0);
        let (one, other) = (node(), node());
        let next = match (&self.cut, self.random.range(0, 5)) {
            (Cut::Nothing, 0) => Cut::Alone(one),
            (Cut::Nothing, 1) => Cut::Listener(one),
            (Cut::Nothing, 2) => Cut::Outgoing(one),
            (Cut::Nothing, 3) if one != other => Cut::Pair(one, other),
            (Cut::Nothing, 4) if one > 0 => Cut::Parts(one),
            _ => Cut::Nothing,
        };
        self.before = std::mem::replace(&mut self.cut, next);
        self.changed_at = self.now;
        self.trace.push(format!("{} ms: {:?}", self.now, self.cut));
    }

    fn probe(&mut self, node: usize) {
        for peer in (0..self.nodes()).filter(|peer| *peer != node) {
            let probed = &mut self.reach[node][peer];
            if self.now < probed.next {
                continue;
            }
            let is_lost = self.random.range(1, LOST_ONE_IN) == 1 && !probed.was_lost;
            probed.was_lost = is_lost;
            let answered = self.cut.answers(node, peer) && !is_lost;
            let took = if answered { 1 } else { PROBE_TIMEOUT_MS };
            let (sent, ended) = (BootTime(self.now), BootTime(self.now + took));
            probed.reach.probed(sent, ended, answered);
            probed.next = self.now + took + PROBE_EVERY_MS;
        }
    }

    fn judge(&mut self) -> Option<Violation> {
        let names: Vec<String> = (0..self.nodes()).map(name).collect();
        let reports: Vec<ReachReport<'_>> = names
            .iter()
            .zip(&self.published)
            .map(|(node, unreached)| ReachReport { node, unreached })
            .collect();
        let marked = cut_off(&reports);
        let expected = |cut: &Cut| -> BTreeSet<&str> {
            let marks = cut.marks(names.len());
            marks.into_iter().map(|node| &*names[node]).collect()
        };
        let (due, past) = (expected(&self.cut), expected(&self.before));
        let is_settled = self.now - self.changed_at >= SETTLED_MS;
        // Of two halves, one node may report before the others do.
        let halves = [&self.cut, &self.before].map(|cut| cut.is_of_halves(names.len()));
        let may = |node: &&str| {
            due.contains(node) || !is_settled && (past.contains(node) || halves.contains(&true))
        };
        let violation = |rule, what| Some(Violation { rule, what });
        if let Some(wrong) = marked.iter().find(|node| !may(node)) {
            let what = format!("{wrong} at {} ms, while {:?}", self.now, self.cut);
            return violation(Rule::WronglyCutOff, what);
        }
        if is_settled && let Some(missed) = due.difference(&marked).next() {
            let what = format!("{missed} at {} ms, while {:?}", self.now, self.cut);
            return violation(Rule::NotCutOff, what);
        }
        None
    }
}
