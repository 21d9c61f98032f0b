//! The daemon's side of the protocol, put together: heartbeat, observation, sessions.
//!
//! ```text
//!  node:     Rejoining ──live──▶ Listing ──records──▶ Live ──fenced──▶ Rejoining
//!  session:  Looking ─▶ Claiming ─▶ Held ─▶ Ending ──certificate──▶ Releasing ─▶ (Collecting) ─▶ gone
//!                          └─ not mine: gone      └─ lost: no release
//! ```
//!
//! The driver carries out actions in their order and answers every [`Action::Store`] once, with
//! [`Answer::Ambiguous`] after its own time-out. It passes orders on to the shim's
//! [`Fence`](super::Fence) and certificates back; what is said late or twice changes nothing.

use std::collections::BTreeMap;

use super::{
    Answer, BootTime, Key, NodeName, Observer, OwnedState, Ownership, Rejoin, Renewal, Renewed,
    Request, SessionName, Slot, SlotView, Step, Timing, Value, Verdict, claim, collect, release,
};

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Looking,
    Claiming,
    /// A container of it may exist.
    Held,
    /// Condemned; released on its certificate if it is still ours.
    Ending {
        owned: bool,
    },
    /// Certified.
    Releasing {
        due: Option<BootTime>,
    },
    Collecting,
}

#[derive(Debug, Clone)]
struct Local {
    record: Ownership,
    phase: Phase,
    delete: bool,
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
    pending: BTreeMap<u64, Pending>,
    next_op: u64,
    actions: Vec<Action>,
}

impl NodeProtocol {
    /// `first_attempt` must exceed every attempt number that an earlier daemon of this node used;
    /// `slots` is what the shim holds.
    #[must_use]
    pub fn new(
        me: NodeName,
        peers: &[NodeName],
        timing: Timing,
        now: BootTime,
        first_attempt: u64,
        slots: Vec<SlotView>,
    ) -> Self {
        let mut sessions = BTreeMap::new();
        for view in slots {
            let record = Ownership {
                owner: me.clone(),
                incarnation: 0,
                generation: view.slot.generation,
                state: OwnedState::Owned,
            };
            // Listing decides what becomes of it; a certificate is told again when condemned.
            let phase = if view.certified {
                Phase::Ending { owned: true }
            } else {
                Phase::Held
            };
            let local = Local {
                record,
                phase,
                delete: false,
            };
            sessions.insert(view.slot.session, local);
        }
        let peers = peers
            .iter()
            .map(|name| Peer {
                name: name.clone(),
                observer: Observer::new(name.clone()),
                due: Some(now),
            })
            .collect();
        Self {
            standing: Standing::Rejoining(Rejoin::new(me.clone(), first_attempt, now)),
            me,
            timing,
            incarnation: 0,
            deadline: BootTime(0),
            fired: true,
            admits: true,
            peers,
            sessions,
            pending: BTreeMap::new(),
            next_op: 0,
            actions: Vec::new(),
        }
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
            Event::StopAsked { session, delete } => {
                if let Some(local) = self.sessions.get_mut(&session) {
                    local.delete |= delete;
                    self.end(&session, true);
                } else if delete && self.is_live() {
                    self.look_for_tombstone(session);
                }
            }
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
        let mut releases = Vec::new();
        for (session, local) in &mut self.sessions {
            if let Phase::Releasing { due } = &mut local.phase
                && due.is_some_and(|due| now >= due)
            {
                *due = None;
                releases.push((session.clone(), release(session, &local.record)));
            }
        }
        for (session, transaction) in releases {
            self.send(Pending::Release(session), Request::Commit(transaction));
        }
    }

    fn ensure(&mut self, now: BootTime, session: SessionName) {
        if !self.admits || !self.may_act(now) || self.sessions.contains_key(&session) {
            return;
        }
        let record = Ownership {
            owner: self.me.clone(),
            incarnation: self.incarnation,
            generation: 0,
            state: OwnedState::Owned,
        };
        let local = Local {
            record,
            phase: Phase::Looking,
            delete: false,
        };
        self.sessions.insert(session.clone(), local);
        let keys = vec![Key::Session(session.clone()), Key::Floor];
        self.send(Pending::Look(session), Request::Read(keys));
    }

    fn look_for_tombstone(&mut self, session: SessionName) {
        let keys = vec![Key::Session(session.clone()), Key::Floor];
        self.send(Pending::CollectRead(session), Request::Read(keys));
    }

    fn end(&mut self, session: &SessionName, owned: bool) {
        let Some(local) = self.sessions.get_mut(session) else {
            return;
        };
        if let Phase::Held | Phase::Ending { .. } = local.phase {
            local.phase = Phase::Ending { owned };
            self.actions.push(Action::Kill(Slot {
                session: session.clone(),
                generation: local.record.generation,
            }));
        }
    }

    fn certified(&mut self, now: BootTime, slot: &Slot) {
        // While listing it is not known whose it is; Listing condemns it again and hears it again.
        let listed = self.is_live();
        let Some(local) = self.sessions.get_mut(&slot.session) else {
            self.actions.push(Action::Forget(slot.clone()));
            return;
        };
        if local.record.generation != slot.generation {
            return;
        }
        match local.phase {
            Phase::Ending { owned: false } => {
                self.sessions.remove(&slot.session);
                self.actions.push(Action::Forget(slot.clone()));
            }
            Phase::Held | Phase::Ending { owned: true } if listed => {
                local.phase = Phase::Releasing { due: Some(now) };
            }
            Phase::Held => local.phase = Phase::Ending { owned: true },
            _ => {}
        }
    }

    fn answered(&mut self, now: BootTime, pending: Pending, answer: &Answer) {
        match pending {
            Pending::Renew => self.renewed(now, answer),
            Pending::Rejoin => {
                let Standing::Rejoining(rejoin) = &mut self.standing else {
                    return;
                };
                if let Step::Live { heartbeat, sent_at } =
                    rejoin.answered(now, answer, &self.timing)
                {
                    let next = rejoin.next_attempt();
                    let mut renewal =
                        Renewal::new(self.me.clone(), heartbeat, sent_at, &self.timing);
                    renewal.skip_to(next);
                    self.incarnation = heartbeat.incarnation;
                    self.standing = Standing::Listing {
                        renewal,
                        due: Some(now),
                    };
                    self.deadline = sent_at.plus(self.timing.fence_ms);
                }
            }
            Pending::List => self.listed(now, answer),
            Pending::Observe(index) => {
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
            Pending::Fencing(index) => {
                let peer = &mut self.peers[index];
                peer.due = peer.due.map(|_| now);
            }
            Pending::Look(session) => self.looked(now, session, answer),
            Pending::Claim(session) => match answer {
                Answer::Committed => self.claimed(now, &session),
                Answer::Unavailable => self.give_up(&session),
                _ => {
                    let keys = vec![Key::Session(session.clone())];
                    self.send(Pending::ReadBack(session), Request::Read(keys));
                }
            },
            Pending::ReadBack(session) => {
                let mine = match (self.sessions.get(&session), answer) {
                    (Some(local), Answer::Values(_)) => {
                        answer.value(&Key::Session(session.clone()))
                            == Some(&Value::Session(local.record.clone()))
                    }
                    _ => false,
                };
                if mine {
                    self.claimed(now, &session);
                } else {
                    // It may still land: then the record is mine without a slot, which the next
                    // who asks is forwarded to me for.
                    self.give_up(&session);
                }
            }
            Pending::Release(session) => match answer {
                Answer::Committed => self.released(&session),
                _ => {
                    let keys = vec![Key::Session(session.clone())];
                    self.send(Pending::ReleaseRead(session), Request::Read(keys));
                }
            },
            Pending::ReleaseRead(session) => self.release_read(now, &session, answer),
            Pending::CollectRead(session) => {
                let key = Key::Session(session.clone());
                let floor = match answer.value(&Key::Floor) {
                    Some(Value::Floor(floor)) => Some(*floor),
                    _ => None,
                };
                match answer.value(&key) {
                    Some(Value::Session(record)) if record.state == OwnedState::Released => {
                        let transaction = collect(&session, record, floor);
                        self.send(Pending::Collect(session), Request::Commit(transaction));
                    }
                    _ => self.collected(&session),
                }
            }
            Pending::Collect(session) => self.collected(&session),
        }
    }

    fn outage(&mut self, now: BootTime) {
        for peer in &mut self.peers {
            peer.observer.outage(now);
        }
    }

    fn renewed(&mut self, now: BootTime, answer: &Answer) {
        let (Standing::Live(renewal) | Standing::Listing { renewal, .. }) = &mut self.standing
        else {
            return;
        };
        if matches!(answer, Answer::Ambiguous | Answer::Unavailable) {
            for peer in &mut self.peers {
                peer.observer.outage(now);
            }
        }
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
                // What these might yet claim bears the old incarnation and fails.
                self.sessions
                    .retain(|_, local| !matches!(local.phase, Phase::Looking | Phase::Claiming));
                self.pending.retain(|_, pending| {
                    !matches!(
                        pending,
                        Pending::Look(_) | Pending::Claim(_) | Pending::ReadBack(_)
                    )
                });
            }
        }
    }

    fn thaw(&mut self) {
        self.fired = false;
        let slots = self
            .sessions
            .iter()
            .filter(|(_, local)| local.phase == Phase::Held)
            .map(|(session, local)| Slot {
                session: session.clone(),
                generation: local.record.generation,
            })
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
            let Some(local) = self.sessions.get_mut(&session) else {
                continue;
            };
            let generation = local.record.generation;
            match mine.remove(&session) {
                Some(record) if record.generation == generation => {
                    local.record = record;
                    if let Phase::Ending { .. } = local.phase {
                        self.end(&session, true);
                    }
                }
                _ => self.end(&session, false),
            }
        }
        // No slot was ever opened for these, or it died with the machine.
        for (session, record) in mine {
            let phase = Phase::Releasing { due: Some(now) };
            let local = Local {
                record,
                phase,
                delete: false,
            };
            self.sessions.entry(session).or_insert(local);
        }
        if now < self.deadline {
            self.thaw();
        }
    }

    fn looked(&mut self, now: BootTime, session: SessionName, answer: &Answer) {
        if !matches!(answer, Answer::Values(_)) || !self.may_act(now) {
            self.give_up(&session);
            return;
        }
        let current = match answer.value(&Key::Session(session.clone())) {
            Some(Value::Session(record)) => Some(record),
            _ => None,
        };
        let floor = match answer.value(&Key::Floor) {
            Some(Value::Floor(floor)) => Some(*floor),
            _ => None,
        };
        let owner = current.and_then(|record| {
            let peer = self.peers.iter().find(|peer| peer.name == record.owner)?;
            peer.observer.record()
        });
        match claim(&self.me, self.incarnation, &session, current, owner, floor) {
            Ok((record, transaction)) => {
                if let Some(local) = self.sessions.get_mut(&session) {
                    local.record = record;
                    local.phase = Phase::Claiming;
                }
                self.send(Pending::Claim(session), Request::Commit(transaction));
            }
            Err(super::Refusal::Owned(owner)) => {
                self.give_up(&session);
                self.actions.push(Action::Forward { session, owner });
            }
        }
    }

    fn claimed(&mut self, now: BootTime, session: &SessionName) {
        let may = self.may_act(now) && self.admits;
        let Some(local) = self.sessions.get_mut(session) else {
            return;
        };
        if may {
            local.phase = Phase::Held;
            self.actions.push(Action::Start(Slot {
                session: session.clone(),
                generation: local.record.generation,
            }));
        } else {
            // Nothing was sent, so nothing needs to die first.
            local.phase = Phase::Releasing { due: Some(now) };
        }
    }

    fn give_up(&mut self, session: &SessionName) {
        if self
            .sessions
            .get(session)
            .is_some_and(|local| matches!(local.phase, Phase::Looking | Phase::Claiming))
        {
            self.sessions.remove(session);
        }
    }

    fn release_read(&mut self, now: BootTime, session: &SessionName, answer: &Answer) {
        let Some(local) = self.sessions.get_mut(session) else {
            return;
        };
        if !matches!(answer, Answer::Values(_)) {
            local.phase = Phase::Releasing {
                due: Some(now.plus(self.timing.retry_ms)),
            };
            return;
        }
        match answer.value(&Key::Session(session.clone())) {
            Some(Value::Session(read))
                if read.owner == self.me
                    && read.generation == local.record.generation
                    && read.state == OwnedState::Owned =>
            {
                local.record = read.clone();
                local.phase = Phase::Releasing {
                    due: Some(now.plus(self.timing.retry_ms)),
                };
            }
            _ => self.released(session),
        }
    }

    fn released(&mut self, session: &SessionName) {
        let Some(local) = self.sessions.get_mut(session) else {
            return;
        };
        self.actions.push(Action::Forget(Slot {
            session: session.clone(),
            generation: local.record.generation,
        }));
        if local.delete {
            local.phase = Phase::Collecting;
            self.look_for_tombstone(session.clone());
        } else {
            self.sessions.remove(session);
        }
    }

    fn collected(&mut self, session: &SessionName) {
        if self
            .sessions
            .get(session)
            .is_some_and(|local| local.phase == Phase::Collecting)
        {
            self.sessions.remove(session);
        }
    }
}
