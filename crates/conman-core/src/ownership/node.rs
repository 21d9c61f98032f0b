//! The daemon's side of the protocol: heartbeat, observation, sessions.
//!
//! ```text
//!  node:     Rejoining ──live──▶ Listing ──records──▶ Live ──fenced──▶ Rejoining
//! ```
//!
//! The driver executes actions in their order and answers every [`Action::Store`] once, with
//! [`Answer::Ambiguous`] after its timeout. A renewal's answer that comes after that is passed on too. It passes orders to the shim's [`Fence`](super::Fence)
//! and certificates back. Orders and certificates may be lost with a shim: [`Event::ShimConnected`]
//! reports what the new one holds, and lost orders are given again. Late or duplicate events change
//! nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Answer, BootTime, Key, NodeName, Observer, Ownership, Rejoin, Renewing, Request, SessionName,
    Slot, SlotView, Timing, Transaction, Verdict,
};

mod sessions;
mod standing;

use standing::Standing;

/// More than are sent within F.
const MAX_LATE: usize = 64;

#[derive(Debug, Clone)]
pub enum Event {
    Tick,
    StoreAnswer {
        op: u64,
        answer: Answer,
    },
    /// A caller requests that the session runs.
    EnsureAsked(SessionName),
    /// End it, if this node owns it.
    StopAsked(SessionName),
    /// The ordered start is about to be sent: from here on a shim may know its slot, and a shim
    /// that does not has lost it.
    StartSent(Slot),
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
    /// The fence has its certificate: the driver reports how it ended, and passes the certificate
    /// on.
    Ended(Slot),
    Forget(Slot),
    SetDeadline(BootTime),
    Thaw {
        deadline: BootTime,
        slots: Vec<Slot>,
    },
    FreezeAll,
    /// Send the request to this node.
    Forward {
        session: SessionName,
        owner: NodeName,
    },
}

/// This node's relation to a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stake {
    /// A start was requested, and it is not yet known whether it is allowed.
    Claiming,
    /// This node owns it, as far as it knows.
    Held { generation: u64 },
    /// Condemned or certified, and not yet released; or lost, as far as known.
    Ending { generation: u64, owned: bool },
    /// Nothing of it is here; its record is being read.
    Checking,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Looking,
    /// `doubt`: an earlier attempt may still take effect.
    Claiming {
        claim: Transaction,
        doubt: bool,
    },
    /// A container of it may exist.
    Held,
    /// Condemned; released on its certificate if this node still owns it.
    Ending {
        owned: bool,
    },
    /// Certified.
    Releasing,
    /// Nothing of it is here; its record is read, in case this node owns it.
    Checking,
}

#[derive(Debug, Clone)]
struct Local {
    record: Ownership,
    /// The generation of the slot that the fence holds, 0 without one.
    slot: u64,
    /// Whether a shim may know the slot.
    sent: bool,
    /// Whether the shim that it was sent to has lost it: it is ended, and never sent again.
    astray: bool,
    phase: Phase,
    /// When the phase continues; its entry in `due`.
    waits: Option<BootTime>,
}

#[derive(Debug, Clone)]
enum Pending {
    Renew(Renewing),
    Rejoin,
    Silence,
    List,
    Observe(NodeName),
    Fencing(NodeName),
    Look(SessionName),
    Claim(SessionName),
    ReadBack(SessionName),
    Release(SessionName),
    ReleaseRead(SessionName),
    Check(SessionName),
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
    /// When no deadline of an earlier daemon with longer times can be set any more.
    lowers_silence: Option<BootTime>,
    fired: bool,
    peers: Vec<Peer>,
    sessions: BTreeMap<SessionName, Local>,
    due: BTreeSet<(BootTime, SessionName)>,
    pending: BTreeMap<u64, Pending>,
    /// Renewals that were taken for ambiguous, and may still be answered.
    late: BTreeMap<u64, Renewing>,
    next_op: u64,
    actions: Vec<Action>,
}

impl NodeProtocol {
    /// `observed` are the nodes that this one watches. `first_attempt` must exceed every attempt
    /// number that an earlier daemon of this node used. `slots` is what the shim holds: without a
    /// shim's answer it is unknown what exists, and nothing may begin. The shim executes, or drops,
    /// every order of an earlier daemon before the first of this one.
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
            lowers_silence: None,
            fired: true,
            peers,
            sessions: BTreeMap::new(),
            due: BTreeSet::new(),
            pending: BTreeMap::new(),
            late: BTreeMap::new(),
            next_op: 0,
            actions: Vec::new(),
        };
        node.adopt(slots);
        node
    }

    /// Watches these nodes from here on. Observations of nodes that stay are kept; those of a node
    /// that is removed and added again are not.
    pub fn set_observed(&mut self, now: BootTime, observed: &[NodeName]) {
        self.peers.retain(|peer| observed.contains(&peer.name));
        for name in observed {
            // A read that was sent for an earlier observer may count here: it only starts the wait,
            // with a state that was current after it was sent.
            if !self.peers.iter().any(|peer| peer.name == *name) {
                self.peers.push(Peer {
                    name: name.clone(),
                    observer: Observer::new(name.clone()),
                    due: Some(now),
                });
            }
        }
    }

    /// Whether its ownership is valid, and it may claim and fence others.
    #[must_use]
    pub fn may_act(&self, now: BootTime) -> bool {
        self.is_live() && !self.fired && now < self.deadline
    }

    /// Whether the start of this slot may be sent: this node owns it, and it was not condemned.
    #[must_use]
    pub fn may_start(&self, now: BootTime, slot: &Slot) -> bool {
        let local = self.sessions.get(&slot.session);
        local.is_some_and(|local| {
            local.phase == Phase::Held && local.slot == slot.generation && !local.astray
        }) && self.may_act(now)
    }

    /// When its ownership expires, without further renewals; meaningless before it is live.
    #[must_use]
    pub fn deadline(&self) -> BootTime {
        self.deadline
    }

    /// Whether it has rejoined and read every record since.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self.standing, Standing::Live(_))
    }

    /// Incarnation of its latest rejoin; 0 before the first.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// This node's relation to a session, if any.
    #[must_use]
    pub fn stake(&self, session: &SessionName) -> Option<Stake> {
        let local = self.sessions.get(session)?;
        Some(match local.phase {
            Phase::Looking | Phase::Claiming { .. } => Stake::Claiming,
            Phase::Held => Stake::Held {
                generation: local.slot,
            },
            Phase::Ending { owned } => Stake::Ending {
                generation: local.slot,
                owned,
            },
            Phase::Releasing => Stake::Ending {
                generation: local.record.generation,
                owned: true,
            },
            Phase::Checking => Stake::Checking,
        })
    }

    pub fn on(&mut self, now: BootTime, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => {}
            Event::StoreAnswer { op, answer } => {
                if let Some(pending) = self.pending.remove(&op) {
                    if let Pending::Renew(request @ Renewing::Commit { .. }) = pending
                        && answer == Answer::Ambiguous
                    {
                        self.late.insert(op, request);
                        if self.late.len() > MAX_LATE {
                            self.late.pop_first();
                        }
                    }
                    self.answered(now, pending, &answer);
                } else if let Some(request) = self.late.remove(&op)
                    && answer == Answer::Committed
                {
                    self.renewed(now, request, &answer);
                }
            }
            Event::EnsureAsked(session) => self.ensure(now, session),
            Event::StopAsked(session) => self.stop(now, &session),
            Event::StartSent(slot) => {
                if let Some(local) = self.sessions.get_mut(&slot.session)
                    && local.slot == slot.generation
                {
                    local.sent = true;
                }
            }
            Event::DeathCertificate(slot) => self.certified(now, &slot),
            Event::FenceFired => self.fired = true,
            Event::ShimConnected { fired, slots } => self.shim_connected(fired, slots),
        }
        self.work(now);
        std::mem::take(&mut self.actions)
    }

    fn send(&mut self, pending: Pending, request: Request) {
        let op = self.next_op;
        self.next_op += 1;
        self.pending.insert(op, pending);
        self.actions.push(Action::Store { op, request });
    }

    /// Takes the actions that are due.
    fn work(&mut self, now: BootTime) {
        let due = match &mut self.standing {
            Standing::Rejoining(rejoin) => {
                rejoin.due(now, &self.timing).map(|r| (Pending::Rejoin, r))
            }
            Standing::Listing { renewal, .. } | Standing::Live(renewal) => {
                renewal.due(now).map(|(is, r)| (Pending::Renew(is), r))
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
        if !matches!(self.standing, Standing::Rejoining(_))
            && self.lowers_silence.is_some_and(|due| now >= due)
        {
            self.lowers_silence = None;
            let transaction = self.own_silence();
            self.send(Pending::Silence, Request::Commit(transaction));
        }
        let due = |peer: &&mut Peer| peer.due.is_some_and(|due| now >= due);
        let observed: Vec<NodeName> = self
            .peers
            .iter_mut()
            .filter(due)
            .map(|peer| {
                peer.due = None;
                peer.name.clone()
            })
            .collect();
        for name in observed {
            let keys = vec![
                Key::Node(name.clone()),
                Key::Heartbeat(name.clone()),
                Key::Silence(name.clone()),
            ];
            self.send(Pending::Observe(name), Request::Read(keys));
        }
        while self.due.first().is_some_and(|(at, _)| now >= *at)
            && let Some((at, session)) = self.due.pop_first()
        {
            self.session_due(now, at, session);
        }
    }

    fn answered(&mut self, now: BootTime, pending: Pending, answer: &Answer) {
        match pending {
            Pending::Renew(request) => self.renewed(now, request, answer),
            Pending::Rejoin => self.rejoined(now, answer),
            Pending::Silence => {
                if *answer != Answer::Committed {
                    self.lowers_silence = Some(now.plus(self.timing.retry_ms));
                }
            }
            Pending::List => self.listed(now, answer),
            Pending::Observe(name) => self.observed(now, &name, answer),
            Pending::Fencing(name) => {
                if let Some(peer) = self.peer(&name) {
                    peer.due = peer.due.map(|_| now);
                }
            }
            Pending::Look(session) => self.looked(now, session, answer),
            Pending::Claim(session) => self.claim_answered(now, session, answer),
            Pending::ReadBack(session) => self.read_back(now, &session, answer),
            Pending::Release(session) => self.release_answered(now, session, answer),
            Pending::ReleaseRead(session) => self.release_read(now, &session, answer),
            Pending::Check(session) => self.checked(now, &session, answer),
        }
    }

    fn peer(&mut self, name: &NodeName) -> Option<&mut Peer> {
        self.peers.iter_mut().find(|peer| peer.name == *name)
    }

    fn observed(&mut self, now: BootTime, name: &NodeName, answer: &Answer) {
        let timing = self.timing;
        let Some(peer) = self.peer(name) else {
            // No longer observed by this node.
            return;
        };
        if !matches!(answer, Answer::Values(_)) {
            peer.due = Some(now.plus(timing.renew_ms));
            self.outage();
            return;
        }
        let verdict = peer.observer.answered(now, answer, &timing);
        peer.due = Some(peer.observer.reads_at(now, &timing));
        if let Verdict::Fence(transaction) = verdict
            && self.may_act(now)
        {
            self.send(Pending::Fencing(name.clone()), Request::Commit(transaction));
        }
    }

    fn outage(&mut self) {
        for peer in &mut self.peers {
            peer.observer.outage();
        }
    }
}
