//! Creates a container: waits for a place, checks the binds, asks the runtime.

use std::sync::Arc;

use conman_proto::{ResolvedSpec, SessionId};
use conman_runtime::{BindPlan, ContainerKey, ContainerPlan, Runtime};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout};

use super::answer::{Made, StepFailure};
use super::handle::SessionHandle;
use crate::binds::{self, NewSource};
use crate::context::Context;
use crate::error::FailureKind;
use crate::phases;

/// The permit is returned with the answer: it is held until the container has started.
pub(super) async fn make(
    context: Arc<Context>,
    handle: Arc<SessionHandle>,
    runtime: Arc<dyn Runtime>,
    key: ContainerKey,
) -> (Made, Option<OwnedSemaphorePermit>) {
    let mut made = Made {
        admitted: None,
        prepared: None,
        created: None,
        result: Ok(()),
    };
    let permit = match admit(&context, &handle).await {
        Ok(permit) => permit,
        Err(failure) => {
            made.result = Err(failure);
            return (made, None);
        }
    };
    made.admitted = Some(Instant::now());
    let binds = match prepare(&context, &handle.id, &handle.spec()).await {
        Ok(binds) => binds,
        Err(failure) => {
            made.result = Err(failure);
            return (made, None);
        }
    };
    made.prepared = Some(Instant::now());
    let plan = ContainerPlan {
        files_dir: context.files_dir(&key),
        spec: (*handle.spec()).clone(),
        binds,
        key,
    };
    made.result = create(&context, &*runtime, &plan).await;
    if made.result.is_ok() {
        made.created = Some(Instant::now());
    } else if !matches!(&made.result, Err(failure) if failure.kind == FailureKind::NoSuchImage) {
        // The runtime may still create it, after any removal.
        context.stray_expected.notify_one();
    }
    (made, Some(permit))
}

/// Waits for a place. Given up when the session is to stop: then nothing was sent yet.
async fn admit(
    context: &Context,
    handle: &SessionHandle,
) -> Result<OwnedSemaphorePermit, StepFailure> {
    let mut stop = handle.stop.subscribe();
    let mut fate = handle.fate.subscribe();
    let bound = context.options.bounds.queue;
    let phase = phases::ADMIT;
    tokio::select! {
        // Cancel safe: a permit that was granted and not taken is given back.
        permit = timeout(bound, Arc::clone(&context.starts).acquire_owned()) => match permit {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => Err(StepFailure::new(FailureKind::Host, phase, "shutting down")),
            Err(_) => Err(StepFailure::new(
                FailureKind::TimedOut,
                phase, format!(
                    "no turn within {} s, with {} starts at a time; see whether the \
                     runtime hangs, or raise max_starting",
                    bound.as_secs(),
                    context.options.limits.max_starting
                ),
            )),
        },
        // Cancel safe: the driver sees the order as well.
        order = stop.wait_for(Option::is_some) => {
            let cause = order.ok().and_then(|order| Some(order.as_ref()?.cause));
            let kind = cause.map_or(FailureKind::Stopped, FailureKind::of_stop);
            Err(StepFailure::new(kind, phase, "stopped while waiting"))
        }
        // Cancel safe: likewise.
        _ = fate.wait_for(Option::is_some) => {
            Err(StepFailure::new(FailureKind::Preempted, phase, "preempted while waiting"))
        }
    }
}

async fn prepare(
    context: &Context,
    id: &SessionId,
    spec: &ResolvedSpec,
) -> Result<Vec<BindPlan>, StepFailure> {
    let phase = phases::PREPARE;
    if spec.binds.is_empty() {
        return Ok(Vec::new());
    }
    let (wanted, roots) = (
        spec.binds.clone(),
        context.options.policy.bind_roots.clone(),
    );
    let bound = context.options.bounds.prepare;
    // A file server that hangs blocks one thread of the blocking pool, and nothing else.
    let creation = context.options.policy.bind_creation;
    let new = creation.map(|creation| NewSource {
        name: id.to_string(),
        mode: creation.mode,
        owner: creation.host_owner(spec.runtime),
    });
    let checked = tokio::task::spawn_blocking(move || binds::check(&wanted, &roots, new.as_ref()));
    match timeout(bound, checked).await {
        Ok(Ok(Ok(binds))) => Ok(binds),
        Ok(Ok(Err(bad))) => Err(StepFailure::new(FailureKind::Bind, phase, bad)),
        Ok(Err(error)) => Err(StepFailure::new(FailureKind::Host, phase, error)),
        Err(_) => Err(StepFailure::new(
            FailureKind::TimedOut,
            phase,
            format!(
                "the binds' sources could not be looked up within {} s; see whether \
                 their file system hangs",
                bound.as_secs()
            ),
        )),
    }
}

async fn create(
    context: &Context,
    runtime: &dyn Runtime,
    plan: &ContainerPlan,
) -> Result<(), StepFailure> {
    let phase = phases::CREATE;
    let bound = context.options.bounds.create;
    let creating = runtime.create(plan);
    let health = &context.health;
    let creating = health.while_it_answers(runtime.kind(), phase, creating);
    match timeout(bound, creating).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(StepFailure::of_runtime(phase, &error)),
        Err(_) => Err(StepFailure::new(
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
