//! Keeps a node's ownership: the heartbeat and the deadline that follows from it.
//!
//! ```text
//!  Idle ──due──▶ Sent ──committed──▶ Idle (deadline = its send instant + F)
//!                  └─conflict, ambiguous──▶ Reading ──mine──▶ Idle (deadline of what was READ)
//!                                              └──fenced──▶ lost
//! ```
//! An attempt that was taken for ambiguous because its answer was late may still be answered: the
//! deadline then counts from its send instant like any other.

use std::collections::BTreeMap;

use super::{
    Answer, BootTime, Heartbeat, Key, NodeName, NodeRecord, NodeState, Request, Timing,
    Transaction, Value,
};

/// Maximum number of attempts remembered; if an older one is read back, the node has to rejoin,
/// long after the fence has fired. The heartbeat known to be in the registry is always remembered.
const MAX_UNRESOLVED: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
enum RenewalState {
    Idle { due: BootTime },
    Sent { attempt: u64 },
    Unresolved { due: BootTime },
    Reading { attempt: u64 },
}

/// A request of the renewal, which its answer has to name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewing {
    Commit {
        attempt: u64,
    },
    /// Reads the heartbeat after this attempt.
    Read {
        attempt: u64,
    },
}

/// The meaning of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewed {
    /// The node's ownership is valid until then.
    Deadline(BootTime),
    NotYet,
    /// Another node has declared this node dead.
    Lost,
}

#[derive(Debug, Clone)]
pub struct Renewal {
    me: NodeName,
    incarnation: u64,
    /// The latest heartbeat known to be in the registry.
    known: u64,
    next_attempt: u64,
    /// Send instants of `known` and of every later attempt, one of which may still be read back.
    sent: BTreeMap<u64, BootTime>,
    state: RenewalState,
}

impl Renewal {
    /// Starts after the rejoin that wrote `first`, sent at `sent_at`.
    #[must_use]
    pub fn new(me: NodeName, first: Heartbeat, sent_at: BootTime, timing: &Timing) -> Self {
        Self {
            me,
            incarnation: first.incarnation,
            known: first.attempt,
            next_attempt: first.attempt + 1,
            sent: BTreeMap::from([(first.attempt, sent_at)]),
            state: RenewalState::Idle {
                due: sent_at.plus(timing.renew_ms),
            },
        }
    }

    /// Never used by any send so far.
    #[must_use]
    pub fn next_attempt(&self) -> u64 {
        self.next_attempt
    }

    /// Attempts below `next` were sent by the rejoin.
    pub fn skip_to(&mut self, next: u64) {
        self.next_attempt = self.next_attempt.max(next);
    }

    /// The request that is due; `now` must have been read before it is sent.
    pub fn due(&mut self, now: BootTime) -> Option<(Renewing, Request)> {
        match self.state {
            RenewalState::Idle { due } if now >= due => {
                let attempt = self.next_attempt;
                self.next_attempt += 1;
                self.sent.insert(attempt, now);
                if self.sent.len() > MAX_UNRESOLVED {
                    // The first is `known`, which a refusing registry shows again and again.
                    let oldest = self.sent.keys().nth(1).copied();
                    oldest.map(|oldest| self.sent.remove(&oldest));
                }
                self.state = RenewalState::Sent { attempt };
                let request = Request::Commit(self.transaction(attempt));
                Some((Renewing::Commit { attempt }, request))
            }
            RenewalState::Unresolved { due } if now >= due => {
                let attempt = self.next_attempt;
                // So that no two reads have the same number.
                self.next_attempt += 1;
                self.state = RenewalState::Reading { attempt };
                let keys = vec![Key::Node(self.me.clone()), Key::Heartbeat(self.me.clone())];
                Some((Renewing::Read { attempt }, Request::Read(keys)))
            }
            _ => None,
        }
    }

    fn transaction(&self, attempt: u64) -> Transaction {
        let heartbeat = |attempt| {
            Value::Heartbeat(Heartbeat {
                incarnation: self.incarnation,
                attempt,
            })
        };
        let key = Key::Heartbeat(self.me.clone());
        Transaction {
            compare: vec![
                (Key::Node(self.me.clone()), Some(Value::Node(self.live()))),
                (key.clone(), Some(heartbeat(self.known))),
            ],
            write: vec![(key, Some(heartbeat(attempt)))],
        }
    }

    fn live(&self) -> NodeRecord {
        NodeRecord {
            incarnation: self.incarnation,
            state: NodeState::Live,
        }
    }

    /// Handles the answer to a request of this renewal or of an earlier one. A commit that was
    /// answered with [`Answer::Ambiguous`] may be answered a second time.
    pub fn answered(
        &mut self,
        now: BootTime,
        request: Renewing,
        answer: &Answer,
        timing: &Timing,
    ) -> Renewed {
        match request {
            Renewing::Commit { attempt } => self.commit_answered(now, attempt, answer, timing),
            Renewing::Read { attempt } if self.state == (RenewalState::Reading { attempt }) => {
                self.read_answered(now, answer, timing)
            }
            Renewing::Read { .. } => Renewed::NotYet,
        }
    }

    fn commit_answered(
        &mut self,
        now: BootTime,
        attempt: u64,
        answer: &Answer,
        timing: &Timing,
    ) -> Renewed {
        let is_awaited = self.state == (RenewalState::Sent { attempt });
        match answer {
            // A later attempt is under way, whose answer decides what follows.
            Answer::Committed if !is_awaited && matches!(self.state, RenewalState::Sent { .. }) => {
                self.stands(attempt, timing).unwrap_or(Renewed::NotYet)
            }
            Answer::Committed => {
                let Some(renewed) = self.stands(attempt, timing) else {
                    return Renewed::NotYet;
                };
                self.state = self.next(now, timing);
                renewed
            }
            _ if !is_awaited => Renewed::NotYet,
            Answer::Unavailable => {
                self.sent.remove(&attempt);
                self.state = RenewalState::Idle {
                    due: now.plus(self.pause_ms(now, timing)),
                };
                Renewed::NotYet
            }
            _ => {
                self.state = RenewalState::Unresolved { due: now };
                Renewed::NotYet
            }
        }
    }

    fn read_answered(&mut self, now: BootTime, answer: &Answer, timing: &Timing) -> Renewed {
        if !matches!(answer, Answer::Values(_)) {
            self.state = RenewalState::Unresolved {
                due: now.plus(self.pause_ms(now, timing)),
            };
            return Renewed::NotYet;
        }
        let (record, heartbeat) = answer.node(&self.me);
        let mine = heartbeat
            .filter(|read| record == Some(self.live()) && read.incarnation == self.incarnation);
        let stands = mine.and_then(|read| self.stands(read.attempt, timing));
        let Some(renewed) = stands else {
            return Renewed::Lost;
        };
        self.state = self.next(now, timing);
        renewed
    }

    /// The attempt is known to be in the registry; `None` if it is not one of the remembered.
    fn stands(&mut self, attempt: u64, timing: &Timing) -> Option<Renewed> {
        let sent_at = *self.sent.get(&attempt)?;
        self.known = attempt;
        self.sent.retain(|sent, _| *sent >= attempt);
        Some(Renewed::Deadline(sent_at.plus(timing.fence_ms)))
    }

    /// R after the send instant of what stands in the registry, and not sooner than a pause after a
    /// later attempt that did not take effect.
    fn next(&self, now: BootTime, timing: &Timing) -> RenewalState {
        let known_at = self.sent.get(&self.known).copied().unwrap_or(now);
        let regular = known_at.plus(timing.renew_ms);
        let due = match self.sent.last_key_value() {
            Some((last, sent_at)) if *last != self.known => {
                regular.max(sent_at.plus(self.pause_ms(now, timing)))
            }
            _ => regular,
        };
        RenewalState::Idle { due }
    }

    /// Between two attempts that fail: short as long as the deadline can be met.
    fn pause_ms(&self, now: BootTime, timing: &Timing) -> u64 {
        let known_at = self.sent.get(&self.known).copied();
        match known_at.is_some_and(|at| now < at.plus(timing.fence_ms)) {
            true => timing.retry_ms,
            false => timing.renew_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIVE: NodeRecord = NodeRecord {
        incarnation: 1,
        state: NodeState::Live,
    };

    fn renewal() -> Renewal {
        let first = Heartbeat {
            incarnation: 1,
            attempt: 10,
        };
        Renewal::new("a".into(), first, BootTime(0), &Timing::default())
    }

    fn read(record: NodeRecord, attempt: u64) -> Answer {
        Answer::Values(vec![
            (Key::Node("a".into()), Some(Value::Node(record))),
            (
                Key::Heartbeat("a".into()),
                Some(Value::Heartbeat(Heartbeat {
                    incarnation: 1,
                    attempt,
                })),
            ),
        ])
    }

    /// Sends what is due.
    fn sent(renewal: &mut Renewal, now: u64) -> Renewing {
        let (request, _) = renewal.due(BootTime(now)).expect("a request is due");
        request
    }

    #[test]
    fn the_deadline_counts_from_the_send_instant_not_from_the_answer() {
        let (mut renewal, timing) = (renewal(), Timing::default());
        let commit = sent(&mut renewal, 1_000);
        let renewed = renewal.answered(BootTime(3_000), commit, &Answer::Committed, &timing);
        assert_eq!(
            renewed,
            Renewed::Deadline(BootTime(1_000 + timing.fence_ms))
        );
    }

    #[test]
    fn an_ambiguous_answer_gives_the_deadline_of_the_attempt_that_is_read_back() {
        let (mut renewal, timing) = (renewal(), Timing::default());
        for (at, shown, deadline) in [(1_000, 10, 5_000), (2_000, 11, 6_000)] {
            let commit = sent(&mut renewal, at);
            renewal.answered(BootTime(at + 1), commit, &Answer::Ambiguous, &timing);
            let reads = sent(&mut renewal, at + 1);
            let renewed = renewal.answered(BootTime(at + 2), reads, &read(LIVE, shown), &timing);
            assert_eq!(renewed, Renewed::Deadline(BootTime(deadline)));
        }
    }

    #[test]
    fn a_node_that_was_fenced_learns_it_from_the_read() {
        let (mut renewal, timing) = (renewal(), Timing::default());
        let commit = sent(&mut renewal, 1_000);
        renewal.answered(BootTime(1_001), commit, &Answer::Conflict, &timing);
        let reads = sent(&mut renewal, 1_001);
        let fenced = NodeRecord {
            state: NodeState::Fenced,
            ..LIVE
        };
        let renewed = renewal.answered(BootTime(1_002), reads, &read(fenced, 10), &timing);
        assert_eq!(renewed, Renewed::Lost);
    }

    #[test]
    fn an_answer_that_comes_after_its_timeout_counts_from_its_send_instant() {
        let (mut renewal, timing) = (renewal(), Timing::default());
        let commit = sent(&mut renewal, 1_000);
        renewal.answered(BootTime(2_000), commit, &Answer::Ambiguous, &timing);
        let reads = sent(&mut renewal, 2_000);
        let renewed = renewal.answered(BootTime(2_200), commit, &Answer::Committed, &timing);
        assert_eq!(renewed, Renewed::Deadline(BootTime(6_000)));
        let next = sent(&mut renewal, 2_200);
        assert!(matches!(next, Renewing::Commit { .. }));
        // It was sent before the late answer was known.
        let renewed = renewal.answered(BootTime(2_300), reads, &read(LIVE, 10), &timing);
        assert_eq!(renewed, Renewed::NotYet);
        let renewed = renewal.answered(BootTime(2_400), next, &Answer::Committed, &timing);
        assert_eq!(renewed, Renewed::Deadline(BootTime(7_200)));
    }

    #[test]
    fn a_registry_that_refuses_for_minutes_gets_few_requests_and_never_looks_like_a_loss() {
        let (mut renewal, timing) = (renewal(), Timing::default());
        let (mut before_deadline, mut after) = (0, 0);
        for now in 1_000..300_000 {
            let Some((request, _)) = renewal.due(BootTime(now)) else {
                continue;
            };
            let answer = match request {
                Renewing::Commit { .. } => Answer::Ambiguous,
                Renewing::Read { .. } => read(LIVE, 10),
            };
            let renewed = renewal.answered(BootTime(now), request, &answer, &timing);
            assert_ne!(renewed, Renewed::Lost, "at {now}");
            match now < timing.fence_ms {
                true => before_deadline += 1,
                false => after += 1,
            }
        }
        assert!((16..=40).contains(&before_deadline), "{before_deadline}");
        assert!((500..=600).contains(&after), "{after}");
        let commit = sent(&mut renewal, 301_000);
        let renewed = renewal.answered(BootTime(301_001), commit, &Answer::Committed, &timing);
        assert_eq!(renewed, Renewed::Deadline(BootTime(306_000)));
    }
}
