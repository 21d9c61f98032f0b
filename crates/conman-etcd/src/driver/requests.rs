//! The driver's requests to etcd, and the handling of their answers.

use std::time::Duration;

use conman_core::ownership::{
    Answer, Event, Key, NodeState, OwnedState, Ownership, Request, SessionName, Slot, Transaction,
    Value,
};

use super::super::call_queue::take_group;
use super::super::codec;
use super::super::figures::Tally;
use super::super::store::{Additions, Answered, Entry, Kind, kind};
use super::super::talk_names;
use super::super::wire::{self, TxnRequest};
use super::{Done, Serving};
use conman_registry::Standing;

/// Delay before a refused release is tried again.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// A release that is about to be sent, together with others of the moment.
pub(super) struct UnsentRelease {
    op: u64,
    slot: Slot,
    request: TxnRequest,
}

impl Serving<'_> {
    /// Sends a request with the writes and comparisons that accompany it. Releases are only collected.
    pub(super) fn prepare(&mut self, op: u64, request: Request) {
        let transaction = match request {
            Request::Commit(transaction) => transaction,
            read => {
                let store = self.shared.store.clone();
                self.work.push(Box::pin(async move {
                    Done::Answered(op, store.execute(read).await)
                }));
                return;
            }
        };
        if let Some(tally) = Tally::of(&transaction, &self.shared.me) {
            self.tallies.insert(op, tally);
        }
        let mut additions = Additions::default();
        let heartbeat = Key::Heartbeat(self.shared.me.clone());
        if transaction.write.iter().any(|(key, _)| *key == heartbeat) {
            self.renewals.push(op);
        }
        for (key, value) in &transaction.write {
            match (key, value) {
                (Key::Node(name), Some(Value::Node(record)))
                    if *name == self.shared.me && record.state == NodeState::Live =>
                {
                    let key = self.shared.store.keys.holder(name);
                    let unchanged = wire::unchanged_since(key.clone(), self.holder);
                    additions.compare.push(unchanged);
                    let gone = self.shared.store.keys.lost_node(name);
                    additions.compare.push(wire::is(gone, None));
                    additions.write.push(wire::put(key, self.me()));
                    self.rejoins.push(op);
                }
                (Key::Session(session), Some(Value::Session(ownership))) => {
                    self.add_details(op, session, ownership, &mut additions);
                }
                _ => {}
            }
        }
        let store = self.shared.store.clone();
        if kind(&transaction) == Kind::Renewal {
            let patience = store.client.patience();
            self.work.push(Box::pin(async move {
                tokio::time::sleep(patience).await;
                Done::Overdue(op)
            }));
        }
        match released_slot(&transaction) {
            Some(slot) => self.unsent_releases.push(UnsentRelease {
                op,
                slot,
                request: store.request(&transaction, additions),
            }),
            None => self.work.push(Box::pin(async move {
                Done::Answered(op, store.commit(&transaction, additions).await)
            })),
        }
    }

    fn add_details(
        &mut self,
        op: u64,
        session: &SessionName,
        ownership: &Ownership,
        additions: &mut Additions,
    ) {
        let details = match ownership.state {
            OwnedState::Owned => {
                if let Some(revision) = self.claims.read(session) {
                    let key = self.shared.store.keys.details(session);
                    let unchanged = wire::unchanged_since(key, revision);
                    additions.compare.push(unchanged);
                }
                self.claims.details(op, session, ownership, &self.shared)
            }
            OwnedState::Released => {
                let slot = Slot {
                    session: session.clone(),
                    generation: ownership.generation,
                };
                self.releases.details(&slot, &self.claims, &self.shared)
            }
        };
        if let Some(details) = details {
            let key = self.shared.store.keys.details(session);
            additions.write.push(wire::put(key, codec::text(&details)));
            if ownership.state == OwnedState::Released {
                let keys = &self.shared.store.keys;
                let gone = talk_names::removal(keys, &details.record);
                additions.write.extend(gone);
            }
        }
    }

    /// Sends the collected releases, as many in one call as fit. No call waits for another.
    pub(super) fn send_releases(&mut self) {
        while !self.unsent_releases.is_empty() {
            let group = take_group(&mut self.unsent_releases, |one| &one.request);
            let store = self.shared.store.clone();
            self.work.push(Box::pin(async move {
                let (names, requests): (Vec<_>, Vec<_>) = group
                    .into_iter()
                    .map(|one| ((one.op, one.slot), one.request))
                    .unzip();
                let answers = store.commit_releases(&requests).await;
                Done::Released(names.into_iter().zip(answers).collect())
            }));
        }
    }

    pub(super) fn done(&mut self, done: Done) {
        match done {
            Done::Answered(op, answered) => self.answered(op, answered),
            // Its answer still counts when it comes.
            Done::Overdue(op) if self.renewals.contains(&op) => {
                let waited_ms = self.shared.store.client.patience().as_millis();
                let trouble = format!("etcd has not answered a renewal within {waited_ms} ms");
                self.shared.note_trouble(Some(trouble));
                let answer = Answer::Ambiguous;
                self.inbox.push_back(Event::StoreAnswer { op, answer });
            }
            Done::Overdue(_) => {}
            Done::Released(releases) => {
                for ((op, slot), answered) in releases {
                    self.release_answered(op, slot, answered);
                }
            }
            Done::Looked(looked) => {
                let follows = self.releases.looked(*looked, &self.protocol, &self.shared);
                self.inbox.extend(follows);
            }
            Done::Holder(Ok((entries, _))) => self.held(&entries),
            Done::Holder(Err(error)) => {
                tracing::debug!(%error, "cannot read the holder of this node's name");
            }
        }
    }

    /// Checks the holder of this node's name after a rejoin that did not commit.
    fn held(&mut self, entries: &[Option<Entry>]) {
        if let [_, Some(_)] = entries {
            self.name_lost = Some("the fleet has forgotten this node meanwhile");
            return;
        }
        match entries.first() {
            Some(Some((_, holder, revision))) if *holder == self.me() => self.holder = *revision,
            // The writer has joined since it was found to be silent.
            Some(Some((_, _, revision))) if *revision != self.holder => {
                self.name_lost = Some("another conman has taken this node's name");
            }
            Some(Some(_)) => {}
            _ => self.holder = 0,
        }
    }

    /// A release that etcd refuses is reported, and tried again only after a pause.
    fn release_answered(&mut self, op: u64, slot: Slot, mut answered: Answered) {
        if answered.refused {
            let reason = answered.trouble.take().unwrap_or_default();
            self.releases.refused(&slot, reason);
            self.work.push(Box::pin(async move {
                tokio::time::sleep(REFUSED_PAUSE).await;
                Done::Answered(op, answered)
            }));
            return;
        }
        if answered.answer == Answer::Committed {
            self.releases.recorded(slot);
        }
        self.answered(op, answered);
    }

    fn answered(&mut self, op: u64, answered: Answered) {
        if let Some(trouble) = &answered.trouble {
            tracing::debug!(op, trouble, "etcd");
            if !self.ever_live {
                let reason = trouble.clone();
                self.shared.stands(Standing::Joining { reason });
            }
        }
        let renewal = self.renewals.iter().position(|renewal| *renewal == op);
        let is_renewal = renewal.map(|index| self.renewals.swap_remove(index));
        match (&answered.trouble, &answered.answer) {
            // Reads before a rejoin are part of it.
            (Some(trouble), _) if is_renewal.is_some() || !self.protocol.is_live() => {
                self.shared.note_trouble(Some(trouble.clone()));
            }
            (None, Answer::Committed) if is_renewal.is_some() => self.shared.note_trouble(None),
            _ => {}
        }
        if answered.refused {
            self.claims
                .refused(op, answered.trouble.as_deref().unwrap_or_default());
        }
        // A conflict tells the store's revision, not the record's.
        if answered.answer == Answer::Committed {
            self.claims.answered(op, answered.revision);
        }
        if let Some(tally) = self.tallies.remove(&op)
            && answered.answer == Answer::Committed
        {
            tally.count();
            self.shared.events.committed(&tally);
        }
        if self.rejoins.contains(&op) {
            self.rejoins.retain(|rejoin| *rejoin != op);
            match answered.answer {
                Answer::Committed => self.holder = answered.revision,
                // Another installation may hold the name, or an earlier try may have succeeded.
                _ => {
                    let store = self.shared.store.clone();
                    let me = &self.shared.me;
                    let names = [store.keys.holder(me), store.keys.lost_node(me)];
                    self.work.push(Box::pin(
                        async move { Done::Holder(store.get(&names).await) },
                    ));
                }
            }
        }
        let answer = answered.answer;
        self.inbox.push_back(Event::StoreAnswer { op, answer });
    }
}

/// The slot that a release gives up; `None` for every other transaction.
fn released_slot(transaction: &Transaction) -> Option<Slot> {
    match &transaction.write[..] {
        [(Key::Session(session), Some(Value::Session(ownership)))]
            if ownership.state == OwnedState::Released =>
        {
            Some(Slot {
                session: session.clone(),
                generation: ownership.generation,
            })
        }
        _ => None,
    }
}
