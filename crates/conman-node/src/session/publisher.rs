//! Publishes a life: its view, the journal, the metrics.

use std::sync::Arc;

use conman_core::Closing;
use conman_core::lifecycle::Cause;
use conman_core::preemption::Certificate;
use conman_linux::PidFd;
use conman_proto::{EndCause, EventKind, Generation, SessionEnd, SessionState};
use conman_registry::{Ending, NewEvent, Phase, Phases};
use jiff::Timestamp;
use tokio::time::Instant;

use super::answer::Claimed;
use super::handle::SessionHandle;
use super::view::{Failure, View};
use crate::certificate;
use crate::context::Context;
use crate::events::{end_event, phase_event, session_event};
use crate::stuck;

#[derive(Debug)]
pub(super) struct Publisher {
    context: Arc<Context>,
    handle: Arc<SessionHandle>,
    killed: bool,
    finished: bool,
    /// The emergency thread released it and reports that, or another node owns it already.
    elsewhere: bool,
    /// Number of the start's phases that the journal has.
    published_phases: usize,
}

impl Publisher {
    pub(super) fn new(context: Arc<Context>, handle: Arc<SessionHandle>) -> Self {
        let published_phases = handle.view().phases.len();
        Self {
            context,
            handle,
            killed: false,
            finished: false,
            elsewhere: false,
            published_phases,
        }
    }

    /// Changes the view, and wakes its watchers only if `change` returns that it did.
    fn show(&self, change: impl FnOnce(&mut View) -> bool) {
        self.handle.view.send_if_modified(change);
    }

    fn note(&self, kind: EventKind, generation: Option<Generation>, message: impl Into<String>) {
        if let Some(generation) = generation {
            self.context
                .note_session(kind, &self.handle.id, generation, message);
        }
    }

    pub(super) fn claimed(&self, claimed: &Claimed) {
        self.show(|view| {
            view.created_at = claimed.created_at;
            view.generation = Some(claimed.generation);
            true
        });
        let spec = self.handle.spec();
        let message = format!("starting {} with {}", spec.image, spec.runtime);
        self.note(EventKind::SessionClaimed, Some(claimed.generation), message);
        let restarted = spec.restarted.as_ref();
        if let Some(restarted) = restarted.filter(|restarted| restarted.count > 0) {
            let message = format!(
                "restarted, since node {} was {} (number {} in a row)",
                restarted.from, restarted.because, restarted.count
            );
            let generation = Some(claimed.generation);
            self.note(EventKind::SessionRestarted, generation, message);
            let because = restarted.because.to_string();
            metrics::counter!("conman_restarts_total", "reason" => because).increment(1);
        }
    }

    pub(super) fn starting(
        &self,
        generation: Option<Generation>,
        process: Option<&Arc<PidFd>>,
        phases: &[Phase],
    ) {
        self.show(|view| {
            // A caller that waits for the start need not wake for each phase.
            if view.phases.len() != phases.len() {
                view.phases = Phases::from(phases);
            }
            set_process(view, generation, process)
        });
    }

    /// Shows and journals the phases of a failed start, once.
    pub(super) fn gave_up(&mut self, generation: Option<Generation>, phases: &Phases) {
        let Some(generation) = generation else { return };
        let events = self.phase_events(generation, phases);
        if !events.is_empty() {
            self.context.journal.append(events);
            self.show(|view| {
                view.phases = phases.clone();
                false
            });
        }
    }

    /// Events of the phases that the journal does not have yet.
    fn phase_events(&mut self, generation: Generation, phases: &[Phase]) -> Vec<NewEvent> {
        let new = phases.get(self.published_phases..).unwrap_or_default();
        self.published_phases = phases.len();
        new.iter()
            // Steps of a phase are shown only with the session: five more lines for each start.
            .filter(|phase| !phase.name.contains('.'))
            .map(|phase| phase_event(&self.handle.id, generation, phase))
            .collect()
    }

    pub(super) fn recorded(&self) {
        self.show(|view| !std::mem::replace(&mut view.recorded, true));
    }

    pub(super) fn ready(
        &mut self,
        generation: Option<Generation>,
        started_at: Timestamp,
        phases: &Phases,
    ) {
        let Some(generation) = generation else { return };
        let mut events = self.phase_events(generation, phases);
        let whole = phases.iter().filter(|phase| !phase.name.contains('.'));
        let total: f64 = whole.map(|phase| phase.duration_ms).sum();
        let message = match self.handle.spec().port {
            Some(port) => format!("running and ready on port {port} after {total:.1} ms"),
            None => format!("running after {total:.1} ms"),
        };
        events.push(session_event(
            EventKind::SessionReady,
            &self.handle.id,
            generation,
            message,
        ));
        self.context.journal.append(events);
        for phase in phases.iter() {
            metrics::histogram!("conman_start_phase_duration_seconds", "phase" => phase.name.clone())
                .record(phase.duration_ms / 1_000.0);
        }
        metrics::histogram!("conman_start_duration_seconds").record(total / 1_000.0);
        metrics::counter!("conman_starts_total", "result" => "ready").increment(1);
        if self.handle.spec().pool > 0 {
            let is_ahead = phases
                .iter()
                .any(|phase| &*phase.name == conman_runtime::MADE_AHEAD);
            let way = if is_ahead { "ahead" } else { "usual" };
            metrics::counter!("conman_pool_starts_total", "way" => way).increment(1);
        }
        self.show(|view| {
            view.started_at = Some(started_at);
            view.phases = phases.clone();
            true
        });
    }

    pub(super) fn running(&self, generation: Generation, process: Option<&Arc<PidFd>>) {
        self.show(|view| {
            let changed = view.state != SessionState::Running;
            view.state = SessionState::Running;
            set_process(view, Some(generation), process) || changed
        });
    }

    pub(super) fn close_tunnels(&self, why: &str) {
        self.handle.closing.send_if_modified(|closing| {
            if closing.is_some() {
                return false;
            }
            let reason = format!("session ended: {why}");
            *closing = Some(Closing::service_restart(&reason));
            true
        });
    }

    pub(super) fn killed(&mut self, generation: Option<Generation>, why: &str) {
        if !std::mem::replace(&mut self.killed, true) {
            self.note(
                EventKind::SessionKilled,
                generation,
                format!("SIGKILL: {why}"),
            );
        }
    }

    pub(super) fn not_released_here(&mut self) {
        self.elsewhere = true;
    }

    pub(super) fn kill_failed(&self, why: &str) {
        tracing::error!(session = %self.handle.id, why, "cannot send SIGKILL");
    }

    pub(super) fn dead(&self, generation: Option<Generation>) {
        self.certified(generation, certificate::message(Certificate::Empty));
    }

    /// Nothing of it can run, although its PID namespace is not empty yet.
    pub(super) fn exiting(&self, generation: Option<Generation>) {
        self.certified(generation, certificate::message(Certificate::Exiting));
    }

    fn certified(&self, generation: Option<Generation>, message: &str) {
        self.show(|view| {
            view.dead_at = Some(Instant::now());
            view.process = None;
            true
        });
        self.note(EventKind::SessionDead, generation, message);
    }

    pub(super) fn stopping(
        &self,
        cause: &Cause,
        end: SessionEnd,
        trouble: Option<String>,
        failure: Option<Failure>,
    ) {
        let reason = with_trouble(cause.outcome(None).reason, trouble);
        self.show(|view| {
            view.end = Some(end);
            view.failure = failure;
            set_state(view, SessionState::Stopping, reason)
        });
    }

    /// Returns the reason if this call made it stuck.
    pub(super) fn stuck(
        &self,
        generation: Option<Generation>,
        cause: &Cause,
        pid: Option<i32>,
        trouble: Option<String>,
    ) -> Option<String> {
        let mut reason = with_trouble(cause.outcome(None).reason, trouble);
        if let Some(pid) = pid {
            reason = format!("{reason}; killed, and not dead: {}", stuck::describe(pid));
        }
        let new = self.handle.state() != SessionState::Stuck;
        self.show(|view| set_state(view, SessionState::Stuck, reason.clone()));
        if !new {
            return None;
        }
        metrics::counter!("conman_sessions_stuck_total").increment(1);
        self.note(EventKind::SessionStuck, generation, reason.clone());
        Some(reason)
    }

    /// Shows the end, once. `ending` is absent only for a life that was never recorded; `end` is then how it
    /// ended.
    pub(super) fn ended(
        &mut self,
        generation: Option<Generation>,
        cause: &Cause,
        end: SessionEnd,
        ending: Option<Ending>,
        failure: Option<Failure>,
    ) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        let ending = ending.unwrap_or_else(|| {
            let outcome = cause.outcome(None);
            Ending {
                failed_phase: end.phase,
                ..Ending::now(outcome.failed, end.cause, outcome.reason)
            }
        });
        let (end, told) = (ending.end(), ending.cause());
        self.note_end(generation, cause, &end, &ending.reason, failure.is_some());
        self.close_tunnels(&ending.reason);
        self.context.table.remove(&self.handle.id, generation);
        let now = Instant::now();
        let publish = || {
            self.show(|view| {
                set_state(view, crate::view::ended_state(&ending), ending.reason);
                view.end = Some(end);
                view.exit_code = ending.exit_code;
                view.ended_at = Some(ending.ended_at);
                view.process = None;
                view.failure = failure;
                view.dead_at.get_or_insert(now);
                view.released_at = Some(now);
                true
            });
        };
        let kept = self.context.options.limits.max_stopped_kept;
        let forgotten = self.context.sessions.finish(&self.handle, kept, publish);
        crate::adoption::forget(&self.context, forgotten);
        // A client deleted it after its release was sent.
        if self.handle.caused_by(told) != told {
            let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
            tokio::spawn(async move {
                if let Err(error) = crate::ensure::call_off(&context, &handle).await {
                    let reason = conman_core::error_chain(&error);
                    tracing::warn!(
                        session = %handle.id,
                        reason,
                        "cannot cancel the session's restart"
                    );
                }
            });
        }
    }

    fn note_end(
        &self,
        generation: Option<Generation>,
        cause: &Cause,
        end: &SessionEnd,
        reason: &str,
        start_failed: bool,
    ) {
        if start_failed {
            metrics::counter!("conman_starts_total", "result" => "failed").increment(1);
        }
        let kind = match cause {
            Cause::StartFailed(_) | Cause::ExitedEarly => Some(EventKind::SessionFailed),
            Cause::Exited => Some(EventKind::SessionExited),
            Cause::Asked(..) => None,
        };
        let released = (!self.elsewhere).then_some(EventKind::SessionReleased);
        if let Some(generation) = generation {
            let id = &self.handle.id;
            let events = kind.into_iter().chain(released);
            let events = events.map(|kind| end_event(kind, id, generation, end, reason));
            self.context.journal.append(events.collect());
        }
        let cause = match (end.cause, cause) {
            (EndCause::OutOfMemory, _) => "out_of_memory",
            (EndCause::Killed, _) => "killed",
            (_, Cause::StartFailed(_)) => "start_failed",
            (_, Cause::ExitedEarly) => "exited_early",
            (_, Cause::Exited) => "exited",
            (_, Cause::Asked(..)) => "requested",
        };
        metrics::counter!("conman_sessions_ended_total", "cause" => cause).increment(1);
    }
}

fn with_trouble(reason: String, trouble: Option<String>) -> String {
    match trouble {
        Some(trouble) => format!("{reason}; {trouble}"),
        None => reason,
    }
}

fn set_state(view: &mut View, state: SessionState, reason: String) -> bool {
    let reason = Some(reason).filter(|reason| !reason.is_empty());
    let changed = view.state != state || view.reason != reason;
    view.state = state;
    view.reason = reason;
    changed
}

fn set_process(
    view: &mut View,
    generation: Option<Generation>,
    process: Option<&Arc<PidFd>>,
) -> bool {
    let changed = view.generation != generation || view.process.is_some() != process.is_some();
    view.generation = generation;
    view.process = process.cloned();
    changed
}
