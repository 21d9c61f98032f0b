//! Declares a silent node dead.
//!
//! ```text
//!  Unseen ──answer──▶ Seen { heartbeat, since its arrival } ── T, same heartbeat ──▶ CAS fenced
//!    ▲                   └──another heartbeat──▶ Seen
//!    └── any outage of the store that this observer saw
//! ```
//! If the node requires that its silence lasts longer than T, the observer waits that long.

use super::{
    Answer, BootTime, Heartbeat, Key, NodeName, NodeRecord, NodeState, Timing, Transaction, Value,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Wait,
    /// It may be fenced if nothing changed.
    Fence(Transaction),
}

#[derive(Debug, Clone)]
pub struct Observer {
    node: NodeName,
    seen: Option<(Heartbeat, BootTime)>,
    /// When the wait for another heartbeat ends, as of the last answer.
    ends_at: Option<BootTime>,
}

impl Observer {
    #[must_use]
    pub fn new(node: NodeName) -> Self {
        Self {
            node,
            seen: None,
            ends_at: None,
        }
    }

    /// When to read again: after R, or when the wait ends.
    #[must_use]
    pub fn reads_at(&self, now: BootTime, timing: &Timing) -> BootTime {
        let regular = now.plus(timing.renew_ms);
        let ends_at = self.ends_at.filter(|at| *at > now);
        ends_at.map_or(regular, |at| at.min(regular))
    }

    /// The store did not answer: the silence proves nothing about the node.
    pub fn outage(&mut self) {
        self.seen = None;
    }

    /// Handles a read of the node's record and heartbeat that arrived at `now`.
    pub fn answered(&mut self, now: BootTime, answer: &Answer, timing: &Timing) -> Verdict {
        let (record, heartbeat) = answer.node(&self.node);
        self.ends_at = None;
        let (Some(record), Some(heartbeat)) = (record, heartbeat) else {
            self.seen = None;
            return Verdict::Wait;
        };
        let patience_ms = timing.patience_ms(answer.silence_ms(&self.node));
        let since = match self.seen {
            Some((seen, since)) if seen == heartbeat => since,
            _ => now,
        };
        self.seen = Some((heartbeat, since));
        self.ends_at = Some(since.plus(patience_ms));
        if record.state == NodeState::Live && now.since(since) >= patience_ms {
            return Verdict::Fence(self.fencing(record, heartbeat));
        }
        Verdict::Wait
    }

    fn fencing(&self, record: NodeRecord, heartbeat: Heartbeat) -> Transaction {
        let key = Key::Node(self.node.clone());
        let fenced = NodeRecord {
            state: NodeState::Fenced,
            ..record
        };
        Transaction {
            compare: vec![
                (key.clone(), Some(Value::Node(record))),
                (
                    Key::Heartbeat(self.node.clone()),
                    Some(Value::Heartbeat(heartbeat)),
                ),
            ],
            write: vec![(key, Some(Value::Node(fenced)))],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(attempt: u64) -> Answer {
        let record = NodeRecord {
            incarnation: 1,
            state: NodeState::Live,
        };
        let heartbeat = Heartbeat {
            incarnation: 1,
            attempt,
        };
        Answer::Values(vec![
            (Key::Node("x".into()), Some(Value::Node(record))),
            (
                Key::Heartbeat("x".into()),
                Some(Value::Heartbeat(heartbeat)),
            ),
        ])
    }

    #[test]
    fn a_node_is_fenced_once_one_heartbeat_stood_for_t() {
        let (mut observer, timing) = (Observer::new("x".into()), Timing::default());
        for (now, attempt) in [(0, 1), (7_000, 2), (16_474, 2)] {
            let verdict = observer.answered(BootTime(now), &read(attempt), &timing);
            assert_eq!(verdict, Verdict::Wait);
        }
        let Verdict::Fence(fencing) = observer.answered(BootTime(16_475), &read(2), &timing) else {
            panic!("not fenced");
        };
        assert_eq!(fencing.compare.len(), 2, "record and that very heartbeat");
    }

    #[test]
    fn the_last_read_is_at_the_end_of_the_wait() {
        let (mut observer, timing) = (Observer::new("x".into()), Timing::default());
        let mut reads_at = |now, attempt| {
            observer.answered(BootTime(now), &read(attempt), &timing);
            observer.reads_at(BootTime(now), &timing)
        };
        assert_eq!(reads_at(0, 1), BootTime(1_000));
        assert_eq!(reads_at(9_020, 1), BootTime(9_475));
        assert_eq!(reads_at(9_475, 1), BootTime(10_475), "it may be refused");
        assert_eq!(reads_at(9_480, 2), BootTime(10_480));
    }

    #[test]
    fn a_node_that_says_so_is_waited_for_longer_than_t() {
        let (mut observer, timing) = (Observer::new("x".into()), Timing::default());
        let read = |silence_ms| {
            let Answer::Values(mut values) = read(1) else {
                unreachable!("it is a read")
            };
            values.push((Key::Silence("x".into()), Some(Value::Silence(silence_ms))));
            Answer::Values(values)
        };
        observer.answered(BootTime(0), &read(24_240), &timing);
        for now in [9_475, 24_484] {
            let verdict = observer.answered(BootTime(now), &read(24_240), &timing);
            assert_eq!(verdict, Verdict::Wait);
        }
        let verdict = observer.answered(BootTime(24_485), &read(24_240), &timing);
        assert!(matches!(verdict, Verdict::Fence(_)));
    }

    #[test]
    fn an_outage_never_shortens_the_wait() {
        let (mut observer, timing) = (Observer::new("x".into()), Timing::default());
        observer.answered(BootTime(0), &read(1), &timing);
        observer.outage();
        observer.answered(BootTime(8_000), &read(1), &timing);
        let verdict = observer.answered(BootTime(17_474), &read(1), &timing);
        assert_eq!(verdict, Verdict::Wait);
        let verdict = observer.answered(BootTime(17_475), &read(1), &timing);
        assert!(matches!(verdict, Verdict::Fence(_)));
    }
}
