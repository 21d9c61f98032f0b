//! The daemon's side of the protocol, put together: heartbeat, observation, sessions.
//!
//! ```text
//!  node:     Rejoining ──live──▶ Listing ──records──▶ Live ──fenced──▶ Rejoining
//! ```
//!
//! The driver carries out actions in their order and answers every [`Action::Store`] once, with
//! [`Answer::Ambiguous`] after its own time-out. It passes orders on to the shim's
//! [`Fence`](super::Fence) and certificates back. Orders and certificates may be lost with a shim:
//! [`Event::ShimConnected`] tells what the new one holds, and what was lost is ordered again. What
//! is said late or twice changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Answer, BootTime, Key, NodeName, Observer, OwnedState, Ownership, Rejoin, Renewal, Renewed,
    Request, SessionName, Slot, SlotView, Step, Timing, Transaction, Value, Verdict,
};

mod sessions;

#[derive(Debug, Clone)]
pub enum Event {
    Tick,
    StoreAnswer {
        op: u64,
        answer: Answer,
    },
    /// Something may have happened to that node's heartbeat.
    WatchHint {
        node: NodeName,
        deleted: bool,
    },
    /// Somebody wants the session to run.
    EnsureAsked(SessionName),
    /// End it; `delete` also forgets its record.
    StopAsked {
        session: SessionName,
        delete: bool,
    },
    /// The machine is going.
    PreemptAsked,
    PreemptCancelled,
    /// The fence refused to open the slot: the create was not sent.
    StartRefused(Slot),
    /// Nothing of the slot exists or can appear any more.
    DeathCertificate(Slot),
    FenceFired,
    /// A new shim answers; everything under way to or from the old one is lost.
    ShimConnected {
        fired: bool,
        slots: Vec<SlotView>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Store {
        op: u64,
        request: Request,
    },
    /// Open the slot at the fence, then send the create.
    Start(Slot),
    Kill(Slot),
    Forget(Slot),
    SetDeadline(BootTime),
    Thaw {
        deadline: BootTime,
        slots: Vec<Slot>,
    },
    FreezeAll,
    /// Ask this node instead.
    Forward {
        session: SessionName,
        owner: NodeName,
    },
}

#[derive(Debug, Clone)]
enum Standing {
    Rejoining(Rejoin),
    Listing {
        renewal: Renewal,
        due: Option<BootTime>,
    },
    Live(Renewal),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Looking,
    /// `doubt`: an earlier try may yet take effect.
    Claiming {
        claim: Transaction,
        doubt: bool,
    },
    /// A container of it may exist.
    Held,
    /// Condemned; released on its certificate if it is still ours.
    Ending {
        owned: bool,
    },
    /// Certified.
    Releasing,
    /// Nothing of it is here; its record is looked at, and deleted if it is released.
    Collecting,
}

#[derive(Debug, Clone)]
struct Local {
    record: Ownership,
    /// The generation of the slot that the fence holds, 0 without one.
    slot: u64,
    phase: Phase,
    stop: bool,
    delete: bool,
    /// When the phase goes on; its entry in `due`.
    waits: Option<BootTime>,
}

#[derive(Debug, Clone)]
enum Pending {
    Renew,
    Rejoin,
    List,
    Observe(usize),
    Fencing(usize),
    Look(SessionName),
    Claim(SessionName),
    ReadBack(SessionName),
    Release(SessionName),
    ReleaseRead(SessionName),
    CollectRead(SessionName),
    Collect(SessionName),
}

#[derive(Debug, Clone)]
struct Peer {
    name: NodeName,
    observer: Observer,
    due: Option<BootTime>,
}

#[derive(Debug, Clone)]
pub struct NodeProtocol {
    me: NodeName,
    timing: Timing,
    standing: Standing,
    incarnation: u64,
    deadline: BootTime,
    fired: bool,
    admits: bool,
    peers: Vec<Peer>,
    sessions: BTreeMap<SessionName, Local>,
    due: BTreeSet<(BootTime, SessionName)>,
    pending: BTreeMap<u64, Pending>,
    next_op: u64,
    actions: Vec<Action>,
}

impl NodeProtocol {
    /// `observed` are the nodes that this one watches; `first_attempt` must exceed every attempt
    /// number that an earlier daemon of this node used; `slots` is what the shim holds: without a
    /// shim's answer there is no telling what exists, and nothing may begin. The shim carries out,
    /// or drops, every order of an earlier daemon before the first of this one.
    #[must_use]
    pub fn new(
        me: NodeName,
        observed: &[NodeName],
        timing: Timing,
        now: BootTime,
        first_attempt: u64,
        slots: Vec<SlotView>,
    ) -> Self {
        let peers = observed
            .iter()
            .map(|name| Peer {
                name: name.clone(),
                observer: Observer::new(name.clone()),
                due: Some(now),
            })
            .collect();
        let mut node = Self {
            standing: Standing::Rejoining(Rejoin::new(me.clone(), first_attempt, now)),
            me,
            timing,
            incarnation: 0,
            deadline: BootTime(0),
            fired: true,
            admits: true,
            peers,
            sessions: BTreeMap::new(),
            due: BTreeSet::new(),
            pending: BTreeMap::new(),
            next_op: 0,
            actions: Vec::new(),
        };
        node.adopt(slots);
        node
    }

    /// Every slot that it starts, keeps or ends.
    #[must_use]
    pub fn slots(&self) -> Vec<Slot> {
        let held = self.sessions.iter().filter(|(_, local)| local.slot != 0);
        held.map(|(session, local)| local.slot_of(session))
            .collect()
    }

    pub fn on(&mut self, now: BootTime, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => {}
            Event::StoreAnswer { op, answer } => {
                if let Some(pending) = self.pending.remove(&op) {
                    self.answered(now, pending, &answer);
                }
            }
            Event::WatchHint { node, deleted } => {
                if let Some(peer) = self.peers.iter_mut().find(|peer| peer.name == node) {
                    peer.observer.hint(now, deleted, &self.timing);
                    peer.due = peer.due.map(|_| now);
                }
            }
            Event::EnsureAsked(session) => self.ensure(now, session),
            Event::StopAsked { session, delete } => self.stop(now, &session, delete),
            Event::PreemptAsked => {
                self.admits = false;
                let all: Vec<_> = self.sessions.keys().cloned().collect();
                for session in all {
                    self.end(&session, true);
                }
            }
            Event::PreemptCancelled => self.admits = true,
            Event::StartRefused(slot) | Event::DeathCertificate(slot) => {
                self.certified(now, &slot);
            }
            Event::FenceFired => self.fired = true,
            Event::ShimConnected { fired, slots } => self.shim_connected(now, fired, slots),
        }
        self.work(now);
        std::mem::take(&mut self.actions)
    }

    fn is_live(&self) -> bool {
        matches!(self.standing, Standing::Live(_))
    }

    fn may_act(&self, now: BootTime) -> bool {
        self.is_live() && !self.fired && now < self.deadline
    }

    fn send(&mut self, pending: Pending, request: Request) {
        let op = self.next_op;
        self.next_op += 1;
        self.pending.insert(op, pending);
        self.actions.push(Action::Store { op, request });
    }

    /// Whatever time alone makes due.
    fn work(&mut self, now: BootTime) {
        let due = match &mut self.standing {
            Standing::Rejoining(rejoin) => rejoin.due(now).map(|r| (Pending::Rejoin, r)),
            Standing::Listing { renewal, .. } | Standing::Live(renewal) => {
                renewal.due(now).map(|r| (Pending::Renew, r))
            }
        };
        if let Some((pending, request)) = due {
            self.send(pending, request);
        }
        if let Standing::Listing { due, .. } = &mut self.standing
            && due.is_some_and(|due| now >= due)
        {
            *due = None;
            self.send(Pending::List, Request::ReadSessions);
        }
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            if peer.due.is_some_and(|due| now >= due) {
                peer.due = None;
                let keys = vec![
                    Key::Node(peer.name.clone()),
                    Key::Heartbeat(peer.name.clone()),
                ];
                self.send(Pending::Observe(index), Request::Read(keys));
            }
        }
        while self.due.first().is_some_and(|(at, _)| now >= *at)
            && let Some((at, session)) = self.due.pop_first()
        {
            self.session_due(now, at, session);
        }
    }

    fn answered(&mut self, now: BootTime, pending: Pending, answer: &Answer) {
        match pending {
            Pending::Renew => self.renewed(now, answer),
            Pending::Rejoin => self.rejoined(now, answer),
            Pending::List => self.listed(now, answer),
            Pending::Observe(index) => self.observed(now, index, answer),
            Pending::Fencing(index) => {
                let peer = &mut self.peers[index];
                peer.due = peer.due.map(|_| now);
            }
            Pending::Look(session) => self.looked(now, session, answer),
            Pending::Claim(session) => self.claim_answered(now, session, answer),
            Pending::ReadBack(session) => self.read_back(now, &session, answer),
            Pending::Release(session) => self.release_answered(now, session, answer),
            Pending::ReleaseRead(session) => self.release_read(now, &session, answer),
            Pending::CollectRead(session) => self.collect_read(now, session, answer),
            Pending::Collect(session) => match answer {
                Answer::Committed => self.collected(&session),
                _ => self.wait(&session, now.plus(self.timing.retry_ms)),
            },
        }
    }

    fn rejoined(&mut self, now: BootTime, answer: &Answer) {
        let Standing::Rejoining(rejoin) = &mut self.standing else {
            return;
        };
        if let Step::Live { heartbeat, sent_at } = rejoin.answered(now, answer, &self.timing) {
            let next = rejoin.next_attempt();
            let mut renewal = Renewal::new(self.me.clone(), heartbeat, sent_at, &self.timing);
            renewal.skip_to(next);
            self.incarnation = heartbeat.incarnation;
            self.standing = Standing::Listing {
                renewal,
                due: Some(now),
            };
            self.deadline = sent_at.plus(self.timing.fence_ms);
        }
    }

    fn observed(&mut self, now: BootTime, index: usize, answer: &Answer) {
        let peer = &mut self.peers[index];
        peer.due = Some(now.plus(self.timing.renew_ms));
        if !matches!(answer, Answer::Values(_)) {
            self.outage(now);
            return;
        }
        let verdict = peer.observer.answered(now, answer, &self.timing);
        if let Verdict::Fence(transaction) = verdict
            && self.may_act(now)
        {
            self.send(Pending::Fencing(index), Request::Commit(transaction));
        }
    }

    fn outage(&mut self, now: BootTime) {
        for peer in &mut self.peers {
            peer.observer.outage(now);
        }
    }

    fn renewed(&mut self, now: BootTime, answer: &Answer) {
        if matches!(answer, Answer::Ambiguous | Answer::Unavailable) {
            self.outage(now);
        }
        let (Standing::Live(renewal) | Standing::Listing { renewal, .. }) = &mut self.standing
        else {
            return;
        };
        match renewal.answered(now, answer, &self.timing) {
            Renewed::NotYet => {}
            Renewed::Deadline(deadline) => {
                let late = self.fired || now >= self.deadline;
                self.deadline = self.deadline.max(deadline);
                if !self.is_live() || now >= self.deadline {
                    return;
                }
                if late {
                    self.thaw();
                } else {
                    self.actions.push(Action::SetDeadline(self.deadline));
                }
            }
            Renewed::Lost => {
                let next = renewal.next_attempt();
                self.standing = Standing::Rejoining(Rejoin::new(self.me.clone(), next, now));
                self.fired = true;
                self.actions.push(Action::FreezeAll);
                self.drop_claims();
            }
        }
    }

    fn thaw(&mut self) {
        self.fired = false;
        let held = self.sessions.iter().filter(|(_, l)| l.phase == Phase::Held);
        let slots = held
            .map(|(session, local)| local.slot_of(session))
            .collect();
        self.actions.push(Action::Thaw {
            deadline: self.deadline,
            slots,
        });
    }

    /// Every record, read after the CAS to live.
    fn listed(&mut self, now: BootTime, answer: &Answer) {
        let Standing::Listing { renewal, due } = &mut self.standing else {
            return;
        };
        let Answer::Values(values) = answer else {
            *due = Some(now.plus(self.timing.retry_ms));
            return;
        };
        self.standing = Standing::Live(renewal.clone());
        let mut mine = BTreeMap::new();
        for (key, value) in values {
            if let (Key::Session(session), Some(Value::Session(record))) = (key, value)
                && record.owner == self.me
                && record.state == OwnedState::Owned
            {
                mine.insert(session.clone(), record.clone());
            }
        }
        let held: Vec<_> = self.sessions.keys().cloned().collect();
        for session in held {
            let record = mine.remove(&session);
            self.settle(&session, record);
        }
        for (session, record) in mine {
            self.sessions
                .insert(session.clone(), Local::new(record.clone(), Phase::Looking));
            self.end_unknown(&session, record);
        }
        if now < self.deadline {
            self.thaw();
        }
    }
}
