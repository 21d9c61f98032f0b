//! What the daemon of a node does besides the protocol: it reads and announces nodes, reads records after a loss, and
//! places and starts sessions.

use std::collections::BTreeMap;
use std::time::Instant;

use conman_core::ownership::{Event, SessionName, Slot};
use conman_core::placement::{Demand, PlacementLimits, place};
use conman_proto::{RuntimeKind, SessionId};

use crate::fleet::{BUDGET_MS, Due, Fleet, Job, session_name};

/// Its intervals, as `conman-etcd` and `conman-fleet` have them, in milliseconds.
pub(crate) const ANNOUNCE_AGAIN_MS: u64 = 5_000;
pub(crate) const CHECK_MS: u64 = 500;
const SCAN_AFTER_LOSS_MS: u64 = 1_000;
pub(crate) const SCAN_IDLE_MS: u64 = 30_000;
const LOSS_PERIOD_MS: u64 = 20_000;
const SCAN_BACKOFF: u64 = 20;
const PAGE: usize = 500;
/// A start, of which a node does one after the other.
const START_MS: u64 = 15;
/// Records that a read of all nodes returns for each: `node`, `heartbeat`, `peer`, `takeover-delay`.
const RECORDS_A_NODE: usize = 4;
/// Nodes from which on one placement serves several sessions, which take its candidates in turn: a placement
/// takes a millisecond there.
const PLACED_ALONE: usize = 1_000;

impl Fleet {
    pub(crate) fn released(&mut self, name: &SessionName) {
        if let Some(index) = self.sessions.get(name).copied() {
            self.assign_restart(index);
        }
    }

    /// One of the nodes that stay has to restart it.
    fn assign_restart(&mut self, session: usize) {
        let restarter = self.any_live();
        self.members[restarter].to_restart.push(session);
    }

    pub(crate) fn any_live(&mut self) -> usize {
        loop {
            let node = self.random.usize(0..self.members.len());
            if self.members[node].up && !self.members[node].leaving {
                return node;
            }
        }
    }

    /// Reads a page of the records.
    fn read_page(&mut self, node: usize) {
        let records_us = self.options.costs.record_us * PAGE as f64;
        self.read(PAGE, records_us, Job::Page(node));
    }

    /// Reads all nodes, unless a read is under way.
    pub(crate) fn look(&mut self, node: usize) {
        let records = RECORDS_A_NODE * self.members.len();
        let member = &mut self.members[node];
        if !member.up || member.is_reading_nodes {
            return;
        }
        member.is_reading_nodes = true;
        let records_us = self.options.costs.state_us * records as f64;
        self.read(records, records_us, Job::Nodes(node));
    }

    /// Publishes what has changed, and the rest now and then.
    pub(crate) fn announce(&mut self, node: usize) {
        let (now_ms, intervals) = (self.now_ms(), self.options.intervals);
        let member = &mut self.members[node];
        let due_ms = member.announced_ms + ANNOUNCE_AGAIN_MS * intervals;
        if !member.up || !(member.dirty || now_ms >= due_ms) {
            return;
        }
        member.dirty = false;
        member.announced_ms = now_ms;
        self.counts.transactions += 1;
        let work_us = self.options.costs.transaction_us;
        self.etcd
            .begin(self.now_us as f64, work_us, Job::Announced(node));
    }

    /// Begins a scan of the records when a node is lost, and now and then.
    pub(crate) fn check(&mut self, node: usize) {
        let (now_ms, intervals) = (self.now_ms(), self.options.intervals);
        let pages = self.sessions_stored.div_ceil(PAGE);
        let member = &mut self.members[node];
        if !member.up {
            return;
        }
        let is_new = member.known_losses != member.scanned_losses;
        if is_new {
            member.scanned_losses = member.known_losses;
            member.changed_ms = Some(now_ms);
        }
        let changed = member.changed_ms;
        let recent = changed.is_some_and(|changed| now_ms - changed < LOSS_PERIOD_MS * intervals);
        let pause_ms = if recent {
            SCAN_AFTER_LOSS_MS
        } else {
            SCAN_IDLE_MS
        } * intervals;
        let pause_ms = pause_ms.max(member.scan_took_ms * SCAN_BACKOFF);
        let due = now_ms.saturating_sub(member.scanned_ms) >= pause_ms;
        if member.scan.is_none() && !member.leaving && (is_new || due) {
            member.scan = Some((now_ms, pages, member.to_restart.len()));
            self.read_page(node);
        }
        // Half to one and a half of the interval.
        let half = CHECK_MS / 2;
        let pause = half + self.random.u64(0..=CHECK_MS);
        self.after_ms(pause, Due::Check(node));
    }

    pub(crate) fn page(&mut self, node: usize) {
        let now_ms = self.now_ms();
        let member = &mut self.members[node];
        let Some((begun_ms, pages, found)) = member.scan else {
            return;
        };
        if pages > 1 {
            member.scan = Some((begun_ms, pages - 1, found));
            return self.read_page(node);
        }
        member.scan = None;
        member.scanned_ms = now_ms;
        member.scan_took_ms = now_ms - begun_ms;
        let found: Vec<usize> = member.to_restart.drain(..found).collect();
        for session in found {
            let target = self.place(node, session);
            let name = session_name(session).into();
            self.on(target, Event::EnsureAsked(name));
        }
    }

    /// The node that starts a session, by the order of `restarter`.
    pub(crate) fn place(&mut self, restarter: usize, session: usize) -> usize {
        loop {
            while let Some(target) = self.candidates.pop() {
                if self.members[target].takes_sessions() {
                    self.views[target].load.sessions += 1;
                    return target;
                }
            }
            let name = session_name(session);
            let id: SessionId = name.parse().expect("a session's name");
            let demand = Demand {
                session: &id,
                template: None,
                runtime: Some(RuntimeKind::Native),
                labels: &BTreeMap::new(),
                memory_bytes: 64 << 20,
                anywhere: true,
            };
            let me = &self.members[restarter].name;
            let begun = Instant::now();
            let placed = place(me, &self.views, demand, &PlacementLimits::default());
            self.placing.0 += begun.elapsed();
            self.placing.1 += 1;
            // A node that leaves refuses before the others know, and the next candidate is asked.
            let found = placed.candidates.iter();
            let found = found.filter_map(|name| self.index.get(name.as_str()).copied());
            let willing = found.filter(|node| self.members[*node].takes_sessions());
            let shared = self.members.len().div_ceil(PLACED_ALONE);
            self.candidates = willing.take(shared).collect();
            self.candidates.reverse();
            assert!(!self.candidates.is_empty(), "no node takes a session");
        }
    }

    pub(crate) fn start(&mut self, node: usize, slot: Slot) {
        let Some(index) = self.sessions.get(&slot.session).copied() else {
            return;
        };
        let now_ms = self.now_ms();
        let member = &mut self.members[node];
        member.held.push(index);
        member.dirty = true;
        if member.leaving {
            let session = slot.session.clone();
            self.on(node, Event::StartSent(slot));
            return self.on(node, Event::StopAsked(session));
        }
        member.starts_end_ms = member.starts_end_ms.max(now_ms) + START_MS;
        let wait_ms = member.starts_end_ms - now_ms;
        self.on(node, Event::StartSent(slot));
        self.after_ms(wait_ms, Due::Started(node, index));
    }

    /// It runs: its record says so from now on.
    pub(crate) fn started(&mut self, node: usize, session: usize) {
        if self.members[node].leaving {
            return;
        }
        self.counts.transactions += 1;
        let work_us = self.options.costs.transaction_us;
        self.begin(work_us, Job::Other);
        if !std::mem::replace(&mut self.served[session], true) {
            self.unserved -= 1;
            self.served_count += 1;
            self.last_served_ms = self.now_ms();
        }
    }

    /// A notice: it says so to the others, ends its sessions, and leaves what it has to restart to others.
    pub(crate) fn leave(&mut self, node: usize) {
        self.members[node].leaving = true;
        self.members[node].dirty = true;
        self.to_come -= 1;
        self.announce(node);
        for index in std::mem::take(&mut self.members[node].held) {
            if std::mem::replace(&mut self.served[index], false) {
                self.unserved += 1;
                self.lost += 1;
            }
            self.on(node, Event::StopAsked(session_name(index).into()));
        }
        self.members[node].scan = None;
        for session in std::mem::take(&mut self.members[node].to_restart) {
            self.assign_restart(session);
        }
        self.after_ms(BUDGET_MS, Due::Gone(node));
    }
}
