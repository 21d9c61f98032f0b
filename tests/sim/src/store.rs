//! The registry behind a network: linearizable itself, while requests and answers are lost or
//! late, watches are lost, late, doubled or wrong, and all of it may be down.

use conman_core::ownership::{Answer, Event, Key, NodeState, Request, Transaction, Value};

use crate::world::{Ev, HEAL_MS, World};

/// A daemon takes what is not answered by then for ambiguous.
pub(crate) const STORE_TIMEOUT_MS: u64 = 1_000;

impl World {
    pub(crate) fn arrive(&mut self, node: usize, epoch: u64, op: u64, request: &Request) {
        if self.now < self.store_down_until {
            if self.random.percent(50) {
                self.reply(node, epoch, op, Answer::Unavailable);
            }
            return;
        }
        let answer = match request {
            Request::Commit(transaction) => self.commit(node, op, transaction),
            Request::Read(keys) => {
                let read = |key: &Key| (key.clone(), self.store.get(key).cloned());
                Answer::Values(keys.iter().map(read).collect())
            }
            Request::ReadSessions => {
                let all = self.store.iter();
                let all = all.filter(|(key, _)| matches!(key, Key::Session(_)));
                Answer::Values(all.map(|(k, v)| (k.clone(), Some(v.clone()))).collect())
            }
        };
        self.reply(node, epoch, op, answer);
    }

    /// A renewal when nothing goes wrong any more: not worth a line in a trace.
    pub(crate) fn is_routine(&self, transaction: &Transaction) -> bool {
        let renews = matches!(transaction.write[..], [(Key::Heartbeat(_), _)]);
        renews && self.now > HEAL_MS
    }

    fn commit(&mut self, node: usize, op: u64, transaction: &Transaction) -> Answer {
        let mut compare = transaction.compare.iter();
        if !compare.all(|(key, value)| self.store.get(key) == value.as_ref()) {
            return Answer::Conflict;
        }
        if !self.is_routine(transaction) {
            self.note(|| format!("store: n{node}'s {op} takes effect"));
        }
        self.checker.committed(self.now, transaction);
        for (key, value) in &transaction.write {
            match value {
                Some(value) => self.store.insert(key.clone(), value.clone()),
                None => self.store.remove(key),
            };
            self.watches(key);
            if let (Key::Node(name), Some(Value::Node(record))) = (key, value)
                && record.state == NodeState::Fenced
                && let Some(fenced) = self.names.iter().position(|other| other == name)
            {
                self.stir(fenced);
            }
        }
        Answer::Committed
    }

    fn reply(&mut self, node: usize, epoch: u64, op: u64, answer: Answer) {
        if self.machines[node].cut_in || self.random.percent(self.lossy) {
            return;
        }
        let late = self.lossy > 0 && self.random.percent(10);
        let most = if late { 900 } else { 30 };
        let event = Event::StoreAnswer { op, answer };
        self.soon(1, most, Ev::Daemon(node, epoch, None, event));
    }

    /// What watchers of a node's keys hear: most of it, once or twice, sooner or later, and now
    /// and then that the key is gone.
    fn watches(&mut self, key: &Key) {
        let (Key::Node(name) | Key::Heartbeat(name)) = key else {
            return;
        };
        let name = name.clone();
        for watcher in 0..self.machines.len() {
            let times = match self.random.range(0, 99) {
                0..30 => 0,
                30..90 => 1,
                _ => 2,
            };
            for _ in 0..times {
                let deleted = self.random.percent(2);
                let late = self.random.percent(10);
                let most = if late { 8_000 } else { 50 };
                let epoch = self.machines[watcher].daemon_epoch;
                let node = name.clone();
                let event = Event::WatchHint { node, deleted };
                if !self.machines[watcher].cut_in {
                    self.soon(1, most, Ev::Daemon(watcher, epoch, None, event));
                }
            }
        }
    }
}
