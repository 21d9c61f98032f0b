//! The node's own standing: from its rejoin over the reading of all records to its renewals.

use std::collections::BTreeMap;

use super::{Action, Local, NodeProtocol, Phase};
use crate::ownership::{
    Answer, BootTime, Key, NodeRecord, NodeState, OwnedState, Rejoin, Renewal, Renewed, Renewing,
    Step, Transaction, Value,
};

#[derive(Debug, Clone)]
pub(super) enum Standing {
    Rejoining(Rejoin),
    Listing {
        renewal: Renewal,
        due: Option<BootTime>,
    },
    Live(Renewal),
}

impl NodeProtocol {
    pub(super) fn rejoined(&mut self, now: BootTime, answer: &Answer) {
        let Standing::Rejoining(rejoin) = &mut self.standing else {
            return;
        };
        if let Step::Live {
            heartbeat,
            sent_at,
            silence_ms,
        } = rejoin.answered(now, answer, &self.timing)
        {
            let next = rejoin.next_attempt();
            let mut renewal = Renewal::new(self.me.clone(), heartbeat, sent_at, &self.timing);
            renewal.skip_to(next);
            self.incarnation = heartbeat.incarnation;
            self.standing = Standing::Listing {
                renewal,
                due: Some(now),
            };
            self.deadline = sent_at.plus(self.timing.fence_ms);
            let own = self.timing.silence_ms();
            self.lowers_silence = silence_ms
                .filter(|said| *said != own)
                .map(|said| sent_at.plus(said));
        }
    }

    /// Publishes how long this node's silence has to last, if its live record is unchanged.
    pub(super) fn own_silence(&self) -> Transaction {
        let live = NodeRecord {
            incarnation: self.incarnation,
            state: NodeState::Live,
        };
        Transaction {
            compare: vec![(Key::Node(self.me.clone()), Some(Value::Node(live)))],
            write: vec![(
                Key::Silence(self.me.clone()),
                Some(Value::Silence(self.timing.silence_ms())),
            )],
        }
    }

    pub(super) fn renewed(&mut self, now: BootTime, request: Renewing, answer: &Answer) {
        if matches!(answer, Answer::Ambiguous | Answer::Unavailable) {
            self.outage();
        }
        let (Standing::Live(renewal) | Standing::Listing { renewal, .. }) = &mut self.standing
        else {
            return;
        };
        match renewal.answered(now, request, answer, &self.timing) {
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

    pub(super) fn thaw(&mut self) {
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

    /// Handles all records, read after the CAS to live.
    pub(super) fn listed(&mut self, now: BootTime, answer: &Answer) {
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
