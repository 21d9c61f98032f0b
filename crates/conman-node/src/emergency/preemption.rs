//! One preemption, from the notice to the report.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use conman_core::{EndCause, PREEMPTED};
use conman_linux::KeptNamespaces;
use conman_proto::{EventKind, Generation, PreemptReport, SessionId, Unreleased};
use conman_registry::{Ending, NewEvent, RegistryError, Release};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::claims::{self, Claims};
use super::kill_priority::{KillPriority, Weight};
use super::releases::{Released, Releases};
use super::target::{Progress, Target};
use super::{Means, Notice};
use crate::events::{end_event, session_event};
use crate::kill_table::{Fate, KillEntry, Stage};
use crate::session;

mod kills;

use kills::SessionToKill;

/// Minimum interval between polls of sessions that are still starting.
const START_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A poll waits at least this multiple of the previous poll's duration, so that polling thousands of
/// sessions does not compete with killing and releasing them.
const POLL_BACKOFF: u32 = 8;

/// What a preemption did, with its events.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) report: PreemptReport,
    pub(super) events: Vec<NewEvent>,
    /// Of the killed sessions, until the machine is known to stay.
    pub(super) namespaces: KeptNamespaces,
}

pub(super) struct Preemption {
    means: Means,
    reason: String,
    source: String,
    at: Instant,
    noticed_at: Timestamp,
    budget_ms: u32,
    deadline: watch::Receiver<Instant>,
    targets: HashMap<SessionId, Target>,
    /// Taking them down would compete with the releases, and is useless on a machine that goes.
    namespaces: KeptNamespaces,
    dying: FuturesUnordered<BoxFuture<'static, SessionId>>,
    releases: Releases,
    claims: Claims,
    priority: KillPriority,
    events: Vec<NewEvent>,
    last_poll: Duration,
    last_kill: Option<Instant>,
    last_certificate: Option<Instant>,
    last_release: Option<Instant>,
    killed: u64,
    certified: u64,
}

impl Preemption {
    /// Runs on the emergency thread, which has priority while this lives.
    pub(super) fn new(
        means: &Means,
        weight: &Weight,
        notice: &Notice,
        deadline: watch::Receiver<Instant>,
    ) -> Self {
        Self {
            means: means.clone(),
            reason: notice.reason.clone(),
            source: notice.source.clone(),
            at: notice.at,
            noticed_at: notice.noticed_at,
            budget_ms: notice.budget_ms.unwrap_or(means.budget_ms),
            deadline,
            targets: HashMap::new(),
            namespaces: KeptNamespaces::default(),
            dying: FuturesUnordered::new(),
            releases: Releases::new(means.registry.clone()),
            claims: Claims::default(),
            priority: KillPriority::take(weight),
            events: Vec::new(),
            last_poll: Duration::ZERO,
            last_kill: None,
            last_certificate: None,
            last_release: None,
            killed: 0,
            certified: 0,
        }
    }

    /// Kills, certifies and releases until everything is settled or the time is up.
    pub(super) async fn run(mut self) -> Outcome {
        self.scan();
        let message = format!(
            "{} sessions, notice by {}: {}",
            self.targets.len(),
            self.source,
            self.reason
        );
        let started = NewEvent {
            at: self.noticed_at,
            ..NewEvent::of_node(EventKind::PreemptStarted, message)
        };
        self.events.insert(0, started);
        while !self.targets.values().all(Target::is_settled) {
            let end = *self.deadline.borrow_and_update();
            if Instant::now() >= end {
                break;
            }
            self.releases.begin();
            self.raise_priority();
            self.step(end).await;
        }
        self.conclude()
    }

    /// Gives dying processes priority, unless a session's grace is still running: its program would then
    /// get all processors.
    fn raise_priority(&mut self) {
        let mut dying = false;
        for target in self.targets.values() {
            match &target.progress {
                Progress::Warned(..) => return,
                Progress::Killed(..) => dying = true,
                _ => {}
            }
        }
        if dying {
            self.priority.give();
        }
    }

    /// Waits for the next event and handles it.
    async fn step(&mut self, end: Instant) {
        let means = self.means.clone();
        let uncertain = self.targets.values().any(Target::is_uncertain);
        let poll = if uncertain {
            Instant::now() + START_POLL_INTERVAL.max(self.last_poll * POLL_BACKOFF)
        } else {
            end
        };
        let kill = self.next_kill().unwrap_or(end);
        let retry = self.releases.retry_at().unwrap_or(end);
        let wake = poll.min(kill).min(retry).min(end);
        tokio::select! {
            // Cancel safe: a certificate is taken or stays in the set.
            Some(id) = self.dying.next(), if !self.dying.is_empty() => self.certify(id),
            // Cancel safe: see there.
            released = self.releases.next() => self.released(released),
            // Cancel safe: see there.
            found = self.claims.next() => self.found_claims(found),
            // Cancel safe: the loop reads the deadline again. The sender lives as long as this.
            Ok(()) = self.deadline.changed() => self.shorten_grace(),
            // Cancel safe: changes are read from the table, and polled anyway while a session is
            // uncertain.
            () = means.table.changed() => self.scan(),
            // Cancel safe: the time is read again.
            () = sleep_until(wake) => {
                self.kill_due();
                if uncertain {
                    let begun = Instant::now();
                    self.scan();
                    self.look_up_claims();
                    self.last_poll = begun.elapsed();
                }
            }
        }
    }

    /// Reads the table, and acts on every new entry.
    fn scan(&mut self) {
        let entries: HashMap<_, _> = self.means.table.entries().into_iter().collect();
        for (id, target) in &mut self.targets {
            // Its own task released it. Others are settled by their certificates.
            if target.is_uncertain() && !entries.contains_key(id) {
                target.progress = Progress::Settled;
            }
        }
        let mut to_kill = Vec::new();
        for (id, entry) in entries {
            to_kill.extend(self.take_over(id, entry));
        }
        self.kill(to_kill);
    }

    /// Takes over an entry. Returns the session if it is to be killed now.
    fn take_over(&mut self, id: SessionId, entry: KillEntry) -> Option<SessionToKill> {
        let known = match self.targets.entry(id.clone()) {
            Entry::Vacant(vacant) => {
                vacant.insert(Target::new(entry.clone()));
                true
            }
            // Only an uncertain target can have changed.
            Entry::Occupied(target) => target.get().is_uncertain(),
        };
        if !known {
            return None;
        }
        match entry.stage {
            Stage::Claiming => None,
            Stage::Reserved(generation) => {
                self.never_ran(&id, generation);
                None
            }
            Stage::Sent(generation) => {
                self.kill_starting(&id, generation);
                None
            }
            Stage::Running(generation, process) => self.warn(id, generation, process),
        }
    }

    /// A closed table lets no start be sent, so a reserved session has no process and gets none.
    fn never_ran(&mut self, id: &SessionId, generation: Generation) {
        self.set(id, Progress::Dead(generation));
        self.queue_release(id, generation);
    }

    /// Handles one certificate, and all others that are available.
    fn certify(&mut self, first: SessionId) {
        let mut next = Some(first);
        while let Some(id) = next {
            if let Some(generation) = self.targets.get(&id).and_then(Target::generation)
                && !self.targets.get(&id).is_some_and(Target::is_settled)
            {
                self.certified += 1;
                self.last_certificate = Some(Instant::now());
                self.event(
                    EventKind::SessionDead,
                    &id,
                    generation,
                    "its PID namespace is empty",
                );
                self.set(&id, Progress::Dead(generation));
                self.queue_release(&id, generation);
            }
            next = self.dying.next().now_or_never().flatten();
        }
    }

    fn queue_release(&mut self, id: &SessionId, generation: Generation) {
        let Some(target) = self.targets.get(id) else {
            return;
        };
        let reason = format!("{PREEMPTED}: {}", self.reason);
        let mut ending = Ending {
            started_at: target.entry.started_at,
            phases: target.entry.phases.clone(),
            ..Ending::now(false, EndCause::Preempted, reason)
        };
        session::attribute_to_deletion(target.entry.stop.borrow().as_ref(), &mut ending);
        self.releases.push(Release {
            id: id.clone(),
            generation,
            ending,
        });
    }

    fn released(&mut self, released: Released) {
        for (release, result) in released {
            let (id, generation) = (release.id.clone(), release.generation);
            match result {
                // The record is deleted, or is of a newer generation: it was released before, by the
                // session's task, which sees the death as well, or by a try whose answer was lost.
                Ok(()) | Err(RegistryError::Superseded { .. }) => {
                    self.last_release = Some(Instant::now());
                    let (kind, ending) = (EventKind::SessionReleased, &release.ending);
                    let event = end_event(kind, &id, generation, &ending.end(), &ending.reason);
                    self.events.push(event);
                    if let Some(target) = self.targets.get_mut(&id) {
                        target.progress = Progress::Released(generation);
                        target
                            .entry
                            .fate
                            .send_replace(Some(Fate::Released(release.ending)));
                    }
                    self.means.table.remove(&id, Some(generation));
                }
                Err(error) if error.is_retryable() => {
                    self.releases.put_back(release);
                }
                Err(error) => {
                    let reason = format!(
                        "its release was refused: {}",
                        conman_core::error_chain(&error)
                    );
                    self.set(&id, Progress::Failed(Some(generation), reason));
                }
            }
        }
    }

    /// Reads the generations of claims under way from the registry. After a while, gives up on claims that
    /// it does not have.
    fn look_up_claims(&mut self) {
        let claiming: Vec<SessionId> = self
            .targets
            .iter()
            .filter(|(_, target)| matches!(target.progress, Progress::Claiming))
            .map(|(id, _)| id.clone())
            .collect();
        if Instant::now() < self.at + claims::PATIENCE {
            self.claims.look_up(&self.means.registry, claiming);
            return;
        }
        for id in claiming {
            let reason = "its claim was still under way; it has no container, and the record, if \
                any, is released at the next start of conman";
            self.set(&id, Progress::Failed(None, reason.to_owned()));
        }
    }

    fn found_claims(&mut self, found: Vec<(SessionId, Generation)>) {
        for (id, generation) in found {
            let claiming = self
                .targets
                .get(&id)
                .is_some_and(|target| matches!(target.progress, Progress::Claiming));
            if claiming {
                // The table is closed, so this generation's start is never sent.
                self.never_ran(&id, generation);
            }
        }
    }

    fn set(&mut self, id: &SessionId, progress: Progress) {
        if let Some(target) = self.targets.get_mut(id) {
            target.progress = progress;
        }
    }

    fn event(&mut self, kind: EventKind, id: &SessionId, generation: Generation, message: &str) {
        self.events
            .push(session_event(kind, id, generation, message.to_owned()));
    }

    fn conclude(mut self) -> Outcome {
        let mut unreleased = Vec::new();
        let mut released = 0;
        for (id, target) in &self.targets {
            match (&target.progress, target.generation()) {
                (Progress::Released(_) | Progress::Settled, _) => released += 1,
                (_, generation) => {
                    let reason = target.unreleased_reason();
                    target.entry.fate.send_replace(Some(Fate::Unreleased));
                    // A claim that was never answered has no generation to report.
                    if let Some(generation) = generation {
                        unreleased.push(Unreleased {
                            id: id.clone(),
                            generation,
                            reason,
                        });
                    }
                }
            }
        }
        unreleased.sort_by(|a, b| a.id.cmp(&b.id));
        let since = |at: Option<Instant>| {
            at.map(|at| at.saturating_duration_since(self.at).as_secs_f64() * 1_000.0)
        };
        let report = PreemptReport {
            noticed_at: self.noticed_at,
            source: self.source.clone(),
            sessions: self.targets.len() as u64,
            killed: self.killed,
            certified: self.certified,
            released,
            last_kill_ms: since(self.last_kill),
            last_certificate_ms: since(self.last_certificate),
            last_release_ms: since(self.last_release),
            unreleased,
            through: self.means.leave.through().in_flight(),
        };
        let message = format!("{released} of {} sessions released", report.sessions);
        self.events
            .push(NewEvent::of_node(EventKind::PreemptFinished, message));
        Outcome {
            report,
            events: self.events,
            namespaces: self.namespaces,
        }
    }
}
