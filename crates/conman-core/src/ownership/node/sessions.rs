//! One session's phases, from the first read of its record to its release.
//!
//! ```text
//!  Looking ─▶ Claiming ─▶ Held ─▶ Ending ──certificate──▶ Releasing ─▶ removed
//!                └─ not ours: removed  └─ lost: removed without a release
//! ```
//! A claim in doubt is sent again until its result is known: whatever refutes one copy of it (this
//! node's incarnation, the record, the owner's incarnation, the floor) never becomes true again and
//! refutes all copies.

use super::{Action, Local, NodeProtocol, Pending, Phase};
use crate::ownership::{
    Answer, BootTime, Key, OwnedState, Ownership, Refusal, Request, SessionName, Slot, SlotView,
    Value, claim, release,
};

impl Local {
    pub(super) fn new(record: Ownership, phase: Phase) -> Self {
        Self {
            record,
            slot: 0,
            sent: false,
            astray: false,
            phase,
            waits: None,
        }
    }

    pub(super) fn slot_of(&self, session: &SessionName) -> Slot {
        Slot {
            session: session.clone(),
            generation: self.slot,
        }
    }
}

fn floor_in(answer: &Answer) -> Option<u64> {
    match answer.value(&Key::Floor) {
        Some(Value::Floor(floor)) => Some(*floor),
        _ => None,
    }
}

fn record_in<'a>(answer: &'a Answer, session: &SessionName) -> Option<&'a Ownership> {
    match answer.value(&Key::Session(session.clone())) {
        Some(Value::Session(record)) => Some(record),
        _ => None,
    }
}

fn was_asked(answer: &Answer, key: &Key) -> bool {
    matches!(answer, Answer::Values(values) if values.iter().any(|(asked, _)| asked == key))
}

impl NodeProtocol {
    fn unclaimed(&self) -> Ownership {
        Ownership {
            owner: self.me.clone(),
            incarnation: self.incarnation,
            generation: 0,
            state: OwnedState::Owned,
        }
    }

    /// Adopts what the shim holds when this daemon starts: listing the records decides on it.
    pub(super) fn adopt(&mut self, mut slots: Vec<SlotView>) {
        // Of two slots of one session the later one is kept, in whatever order the shim reports
        // them.
        slots.sort_by(|a, b| a.slot.cmp(&b.slot));
        for view in slots {
            let mut record = self.unclaimed();
            record.generation = view.slot.generation;
            // A slot that died meanwhile is condemned by listing, to receive its certificate again.
            let mut local = match view.certified {
                true => Local::new(record, Phase::Ending { owned: true }),
                false => Local::new(record, Phase::Held),
            };
            local.slot = view.slot.generation;
            local.sent = true;
            if let Some(older) = self.sessions.insert(view.slot.session.clone(), local) {
                self.actions
                    .push(Action::Kill(older.slot_of(&view.slot.session)));
            }
        }
    }

    pub(super) fn shim_connected(&mut self, fired: bool, slots: Vec<SlotView>) {
        // Slots that the old shim had condemned may be frozen: they are thawed by order like the
        // rest.
        self.fired |= fired || slots.iter().any(|view| view.frozen);
        let mut known = std::collections::BTreeSet::new();
        for view in slots {
            let local = self.sessions.get(&view.slot.session);
            let ours = local.filter(|local| local.slot == view.slot.generation);
            match ours.map(|local| &local.phase) {
                Some(Phase::Held) if !view.certified => {}
                Some(Phase::Held | Phase::Ending { .. }) if view.certified => {
                    self.actions.push(Action::Ended(view.slot.clone()));
                }
                // Its certificate was reported before; the release forgets it.
                Some(Phase::Releasing | Phase::Checking) => {}
                _ if view.certified => self.actions.push(Action::Forget(view.slot.clone())),
                _ => self.actions.push(Action::Kill(view.slot.clone())),
            }
            known.insert(view.slot);
        }
        // It died with the old shim, or its order never arrived: both are now certified. A start
        // that was not sent to the old shim is sent to this one.
        for (session, local) in &mut self.sessions {
            let slot = local.slot_of(session);
            let unsettled = match local.phase {
                Phase::Held => local.sent,
                Phase::Ending { .. } => true,
                _ => false,
            };
            if unsettled && !known.contains(&slot) {
                local.astray = true;
                self.actions.push(Action::Kill(slot));
            }
        }
    }

    pub(super) fn wait(&mut self, session: &SessionName, at: BootTime) {
        if let Some(local) = self.sessions.get_mut(session) {
            local.waits = Some(at);
            self.due.insert((at, session.clone()));
        }
    }

    fn retry(&mut self, session: &SessionName, now: BootTime) {
        self.wait(session, now.plus(self.timing.retry_ms));
    }

    pub(super) fn session_due(&mut self, now: BootTime, at: BootTime, session: SessionName) {
        let may_act = self.may_act(now);
        let Some(local) = self.sessions.get_mut(&session) else {
            return;
        };
        if local.waits != Some(at) {
            return;
        }
        local.waits = None;
        match &local.phase {
            Phase::Claiming { claim, .. } if may_act => {
                let request = Request::Commit(claim.clone());
                self.send(Pending::Claim(session), request);
            }
            Phase::Claiming { .. } => self.retry(&session, now),
            Phase::Releasing => {
                let request = Request::Commit(release(&session, &local.record));
                self.send(Pending::Release(session), request);
            }
            Phase::Checking => {
                let keys = vec![Key::Session(session.clone())];
                self.send(Pending::Check(session), Request::Read(keys));
            }
            Phase::Looking | Phase::Held | Phase::Ending { .. } => {}
        }
    }

    pub(super) fn ensure(&mut self, now: BootTime, session: SessionName) {
        if !self.may_act(now) || self.sessions.contains_key(&session) {
            return;
        }
        let local = Local::new(self.unclaimed(), Phase::Looking);
        self.sessions.insert(session.clone(), local);
        let keys = vec![Key::Session(session.clone()), Key::Floor];
        self.send(Pending::Look(session), Request::Read(keys));
    }

    pub(super) fn stop(&mut self, now: BootTime, session: &SessionName) {
        if self.sessions.contains_key(session) {
            self.end(session, true);
        } else if self.is_live() {
            let local = Local::new(self.unclaimed(), Phase::Checking);
            self.sessions.insert(session.clone(), local);
            self.wait(session, now);
        }
    }

    pub(super) fn end(&mut self, session: &SessionName, owned: bool) {
        let Some(local) = self.sessions.get_mut(session) else {
            return;
        };
        let owned = match local.phase {
            Phase::Held => owned,
            Phase::Ending { owned: still } => owned && still,
            _ => return,
        };
        local.phase = Phase::Ending { owned };
        self.actions.push(Action::Kill(local.slot_of(session)));
    }

    /// The registry says that this node owns it, but no slot is known: it was never opened, or was
    /// lost with the machine, or an earlier daemon's order to open it is still on its way. The
    /// fence knows, and refuses to open it after it was condemned.
    pub(super) fn end_unknown(&mut self, session: &SessionName, record: Ownership) {
        if let Some(local) = self.sessions.get_mut(session) {
            if local.slot != 0 && local.slot != record.generation {
                self.actions.push(Action::Forget(local.slot_of(session)));
            }
            local.slot = record.generation;
            local.record = record;
            local.phase = Phase::Held;
            self.end(session, true);
        }
    }

    pub(super) fn certified(&mut self, now: BootTime, slot: &Slot) {
        let live = self.is_live();
        let local = self.sessions.get_mut(&slot.session);
        let Some(local) = local.filter(|local| local.slot == slot.generation) else {
            self.actions.push(Action::Forget(slot.clone()));
            return;
        };
        match local.phase {
            Phase::Ending { owned: false } => {
                self.sessions.remove(&slot.session);
                self.actions.push(Action::Forget(slot.clone()));
            }
            Phase::Held | Phase::Ending { .. } if live && local.record.generation != local.slot => {
                let record = local.record.clone();
                self.end_unknown(&slot.session, record);
            }
            Phase::Held | Phase::Ending { .. } if live => {
                local.phase = Phase::Releasing;
                self.wait(&slot.session, now);
            }
            // Its owner is unknown: listing condemns it again and gets this answer again.
            Phase::Held => local.phase = Phase::Ending { owned: true },
            _ => {}
        }
    }

    /// `record` shows that this node owns it, read after the CAS to live; without a record the
    /// session was lost.
    pub(super) fn settle(&mut self, session: &SessionName, record: Option<Ownership>) {
        let Some(local) = self.sessions.get_mut(session) else {
            return;
        };
        let ending = match local.phase {
            Phase::Held => false,
            Phase::Ending { .. } => true,
            // They continue automatically; a claim does not outlive its incarnation.
            _ => return,
        };
        let Some(record) = record else {
            return self.end(session, false);
        };
        // If the record has another generation than the slot, the slot is ended first.
        let superseded = record.generation != local.slot;
        local.record = record;
        local.phase = Phase::Held;
        if ending || superseded {
            self.end(session, true);
        }
    }

    /// Their outstanding claims have the old incarnation and fail.
    pub(super) fn drop_claims(&mut self) {
        let claims = |phase: &Phase| matches!(phase, Phase::Looking | Phase::Claiming { .. });
        self.sessions.retain(|_, local| !claims(&local.phase));
        self.pending.retain(|_, pending| {
            !matches!(
                pending,
                Pending::Look(_) | Pending::Claim(_) | Pending::ReadBack(_)
            )
        });
    }

    pub(super) fn looked(&mut self, now: BootTime, session: SessionName, answer: &Answer) {
        if !self.sessions.contains_key(&session) {
            return;
        }
        if !self.may_act(now) || !matches!(answer, Answer::Values(_)) {
            return self.give_up(&session);
        }
        let current = record_in(answer, &session);
        let owned = current.filter(|record| record.state == OwnedState::Owned);
        let mut owner = None;
        if let Some(record) = owned {
            if record.owner == self.me {
                return self.end_unknown(&session, record.clone());
            }
            let key = Key::Node(record.owner.clone());
            if !was_asked(answer, &key) {
                let keys = vec![Key::Session(session.clone()), Key::Floor, key];
                return self.send(Pending::Look(session), Request::Read(keys));
            }
            (owner, _) = answer.node(&record.owner);
        }
        let floor = floor_in(answer);
        match claim(&self.me, self.incarnation, &session, current, owner, floor) {
            Ok((record, transaction)) => {
                if let Some(local) = self.sessions.get_mut(&session) {
                    local.record = record;
                    local.phase = Phase::Claiming {
                        claim: transaction.clone(),
                        doubt: false,
                    };
                }
                self.send(Pending::Claim(session), Request::Commit(transaction));
            }
            Err(Refusal::Owned(owner)) => {
                self.give_up(&session);
                self.actions.push(Action::Forward { session, owner });
            }
            Err(Refusal::NoGenerationLeft) => self.give_up(&session),
        }
    }

    pub(super) fn claim_answered(&mut self, now: BootTime, session: SessionName, answer: &Answer) {
        let Some(local) = self.sessions.get_mut(&session) else {
            return;
        };
        let Phase::Claiming { doubt, .. } = &mut local.phase else {
            return;
        };
        match answer {
            Answer::Committed => self.claimed(now, &session),
            // Refuted, unless an earlier copy of it is the stored record.
            Answer::Conflict => {
                let keys = vec![Key::Session(session.clone())];
                self.send(Pending::ReadBack(session), Request::Read(keys));
            }
            Answer::Unavailable if !*doubt => self.give_up(&session),
            Answer::Unavailable => self.retry(&session, now),
            Answer::Ambiguous | Answer::Values(_) => {
                *doubt = true;
                self.retry(&session, now);
            }
        }
    }

    pub(super) fn read_back(&mut self, now: BootTime, session: &SessionName, answer: &Answer) {
        let Some(local) = self.sessions.get(session) else {
            return;
        };
        if !matches!(answer, Answer::Values(_)) {
            self.retry(session, now);
        } else if record_in(answer, session) == Some(&local.record) {
            self.claimed(now, session);
        } else {
            self.give_up(session);
        }
    }

    fn claimed(&mut self, now: BootTime, session: &SessionName) {
        let may = self.may_act(now);
        let Some(local) = self.sessions.get_mut(session) else {
            return;
        };
        if may {
            local.phase = Phase::Held;
            local.slot = local.record.generation;
            self.actions.push(Action::Start(local.slot_of(session)));
        } else {
            // Nothing was sent, so nothing has to die first.
            local.phase = Phase::Releasing;
            self.wait(session, now);
        }
    }

    fn give_up(&mut self, session: &SessionName) {
        self.sessions.remove(session);
    }

    pub(super) fn release_answered(
        &mut self,
        now: BootTime,
        session: SessionName,
        answer: &Answer,
    ) {
        match answer {
            Answer::Committed => self.released(&session),
            Answer::Unavailable => self.retry(&session, now),
            _ => {
                let keys = vec![Key::Session(session.clone())];
                self.send(Pending::ReleaseRead(session), Request::Read(keys));
            }
        }
    }

    pub(super) fn release_read(&mut self, now: BootTime, session: &SessionName, answer: &Answer) {
        if !matches!(answer, Answer::Values(_)) {
            return self.retry(session, now);
        }
        match record_in(answer, session) {
            Some(read) if read.owner == self.me && read.state == OwnedState::Owned => {
                let Some(local) = self.sessions.get_mut(session) else {
                    return;
                };
                if local.record.generation == read.generation {
                    local.record = read.clone();
                    self.retry(session, now);
                } else {
                    self.end_unknown(session, read.clone());
                }
            }
            _ => self.released(session),
        }
    }

    fn released(&mut self, session: &SessionName) {
        if let Some(local) = self.sessions.remove(session)
            && local.slot != 0
        {
            self.actions.push(Action::Forget(local.slot_of(session)));
        }
    }

    pub(super) fn checked(&mut self, now: BootTime, session: &SessionName, answer: &Answer) {
        if !matches!(answer, Answer::Values(_)) {
            return self.retry(session, now);
        }
        match record_in(answer, session) {
            Some(record) if record.owner == self.me && record.state == OwnedState::Owned => {
                self.end_unknown(session, record.clone());
            }
            _ => {
                self.sessions.remove(session);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ownership::Timing;

    #[test]
    fn a_later_life_stands_over_one_that_has_ended_in_whatever_order_the_shim_tells_them() {
        let view = |generation, certified: bool| SlotView {
            slot: Slot {
                session: "s".into(),
                generation,
            },
            present: !certified,
            frozen: false,
            certified,
        };
        // In both numeric and lexical order of the names.
        for slots in [[(10, false), (9, true)], [(9, true), (10, false)]] {
            let slots = slots.map(|(generation, certified)| view(generation, certified));
            let now = BootTime(0);
            let timing = Timing::default();
            let node = NodeProtocol::new("n".into(), &[], timing, now, 1, slots.to_vec());
            let held = Some(crate::ownership::Stake::Held { generation: 10 });
            assert_eq!(node.stake(&"s".into()), held);
            let killed = node.actions.iter().filter_map(|action| match action {
                Action::Kill(slot) => Some(slot.generation),
                _ => None,
            });
            assert_eq!(killed.collect::<Vec<_>>(), [9]);
        }
    }
}
