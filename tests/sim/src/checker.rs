//! What must hold, judged from true-time container runs and the store's history alone.

use std::collections::{BTreeMap, BTreeSet};

use conman_core::ownership::{Key, NodeState, OwnedState, Transaction, Value};

/// (node, session, generation)
pub type Container = (usize, String, u64);

#[derive(Debug, Default)]
pub struct Checker {
    pub violation: Option<String>,
    runnable: BTreeSet<Container>,
    /// May run, now or later: created and not dead, or still to be created.
    possible: BTreeSet<Container>,
    highest: BTreeMap<String, u64>,
    fenced: BTreeSet<String>,
    live: BTreeMap<String, u64>,
    pub starts: u64,
    pub takeovers: u64,
}

impl Checker {
    fn fail(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub fn may_exist(&mut self, container: Container) {
        self.possible.insert(container);
    }

    pub fn gone(&mut self, container: &Container) {
        self.possible.remove(container);
        self.runnable.remove(container);
    }

    pub fn runs(&mut self, container: Container) {
        if let Some(other) = self
            .runnable
            .iter()
            .find(|other| other.1 == container.1 && **other != container)
        {
            self.fail(format!("overlap: {container:?} runs beside {other:?}"));
        }
        if self.fenced.contains(&format!("n{}", container.0)) {
            self.fail(format!(
                "past deadline: {container:?} runs on a fenced node"
            ));
        }
        if self.runnable.insert(container) {
            self.starts += 1;
        }
    }

    pub fn stops(&mut self, container: &Container) {
        self.runnable.remove(container);
    }

    /// A transaction that the store has just made effective.
    pub fn committed(&mut self, transaction: &Transaction) {
        for (key, value) in &transaction.write {
            match (key, value) {
                (Key::Node(node), Some(Value::Node(record))) => {
                    if record.state == NodeState::Fenced {
                        self.takeovers += 1;
                        self.fenced.insert(node.to_string());
                        self.live.remove(&**node);
                        let here = self.runnable.iter().find(|c| format!("n{}", c.0) == **node);
                        if let Some(container) = here.cloned() {
                            self.fail(format!("past deadline: {container:?} runs, node fenced"));
                        }
                    } else {
                        self.fenced.remove(&**node);
                        self.live.insert(node.to_string(), record.incarnation);
                    }
                }
                (Key::Session(session), Some(Value::Session(record))) => {
                    let slot = |c: &&Container| c.1 == **session && c.2 == record.generation;
                    if record.state == OwnedState::Released {
                        if let Some(container) = self.possible.iter().find(slot).cloned() {
                            self.fail(format!("released while {container:?} may run"));
                        }
                        continue;
                    }
                    let highest = self.highest.get(&**session).copied().unwrap_or(0);
                    if record.generation <= highest {
                        self.fail(format!(
                            "generation {} of {session} after {highest}",
                            record.generation
                        ));
                    }
                    self.highest.insert(session.to_string(), record.generation);
                    if self.live.get(&*record.owner) != Some(&record.incarnation) {
                        self.fail(format!(
                            "{session} claimed by {record:?}, which is not live"
                        ));
                    }
                }
                _ => {}
            }
        }
    }

    /// After healing: every session runs, where the registry says, and nothing else exists.
    pub fn finish(&mut self, sessions: &[String], records: &BTreeMap<Key, Value>) {
        for session in sessions {
            if !self.runnable.iter().any(|c| c.1 == *session) {
                self.fail(format!("{session} is not served after healing"));
            }
        }
        let mut owned = BTreeSet::new();
        for (key, value) in records {
            if let (Key::Session(session), Value::Session(record)) = (key, value)
                && record.state == OwnedState::Owned
            {
                owned.insert((
                    record.owner.to_string(),
                    session.to_string(),
                    record.generation,
                ));
            }
        }
        let there: BTreeSet<_> = self
            .possible
            .iter()
            .map(|c| (format!("n{}", c.0), c.1.clone(), c.2))
            .collect();
        if owned != there {
            self.fail(format!("leak: records {owned:?}, containers {there:?}"));
        }
    }
}
