//! Starts a container, and kills its processes when it is not wanted any more.

use std::sync::Arc;
use std::time::Duration;

use conman_runtime::{ContainerKey, Runtime, Started};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::answer::{Launched, StepFailure};
use super::handle::SessionHandle;
use super::unanswered_start::kill_init;
use crate::context::Context;
use crate::error::FailureKind;
use crate::phases;

/// Pause between two requests whether the start may be sent.
const ASK_PAUSE: Duration = Duration::from_millis(100);

/// Sends the start, if the registry and the kill table allow it.
pub(super) async fn launch(
    context: Arc<Context>,
    handle: Arc<SessionHandle>,
    runtime: Arc<dyn Runtime>,
    key: ContainerKey,
) -> Launched {
    let phase = phases::START;
    if let Err(failure) = may_start(&context, &handle, &key).await {
        return Launched::Failed(failure);
    }
    if let Err(closed) = context.table.send(&key.session, key.generation) {
        let why = format!(
            "not sent, because the node is preempted ({})",
            closed.reason
        );
        return Launched::Failed(StepFailure::new(FailureKind::Preempted, phase, why));
    }
    let bound = context.options.bounds.start;
    let starting = runtime.start(&key);
    let health = &context.health;
    let starting = health.while_it_answers(runtime.kind(), phase, starting);
    let answer = tokio::select! {
        // Cancelled only once the container's init was found and killed: the runtime's answer does
        // not matter then.
        answer = timeout(bound, starting) => answer,
        // Cancel safe: it only kills.
        pid = kill_when_unwanted(&handle, &*runtime, &key) => {
            return Launched::Started(Started { container_id: String::new(), pid, steps: Vec::new(), egress: None });
        }
    };
    match answer {
        Ok(Ok(started)) => Launched::Started(started),
        Ok(Err(error)) => {
            let failure = StepFailure::of_runtime(phase, &error);
            // A refusal counts only if the kernel has no process of the container either.
            if error.is_ambiguous() || !matches!(runtime.pids(&key).as_deref(), Ok([])) {
                Launched::Ambiguous(failure)
            } else {
                Launched::Failed(failure)
            }
        }
        Err(_) => Launched::Ambiguous(StepFailure::new(
            FailureKind::TimedOut,
            phase,
            format!(
                "{} did not answer within {} s; see whether it hangs",
                runtime.kind(),
                bound.as_secs()
            ),
        )),
    }
}

/// Asks the registry whether the start may still be sent, until it answers.
async fn may_start(
    context: &Context,
    handle: &SessionHandle,
    key: &ContainerKey,
) -> Result<(), StepFailure> {
    let phase = phases::START;
    let bound = context.options.bounds.start;
    let deadline = Instant::now() + bound;
    let mut stop = handle.stop.subscribe();
    let mut fate = handle.fate.subscribe();
    let asking = async {
        loop {
            match context
                .registry
                .may_start(&key.session, key.generation)
                .await
            {
                Err(error) if error.is_retryable() && Instant::now() + ASK_PAUSE < deadline => {
                    sleep(ASK_PAUSE).await;
                }
                answer => return answer,
            }
        }
    };
    tokio::select! {
        // Cancel safe: a caller that is cancelled has sent nothing.
        asked = timeout_at(deadline, asking) => match asked {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(StepFailure::new(
                FailureKind::Registry,
                phase, format!("not sent, because {}", conman_core::error_chain(&error)),
            )),
            Err(_) => Err(StepFailure::new(
                FailureKind::Registry,
                phase, format!(
                    "not sent, because the registry did not say within {} s whether the \
                     session is still this node's",
                    bound.as_secs()
                ),
            )),
        },
        // Cancel safe: the driver sees the order as well.
        order = stop.wait_for(Option::is_some) => {
            let cause = order.ok().and_then(|order| Some(order.as_ref()?.cause));
            let kind = cause.map_or(FailureKind::Stopped, FailureKind::of_stop);
            Err(StepFailure::new(kind, phase, "stopped before it was sent"))
        }
        // Cancel safe: likewise.
        _ = fate.wait_for(Option::is_some) => {
            Err(StepFailure::new(FailureKind::Preempted, phase, "preempted before it was sent"))
        }
    }
}

/// Once the session is to stop, kills every process that the start creates, without waiting for the
/// runtime's answer. Completes with the init's PID once that was killed.
async fn kill_when_unwanted(
    handle: &SessionHandle,
    runtime: &dyn Runtime,
    key: &ContainerKey,
) -> i32 {
    let mut stop = handle.stop.subscribe();
    // The sender lives in the handle, so this cannot fail.
    let _ = stop.wait_for(Option::is_some).await;
    kill_init(runtime, key).await
}
