//! The registry behind a network: linearizable itself, while requests and answers are lost or
//! late, and all of it may be down.

use conman_core::ownership::{
    Answer, BootTime, Event, Key, NodeState, OwnedState, Request, SessionName, Transaction, Value,
    collect,
};

use crate::world::{Ev, HEAL_MS, World};

/// A daemon takes what is not answered by then for ambiguous.
pub(crate) const STORE_TIMEOUT_MS: u64 = 1_000;

/// The number of every deletion of a record: no request of a protocol has it, so that none takes the
/// answer for its own.
const FORGET_OP: u64 = u64::MAX;

impl World {
    pub(crate) fn request(&mut self, node: usize, now: BootTime, op: u64, request: Request) {
        let epoch = self.machines[node].daemon_epoch;
        if let Request::Commit(transaction) = &request {
            if !self.is_routine(transaction) {
                self.note(|| format!("n{node} sends {op}: {:?}", transaction.write));
            }
            self.checker.sends(node, now.0, transaction);
            self.checker.renews(node, self.now, transaction);
        }
        self.machines[node].open.insert(op);
        self.at(STORE_TIMEOUT_MS, Ev::Timeout(node, epoch, op));
        let lost = self.machines[node].cut_out || self.random.percent(self.lossy);
        if !lost {
            let late = self.lossy > 0 && self.random.percent(8);
            let most = if late { 9_000 } else { 30 };
            let slow_ms = self.slow_ms / 2;
            let arrival = Ev::Arrive(node, epoch, op, request);
            self.soon(slow_ms + 1, slow_ms + most, arrival);
            // Then another daemon, of another incarnation, meets what this one sent.
            if late && self.random.percent(10) {
                self.soon(1, 500, Ev::DaemonDies(node));
            }
        }
    }

    pub(crate) fn arrive(&mut self, node: usize, epoch: u64, op: u64, request: &Request) {
        if self.now < self.store_down_until {
            if self.random.percent(50) {
                self.reply(node, epoch, op, Answer::Unavailable);
            }
            return;
        }
        if let Some(answer) = self.refused(node, op, request) {
            let delay = self.refusal_delay();
            let event = Event::StoreAnswer { op, answer };
            return self.at(delay, Ev::Daemon(node, epoch, None, event));
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

    pub(crate) fn commit(&mut self, node: usize, op: u64, transaction: &Transaction) -> Answer {
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
        let slow_ms = self.slow_ms / 2;
        self.soon(
            slow_ms + 1,
            slow_ms + most,
            Ev::Daemon(node, epoch, None, event),
        );
    }

    /// A node deletes the record of a session that is released: for a caller, beside its protocol.
    pub(crate) fn forget(&mut self, node: usize, session: &SessionName) {
        if !self.machines[node].is_awake() {
            return;
        }
        let record = match self.store.get(&Key::Session(session.clone())) {
            Some(Value::Session(record)) if record.state == OwnedState::Released => record.clone(),
            _ => return,
        };
        let floor = match self.store.get(&Key::Floor) {
            Some(Value::Floor(floor)) => Some(*floor),
            _ => None,
        };
        let now = self.clock(node);
        let transaction = collect(session, &record, floor);
        self.request(node, now, FORGET_OP, Request::Commit(transaction));
    }
}
