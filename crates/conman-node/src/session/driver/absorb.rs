//! Translates inputs into events of the state machine.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use conman_core::lifecycle::{Event, LifeState, Step};
use conman_core::{EndCause, PREEMPTED, UNRECORDED};
use conman_linux::{PidFd, ProcessIdentity};
use conman_proto::IdleAction;
use conman_registry::{ContainerIdentity, Ending, RecordState, RegistryError};
use conman_runtime::PausedBy;
use jiff::Timestamp;
use tokio::time::Instant;

use super::{Driver, Input, Timer};
use crate::certificate;
use crate::error::FailureKind;
use crate::gentle_stop;
use crate::kept_access;
use crate::kill_table::Fate;
use crate::phases;
use crate::session::answer::{
    Answer, Hold, Launched, Made, ReleaseFailure, StartOutcome, StepFailure,
};
use crate::session::egress;
use crate::session::handle::StopOrder;
use crate::session::idle::Patience;
use crate::session::view::Failure;

impl Driver {
    /// Handles an input, and returns the machine's events for it.
    pub(super) fn absorb(&mut self, input: Input) -> Vec<Event> {
        match input {
            Input::Due(Timer::Machine) => vec![Event::Tick],
            Input::Stop(StopOrder { cause, why }) => {
                self.stop_ordered = true;
                self.fail_with(FailureKind::of_stop(cause));
                vec![Event::StopAsked(cause, why)]
            }
            Input::Fate(fate) => self.absorb_fate(fate),
            Input::Pausing => {
                if matches!(self.life.state(), LifeState::Running { .. }) {
                    self.note_running();
                }
                // It is idle from now on, not since before the pause.
                self.follow_spec();
                Vec::new()
            }
            Input::SpecChanged => {
                self.follow_spec();
                Vec::new()
            }
            Input::Due(Timer::Look) => self.look().into_iter().collect(),
            Input::Due(Timer::ClaimSlow) => {
                // The claim may still be recorded; it is given up then.
                self.failure = Some(Failure::ClaimSlow);
                vec![Event::StopAsked(
                    EndCause::Unrecorded,
                    UNRECORDED.to_owned(),
                )]
            }
            Input::Answer(answer) => {
                let mut events = self.absorb_preemption();
                events.extend(self.absorb_answer(answer));
                events
            }
        }
    }

    fn follow_spec(&mut self) {
        if let Some(patience) = &mut self.patience {
            patience.follow(&self.handle.spec(), &self.handle.activity, Instant::now());
        }
    }

    /// Stops or pauses the session if it is time.
    fn look(&mut self) -> Option<Event> {
        let activity = &self.handle.activity;
        let now = Instant::now();
        let begun = activity.begun();
        let runs_commands = self.handle.kept_commands.load(Ordering::Relaxed);
        if runs_commands {
            self.find_kept_commands();
        }
        let patience = self.patience.as_mut()?;
        let (cause, why) = patience.look(activity, runs_commands, now)?;
        if cause == EndCause::Idle && self.handle.spec().idle_action == IdleAction::Pause {
            self.pause_idle(begun, why);
            return None;
        }
        self.patience = None;
        if self.handle.spec().stop_grace_ms == 0 {
            return Some(Event::StopAsked(cause, why));
        }
        let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
        tokio::spawn(async move { gentle_stop::stop(&context, &handle, cause, &why).await });
        None
    }

    /// Finds out whether kept commands still run, for the next look.
    fn find_kept_commands(&self) {
        let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
        tokio::spawn(async move { kept_access::find_running(&context, &handle).await });
    }

    /// Pauses the session, which has been idle since this many uses began; a failure is retried at the
    /// next look.
    fn pause_idle(&self, begun: u64, why: String) {
        if self.handle.pausing.is_paused() {
            return;
        }
        let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
        tokio::spawn(async move {
            let by = PausedBy::IdleTimeout;
            if let Err(error) = crate::pause::pause(&context, &handle, begun, (by, &why)).await {
                let error = conman_core::error_chain(&error);
                tracing::warn!(session = %handle.id, error, "cannot pause an idle session");
            }
        });
    }

    fn absorb_fate(&mut self, fate: Fate) -> Vec<Event> {
        self.knows_fate = true;
        self.fail_with(FailureKind::Preempted);
        match fate {
            Fate::Released(ending) => {
                let (cause, why) = (ending.cause(), ending.reason.clone());
                self.ending = Some(ending);
                self.publisher.not_released_here();
                vec![Event::ReleasedElsewhere(cause, why)]
            }
            // The session's task finishes what the emergency thread could not.
            Fate::Unreleased => self.absorb_preemption(),
        }
    }

    /// During a preemption, whatever happens to a session is attributed to it.
    fn absorb_preemption(&mut self) -> Vec<Event> {
        let Some(closed) = self.context.table.closed() else {
            return Vec::new();
        };
        if matches!(
            self.life.state(),
            LifeState::Stopping(_) | LifeState::Stuck(_) | LifeState::Ended { .. }
        ) {
            return Vec::new();
        }
        self.fail_with(FailureKind::Preempted);
        let why = format!("{PREEMPTED}: {}", closed.reason);
        vec![Event::StopAsked(EndCause::Preempted, why)]
    }

    fn absorb_answer(&mut self, answer: Answer) -> Option<Event> {
        let event = match answer {
            Answer::Claim(Ok(claimed)) => {
                self.clock.end(phases::CLAIM);
                self.publisher.claimed(&claimed);
                // A refusal shows again, and takes effect, when the start is to be sent.
                let _ = self
                    .context
                    .table
                    .reserve(&self.handle.id, claimed.generation);
                Event::Claimed(claimed.generation)
            }
            Answer::Claim(Err(error)) => self.absorb_claim_failure(error),
            Answer::Make(made, permit) => {
                self.permit = permit;
                self.is_making = false;
                self.absorb_made(made)
            }
            Answer::Launch(launched) => {
                self.permit = None;
                self.absorb_launched(launched)
            }
            Answer::Hold(hold) => self.absorb_hold(hold),
            Answer::Record(Ok(at)) => {
                self.recorded_at = Some(at);
                self.publisher.recorded();
                Event::Recorded
            }
            Answer::Record(Err(failure)) => Event::RecordFailed(self.fail(failure)),
            Answer::Probe(result) => {
                // The handle would keep the task's memory for as long as the session lives.
                self.probing = None;
                self.ready = Some(result);
                return self.take_ready();
            }
            Answer::StartResolved(StartOutcome::Found { pid }) => Event::StartFound { pid },
            Answer::StartResolved(StartOutcome::Ended | StartOutcome::Gone) => Event::StartGone,
            Answer::StartResolved(StartOutcome::Unknown(why)) => Event::StartUnknown(why),
            Answer::Release(Ok(ending)) => {
                self.learn(ending);
                Event::Released
            }
            Answer::Release(Err(ReleaseFailure::Superseded(ending))) => {
                self.learn(ending);
                self.publisher.not_released_here();
                Event::Superseded
            }
            Answer::Release(Err(ReleaseFailure::Failed(why, ending))) => {
                if let Some(ending) = ending {
                    self.learn(ending);
                }
                Event::ReleaseFailed(why)
            }
            Answer::Exiting => {
                self.publisher.exiting(self.life.generation());
                Event::Exited
            }
            Answer::Dead => {
                // The emergency thread reports the deaths that it certifies.
                let theirs = match self.context.table.closed() {
                    Some(_) => !self.knows_fate || self.is_ended(),
                    // It was released once nothing of it could run.
                    None => self.is_ended(),
                };
                // Its sockets would keep the network namespace.
                self.egress = None;
                self.egress_sockets = None;
                self.publisher
                    .dead(self.life.generation().filter(|_| !theirs));
                Event::Exited
            }
        };
        Some(event)
    }

    /// Takes the actual ending, also where the program seemed to exit without a cause.
    fn learn(&mut self, ending: Ending) {
        if ending.cause() == EndCause::NodeLost {
            self.life.attribute(EndCause::NodeLost, &ending.reason);
            // The release may take long; show the cause meanwhile.
            self.publish();
        }
        self.ending = Some(ending);
    }

    fn absorb_claim_failure(&mut self, error: RegistryError) -> Event {
        let why = format!("{}: {}", phases::CLAIM, conman_core::error_chain(&error));
        self.failed_phase = Some(phases::CLAIM);
        self.failure = Some(Failure::Unclaimed(Arc::new(error)));
        Event::ClaimFailed(why)
    }

    fn absorb_made(&mut self, made: Made) -> Event {
        let ends = [
            (phases::ADMIT, made.admitted),
            (phases::PREPARE, made.prepared),
            (phases::CREATE, made.created),
        ];
        for (name, at) in ends {
            if let Some(at) = at {
                self.clock.end_at(name, at);
            }
        }
        match made.result {
            Ok(()) => Event::Created,
            Err(failure) => Event::CreateFailed(self.fail(failure)),
        }
    }

    fn absorb_launched(&mut self, launched: Launched) -> Event {
        match launched {
            Launched::Started(started) => {
                self.clock.end_with_steps(phases::START, &started.steps);
                self.egress_sockets = started.egress;
                self.container = Some(ContainerIdentity {
                    container_id: started.container_id,
                    pid: started.pid,
                    // Both are read once the process is held.
                    start_time_ticks: 0,
                    boot_id: String::new(),
                    addresses: Vec::new(),
                });
                Event::StartAnswered { pid: started.pid }
            }
            Launched::Failed(failure) => Event::StartFailed(self.fail(failure)),
            Launched::Ambiguous(failure) => Event::StartAmbiguous(self.fail(failure)),
        }
    }

    fn absorb_hold(&mut self, hold: Hold) -> Event {
        match hold {
            Hold::Held(process, identity) => {
                self.clock.end(phases::VERIFY);
                if let Some(generation) = self.life.generation() {
                    // After a refusal the emergency thread knows the process and kills it.
                    let _ =
                        self.context
                            .table
                            .run(&self.handle.id, generation, Arc::clone(&process));
                }
                self.identify(identity);
                self.hold(process);
                Event::Held
            }
            Hold::Vanished => Event::Vanished,
            Hold::NotOurs => {
                self.fail_with(FailureKind::Host);
                self.failed_phase.get_or_insert(phases::VERIFY);
                Event::NotOurs
            }
            Hold::Failed(failure) => Event::HoldFailed(self.fail(failure)),
        }
    }

    fn identify(&mut self, identity: ProcessIdentity) {
        let container_id = self
            .container
            .take()
            .map(|container| container.container_id)
            .unwrap_or_default();
        self.container = Some(ContainerIdentity {
            container_id,
            pid: identity.pid,
            start_time_ticks: identity.start_time_ticks,
            boot_id: identity.boot_id,
            addresses: self.fabric_addresses(),
        });
    }

    /// The addresses by which sessions on all nodes reach this one.
    fn fabric_addresses(&self) -> Vec<IpAddr> {
        let spec = self.handle.spec();
        let runtime = self.context.runtime(spec.runtime);
        match (self.key(), runtime) {
            (Some(key), Some(runtime)) if !spec.talk.is_empty() => runtime.fabric_addresses(&key),
            _ => Vec::new(),
        }
    }

    /// Holds the init from now on, and reports its death.
    pub(super) fn hold(&mut self, process: Arc<PidFd>) {
        if let Some(generation) = self.life.generation() {
            let sockets = self.egress_sockets.take();
            self.egress = egress::serve(&self.context, &self.handle, generation, &process, sockets);
        }
        self.handle.learn_program(process.pid());
        self.process = Some(Arc::clone(&process));
        self.dying = Some(Box::pin(certificate::of(process)));
    }

    /// Readiness counts once the machine waits for it, which is after the container is recorded.
    pub(super) fn take_ready(&mut self) -> Option<Event> {
        if !matches!(self.life.state(), LifeState::Starting(Step::Probing { .. })) {
            return None;
        }
        match self.ready.take()? {
            Ok(ready_at) => {
                self.end_last_phases(ready_at);
                Some(Event::Ready)
            }
            Err(failure) => Some(Event::ReadyFailed(self.fail(failure))),
        }
    }

    fn end_last_phases(&mut self, ready_at: Instant) {
        self.clock.end_at(phases::READY, ready_at);
        if let Some(recorded_at) = self.recorded_at {
            self.clock.end_at(phases::RECORD, recorded_at);
        }
        self.clock.end(phases::PUBLISH);
        let started_at = Timestamp::now();
        self.was_running = true;
        self.begin_patience(Duration::ZERO);
        let phases = self.clock.shared();
        self.context
            .table
            .note_start(&self.handle.id, started_at, phases.clone());
        self.publisher
            .ready(self.life.generation(), started_at, &phases);
        self.note_running();
    }

    /// Records that it runs, or is paused.
    fn note_running(&mut self) {
        let paused = self.pausing.borrow_and_update().is_some();
        let phases = self.clock.shared();
        if let Some(started_at) = self.handle.view().started_at {
            self.note(RecordState::Running {
                started_at,
                phases,
                paused,
            });
        }
    }

    pub(super) fn begin_patience(&mut self, lived: Duration) {
        let (spec, activity) = (self.handle.spec(), &self.handle.activity);
        self.patience = Some(Patience::begin(&spec, activity, lived, Instant::now()));
    }

    fn fail(&mut self, failure: StepFailure) -> String {
        self.fail_with(failure.kind);
        self.failed_phase.get_or_insert(failure.phase);
        self.unrun_exit_code = self.unrun_exit_code.or(failure.exit_code);
        failure.why
    }

    /// The first reason counts.
    fn fail_with(&mut self, kind: FailureKind) {
        if self.failure.is_none() {
            self.failure = Some(Failure::Kind(kind));
        }
    }
}
