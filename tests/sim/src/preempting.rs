//! A node's preemption: what the daemon's emergency thread does with `conman_core::preemption`, and what
//! goes wrong around it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use conman_core::ownership::{Event, Key, OwnedState, SessionName, Slot, SlotView, Stake, Value};
use conman_core::preemption::{
    self, Action, Certificate, ExitProof, KillResult, Origin, Preemption,
};
use conman_core::preemption::{ReleaseResult, TableStage};

use crate::world::{Ev, HEAL_MS, World};

/// The registry's client gives an answer after so long at the latest.
const RELEASE_PATIENCE_MS: u64 = 5_000;

/// From the notice to the end of a preemption.
const SHORTEST_BUDGET_MS: u64 = 2_000;
const LONGEST_BUDGET_MS: u64 = 8_000;

const SOURCES: [Origin; 3] = [
    Origin::Operator,
    Origin::Source {
        name: "cloud",
        signal: "preempted",
    },
    Origin::Source {
        name: "cloud",
        signal: "maintenance",
    },
];

#[derive(Debug, Clone)]
pub(crate) enum Emergency {
    Notice(Origin, u64),
    /// A task of a session sees that the table is closed, and releases what was never started.
    GiveBack(Slot),
    /// A batch that was sent to the registry at this time.
    Releasing(Vec<Slot>, u64),
    /// A start is answered.
    Started(Slot),
    /// Its threads are scanned again.
    Scan(Slot),
    Event(preemption::Event),
}

/// One daemon's.
#[derive(Debug, Default)]
pub(crate) struct EmergencyThread {
    machine: Preemption,
    /// No start is sent.
    pub(crate) closed: bool,
    /// Starts that were sent, and those that were answered.
    sent: BTreeSet<Slot>,
    running: BTreeSet<Slot>,
    /// Not sent, because the table was closed.
    withheld: BTreeSet<Slot>,
    /// The registry was asked to release them, and may do so later: they never start.
    released: BTreeSet<Slot>,
    awaited: BTreeSet<Slot>,
    proofs: BTreeMap<Slot, ExitProof>,
    ticks_at: Option<u64>,
}

impl EmergencyThread {
    /// Adopts what the shim holds: an earlier daemon sent the starts of all of it.
    pub(crate) fn adopting(held: &[SlotView]) -> Self {
        let slots = |keep: fn(&&SlotView) -> bool| {
            let kept = held.iter().filter(keep);
            kept.map(|view| view.slot.clone()).collect()
        };
        Self {
            sent: slots(|view| !view.certified),
            running: slots(|view| view.present),
            ..Self::default()
        }
    }

    /// `None` for what the table does not have, as what only the registry says to be this node's.
    fn stage(&self, slot: &Slot, grace_ms: u64, shares_files: bool) -> Option<TableStage> {
        let generation = slot.generation;
        if self.running.contains(slot) {
            let grace = Duration::from_millis(grace_ms);
            Some(TableStage::Running {
                generation,
                grace,
                shares_files,
            })
        } else if self.sent.contains(slot) {
            Some(TableStage::Sent { generation })
        } else {
            let withheld = self.withheld.contains(slot);
            withheld.then_some(TableStage::Reserved { generation })
        }
    }
}

impl World {
    /// The machine is about to stop, or so it is said.
    pub(crate) fn notice_preemption(&mut self, node: usize) {
        let epoch = self.machines[node].daemon_epoch;
        let origin = SOURCES[self.random.range(0, 2) as usize];
        let budget = self.random.range(SHORTEST_BUDGET_MS, LONGEST_BUDGET_MS);
        let notice = Emergency::Notice(origin, budget);
        self.at(0, Ev::Emergency(node, epoch, notice));
        if self.random.percent(30) {
            let origin = SOURCES[self.random.range(0, 2) as usize];
            let again = Emergency::Notice(origin, SHORTEST_BUDGET_MS);
            self.soon(0, 3_000, Ev::Emergency(node, epoch, again));
        }
        match self.random.range(0, 9) {
            // It is said too soon, and withdrawn.
            0..=5 => {
                let by = [origin, Origin::Operator][self.random.range(0, 1) as usize];
                let event = Emergency::Event(preemption::Event::Readmit(by));
                self.soon(0, 6_000, Ev::Emergency(node, epoch, event));
            }
            6..=8 => self.soon(100, 6_000, Ev::MachineStops(node)),
            // Nobody takes it back before the healing.
            _ => {}
        }
    }

    /// An event of the emergency thread, which waits while the daemon or the machine stands still.
    pub(crate) fn emergency(&mut self, node: usize, epoch: u64, event: Emergency) {
        if self.machines[node].daemon_epoch != epoch || self.machines[node].daemon.is_none() {
            return;
        }
        if !self.machines[node].is_awake() {
            return self.at(100, Ev::Emergency(node, epoch, event));
        }
        let now = self.clock(node).0;
        match event {
            // Nobody would withdraw it.
            Emergency::Notice(..) if self.now >= HEAL_MS => {}
            Emergency::Notice(origin, budget_ms) => {
                self.note(|| format!("n{node} is being preempted in {budget_ms} ms"));
                let event = preemption::Event::Notice {
                    origin,
                    noticed_at: Duration::from_millis(now),
                    deadline: Duration::from_millis(now + budget_ms),
                };
                self.preempts(node, event);
            }
            Emergency::GiveBack(slot) => self.give_back(node, &slot),
            Emergency::Scan(slot) => self.prove_exit(node, slot),
            Emergency::Releasing(slots, since) => self.releasing(node, slots, since),
            Emergency::Started(slot) => {
                self.machines[node].emergency.running.insert(slot);
                self.preempts(node, preemption::Event::TableChanged);
            }
            Emergency::Event(preemption::Event::Tick) => {
                self.machines[node].emergency.ticks_at = None;
                self.preempts(node, preemption::Event::Tick);
            }
            Emergency::Event(event) => self.preempts(node, event),
        }
    }

    /// The machine stays after all.
    pub(crate) fn readmit(&mut self, node: usize) {
        let epoch = self.machines[node].daemon_epoch;
        let event = Emergency::Event(preemption::Event::Readmit(Origin::Operator));
        self.at(0, Ev::Emergency(node, epoch, event));
    }

    fn preempts(&mut self, node: usize, event: preemption::Event) {
        let now = Duration::from_millis(self.clock(node).0);
        let actions = self.machines[node].emergency.machine.on(now, event);
        for action in actions {
            self.note(|| format!("n{node} preemption {action:?}"));
            self.carry_out(node, action);
        }
        self.set_emergency_timer(node);
    }

    fn set_emergency_timer(&mut self, node: usize) {
        let clock = self.clock(node).0;
        let (now, epoch) = (self.now, self.machines[node].daemon_epoch);
        let thread = &mut self.machines[node].emergency;
        let Some(wake) = thread.machine.next_wake() else {
            return;
        };
        // A millisecond late, as the clock may be slow.
        let at = now + (wake.as_millis() as u64).saturating_sub(clock) + 1;
        if thread.ticks_at.is_none_or(|ticks| at < ticks) {
            thread.ticks_at = Some(at);
            let tick = Emergency::Event(preemption::Event::Tick);
            self.at(at - now, Ev::Emergency(node, epoch, tick));
        }
    }

    fn carry_out(&mut self, node: usize, action: Action) {
        match action {
            Action::Close => self.machines[node].emergency.closed = true,
            Action::Reopen => {
                let withheld = std::mem::take(&mut self.machines[node].emergency.withheld);
                self.machines[node].emergency.closed = false;
                for slot in withheld {
                    self.give_back(node, &slot);
                }
            }
            Action::Finish => self.preempted(node),
            Action::ReadTable => {
                let table = self.kill_table(node);
                self.preempts(node, preemption::Event::Table(table));
                let took = Duration::from_millis(self.random.range(0, 5));
                self.preempts(node, preemption::Event::TableHandled { took });
            }
            Action::Warn(slot) => {
                if self.random.percent(20) {
                    self.preempts(node, preemption::Event::NotWarned(slot));
                }
            }
            Action::Kill(slots) => {
                for slot in slots {
                    let result = self.send_kill(node, &slot);
                    self.preempts(node, preemption::Event::KillSent { slot, result });
                }
            }
            Action::Search(slot) => {
                let killed = self.is_alive(node, &slot);
                if killed {
                    self.dying(node, &slot);
                }
                // The init is not always among what one pass finds.
                let init = killed && self.random.percent(80);
                self.preempts(node, preemption::Event::Searched { slot, killed, init });
            }
            Action::AwaitDeath(slot) => {
                self.machines[node].emergency.awaited.insert(slot.clone());
                if !self.machines[node].processes.contains_key(&slot) {
                    self.certify(node, slot);
                }
            }
            Action::ProveExit(slot) => self.prove_exit(node, slot),
            Action::Release(slots) => {
                let since = self.now;
                let released = &mut self.machines[node].emergency.released;
                released.extend(slots.iter().cloned());
                self.releasing(node, slots, since);
            }
            Action::LookUpClaims(sessions) => self.look_up_claims(node, &sessions),
            Action::Answer
            | Action::CloseThrough(_)
            | Action::ForgetNotice
            | Action::RaisePriority
            | Action::NoteKilled(_)
            | Action::NoteReleased(_)
            | Action::NoteDead(..) => {}
        }
    }

    /// What the daemon knows to exist or to be possible.
    fn kill_table(&mut self, node: usize) -> Vec<(SessionName, TableStage)> {
        let grace_ms = [0, 0, 300, 1_500][self.random.range(0, 3) as usize];
        let machine = &self.machines[node];
        let Some(daemon) = &machine.daemon else {
            return Vec::new();
        };
        let stage = |session: &SessionName| {
            let generation = match daemon.stake(session)? {
                Stake::Claiming => return Some(TableStage::Claiming),
                Stake::Held { generation } | Stake::Ending { generation, .. } => generation,
                Stake::Checking => return None,
            };
            let slot = Slot {
                session: session.clone(),
                generation,
            };
            let shares_files = self.shares_files(node, &slot);
            machine.emergency.stage(&slot, grace_ms, shares_files)
        };
        let sessions = self.every_session();
        let known = sessions.filter_map(|session| Some((session.clone(), stage(session)?)));
        known.collect()
    }

    /// SIGKILL through the pidfd.
    fn send_kill(&mut self, node: usize, slot: &Slot) -> KillResult {
        if !self.machines[node].processes.contains_key(slot) {
            return KillResult::DeadAlready;
        }
        if self.now < HEAL_MS && self.random.percent(5) {
            return KillResult::Failed("not permitted".to_owned());
        }
        self.dying(node, slot);
        KillResult::Sent
    }

    /// It is dead: the emergency thread sees it if it watches it.
    pub(crate) fn certify(&mut self, node: usize, slot: Slot) {
        let machine = &mut self.machines[node];
        if machine.emergency.awaited.remove(&slot) {
            let epoch = machine.daemon_epoch;
            let certificates = vec![(slot, Certificate::Empty)];
            let event = Emergency::Event(preemption::Event::Certificates(certificates));
            self.soon(0, 20, Ev::Emergency(node, epoch, event));
        }
    }

    /// Scans its threads, until every one has begun to exit or it is dead.
    fn prove_exit(&mut self, node: usize, slot: Slot) {
        if !self.machines[node].processes.contains_key(&slot) {
            return;
        }
        self.end_all(node, &slot);
        let threads = self.scan(node, &slot);
        let machine = &mut self.machines[node];
        let epoch = machine.daemon_epoch;
        let proofs = &mut machine.emergency.proofs;
        if proofs.entry(slot.clone()).or_default().scanned(threads) {
            proofs.remove(&slot);
            let certificates = vec![(slot, Certificate::Exiting)];
            let event = Emergency::Event(preemption::Event::Certificates(certificates));
            return self.soon(0, 10, Ev::Emergency(node, epoch, event));
        }
        self.soon(10, 40, Ev::Emergency(node, epoch, Emergency::Scan(slot)));
    }

    /// A claim of the daemon's has succeeded. Returns whether its start may be sent.
    pub(crate) fn may_send(&mut self, node: usize, slot: &Slot) -> bool {
        let thread = &mut self.machines[node].emergency;
        let released = thread.released.contains(slot);
        if !thread.closed && !released {
            thread.sent.insert(slot.clone());
            return true;
        }
        thread.withheld.insert(slot.clone());
        // Unless the session's task is stuck.
        if released || self.random.percent(50) {
            let epoch = self.machines[node].daemon_epoch;
            let event = Emergency::GiveBack(slot.clone());
            self.soon(0, 50, Ev::Emergency(node, epoch, event));
        }
        false
    }

    fn give_back(&mut self, node: usize, slot: &Slot) {
        if self.owned_generation(node, &slot.session) == Some(slot.generation) {
            self.daemon(node, Event::DeathCertificate(slot.clone()));
        }
    }

    /// A start is answered, unless the answer is lost.
    pub(crate) fn start_answered(&mut self, node: usize, slot: &Slot) {
        if self.random.percent(85) {
            let epoch = self.machines[node].daemon_epoch;
            let event = Emergency::Started(slot.clone());
            self.soon(0, 100, Ev::Emergency(node, epoch, event));
        }
    }

    fn owned_generation(&self, node: usize, session: &SessionName) -> Option<u64> {
        match self.machines[node].daemon.as_ref()?.stake(session)? {
            Stake::Held { generation } | Stake::Ending { generation, .. } => Some(generation),
            Stake::Claiming | Stake::Checking => None,
        }
    }

    /// The protocol releases what it has a certificate of; the thread gets the answer when all are done,
    /// or do not come to be.
    fn releasing(&mut self, node: usize, slots: Vec<Slot>, since: u64) {
        let is_left = |world: &Self, slot: &Slot| {
            let daemon = world.machines[node].daemon.as_ref();
            let stake = daemon.and_then(|daemon| daemon.stake(&slot.session));
            let claims = stake == Some(Stake::Claiming);
            claims || world.owned_generation(node, &slot.session) == Some(slot.generation)
        };
        for slot in &slots {
            self.give_back(node, slot);
        }
        let left = slots.iter().any(|slot| is_left(self, slot));
        if left && self.now < since + RELEASE_PATIENCE_MS {
            let epoch = self.machines[node].daemon_epoch;
            let event = Emergency::Releasing(slots, since);
            return self.soon(2, 20, Ev::Emergency(node, epoch, event));
        }
        let result = |slot: &Slot| match is_left(self, slot) {
            true => ReleaseResult::Unavailable,
            false => ReleaseResult::Recorded,
        };
        let answers = slots.iter().map(|slot| (slot.clone(), result(slot)));
        let answers = preemption::Event::ReleasesAnswered(answers.collect());
        let epoch = self.machines[node].daemon_epoch;
        self.at(0, Ev::Emergency(node, epoch, Emergency::Event(answers)));
    }

    /// A read of the records, which is as late or as lost as any.
    fn look_up_claims(&mut self, node: usize, sessions: &[SessionName]) {
        let fails = self.now < self.store_down_until || self.machines[node].cut_out;
        let found = sessions.iter().filter_map(|session| {
            match self.store.get(&Key::Session(session.clone())) {
                Some(Value::Session(record)) if record.state == OwnedState::Owned => Some(Slot {
                    session: session.clone(),
                    generation: record.generation,
                }),
                _ => None,
            }
        });
        let found = if fails { Vec::new() } else { found.collect() };
        let epoch = self.machines[node].daemon_epoch;
        let event = Emergency::Event(preemption::Event::ClaimsFound(found));
        self.soon(1, 30, Ev::Emergency(node, epoch, event));
    }

    /// A preemption has ended: what it does not name as unreleased runs no more.
    fn preempted(&mut self, node: usize) {
        let outcome = self.machines[node].emergency.machine.outcome();
        let named: BTreeSet<_> = outcome.unreleased.into_iter().map(|one| one.0).collect();
        for slot in self.alive(node) {
            if !named.contains(&slot.session) && self.machines[node].emergency.knows(&slot) {
                self.checker.spared((node, slot));
            }
        }
    }
}

impl EmergencyThread {
    /// Whether its table had the slot.
    fn knows(&self, slot: &Slot) -> bool {
        self.sent.contains(slot) || self.running.contains(slot)
    }
}
