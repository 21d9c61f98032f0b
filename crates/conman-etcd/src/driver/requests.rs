//! The driver's requests to etcd, and the handling of their answers.

use std::time::Duration;

use conman_core::ownership::{
    Answer, Event, Key, NodeState, OwnedState, Ownership, Request, SessionName, Slot, Transaction,
    Value,
};

use super::super::codec;
use super::super::figures::Tally;
use super::super::store::{Additions, Answered, Entry};
use super::super::wire;
use super::{Done, Serving, batches};
use conman_registry::Standing;

/// Delay before a refused release is tried again.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// A transaction that is sent, possibly together with others.
pub(super) struct Sent {
    pub(super) op: u64,
    pub(super) transaction: Transaction,
    pub(super) additions: Additions,
}

impl Serving<'_> {
    /// Queues a request, and adds the writes and comparisons that accompany it.
    pub(super) fn prepare(&mut self, op: u64, request: Request) {
        let transaction = match request {
            Request::Commit(transaction) => transaction,
            read => {
                let store = self.shared.store.clone();
                self.work.push(Box::pin(async move {
                    Done::Answered(op, store.execute(read, Additions::default()).await)
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
                    self.tell(op, session, ownership, &mut additions);
                }
                (Key::Session(session), None) => {
                    let key = self.shared.store.keys.told(session);
                    additions.write.push(wire::delete(key));
                }
                _ => {}
            }
        }
        self.outbox.push(Sent {
            op,
            transaction,
            additions,
        });
    }

    fn tell(
        &mut self,
        op: u64,
        session: &SessionName,
        ownership: &Ownership,
        additions: &mut Additions,
    ) {
        let told = match ownership.state {
            OwnedState::Owned => {
                if let Some(revision) = self.claims.read(session) {
                    let key = self.shared.store.keys.told(session);
                    let unchanged = wire::unchanged_since(key, revision);
                    additions.compare.push(unchanged);
                }
                self.claims.told(op, session, ownership, &self.shared)
            }
            OwnedState::Released => {
                let slot = Slot {
                    session: session.clone(),
                    generation: ownership.generation,
                };
                self.releases.told(&slot, &self.claims, &self.shared)
            }
        };
        if let Some(told) = told {
            let key = self.shared.store.keys.told(session);
            additions.write.push(wire::put(key, codec::text(&told)));
        }
    }

    /// Sends the queued transactions, releases in batches.
    pub(super) fn flush(&mut self) {
        let mut releases = Vec::new();
        for one in std::mem::take(&mut self.outbox) {
            if is_release(&one.transaction) {
                releases.push(one);
            } else {
                self.send(one);
            }
        }
        for batch in batches::of(releases) {
            self.send_together(batch);
        }
    }

    fn send_together(&mut self, sent: Vec<Sent>) {
        let store = self.shared.store.clone();
        self.work.push(Box::pin(async move {
            let parts: Vec<_> = sent
                .iter()
                .map(|one| (one.transaction.clone(), one.additions.clone()))
                .collect();
            let answered = store.commit(&parts).await;
            // A conflict of a single transaction is its own.
            match <[Sent; 1]>::try_from(sent) {
                Ok([one]) if answered.answer == Answer::Conflict => {
                    Done::Answered(one.op, answered)
                }
                Ok(one) => Done::Merged(one.into(), answered),
                Err(sent) => Done::Merged(sent, answered),
            }
        }));
    }

    fn send(&mut self, one: Sent) {
        let store = self.shared.store.clone();
        self.work.push(Box::pin(async move {
            let parts = [(one.transaction, one.additions)];
            Done::Answered(one.op, store.commit(&parts).await)
        }));
    }

    pub(super) fn done(&mut self, done: Done) {
        match done {
            Done::Answered(op, answered) => self.answered(op, answered),
            Done::Merged(sent, answered) => {
                // After a conflict each transaction is tried alone.
                if answered.answer == Answer::Conflict {
                    for one in sent {
                        self.send_together(vec![one]);
                    }
                    return;
                }
                if answered.refused {
                    return self.refused(sent, answered);
                }
                for one in sent {
                    let answered = Answered {
                        answer: answered.answer.clone(),
                        trouble: answered.trouble.clone(),
                        revision: answered.revision,
                        refused: false,
                    };
                    self.releases.answered(&one.transaction, &answered);
                    self.answered(one.op, answered);
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

    /// Transactions that are refused together may be accepted in parts. A single one is reported,
    /// and tried again only after a pause.
    fn refused(&mut self, mut sent: Vec<Sent>, answered: Answered) {
        if sent.len() > 1 {
            let half = sent.split_off(sent.len() / 2);
            self.send_together(sent);
            self.send_together(half);
            return;
        }
        for one in sent {
            let reason = answered.trouble.clone().unwrap_or_default();
            self.releases.refused(&one.transaction, reason);
            let answered = Answered {
                answer: answered.answer.clone(),
                trouble: None,
                revision: 0,
                refused: true,
            };
            self.work.push(Box::pin(async move {
                tokio::time::sleep(REFUSED_PAUSE).await;
                Done::Answered(one.op, answered)
            }));
        }
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

fn is_release(transaction: &Transaction) -> bool {
    matches!(
        &transaction.write[..],
        [(Key::Session(_), Some(Value::Session(ownership)))]
            if ownership.state == OwnedState::Released
    )
}
