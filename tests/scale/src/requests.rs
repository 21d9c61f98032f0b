//! What nodes ask of etcd, and what it does.

use conman_core::ownership::{Answer, Event, Key, OwnedState, Request, Transaction, Value};

use crate::fleet::{Due, Fleet, HURRY_PAUSE_MS, Job, ROUND_TRIP_MS, session_name};

impl Fleet {
    pub(crate) fn request(&mut self, node: usize, op: u64, request: Request) {
        let costs = self.options.costs;
        let work_us = match &request {
            Request::Commit(transaction) => {
                self.counts.transactions += 1;
                let renews = matches!(transaction.write[..], [(Key::Heartbeat(_), _)]);
                if renews {
                    let now_ms = self.now_ms();
                    self.members[node].renewals.insert(op, now_ms);
                }
                costs.transaction_us
            }
            Request::Read(keys) => {
                self.counts.reads += 1;
                self.counts.records += keys.len() as u64;
                costs.read_us + costs.state_us * keys.len() as f64
            }
            Request::ReadSessions => {
                self.counts.reads += 1;
                self.counts.records += self.sessions_stored as u64;
                costs.read_us + costs.record_us * self.sessions_stored as f64
            }
        };
        let now_us = self.now_us as f64;
        self.etcd
            .begin(now_us, work_us, Job::Answer(node, op, request));
    }

    pub(crate) fn read(&mut self, records: usize, records_us: f64, job: Job) {
        let costs = self.options.costs;
        self.counts.reads += 1;
        self.counts.records += records as u64;
        let work_us = costs.read_us + records_us;
        self.begin(work_us, job);
    }

    pub(crate) fn begin(&mut self, work_us: f64, job: Job) {
        let share_us = work_us / self.options.processors as f64;
        self.etcd.begin(self.now_us as f64, share_us, job);
    }

    /// A change below a key that every node watches.
    pub(crate) fn deliver(&mut self, news: bool) {
        let watching = self.members.iter().filter(|member| member.up).count();
        self.counts.deliveries += watching as u64;
        let work_us = self.options.costs.delivery_us * watching as f64;
        self.begin(work_us, Job::Delivered { news });
    }

    pub(crate) fn done(&mut self, job: Job) {
        match job {
            Job::Answer(node, op, request) => {
                let answer = self.carry_out(node, &request);
                self.answers.insert((node, op), answer);
                self.after_ms(ROUND_TRIP_MS, Due::Answer(node, op, 0));
            }
            Job::Nodes(node) => {
                let (losses, now_ms) = (self.losses, self.now_ms());
                let member = &mut self.members[node];
                member.known_losses = losses;
                member.is_reading_nodes = false;
                member.looked_ms = now_ms;
                self.announce(node);
                let member = &mut self.members[node];
                let pause_ms = match std::mem::take(&mut member.hurry) {
                    true => HURRY_PAUSE_MS * self.options.intervals,
                    false => self.options.timing.renew_ms * self.options.intervals,
                };
                self.after_ms(pause_ms, Due::Look(node));
            }
            Job::Page(node) => self.page(node),
            Job::Announced(node) => {
                let leaving = self.members[node].leaving;
                if leaving && !self.views[node].draining {
                    self.views[node].draining = true;
                    self.losses += 1;
                    return self.deliver(true);
                }
                self.deliver(false);
            }
            Job::Delivered { news: true } => {
                for node in 0..self.members.len() {
                    let member = &mut self.members[node];
                    let waits = member.up && !member.is_reading_nodes && !member.hurry;
                    member.hurry = true;
                    if waits {
                        let pause_ms = HURRY_PAUSE_MS * self.options.intervals;
                        let due_ms = self.members[node].looked_ms + pause_ms;
                        let wait_ms = due_ms.saturating_sub(self.now_ms());
                        self.after_ms(wait_ms, Due::Look(node));
                    }
                }
            }
            Job::Delivered { news: false } | Job::Other => {}
        }
    }

    pub(crate) fn answered(&mut self, node: usize, op: u64, _: u64) {
        let Some(answer) = self.answers.remove(&(node, op)) else {
            return;
        };
        if let Some(sent_ms) = self.members[node].renewals.remove(&op) {
            let took_ms = self.now_ms() - sent_ms;
            self.slowest_renewal_ms = self.slowest_renewal_ms.max(took_ms);
        }
        self.on(node, Event::StoreAnswer { op, answer });
    }

    /// What etcd does with a request.
    pub(crate) fn carry_out(&mut self, node: usize, request: &Request) -> Answer {
        match request {
            Request::Commit(transaction) => self.commit(transaction),
            Request::Read(keys) => {
                let read = |key: &Key| (key.clone(), self.store.get(key).cloned());
                Answer::Values(keys.iter().map(read).collect())
            }
            Request::ReadSessions => {
                // The protocol ignores the others.
                let own = self.members[node].held.iter();
                let keys = own.map(|index| Key::Session(session_name(*index).into()));
                let read = |key: Key| (key.clone(), self.store.get(&key).cloned());
                Answer::Values(keys.map(read).collect())
            }
        }
    }

    pub(crate) fn commit(&mut self, transaction: &Transaction) -> Answer {
        let mut compare = transaction.compare.iter();
        if !compare.all(|(key, value)| self.store.get(key) == value.as_ref()) {
            return Answer::Conflict;
        }
        for (key, value) in &transaction.write {
            match value {
                Some(value) => self.store.insert(key.clone(), value.clone()),
                None => self.store.remove(key),
            };
            if let (Key::Session(name), Some(Value::Session(record))) = (key, value)
                && record.state == OwnedState::Released
            {
                self.released(name);
            }
            if matches!(key, Key::Node(_)) && self.now_us > 0 {
                self.deliver(true);
            }
        }
        Answer::Committed
    }
}
