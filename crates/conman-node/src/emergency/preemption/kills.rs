//! The signals of a preemption: the warning that a spec names, and SIGKILL.

use std::sync::Arc;

use conman_core::Closing;
use conman_linux::PidFd;
use conman_proto::{EventKind, Generation, SessionId};
use futures_util::future::FutureExt;
use tokio::time::Instant;

use super::super::target::{Progress, Target};
use super::Preemption;
use crate::certificate;
use crate::container_kill::kill_container;
use crate::kill_table::Stage;
use crate::plan;
use crate::throttled::{self, Killed};

/// A session that is to be killed now.
pub(super) struct SessionToKill {
    id: SessionId,
    generation: Generation,
    process: Arc<PidFd>,
    /// A task waits for its death already.
    watched: bool,
}

impl Preemption {
    pub(super) fn kill_starting(&mut self, id: &SessionId, generation: Generation) {
        let Some(target) = self.targets.get_mut(id) else {
            return;
        };
        target.progress = Progress::Sent(generation);
        let Some(runtime) = target.entry.runtime.clone() else {
            return;
        };
        let found = kill_container(&*runtime, &target.key(id, generation));
        if found.killed > 0 {
            self.note_kill(id, generation, Instant::now());
        }
        if let Some(init) = found.init {
            self.await_death(id, generation, init);
        }
    }

    /// Sends the signal that the session's spec names; a session without one is to be killed.
    pub(super) fn warn(
        &mut self,
        id: SessionId,
        generation: Generation,
        process: Arc<PidFd>,
    ) -> Option<SessionToKill> {
        let target = self.targets.get_mut(&id)?;
        target.entry.stage = Stage::Running(generation, process.clone());
        let grace = plan::grace(&id, &target.entry, self.budget_ms);
        let warned = target.entry.warning.and_then(|(signal, _)| {
            if grace.is_zero() {
                return None;
            }
            target.entry.leaving.tell();
            process.signal(signal).is_ok().then_some(grace)
        });
        let Some(grace) = warned else {
            return Some(SessionToKill {
                id,
                generation,
                process,
                watched: false,
            });
        };
        target.progress = Progress::Warned(generation, process.clone(), self.at + grace);
        self.watch(&id, process);
        None
    }

    /// Kills all of them before anything else: dying processes compete for the processors with the thread
    /// that kills.
    pub(super) fn kill(&mut self, to_kill: Vec<SessionToKill>) {
        // Before the kill, so that clients can distinguish it from an end of the program.
        for target in to_kill.iter().filter_map(|one| self.targets.get(&one.id)) {
            let closing = Closing::service_restart("session is moving");
            target.entry.closing.send_replace(Some(closing));
        }
        self.namespaces
            .keep(to_kill.iter().map(|one| &*one.process));
        let results: Vec<_> = to_kill.iter().map(|one| one.process.kill()).collect();
        let killed_at = Instant::now();
        self.release_processors(&to_kill);
        for (one, result) in to_kill.into_iter().zip(results) {
            let SessionToKill {
                id,
                generation,
                process,
                watched,
            } = one;
            match result {
                Ok(true) => self.note_kill(&id, generation, killed_at),
                // Dead already: its certificate comes at once.
                Ok(false) => {}
                Err(error) => {
                    let reason = format!(
                        "SIGKILL could not be sent: {}",
                        conman_core::error_chain(&error)
                    );
                    self.set(&id, Progress::Failed(Some(generation), reason));
                    continue;
                }
            }
            self.set(&id, Progress::Killed(generation, process.clone()));
            if !watched {
                self.watch(&id, process);
            }
        }
    }

    /// Lifts the CPU limits that keep killed sessions from dying soon.
    fn release_processors(&self, to_kill: &[SessionToKill]) {
        let killed = to_kill.iter().filter_map(|one| {
            let target = self.targets.get(&one.id)?;
            Some(Killed {
                runtime: target.entry.runtime.clone()?,
                key: target.key(&one.id, one.generation),
                process: Arc::clone(&one.process),
            })
        });
        throttled::release(killed.collect());
    }

    fn await_death(&mut self, id: &SessionId, generation: Generation, process: Arc<PidFd>) {
        self.set(id, Progress::Killed(generation, process.clone()));
        self.watch(id, process);
    }

    fn watch(&mut self, id: &SessionId, process: Arc<PidFd>) {
        let id = id.clone();
        self.dying
            .push(certificate::of(process).map(|()| id).boxed());
    }

    pub(super) fn next_kill(&self) -> Option<Instant> {
        let times = self
            .targets
            .values()
            .filter_map(|target| match &target.progress {
                Progress::Warned(_, _, at) => Some(*at),
                _ => None,
            });
        times.min()
    }

    /// A later notice leaves less time: half of it is for the remaining grace.
    pub(super) fn shorten_grace(&mut self) {
        let now = Instant::now();
        let latest = now + self.deadline.borrow().saturating_duration_since(now) / 2;
        for target in self.targets.values_mut() {
            if let Progress::Warned(_, _, at) = &mut target.progress {
                *at = latest.min(*at);
            }
        }
    }

    /// Kills those whose grace is over.
    pub(super) fn kill_due(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self
            .targets
            .iter()
            .filter_map(|(id, target)| match &target.progress {
                Progress::Warned(generation, process, at) if *at <= now => Some(SessionToKill {
                    id: id.clone(),
                    generation: *generation,
                    process: process.clone(),
                    watched: true,
                }),
                _ => None,
            })
            .collect();
        self.kill(due);
    }

    fn note_kill(&mut self, id: &SessionId, generation: Generation, at: Instant) {
        // A start under way may take several passes.
        let first = |target: &mut Target| !std::mem::replace(&mut target.kill_sent, true);
        if !self.targets.get_mut(id).is_some_and(first) {
            return;
        }
        self.killed += 1;
        self.last_kill = Some(at);
        self.event(
            EventKind::SessionKilled,
            id,
            generation,
            "SIGKILL for the preemption",
        );
    }
}
