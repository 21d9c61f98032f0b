//! Drives one life's state machine: waits for events, passes them to the machine, carries out its
//! actions, and publishes the resulting state.

mod absorb;
mod calls;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use conman_core::EndCause;
use conman_core::lifecycle::{Action, Cause, Event, LifeState, Lifecycle, Remains, Step, Timing};
use conman_linux::PidFd;
use conman_net::egress::{EgressGuard, EgressSockets};
use conman_proto::{Generation, SessionEnd};
use conman_registry::{ContainerIdentity, Ending, RecordState, SessionRecord};
use conman_runtime::{ContainerKey, PausedBy, Runtime};
use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

use super::answer::{Answer, StepFailure};
use super::handle::{SessionHandle, StopOrder};
use super::idle::{self, Patience};
use super::publisher::Publisher;
use super::view::Failure;
use crate::context::Context;
use crate::error::FailureKind;
use crate::kill_table::Fate;
use crate::phases::{self, PhaseClock};

/// Pause between two tries of a step that has to precede the end.
const RETRY_MS: u64 = 250;

/// Pause before a state is sent to the registry again.
const NOTE_AGAIN: Duration = Duration::from_secs(1);

/// How much the machine's bound on readiness exceeds the probe's own, whose message is more useful.
const PROBE_SLACK_MS: u64 = 1_000;

/// How a life begins.
#[derive(Debug)]
pub(crate) enum Beginning {
    /// By a claim, based on the record that was read if there is one.
    Fresh(Option<Box<SessionRecord>>),
    /// It runs and was ready: an earlier daemon started it.
    Running(Arc<PidFd>),
    /// It runs, and was not yet ready.
    Unready(Arc<PidFd>),
    /// It runs and was to be stopped, for this reason.
    KillTarget(Arc<PidFd>, EndCause, String),
    /// It may run or come to run, and ends for this reason.
    Unresolved(Cause),
}

impl Beginning {
    /// Returns the machine of a life that begins like this, and its first actions.
    fn machine(&self, timing: Timing, generation: Generation) -> (Lifecycle, Vec<Action>) {
        match self {
            Self::Fresh(_) => Lifecycle::start(timing),
            Self::Running(process) => (
                Lifecycle::adopt(timing, generation, process.pid()),
                Vec::new(),
            ),
            Self::KillTarget(process, cause, why) => {
                let mut life = Lifecycle::adopt(timing, generation, process.pid());
                let actions = life.on(0, Event::StopAsked(*cause, why.clone()));
                (life, actions)
            }
            Self::Unready(process) => {
                Lifecycle::adopt_unready(0, timing, generation, process.pid())
            }
            Self::Unresolved(cause) => Lifecycle::recover(0, timing, generation, cause.clone()),
        }
    }
}

/// Starts a life's task. Its handle is in the map and in the kill table already.
pub(crate) fn spawn(context: Arc<Context>, handle: Arc<SessionHandle>, beginning: Beginning) {
    let (driver, actions) = Driver::new(context, handle, beginning);
    // Boxed, since a task stores its argument in addition to the future made from it.
    tokio::spawn(Box::new(driver).run(actions));
}

struct Driver {
    context: Arc<Context>,
    handle: Arc<SessionHandle>,
    runtime: Option<Arc<dyn Runtime>>,
    life: Lifecycle,
    /// Zero of the machine's clock.
    began: Instant,
    calls: JoinSet<Answer>,
    probing: Option<AbortHandle>,
    /// The runtime has been asked to create the container and has not answered.
    is_making: bool,
    /// Completes with the latest note to the registry that runs in the background; the next one waits for
    /// it. Not a handle of its task, which would keep that task's memory.
    noting: Option<oneshot::Receiver<()>>,
    /// Number of the latest note.
    noted: Arc<AtomicU64>,
    /// The record that its claim is based on.
    read: Option<Box<SessionRecord>>,
    clock: PhaseClock,
    publisher: Publisher,
    permit: Option<OwnedSemaphorePermit>,
    process: Option<Arc<PidFd>>,
    /// Serves the held process's network namespace, if it has a resolver.
    egress: Option<EgressGuard>,
    /// Those of a start, until its process is held.
    egress_sockets: Option<EgressSockets>,
    /// Completes with the held process's death; `None` afterwards.
    dying: Option<BoxFuture<'static, ()>>,
    /// Completes with the proof that nothing of the killed container can run, if a drain waits for that.
    exiting: Option<BoxFuture<'static, ()>>,
    container: Option<ContainerIdentity>,
    /// Readiness that was found before the container was recorded.
    ready: Option<Result<Instant, StepFailure>>,
    pausing: watch::Receiver<Option<PausedBy>>,
    recorded_at: Option<Instant>,
    patience: Option<Patience>,
    failure: Option<Failure>,
    /// The phase in which the start failed.
    failed_phase: Option<&'static str>,
    /// Exit code of a program that could not be run.
    unrun_exit_code: Option<i32>,
    ending: Option<Ending>,
    was_running: bool,
    /// Whether the machine has received these orders from outside.
    stop_ordered: bool,
    knows_fate: bool,
}

/// What woke the driver.
enum Input {
    Answer(Answer),
    Stop(StopOrder),
    Fate(Fate),
    /// It was paused or resumed.
    Pausing,
    SpecChanged,
    Due(Timer),
}

/// A timed event.
#[derive(Debug, Clone, Copy)]
enum Timer {
    /// The machine's own.
    Machine,
    Look,
    ClaimSlow,
}

impl Driver {
    fn new(
        context: Arc<Context>,
        handle: Arc<SessionHandle>,
        beginning: Beginning,
    ) -> (Self, Vec<Action>) {
        let bounds = &context.options.bounds;
        let timing = Timing {
            ready_timeout_ms: u64::from(handle.spec().ready_timeout_s) * 1_000 + PROBE_SLACK_MS,
            stuck_after_ms: u64::try_from(bounds.stuck_after.as_millis()).unwrap_or(u64::MAX),
            retry_ms: RETRY_MS,
        };
        let view = handle.view();
        let began = Instant::now();
        let generation = view.generation.unwrap_or(Generation::FIRST);
        let (life, actions) = beginning.machine(timing, generation);
        let mut driver = Self {
            runtime: context.runtime(handle.spec().runtime).cloned(),
            publisher: Publisher::new(Arc::clone(&context), Arc::clone(&handle)),
            clock: PhaseClock::resumed(view.phases.clone()),
            pausing: handle.pausing.watch(),
            context,
            handle,
            life,
            began,
            read: None,
            calls: JoinSet::new(),
            probing: None,
            is_making: false,
            noting: None,
            noted: Arc::default(),
            permit: None,
            process: None,
            egress: None,
            egress_sockets: None,
            dying: None,
            exiting: None,
            container: None,
            ready: None,
            recorded_at: None,
            patience: None,
            failure: None,
            failed_phase: None,
            ending: None,
            was_running: false,
            unrun_exit_code: None,
            stop_ordered: false,
            knows_fate: false,
        };
        match beginning {
            Beginning::Fresh(read) => driver.read = read,
            Beginning::Running(process) => {
                driver.begin_patience(idle::lived(&process, &view));
                driver.hold(process);
                driver.was_running = true;
            }
            Beginning::Unready(process) => driver.hold(process),
            Beginning::KillTarget(process, ..) => {
                driver.hold(process);
                driver.was_running = view.started_at.is_some();
            }
            Beginning::Unresolved(_) => {
                driver.failure = Some(Failure::Kind(FailureKind::Interrupted));
            }
        }
        (driver, actions)
    }

    async fn run(mut self: Box<Self>, actions: Vec<Action>) {
        if matches!(self.life.state(), LifeState::Starting(Step::Probing { .. })) {
            self.begin_probe();
        }
        self.carry_out(actions);
        self.publish();
        while !self.is_over() {
            let input = self.next_input().await;
            for event in self.absorb(input) {
                let actions = self.life.on(self.now_ms(), event);
                self.tell_phases();
                self.carry_out(actions);
            }
            self.publish();
        }
    }

    /// An ended life still waits for calls that would otherwise leave something behind, and for the death of
    /// the process that it holds.
    fn is_over(&self) -> bool {
        self.is_ended() && self.calls.is_empty() && self.dying.is_none()
    }

    fn is_ended(&self) -> bool {
        matches!(self.life.state(), LifeState::Ended { .. })
    }

    async fn next_input(&mut self) -> Input {
        let mut stop = self.handle.stop.subscribe();
        let mut fate = self.handle.fate.subscribe();
        let timer = self.next_timer();
        tokio::select! {
            // Outside orders first, so that their effects are attributed to them.
            biased;
            // Cancel safe, like all others: each waits for a state that stays, and the set keeps calls that
            // are not taken.
            Ok(order) = stop.wait_for(Option::is_some), if !self.stop_ordered => {
                match order.clone() {
                    Some(order) => Input::Stop(order),
                    None => Input::Due(Timer::Machine),
                }
            }
            Ok(fate) = fate.wait_for(Option::is_some), if !self.knows_fate => match fate.clone() {
                Some(fate) => Input::Fate(fate),
                None => Input::Due(Timer::Machine),
            },
            () = self.handle.live_spec.changed() => Input::SpecChanged,
            Some(answer) = self.calls.join_next() => match answer {
                Ok(answer) => Input::Answer(answer),
                // Aborted, as probes are. A panic is an answer.
                Err(_) => Input::Due(Timer::Machine),
            },
            () = death(&mut self.dying) => {
                self.dying = None;
                Input::Answer(Answer::Dead)
            }
            () = death(&mut self.exiting), if !self.is_ended() => {
                self.exiting = None;
                Input::Answer(Answer::Exiting)
            }
            Ok(()) = self.pausing.changed() => Input::Pausing,
            due = due(timer) => Input::Due(due),
        }
    }

    /// The first timed event. Of several at the same time the machine's own is first.
    fn next_timer(&self) -> Option<(Instant, Timer)> {
        let machine = self
            .life
            .deadline_ms()
            .map(|ms| (self.began + Duration::from_millis(ms), Timer::Machine));
        let look = self.patience.as_ref().and_then(Patience::next_look);
        let look = look.map(|at| (at, Timer::Look));
        let claim_slow = self.claim_deadline().map(|at| (at, Timer::ClaimSlow));
        [machine, look, claim_slow]
            .into_iter()
            .flatten()
            .min_by_key(|(at, _)| *at)
    }

    fn claim_deadline(&self) -> Option<Instant> {
        let waits = matches!(self.life.state(), LifeState::Starting(Step::Claiming));
        waits.then(|| self.began + self.context.options.bounds.registry)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn key(&self) -> Option<ContainerKey> {
        let generation = self.life.generation()?;
        Some(ContainerKey::new(self.handle.id.clone(), generation))
    }

    /// Sends a state to the registry, in order and without waiting, again for as long as the registry does
    /// not answer and the state is the latest. A refusal means that the life has been released since.
    fn note(&mut self, state: RecordState) {
        let Some(key) = self.key() else { return };
        let before = self.noting.take();
        let context = Arc::clone(&self.context);
        let (noted, noting) = oneshot::channel::<()>();
        let latest = Arc::clone(&self.noted);
        let number = latest.fetch_add(1, Ordering::Relaxed) + 1;
        self.noting = Some(noting);
        tokio::spawn(async move {
            // Dropped at the end, in any case.
            let _noted = noted;
            if let Some(before) = before {
                let _ = before.await;
            }
            let (session, generation) = (&key.session, key.generation);
            while let Err(error) = context
                .registry
                .set_state(session, generation, state.clone())
                .await
            {
                let reason = conman_core::error_chain(&error);
                tracing::debug!(%session, reason, "cannot record a session's state");
                let is_latest = latest.load(Ordering::Relaxed) == number;
                if !error.is_retryable() || !is_latest {
                    return;
                }
                sleep(NOTE_AGAIN).await;
            }
        });
    }

    /// Journals the phases of a start that fails, before its consequences. Those of a successful start are
    /// journalled with its success.
    fn tell_phases(&mut self) {
        match self.life.state() {
            LifeState::Starting(_) | LifeState::Running { .. } => {}
            LifeState::Stopping(_) | LifeState::Stuck(_) | LifeState::Ended { .. } => self
                .publisher
                .gave_up(self.life.generation(), &self.clock.shared()),
        }
    }

    /// Updates what others see.
    fn publish(&mut self) {
        match self.life.state() {
            LifeState::Starting(_) => {
                self.publisher.starting(
                    self.life.generation(),
                    self.process.as_ref(),
                    self.clock.phases(),
                );
            }
            LifeState::Running { generation, .. } => {
                self.publisher.running(*generation, self.process.as_ref());
            }
            LifeState::Stopping(stop) => {
                let trouble = stop.trouble.clone();
                let failure = self.failure_of(&stop.cause);
                let end = self.end_by(&stop.cause);
                self.publisher.stopping(&stop.cause, end, trouble, failure);
            }
            LifeState::Stuck(stop) => {
                let pid = match stop.remains {
                    Remains::Process { pid, .. } => Some(pid),
                    _ => None,
                };
                let trouble = stop.trouble.clone();
                let cause = stop.cause.clone();
                if let Some(reason) =
                    self.publisher
                        .stuck(self.life.generation(), &cause, pid, trouble)
                {
                    let reason = self.handle.reason_of_end(cause.end_cause(), reason);
                    let cause = Some(self.handle.caused_by(cause.end_cause()));
                    self.note(RecordState::Stuck { reason, cause });
                }
            }
            LifeState::Ended { generation, cause } => {
                let (generation, cause) = (*generation, cause.clone());
                let failure = self.failure_of(&cause);
                let (end, ending) = (self.end_by(&cause), self.ending.take());
                self.publisher
                    .ended(generation, &cause, end, ending, failure);
            }
        }
    }

    /// Returns why the session ends, for programs.
    fn end_by(&self, cause: &Cause) -> SessionEnd {
        SessionEnd {
            cause: self.handle.caused_by(cause.end_cause()),
            phase: self.failed_phase(cause).map(str::to_owned),
        }
    }

    /// Returns the phase in which the start failed, if it did.
    fn failed_phase(&self, cause: &Cause) -> Option<&'static str> {
        match cause {
            // Once the container is recorded, only its readiness is awaited.
            Cause::StartFailed(_) => {
                let ready = self.recorded_at.map(|_| phases::READY);
                self.failed_phase.or(ready)
            }
            Cause::ExitedEarly => Some(phases::READY),
            Cause::Exited | Cause::Asked(..) => None,
        }
    }

    /// Returns the failure for callers that wait for the start; `None` once it has run.
    fn failure_of(&self, cause: &Cause) -> Option<Failure> {
        if self.was_running {
            return None;
        }
        let default = match cause {
            Cause::StartFailed(_) => FailureKind::Host,
            Cause::ExitedEarly | Cause::Exited => FailureKind::Exited,
            // No order and not its program ended it.
            Cause::Asked(EndCause::NodeLost, _) => {
                return Some(Failure::Kind(FailureKind::Interrupted));
            }
            Cause::Asked(by, _) => FailureKind::of_stop(*by),
        };
        Some(self.failure.clone().unwrap_or(Failure::Kind(default)))
    }
}

/// Completes with the awaited death, or proof of it; pending without one.
async fn death(dying: &mut Option<BoxFuture<'static, ()>>) {
    match dying {
        Some(dying) => dying.await,
        None => std::future::pending().await,
    }
}

async fn due(timer: Option<(Instant, Timer)>) -> Timer {
    match timer {
        Some((at, timer)) => {
            sleep_until(at).await;
            timer
        }
        None => std::future::pending().await,
    }
}
