//! Keeps a node's ownership: the heartbeat and the deadline that follows from it.
//!
//! ```text
//!  Idle ──due──▶ Sent ──committed──▶ Idle (deadline = its send instant + F)
//!                  └─conflict, ambiguous──▶ Reading ──mine──▶ Idle (deadline of what was READ)
//!                                              └──fenced──▶ lost
//! ```

use std::collections::BTreeMap;

use super::{
    Answer, BootTime, Heartbeat, Key, NodeName, NodeRecord, NodeState, Request, Timing,
    Transaction, Value,
};

/// Maximum number of attempts remembered; if an older one is read back, the node has to rejoin,
/// long after the fence has fired.
const MAX_UNRESOLVED: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Idle { due: BootTime },
    Sent { attempt: u64 },
    Unresolved { due: BootTime },
    Reading,
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
    state: State,
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
            state: State::Idle {
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
    pub fn due(&mut self, now: BootTime) -> Option<Request> {
        match self.state {
            State::Idle { due } if now >= due => {
                let attempt = self.next_attempt;
                self.next_attempt += 1;
                self.sent.insert(attempt, now);
                if self.sent.len() > MAX_UNRESOLVED {
                    self.sent.pop_first();
                }
                self.state = State::Sent { attempt };
                Some(Request::Commit(self.transaction(attempt)))
            }
            State::Unresolved { due } if now >= due => {
                self.state = State::Reading;
                Some(Request::Read(vec![
                    Key::Node(self.me.clone()),
                    Key::Heartbeat(self.me.clone()),
                ]))
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
                (
                    Key::Node(self.me.clone()),
                    Some(Value::Node(NodeRecord {
                        incarnation: self.incarnation,
                        state: NodeState::Live,
                    })),
                ),
                (key.clone(), Some(heartbeat(self.known))),
            ],
            write: vec![(key, Some(heartbeat(attempt)))],
        }
    }

    /// Handles the answer to the request under way.
    pub fn answered(&mut self, now: BootTime, answer: &Answer, timing: &Timing) -> Renewed {
        match (&self.state, answer) {
            (State::Sent { attempt }, Answer::Committed) => {
                let attempt = *attempt;
                self.read_back(attempt, timing)
            }
            (State::Reading, Answer::Values(_)) => {
                let (record, heartbeat) = answer.node(&self.me);
                let live = NodeRecord {
                    incarnation: self.incarnation,
                    state: NodeState::Live,
                };
                match heartbeat {
                    Some(read) if record == Some(live) && read.incarnation == self.incarnation => {
                        self.read_back(read.attempt, timing)
                    }
                    _ => Renewed::Lost,
                }
            }
            (State::Sent { attempt }, Answer::Unavailable) => {
                self.sent.remove(attempt);
                self.state = State::Idle {
                    due: now.plus(timing.retry_ms),
                };
                Renewed::NotYet
            }
            (State::Sent { .. }, _) => {
                self.state = State::Unresolved { due: now };
                Renewed::NotYet
            }
            (State::Reading, _) => {
                self.state = State::Unresolved {
                    due: now.plus(timing.retry_ms),
                };
                Renewed::NotYet
            }
            (State::Idle { .. } | State::Unresolved { .. }, _) => Renewed::NotYet,
        }
    }

    fn read_back(&mut self, attempt: u64, timing: &Timing) -> Renewed {
        let Some(&sent_at) = self.sent.get(&attempt) else {
            return Renewed::Lost;
        };
        self.known = attempt;
        self.sent.retain(|sent, _| *sent >= attempt);
        self.state = State::Idle {
            due: sent_at.plus(timing.renew_ms),
        };
        Renewed::Deadline(sent_at.plus(timing.fence_ms))
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

    #[test]
    fn the_deadline_counts_from_the_send_instant_not_from_the_answer() {
        let (mut renewal, timing) = (renewal(), Timing::default());
        assert!(renewal.due(BootTime(1_000)).is_some());
        let renewed = renewal.answered(BootTime(3_000), &Answer::Committed, &timing);
        assert_eq!(
            renewed,
            Renewed::Deadline(BootTime(1_000 + timing.fence_ms))
        );
    }

    #[test]
    fn an_ambiguous_answer_gives_the_deadline_of_the_attempt_that_is_read_back() {
        let (mut renewal, timing) = (renewal(), Timing::default());
        for (sent, shown, deadline) in [(1_000, 10, 5_000), (2_000, 11, 6_000)] {
            assert!(renewal.due(BootTime(sent)).is_some());
            renewal.answered(BootTime(sent + 1), &Answer::Ambiguous, &timing);
            assert!(renewal.due(BootTime(sent + 1)).is_some(), "it reads");
            let renewed = renewal.answered(BootTime(sent + 2), &read(LIVE, shown), &timing);
            assert_eq!(renewed, Renewed::Deadline(BootTime(deadline)));
        }
    }

    #[test]
    fn a_node_that_was_fenced_learns_it_from_the_read() {
        let (mut renewal, timing) = (renewal(), Timing::default());
        assert!(renewal.due(BootTime(1_000)).is_some());
        renewal.answered(BootTime(1_001), &Answer::Conflict, &timing);
        assert!(renewal.due(BootTime(1_001)).is_some());
        let fenced = NodeRecord {
            state: NodeState::Fenced,
            ..LIVE
        };
        let renewed = renewal.answered(BootTime(1_002), &read(fenced, 10), &timing);
        assert_eq!(renewed, Renewed::Lost);
    }
}
