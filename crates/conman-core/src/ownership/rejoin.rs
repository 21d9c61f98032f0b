//! Rejoining after an outage or a start, in the only safe order.
//!
//! ```text
//!  (frozen) ─▶ Asking ─▶ Committing (live, new incarnation) ─▶ Listing ─▶ kill lost, thaw rest
//!                ▲            │ conflict, ambiguous
//!                └────────────┘
//! ```
//! After the CAS to live, no other node can claim this node's sessions; so only records read after
//! it show what this node owns. The CAS also publishes how long this node's silence has to last. A
//! longer value of an earlier daemon stays while a deadline of that daemon may still be set: the
//! record is live in that case. On a fenced node nothing runs.

use super::{
    Answer, BootTime, Heartbeat, Key, NodeName, NodeRecord, NodeState, Request, Timing,
    Transaction, Value,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Wait,
    /// Live again: read every record next. The CAS was sent at `sent_at`.
    Live {
        heartbeat: Heartbeat,
        sent_at: BootTime,
        /// The registry's value of how long this node's silence has to last.
        silence_ms: Option<u64>,
    },
}

#[derive(Debug, Clone)]
enum RejoinState {
    Idle {
        due: BootTime,
    },
    Asking,
    Committing {
        mine: Heartbeat,
        sent_at: BootTime,
        silence_ms: u64,
    },
}

#[derive(Debug, Clone)]
pub struct Rejoin {
    me: NodeName,
    next_attempt: u64,
    /// Sent and not known to have failed.
    unresolved: Vec<(Heartbeat, BootTime)>,
    read: Option<(Option<NodeRecord>, Option<Heartbeat>, Option<u64>)>,
    state: RejoinState,
}

/// Maximum number of ambiguous attempts remembered; an older one that is read back is overwritten.
const MAX_UNRESOLVED: usize = 16;

impl Rejoin {
    /// `next_attempt` is above every attempt number this node has ever sent, so that a heartbeat
    /// read back identifies one send.
    #[must_use]
    pub fn new(me: NodeName, next_attempt: u64, now: BootTime) -> Self {
        Self {
            me,
            next_attempt,
            unresolved: Vec::new(),
            read: None,
            state: RejoinState::Idle { due: now },
        }
    }

    pub fn due(&mut self, now: BootTime, timing: &Timing) -> Option<Request> {
        match self.state {
            RejoinState::Idle { due } if now >= due => {}
            _ => return None,
        }
        let Some((record, heartbeat, said)) = self.read.take() else {
            self.state = RejoinState::Asking;
            return Some(Request::Read(vec![
                Key::Node(self.me.clone()),
                Key::Heartbeat(self.me.clone()),
                Key::Silence(self.me.clone()),
            ]));
        };
        let before = record.map_or(0, |record| record.incarnation);
        let Some(incarnation) = before.checked_add(1) else {
            // Only an operator can repair it; it is read again until then.
            self.state = RejoinState::Idle {
                due: now.plus(timing.retry_ms),
            };
            return None;
        };
        let mine = Heartbeat {
            incarnation,
            attempt: self.next_attempt,
        };
        self.next_attempt += 1;
        self.unresolved.push((mine, now));
        if self.unresolved.len() > MAX_UNRESOLVED {
            self.unresolved.remove(0);
        }
        let own = timing.silence_ms();
        let live_before = record.is_some_and(|record| record.state == NodeState::Live);
        let silence_ms = said
            .filter(|_| live_before)
            .map_or(own, |said| own.max(said));
        self.state = RejoinState::Committing {
            mine,
            sent_at: now,
            silence_ms,
        };
        let live = NodeRecord {
            incarnation: mine.incarnation,
            state: NodeState::Live,
        };
        let (node, hb) = (Key::Node(self.me.clone()), Key::Heartbeat(self.me.clone()));
        Some(Request::Commit(Transaction {
            compare: vec![
                (node.clone(), record.map(Value::Node)),
                (hb.clone(), heartbeat.map(Value::Heartbeat)),
            ],
            write: vec![
                (node, Some(Value::Node(live))),
                (hb, Some(Value::Heartbeat(mine))),
                (
                    Key::Silence(self.me.clone()),
                    Some(Value::Silence(silence_ms)),
                ),
            ],
        }))
    }

    pub fn answered(&mut self, now: BootTime, answer: &Answer, timing: &Timing) -> Step {
        match (&self.state, answer) {
            (
                RejoinState::Committing {
                    mine,
                    sent_at,
                    silence_ms,
                },
                Answer::Committed,
            ) => Step::Live {
                heartbeat: *mine,
                sent_at: *sent_at,
                silence_ms: Some(*silence_ms),
            },
            (RejoinState::Asking, Answer::Values(_)) => {
                let (record, heartbeat) = answer.node(&self.me);
                self.state = RejoinState::Idle { due: now };
                let ours = self.unresolved.iter().find(|(sent, _)| {
                    Some(*sent) == heartbeat
                        && record
                            == Some(NodeRecord {
                                incarnation: sent.incarnation,
                                state: NodeState::Live,
                            })
                });
                if let Some(&(heartbeat, sent_at)) = ours {
                    return Step::Live {
                        heartbeat,
                        sent_at,
                        silence_ms: answer.silence_ms(&self.me),
                    };
                }
                self.read = Some((record, heartbeat, answer.silence_ms(&self.me)));
                Step::Wait
            }
            _ => {
                self.state = RejoinState::Idle {
                    due: now.plus(timing.retry_ms),
                };
                Step::Wait
            }
        }
    }

    /// Above every attempt that was sent.
    #[must_use]
    pub fn next_attempt(&self) -> u64 {
        self.next_attempt
    }
}
