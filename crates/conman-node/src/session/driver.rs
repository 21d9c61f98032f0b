//! Drives one life's state machine.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use conman_core::lifecycle::{Action, Cause, Event, Lifecycle, Remains, State, Step, Timing};
use conman_linux::{PidFd, ProcessIdentity};
use conman_proto::Generation;
use conman_registry::{ContainerIdentity, Ending, RecordState, RegistryError};
use conman_runtime::{ContainerKey, Runtime};
use futures_util::FutureExt;
use jiff::Timestamp;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::answer::{Answer, Claimed, Hold, Launched, LostStart, Made, ReleaseFailure, Trouble};
use super::handle::SessionHandle;
use super::idle::Patience;
use super::publisher::Publisher;
use super::release::Obituary;
use super::view::Failure;
use super::{claim, hold_process, launch, lost_start, make, release};
use crate::certificate;
use crate::context::Context;
use crate::error::FailureKind;
use crate::kill_table::Fate;
use crate::phases::{self, PhaseClock};
use crate::readiness::{self, Probe};

/// Between two tries of what stands before an end.
const RETRY_MS: u64 = 250;

/// By how much the machine's bound on readiness exceeds the probe's own, whose message says more.
const PROBE_SLACK_MS: u64 = 1_000;

/// What a call that panicked comes to.
const BROKEN: &str = "conman has a bug: a step panicked; its log says where";

/// First and longest pause between two tries of recording a container.
const RECORD_PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How a life begins.
#[derive(Debug)]
pub(crate) enum Beginning {
    /// By being claimed.
    Fresh,
    /// It runs and was ready: an earlier daemon started it.
    Running(Arc<PidFd>),
    /// It runs, and was not yet ready.
    Unready(Arc<PidFd>),
    /// It runs and was to be stopped, for this reason.
    Doomed(Arc<PidFd>, String),
    /// It may run or come to run.
    Unresolved,
}

/// Sets a life going. Its handle is in the map and in the kill table already.
pub(crate) fn spawn(context: Arc<Context>, handle: Arc<SessionHandle>, beginning: Beginning) {
    let (driver, actions) = Driver::new(context, handle, beginning);
    tokio::spawn(driver.run(actions));
}

pub(super) struct Driver {
    context: Arc<Context>,
    handle: Arc<SessionHandle>,
    runtime: Option<Arc<dyn Runtime>>,
    life: Lifecycle,
    /// Zero of the machine's clock.
    began: Instant,
    calls: JoinSet<Answer>,
    probing: Option<AbortHandle>,
    /// The latest note to the registry that nobody waits for; the next one waits for it.
    noting: Option<JoinHandle<()>>,
    clock: PhaseClock,
    publisher: Publisher,
    permit: Option<OwnedSemaphorePermit>,
    process: Option<Arc<PidFd>>,
    container: Option<ContainerIdentity>,
    /// Readiness that was found before the container was recorded.
    ready: Option<Result<Instant, Trouble>>,
    recorded_at: Option<Instant>,
    patience: Option<Patience>,
    failure: Option<Failure>,
    ending: Option<Ending>,
    was_running: bool,
    /// Orders from outside that the machine has been told of.
    told_stop: bool,
    told_fate: bool,
}

/// What woke the driver.
enum Input {
    Answer(Answer),
    Stop(String),
    Fate(Fate),
    Tick,
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
            ready_timeout_ms: u64::from(handle.spec.ready_timeout_s) * 1_000 + PROBE_SLACK_MS,
            stuck_after_ms: u64::try_from(bounds.stuck_after.as_millis()).unwrap_or(u64::MAX),
            retry_ms: RETRY_MS,
        };
        let view = handle.view();
        let began = Instant::now();
        let generation = view.generation.unwrap_or(Generation::FIRST);
        let (life, actions) = match &beginning {
            Beginning::Fresh => Lifecycle::start(timing),
            Beginning::Running(process) => (
                Lifecycle::adopt(timing, generation, process.pid()),
                Vec::new(),
            ),
            Beginning::Doomed(process, why) => {
                let mut life = Lifecycle::adopt(timing, generation, process.pid());
                let actions = life.on(0, Event::StopAsked(why.clone()));
                (life, actions)
            }
            Beginning::Unready(process) => {
                Lifecycle::adopt_unready(0, timing, generation, process.pid())
            }
            Beginning::Unresolved => Lifecycle::recover(0, timing, generation),
        };
        let mut driver = Self {
            runtime: context.runtime(handle.spec.runtime).cloned(),
            publisher: Publisher::new(Arc::clone(&context), Arc::clone(&handle)),
            clock: PhaseClock::resumed(view.phases),
            context,
            handle,
            life,
            began,
            calls: JoinSet::new(),
            probing: None,
            noting: None,
            permit: None,
            process: None,
            container: None,
            ready: None,
            recorded_at: None,
            patience: None,
            failure: None,
            ending: None,
            was_running: false,
            told_stop: false,
            told_fate: false,
        };
        match beginning {
            Beginning::Fresh => {}
            Beginning::Running(process) => {
                driver.hold(process);
                driver.begin_patience(view.started_at.unwrap_or_else(Timestamp::now));
                driver.was_running = true;
            }
            Beginning::Unready(process) => driver.hold(process),
            Beginning::Doomed(process, _) => {
                driver.hold(process);
                driver.was_running = view.started_at.is_some();
            }
            Beginning::Unresolved => driver.failure = Some(Failure::Kind(FailureKind::Interrupted)),
        }
        (driver, actions)
    }

    async fn run(mut self, actions: Vec<Action>) {
        if matches!(self.life.state(), State::Starting(Step::Probing { .. })) {
            self.begin_probe();
        }
        self.carry_out(actions);
        self.publish();
        while !self.is_over() {
            let input = self.next_input().await;
            for event in self.absorb(input) {
                let actions = self.life.on(self.now_ms(), event);
                self.carry_out(actions);
            }
            self.publish();
        }
    }

    /// An ended life still waits for calls that would otherwise leave something behind unseen.
    fn is_over(&self) -> bool {
        self.is_ended() && self.calls.is_empty()
    }

    fn is_ended(&self) -> bool {
        matches!(self.life.state(), State::Ended { .. })
    }

    async fn next_input(&mut self) -> Input {
        let mut stop = self.handle.stop.subscribe();
        let mut fate = self.handle.fate.subscribe();
        let machine = self
            .life
            .deadline_ms()
            .map(|ms| self.began + Duration::from_millis(ms));
        let look = self.patience.as_ref().and_then(Patience::next_look);
        let claim_slow = self.claim_deadline();
        tokio::select! {
            // Outside orders first, so that what they cause is not taken for something else.
            biased;
            // Cancel safe, like all the others: each looks at a state that stays what it is, and
            // the set of calls keeps what is not taken.
            Ok(order) = stop.wait_for(Option::is_some), if !self.told_stop => {
                Input::Stop(order.clone().unwrap_or_default())
            }
            Ok(fate) = fate.wait_for(Option::is_some), if !self.told_fate => match fate.clone() {
                Some(fate) => Input::Fate(fate),
                None => Input::Tick,
            },
            Some(answer) = self.calls.join_next() => match answer {
                Ok(answer) => Input::Answer(answer),
                // Aborted, as probes are. A panic is an answer.
                Err(_) => Input::Tick,
            },
            () = at(machine) => Input::Tick,
            () = at(look) => Input::Look,
            () = at(claim_slow) => Input::ClaimSlow,
        }
    }

    fn claim_deadline(&self) -> Option<Instant> {
        let waits = matches!(self.life.state(), State::Starting(Step::Claiming));
        waits.then(|| self.began + self.context.options.bounds.registry)
    }

    /// Takes note of what happened, and says it in the machine's words.
    fn absorb(&mut self, input: Input) -> Vec<Event> {
        match input {
            Input::Tick => vec![Event::Tick],
            Input::Stop(why) => {
                self.told_stop = true;
                self.fail_with(FailureKind::Stopped);
                vec![Event::StopAsked(why)]
            }
            Input::Fate(fate) => self.absorb_fate(fate),
            Input::Look => {
                let activity = &self.handle.activity;
                let now = Instant::now();
                let why = self.patience.as_mut().and_then(|p| p.look(activity, now));
                why.map(|why| {
                    self.patience = None;
                    Event::StopAsked(why)
                })
                .into_iter()
                .collect()
            }
            Input::ClaimSlow => {
                // The claim may still be recorded, and is given up then.
                self.failure = Some(Failure::ClaimSlow);
                vec![Event::StopAsked(
                    "the registry did not record the start in time".to_owned(),
                )]
            }
            Input::Answer(answer) => {
                let mut events = self.absorb_preemption();
                events.extend(self.absorb_answer(answer));
                events
            }
        }
    }

    fn absorb_fate(&mut self, fate: Fate) -> Vec<Event> {
        self.told_fate = true;
        self.fail_with(FailureKind::Preempted);
        match fate {
            Fate::Released(ending) => {
                let why = ending.reason.clone();
                self.ending = Some(ending);
                self.publisher.released_elsewhere();
                vec![Event::ReleasedElsewhere(why)]
            }
            // What the emergency thread could not finish goes on here.
            Fate::Unreleased => self.absorb_preemption(),
        }
    }

    /// While a preemption is under way, whatever happens to a session happens because of it.
    fn absorb_preemption(&mut self) -> Vec<Event> {
        let Some(closed) = self.context.table.closed() else {
            return Vec::new();
        };
        if matches!(
            self.life.state(),
            State::Stopping(_) | State::Stuck(_) | State::Ended { .. }
        ) {
            return Vec::new();
        }
        self.fail_with(FailureKind::Preempted);
        vec![Event::StopAsked(format!("preempted: {}", closed.reason))]
    }

    fn absorb_answer(&mut self, answer: Answer) -> Option<Event> {
        let event = match answer {
            Answer::Claim(Ok(claimed)) => {
                self.clock.end(phases::CLAIM);
                self.publisher.claimed(&claimed);
                // A refusal shows again, and then counts, when the start is to be sent.
                let _ = self
                    .context
                    .table
                    .reserve(&self.handle.id, claimed.generation);
                Event::Claimed(claimed.generation)
            }
            Answer::Claim(Err(error)) => self.absorb_claim_failure(error),
            Answer::Make(made, permit) => {
                self.permit = permit;
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
            Answer::Record(Err(trouble)) => Event::RecordFailed(self.fail(trouble)),
            Answer::Probe(result) => {
                self.ready = Some(result);
                return self.take_ready();
            }
            Answer::LostStart(LostStart::Found { pid }) => Event::LostStartFound { pid },
            Answer::LostStart(LostStart::Gone) => Event::LostStartGone,
            Answer::LostStart(LostStart::Unknown(why)) => Event::LostStartUnknown(why),
            Answer::Release(Ok(ending)) => {
                self.ending = Some(ending);
                Event::Released
            }
            Answer::Release(Err(ReleaseFailure::Superseded(ending))) => {
                self.ending = Some(ending);
                Event::Superseded
            }
            Answer::Release(Err(ReleaseFailure::Failed(why))) => Event::ReleaseFailed(why),
            Answer::Dead => {
                // The emergency thread tells of those that it certifies.
                let theirs = match self.context.table.closed() {
                    Some(_) => !self.told_fate || self.is_ended(),
                    None => false,
                };
                self.publisher
                    .dead(self.life.generation().filter(|_| !theirs));
                Event::Exited
            }
        };
        Some(event)
    }

    fn absorb_claim_failure(&mut self, error: RegistryError) -> Event {
        let why = format!("{}: {}", phases::CLAIM, crate::error_chain(&error));
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
            Err(trouble) => Event::CreateFailed(self.fail(trouble)),
        }
    }

    fn absorb_launched(&mut self, launched: Launched) -> Event {
        match launched {
            Launched::Started(started) => {
                self.clock.end(phases::START);
                self.container = Some(ContainerIdentity {
                    container_id: started.container_id,
                    pid: started.pid,
                    // Both are read once the process is held.
                    start_time_ticks: 0,
                    boot_id: String::new(),
                });
                Event::StartAnswered { pid: started.pid }
            }
            Launched::Failed(trouble) => Event::StartFailed(self.fail(trouble)),
            Launched::Ambiguous(trouble) => Event::StartAmbiguous(self.fail(trouble)),
        }
    }

    fn absorb_hold(&mut self, hold: Hold) -> Event {
        match hold {
            Hold::Held(process, identity) => {
                self.clock.end(phases::VERIFY);
                if let Some(generation) = self.life.generation() {
                    // After a refusal the emergency thread knows of it and kills it.
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
                Event::NotOurs
            }
            Hold::Failed(trouble) => Event::HoldFailed(self.fail(trouble)),
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
        });
    }

    /// Holds the init from now on, and reports its death.
    fn hold(&mut self, process: Arc<PidFd>) {
        self.process = Some(Arc::clone(&process));
        self.calls.spawn(async move {
            certificate::of(process).await;
            Answer::Dead
        });
    }

    /// Readiness counts once the machine waits for it, which is after the container is recorded.
    fn take_ready(&mut self) -> Option<Event> {
        if !matches!(self.life.state(), State::Starting(Step::Probing { .. })) {
            return None;
        }
        match self.ready.take()? {
            Ok(ready_at) => {
                self.end_last_phases(ready_at);
                Some(Event::Ready)
            }
            Err(trouble) => Some(Event::ReadyFailed(self.fail(trouble))),
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
        self.begin_patience(started_at);
        self.context
            .table
            .note_start(&self.handle.id, started_at, self.clock.phases());
        self.publisher
            .ready(self.life.generation(), started_at, self.clock.phases());
        let phases = self.clock.phases().to_vec();
        self.note(RecordState::Running { started_at, phases });
    }

    fn begin_patience(&mut self, started_at: Timestamp) {
        let (spec, activity) = (&self.handle.spec, &self.handle.activity);
        self.patience = Some(Patience::begin(spec, activity, started_at, Instant::now()));
    }

    fn fail(&mut self, trouble: Trouble) -> String {
        self.fail_with(trouble.kind);
        trouble.why
    }

    /// The first reason counts.
    fn fail_with(&mut self, kind: FailureKind) {
        if self.failure.is_none() {
            self.failure = Some(Failure::Kind(kind));
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn key(&self) -> Option<ContainerKey> {
        let generation = self.life.generation()?;
        Some(ContainerKey {
            session: self.handle.id.clone(),
            generation,
        })
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Claim => self.call_claim(),
                Action::Create => self.call_make(),
                Action::SendStart => self.call_launch(),
                Action::Hold { pid } => self.call_hold(pid),
                Action::Record => {
                    self.call_record();
                    // The program may become ready while the record is written.
                    self.begin_probe();
                }
                Action::Probe => {
                    if let Some(event) = self.take_ready() {
                        let actions = self.life.on(self.now_ms(), event);
                        self.carry_out(actions);
                    }
                }
                Action::ResolveLostStart => self.call_lost_start(),
                Action::Kill => self.kill(),
                Action::Release => self.call_release(),
                Action::Cleanup => self.clean_up(),
                // The view is brought up to date after every event.
                Action::Publish => {}
            }
        }
    }

    /// Begins a call. One that panics is answered with `broken`, so that the machine never waits
    /// for an answer that does not come.
    fn call(
        &mut self,
        broken: Answer,
        work: impl Future<Output = Answer> + Send + 'static,
    ) -> AbortHandle {
        let work = AssertUnwindSafe(work).catch_unwind();
        self.calls
            .spawn(async move { work.await.unwrap_or(broken) })
    }

    fn call_claim(&mut self) {
        let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
        let broken = RegistryError::Closed {
            reason: BROKEN.to_owned(),
        };
        self.call(Answer::Claim(Err(broken)), async move {
            let claimed = claim::claim(&*context.registry, &handle.id, &handle.spec).await;
            Answer::Claim(claimed.map(|record| Claimed {
                generation: record.generation,
                created_at: record.created_at,
            }))
        });
    }

    fn call_make(&mut self) {
        let (Some(key), Some(runtime)) = (self.key(), self.runtime.clone()) else {
            return;
        };
        let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
        let broken = Made {
            admitted: None,
            prepared: None,
            created: None,
            result: Err(bug(phases::CREATE)),
        };
        self.call(Answer::Make(broken, None), async move {
            let (made, permit) = make::make(context, handle, runtime, key).await;
            Answer::Make(made, permit)
        });
    }

    fn call_launch(&mut self) {
        let (Some(key), Some(runtime)) = (self.key(), self.runtime.clone()) else {
            return;
        };
        let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
        let broken = Launched::Ambiguous(bug(phases::START));
        self.call(Answer::Launch(broken), async move {
            Answer::Launch(launch::launch(context, handle, runtime, key).await)
        });
    }

    fn call_hold(&mut self, pid: i32) {
        let (Some(key), Some(runtime)) = (self.key(), self.runtime.clone()) else {
            return;
        };
        self.call(
            Answer::Hold(Hold::Failed(bug(phases::VERIFY))),
            async move { Answer::Hold(hold_process::hold(&*runtime, &key, pid)) },
        );
    }

    fn call_record(&mut self) {
        let (Some(key), Some(container)) = (self.key(), self.container.clone()) else {
            return;
        };
        let context = Arc::clone(&self.context);
        self.call(Answer::Record(Err(bug(phases::RECORD))), async move {
            let recorded = record(&context, &key, &container);
            let bound = context.options.bounds.registry;
            Answer::Record(match timeout(bound, recorded).await {
                Ok(Ok(())) => Ok(Instant::now()),
                Ok(Err(error)) => Err(registry_trouble(&crate::error_chain(&error))),
                Err(_) => Err(registry_trouble(&format!(
                    "no answer within {} s",
                    bound.as_secs()
                ))),
            })
        });
    }

    fn begin_probe(&mut self) {
        let Some(process) = self.process.clone() else {
            return;
        };
        let Some(port) = self.handle.spec.port else {
            self.ready = Some(Ok(Instant::now()));
            return;
        };
        let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
        let bound = Duration::from_secs(handle.spec.ready_timeout_s.into());
        let probing =
            self.call(Answer::Probe(Err(bug(phases::READY))), async move {
                let probe = Probe {
                    port,
                    path: handle.spec.ready_path.clone(),
                };
                let deadline = Instant::now() + bound;
                let waited = readiness::wait(&context.sockets, &process, &probe, deadline).await;
                Answer::Probe(waited.map(|()| Instant::now()).map_err(|last| {
                let what = probe.path.map(|path| format!(" at {path}")).unwrap_or_default();
                Trouble::new(
                    FailureKind::NotReady,
                    format!(
                        "{}: port {port}{what} was not ready within {} s ({last}); see that the \
                         program listens there, or raise ready_timeout_s",
                        phases::READY,
                        bound.as_secs()
                    ),
                )
            }))
            });
        self.probing = Some(probing);
    }

    fn call_lost_start(&mut self) {
        let Some(key) = self.key() else { return };
        let Some(runtime) = self.runtime.clone() else {
            let why = "its runtime is no longer configured; configure it to have it looked for";
            self.calls
                .spawn(async move { Answer::LostStart(LostStart::Unknown(why.to_owned())) });
            return;
        };
        let broken = LostStart::Unknown(BROKEN.to_owned());
        self.call(Answer::LostStart(broken), async move {
            Answer::LostStart(lost_start::resolve(runtime, key).await)
        });
    }

    fn kill(&mut self) {
        let Some(process) = &self.process else { return };
        // Before the kill, so that the tunnels' ends are told apart from a program's own end.
        self.publisher.close_tunnels(&self.why());
        match process.kill() {
            Ok(true) => self.publisher.killed(self.life.generation(), &self.why()),
            // Dead already: its certificate is on the way.
            Ok(false) => {}
            Err(error) => self.publisher.kill_failed(&crate::error_chain(&error)),
        }
    }

    /// Why the life ends.
    fn why(&self) -> String {
        match self.life.state() {
            State::Stopping(stop) | State::Stuck(stop) => stop.cause.outcome(None).reason,
            State::Starting(_) | State::Running { .. } | State::Ended { .. } => String::new(),
        }
    }

    fn call_release(&mut self) {
        let (Some(key), State::Stopping(stop) | State::Stuck(stop)) =
            (self.key(), self.life.state())
        else {
            return;
        };
        let cause = stop.cause.clone();
        if let Some(probing) = self.probing.take() {
            probing.abort();
        }
        self.publisher.close_tunnels(&cause.outcome(None).reason);
        let obituary = Obituary {
            cause,
            started_at: self.handle.view().started_at,
            phases: self.clock.phases().to_vec(),
        };
        let (context, runtime) = (Arc::clone(&self.context), self.runtime.clone());
        let handle = Arc::clone(&self.handle);
        let known = self.ending.clone();
        let broken = ReleaseFailure::Failed(BROKEN.to_owned());
        self.call(Answer::Release(Err(broken)), async move {
            if let Some(ending) = release::left_to_emergency(&context, &handle).await {
                return Answer::Release(Ok(ending));
            }
            let ending = match known {
                Some(ending) => ending,
                None => release::ending(&context, runtime.as_ref(), &key, obituary).await,
            };
            Answer::Release(release::release(&context, &key, ending).await)
        });
    }

    fn clean_up(&mut self) {
        if let Some(key) = self.key() {
            self.context.cleanup.push(self.handle.spec.runtime, key);
        }
    }

    /// Tells the registry of a state, in order and without waiting. A refusal means that the life
    /// has been released since.
    fn note(&mut self, state: RecordState) {
        let Some(key) = self.key() else { return };
        let before = self.noting.take();
        let context = Arc::clone(&self.context);
        self.noting = Some(tokio::spawn(async move {
            if let Some(before) = before {
                // One that panicked left nothing to wait for.
                let _ = before.await;
            }
            if let Err(error) = context
                .registry
                .set_state(&key.session, key.generation, state)
                .await
            {
                let reason = crate::error_chain(&error);
                tracing::debug!(session = %key.session, reason, "a state was not recorded");
            }
        }));
    }

    /// Brings what others see up to date.
    fn publish(&mut self) {
        match self.life.state() {
            State::Starting(_) => {
                self.publisher
                    .starting(self.life.generation(), self.process.as_ref());
            }
            State::Running { generation, .. } => {
                self.publisher.running(*generation, self.process.as_ref());
            }
            State::Stopping(stop) => {
                let trouble = stop.trouble.clone();
                let failure = self.failure_of(&stop.cause);
                self.publisher.stopping(&stop.cause, trouble, failure);
            }
            State::Stuck(stop) => {
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
                    self.note(RecordState::Stuck { reason });
                }
            }
            State::Ended { generation, cause } => {
                let (generation, cause) = (*generation, cause.clone());
                let failure = self.failure_of(&cause);
                let ending = self.ending.take();
                self.publisher.ended(generation, &cause, ending, failure);
            }
        }
    }

    /// What whoever waits for the start is told; nothing once it has run.
    fn failure_of(&self, cause: &Cause) -> Option<Failure> {
        if self.was_running {
            return None;
        }
        let default = match cause {
            Cause::StartFailed(_) => FailureKind::Host,
            Cause::ExitedEarly | Cause::Exited => FailureKind::Exited,
            Cause::Asked(_) => FailureKind::Stopped,
        };
        Some(self.failure.clone().unwrap_or(Failure::Kind(default)))
    }
}

/// Writes down how the container is found again, trying until the caller's time is up.
async fn record(
    context: &Context,
    key: &ContainerKey,
    container: &ContainerIdentity,
) -> Result<(), RegistryError> {
    let (mut pause, longest) = RECORD_PAUSES;
    loop {
        match context
            .registry
            .set_container(&key.session, key.generation, container)
            .await
        {
            Err(error) if error.is_retryable() => {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
            result => return result,
        }
    }
}

fn bug(phase: &str) -> Trouble {
    Trouble::new(FailureKind::Host, format!("{phase}: {BROKEN}"))
}

fn registry_trouble(why: &str) -> Trouble {
    let why = format!("{}: {why}; see to the registry's disk", phases::RECORD);
    Trouble::new(FailureKind::Registry, why)
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}
