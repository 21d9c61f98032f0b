//! Carries out the machine's actions, each call in its own task.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use conman_core::EndCause;
use conman_core::lifecycle::{Action, Cause, LifeState};
use conman_core::preemption::EXIT_PROOF_AFTER;
use conman_registry::{ContainerIdentity, RegistryError};
use conman_runtime::ContainerKey;
use futures_util::FutureExt;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use super::Driver;
use crate::context::Context;
use crate::error::FailureKind;
use crate::exit_proof;
use crate::phases;
use crate::readiness::{self, Probe};
use crate::session::answer::{
    Answer, Claimed, Hold, Launched, Made, ReleaseFailure, StartOutcome, StepFailure,
};
use crate::session::handle::attribute_to_deletion;
use crate::session::release::EndedLife;
use crate::session::view::Failure;
use crate::session::{claim, hold_process, launch, make, release, unanswered_start};
use crate::throttled::{self, Killed};

/// The error of a call that panicked.
const BROKEN: &str = "conman has a bug: a step panicked; its log says where";

/// First and longest pause between two tries to record a container.
const RECORD_PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

impl Driver {
    pub(super) fn carry_out(&mut self, actions: Vec<Action>) {
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
                Action::ResolveStart => self.call_resolve_start(),
                Action::Kill => self.kill(),
                Action::Release => self.call_release(),
                Action::Cleanup => self.clean_up(),
                // The view is updated after every event.
                Action::Publish => {}
            }
        }
    }

    /// Begins a call. One that panics is answered with `broken`, so that the machine never waits for a
    /// missing answer.
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
        let read = self.read.take();
        let broken = RegistryError::Closed {
            reason: BROKEN.to_owned(),
        };
        self.call(Answer::Claim(Err(broken)), async move {
            let claimed = claim::claim(&context, &handle.id, &handle.spec(), read.as_deref()).await;
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
        self.is_making = true;
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
                Ok(Err(error)) => Err(registry_failure(&conman_core::error_chain(&error))),
                Err(_) => Err(registry_failure(&format!(
                    "no answer within {} s",
                    bound.as_secs()
                ))),
            })
        });
    }

    pub(super) fn begin_probe(&mut self) {
        let (Some(process), Some(runtime)) = (self.process.clone(), self.runtime.clone()) else {
            return;
        };
        let Some(port) = self.handle.spec().port else {
            self.ready = Some(Ok(Instant::now()));
            return;
        };
        let (context, handle) = (Arc::clone(&self.context), Arc::clone(&self.handle));
        let bound = Duration::from_secs(handle.spec().ready_timeout_s.into());
        let probing = self.call(Answer::Probe(Err(bug(phases::READY))), async move {
            let probe = Probe {
                network: handle.spec().network.clone(),
                port,
                path: handle.spec().ready_path.clone(),
            };
            let deadline = Instant::now() + bound;
            let waited =
                readiness::wait(&*runtime, &context.sockets, &process, &probe, deadline).await;
            Answer::Probe(waited.map(|()| Instant::now()).map_err(|last| {
                let what = probe
                    .path
                    .map(|path| format!(" at {path}"))
                    .unwrap_or_default();
                StepFailure::new(
                    FailureKind::NotReady,
                    phases::READY,
                    format_args!(
                        "port {port}{what} was not ready within {} s ({last}); see that the \
                         program listens there, or raise ready_timeout_s",
                        bound.as_secs()
                    ),
                )
            }))
        });
        self.probing = Some(probing);
    }

    fn call_resolve_start(&mut self) {
        let Some(key) = self.key() else { return };
        let Some(runtime) = self.runtime.clone() else {
            let why = "its runtime is not configured any more; configure it to find the container";
            self.calls
                .spawn(async move { Answer::StartResolved(StartOutcome::Unknown(why.to_owned())) });
            return;
        };
        let broken = StartOutcome::Unknown(BROKEN.to_owned());
        self.call(Answer::StartResolved(broken), async move {
            Answer::StartResolved(unanswered_start::resolve(runtime, key).await)
        });
    }

    fn kill(&mut self) {
        let Some(process) = &self.process else { return };
        // Before the kill, so that clients can distinguish it from an end of the program.
        self.publisher.close_tunnels(&self.why());
        let sent = process.kill();
        if let (Some(key), Some(runtime)) = (self.key(), &self.runtime) {
            throttled::release(vec![Killed {
                runtime: Arc::clone(runtime),
                key,
                process: Arc::clone(process),
            }]);
        }
        match sent {
            Ok(true) => self.publisher.killed(self.life.generation(), &self.why()),
            // Dead already: its certificate is on the way.
            Ok(false) => {}
            Err(error) => self
                .publisher
                .kill_failed(&conman_core::error_chain(&error)),
        }
        self.prove_exit();
    }

    /// While the node is drained, other nodes wait for its sessions, and it takes no new ones: a killed session is
    /// released as soon as nothing of it can run. Its container stays until the kernel has taken it down.
    fn prove_exit(&mut self) {
        let cause = match self.life.state() {
            LifeState::Stopping(stop) | LifeState::Stuck(stop) => stop.cause.end_cause(),
            LifeState::Starting(_) | LifeState::Running { .. } | LifeState::Ended { .. } => return,
        };
        let is_drained = cause == EndCause::Drained && self.context.drain.reason().is_some();
        let shares_files = !self.handle.spec().binds.is_empty();
        if !is_drained || shares_files || self.exiting.is_some() {
            return;
        }
        if let (Some(key), Some(runtime), Some(process)) =
            (self.key(), self.runtime.clone(), self.process.clone())
        {
            self.exiting = Some(Box::pin(async move {
                sleep(EXIT_PROOF_AFTER).await;
                exit_proof::of(runtime, key, process).await;
            }));
        }
    }

    /// Why the life ends.
    fn why(&self) -> String {
        match self.life.state() {
            LifeState::Stopping(stop) | LifeState::Stuck(stop) => stop.cause.outcome(None).reason,
            LifeState::Starting(_) | LifeState::Running { .. } | LifeState::Ended { .. } => {
                String::new()
            }
        }
    }

    fn call_release(&mut self) {
        self.attribute_leaving();
        let (Some(key), LifeState::Stopping(stop) | LifeState::Stuck(stop)) =
            (self.key(), self.life.state())
        else {
            return;
        };
        let cause = stop.cause.clone();
        if let Some(probing) = self.probing.take() {
            probing.abort();
        }
        self.publisher.close_tunnels(&cause.outcome(None).reason);
        let ended_at_once = matches!(&self.failure, Some(Failure::Kind(FailureKind::Exited)));
        let by_itself = matches!(cause, Cause::Exited | Cause::ExitedEarly);
        let life = EndedLife {
            by_itself: by_itself || ended_at_once,
            unrun_exit_code: self.unrun_exit_code,
            failed_phase: self.failed_phase(&cause),
            cause,
            started_at: self.handle.view().started_at,
            phases: self.clock.shared(),
        };
        let (context, runtime) = (Arc::clone(&self.context), self.runtime.clone());
        let handle = Arc::clone(&self.handle);
        let known = self.ending.clone();
        let broken = ReleaseFailure::Failed(BROKEN.to_owned(), None);
        self.call(Answer::Release(Err(broken)), async move {
            if let Some(ending) = release::left_to_emergency(&context, &handle).await {
                return Answer::Release(Ok(ending));
            }
            let mut ending = match known {
                Some(ending) => ending,
                None => release::ending(&context, runtime.as_ref(), (&key, &handle), life).await,
            };
            attribute_to_deletion(handle.stop.borrow().as_ref(), &mut ending);
            Answer::Release(release::release(&context, &key, ending).await)
        });
    }

    /// Attributes an exit after a drain's signal to the drain, so that another node starts the session.
    fn attribute_leaving(&mut self) {
        if let (Some(order), LifeState::Stopping(stop) | LifeState::Stuck(stop)) =
            (self.handle.leaving.ordered(), self.life.state())
            && matches!(stop.cause, Cause::Exited | Cause::ExitedEarly)
        {
            self.life.attribute(order.cause, &order.why);
        }
    }

    pub(super) fn clean_up(&mut self) {
        // Its answer calls this again: a removal before it would find nothing, and would not be repeated
        // for a long time.
        if self.is_making {
            return;
        }
        if let Some(key) = self.key() {
            self.context.cleanup.push(self.handle.spec().runtime, key);
        }
    }
}

/// Records how the container is found again, retrying until the caller's time is up.
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

fn bug(phase: &'static str) -> StepFailure {
    StepFailure::new(FailureKind::Host, phase, BROKEN)
}

fn registry_failure(why: &str) -> StepFailure {
    let why = format_args!("{why}; see to the registry's disk");
    StepFailure::new(FailureKind::Registry, phases::RECORD, why)
}
