//! Executes the actions of one preemption ([`conman_core::preemption`] decides them), and reports what
//! comes of them.
//!
//! Nothing here waits, except [`Execution::next`], which waits for everything at once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::{SessionName, Slot};
use conman_core::preemption::{Action, Certificate, Event, ReleaseResult, TableStage};
use conman_core::{EndCause, PREEMPTED};
use conman_linux::{KeptNamespaces, PidFd};
use conman_proto::{EventKind, Generation, SessionId};
use conman_registry::{Ending, NewEvent, RegistryError, Release};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use tokio::time::{Instant, sleep_until};

use super::claims::Claims;
use super::kill_priority::{KillPriority, Weight};
use super::releases::{Released, Releases};
use super::{Means, Notice};
use crate::events::{end_event, session_event};
use crate::kill_table::{self, Fate, KillEntry};
use crate::{certificate, exit_proof, plan, session};

mod kills;
mod reporting;

/// One preemption's descriptors, calls under way and events.
pub(super) struct Execution {
    means: Means,
    reason: String,
    source: String,
    noticed_at: Timestamp,
    budget_ms: u32,
    sessions: HashMap<SessionName, Session>,
    /// Taking them down would compete with the releases, and is useless on a machine that goes.
    namespaces: KeptNamespaces,
    dying: FuturesUnordered<BoxFuture<'static, (Slot, Certificate)>>,
    /// Their certificates are reported already.
    awaited: HashSet<Slot>,
    releases: Releases,
    claims: Claims,
    priority: KillPriority,
    events: Vec<NewEvent>,
    /// When the table was read whose actions are being executed.
    table_read_at: Option<Instant>,
}

/// A session of the kill table.
struct Session {
    id: SessionId,
    entry: KillEntry,
    process: Option<Arc<PidFd>>,
}

impl Execution {
    /// Runs on the emergency thread, which has priority while this lives.
    pub(super) fn new(means: &Means, weight: &Weight, notice: &Notice) -> Self {
        Self {
            means: means.clone(),
            reason: notice.reason.clone(),
            source: notice.source.clone(),
            noticed_at: notice.noticed_at,
            budget_ms: notice.budget_ms.unwrap_or(means.budget_ms),
            sessions: HashMap::new(),
            namespaces: KeptNamespaces::default(),
            dying: FuturesUnordered::new(),
            awaited: HashSet::new(),
            releases: Releases::new(means.registry.clone()),
            claims: Claims::default(),
            priority: KillPriority::take(weight),
            events: Vec::new(),
            table_read_at: None,
        }
    }

    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    /// Executes an action. Returns what there is to report at once.
    pub(super) fn execute(&mut self, action: Action) -> Vec<Event> {
        match action {
            Action::ReadTable => vec![self.read_table()],
            Action::Warn(slot) => self.warn(slot).into_iter().collect(),
            Action::Kill(slots) => self.kill(slots),
            Action::Search(slot) => self.search(slot).into_iter().collect(),
            Action::AwaitDeath(slot) => {
                self.await_death(slot);
                Vec::new()
            }
            Action::ProveExit(slot) => {
                self.prove_exit(slot);
                Vec::new()
            }
            Action::RaisePriority => {
                self.priority.give();
                Vec::new()
            }
            Action::Release(slots) => {
                let batch = slots.iter().filter_map(|slot| self.release_of(slot));
                let batch = batch.collect();
                self.releases.send(batch);
                Vec::new()
            }
            Action::LookUpClaims(sessions) => {
                let id = |name: &SessionName| Some(self.sessions.get(name)?.id.clone());
                let claiming = sessions.iter().filter_map(id).collect();
                self.claims.look_up(&self.means.registry, claiming);
                Vec::new()
            }
            Action::NoteKilled(slot) => {
                self.note(
                    EventKind::SessionKilled,
                    &slot,
                    "SIGKILL for the preemption",
                );
                Vec::new()
            }
            Action::NoteDead(slot, certificate) => {
                let message = certificate::message(certificate);
                self.note(EventKind::SessionDead, &slot, message);
                Vec::new()
            }
            // The release itself is noted with its answer, which has its ending. The others are the
            // emergency thread's.
            Action::NoteReleased(_)
            | Action::Close
            | Action::Reopen
            | Action::ForgetNotice
            | Action::Finish
            | Action::CloseThrough(_)
            | Action::Answer => Vec::new(),
        }
    }

    /// Everything that the last reading of the table led to is done.
    pub(super) fn table_handled(&mut self) -> Option<Event> {
        let read_at = self.table_read_at.take()?;
        Some(Event::TableHandled {
            took: read_at.elapsed(),
        })
    }

    /// Waits for the next event.
    pub(super) async fn next(&mut self, wake: Instant) -> Event {
        let means = self.means.clone();
        tokio::select! {
            // Cancel safe: a certificate is taken or stays in the set.
            Some(first) = self.dying.next(), if !self.dying.is_empty() => {
                let mut certificates = vec![first];
                while let Some(Some(next)) = self.dying.next().now_or_never() {
                    certificates.push(next);
                }
                Event::Certificates(certificates)
            }
            // Cancel safe: see there.
            released = self.releases.next() => self.released(released),
            // Cancel safe: see there.
            found = self.claims.next() => {
                let found = found.iter().map(|(id, generation)| slot(id, *generation));
                Event::ClaimsFound(found.collect())
            }
            // Cancel safe: changes are read from the table, and polled anyway while a session is
            // uncertain.
            () = means.table.changed() => Event::TableChanged,
            // Cancel safe: the time is read again.
            () = sleep_until(wake) => Event::Tick,
        }
    }

    fn read_table(&mut self) -> Event {
        self.table_read_at = Some(Instant::now());
        let entries = self.means.table.entries();
        let mut stages = Vec::with_capacity(entries.len());
        for (id, entry) in entries {
            let name = name(&id);
            let stage = match &entry.stage {
                kill_table::StartStage::Claiming => TableStage::Claiming,
                kill_table::StartStage::Reserved(generation) => TableStage::Reserved {
                    generation: generation.get(),
                },
                kill_table::StartStage::Sent(generation) => TableStage::Sent {
                    generation: generation.get(),
                },
                kill_table::StartStage::Running(generation, _) => TableStage::Running {
                    generation: generation.get(),
                    shares_files: entry.shares_files,
                    grace: match entry.warning {
                        Some(_) => plan::grace(&id, &entry, self.budget_ms),
                        None => Duration::ZERO,
                    },
                },
            };
            self.remember(&name, id, entry);
            stages.push((name, stage));
        }
        Event::Table(stages)
    }

    /// Keeps an entry, with the process that is known for it: the search for one may have found it
    /// before its start was answered.
    fn remember(&mut self, name: &SessionName, id: SessionId, entry: KillEntry) {
        let process = match &entry.stage {
            kill_table::StartStage::Running(_, process) => Some(Arc::clone(process)),
            _ => None,
        };
        let earlier = self.sessions.remove(name).and_then(|one| one.process);
        let session = Session {
            id,
            entry,
            process: earlier.or(process),
        };
        self.sessions.insert(SessionName::clone(name), session);
    }

    fn await_death(&mut self, slot: Slot) {
        let process = self.session(&slot).and_then(|one| one.process.clone());
        if let Some(process) = process
            && self.awaited.insert(slot.clone())
        {
            let death = certificate::of(process).map(|()| (slot, Certificate::Empty));
            self.dying.push(death.boxed());
        }
    }

    /// Nothing here waits for it: it runs beside the wait for its death, and the first one counts.
    fn prove_exit(&mut self, slot: Slot) {
        let Some(session) = self.session(&slot) else {
            return;
        };
        if let (Some(runtime), Some(process)) = (&session.entry.runtime, &session.process)
            && let Some(key) = session.key(&slot)
        {
            let proof = exit_proof::of(Arc::clone(runtime), key, Arc::clone(process));
            self.dying
                .push(proof.map(|()| (slot, Certificate::Exiting)).boxed());
        }
    }

    fn release_of(&self, slot: &Slot) -> Option<Release> {
        let Session { id, entry, .. } = self.session(slot)?;
        let reason = format!("{PREEMPTED}: {}", self.reason);
        let mut ending = Ending {
            started_at: entry.started_at,
            phases: entry.phases.clone(),
            ..Ending::now(false, EndCause::Preempted, reason)
        };
        session::attribute_to_deletion(entry.stop.borrow().as_ref(), &mut ending);
        Some(Release {
            id: id.clone(),
            generation: Generation::new(slot.generation)?,
            ending,
        })
    }

    fn released(&mut self, released: Released) -> Event {
        let mut answers = Vec::with_capacity(released.len());
        for (release, result) in released {
            let slot = slot(&release.id, release.generation);
            let result = match result {
                // Superseded: the record is deleted, or is of a newer generation. It was released before,
                // by the session's task, which sees the death as well, or by a try whose answer was lost.
                Ok(()) | Err(RegistryError::Superseded { .. }) => {
                    self.forget(&slot, release);
                    ReleaseResult::Recorded
                }
                Err(error) if error.is_retryable() => ReleaseResult::Unavailable,
                Err(error) => {
                    let why = conman_core::error_chain(&error);
                    ReleaseResult::Refused(format!("its release was refused: {why}"))
                }
            };
            answers.push((slot, result));
        }
        Event::ReleasesAnswered(answers)
    }

    /// It is released: its task takes the ending from here.
    fn forget(&mut self, slot: &Slot, release: Release) {
        let (kind, ending) = (EventKind::SessionReleased, &release.ending);
        let (id, generation) = (&release.id, release.generation);
        let event = end_event(kind, id, generation, &ending.end(), &ending.reason);
        self.events.push(event);
        if let Some(session) = self.session(slot) {
            let fate = Fate::Released(release.ending);
            session.entry.fate.send_replace(Some(fate));
        }
        self.means.table.remove(&release.id, Some(generation));
    }

    fn note(&mut self, kind: EventKind, slot: &Slot, message: &str) {
        if let Some(generation) = Generation::new(slot.generation)
            && let Some(session) = self.session(slot)
        {
            let event = session_event(kind, &session.id, generation, message.to_owned());
            self.events.push(event);
        }
    }

    fn session(&self, slot: &Slot) -> Option<&Session> {
        self.sessions.get(&slot.session)
    }
}

fn name(id: &SessionId) -> SessionName {
    id.as_str().into()
}

fn slot(id: &SessionId, generation: Generation) -> Slot {
    Slot {
        session: name(id),
        generation: generation.get(),
    }
}
