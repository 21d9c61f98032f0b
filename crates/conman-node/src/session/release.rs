//! Releases a session that is proven dead.

use std::sync::Arc;
use std::time::Duration;

use conman_core::lifecycle::Cause;
use conman_core::{EndCause, FENCED, size};
use conman_registry::{Ending, Phases, RegistryError, Release};
use conman_runtime::{ContainerKey, Runtime};
use jiff::Timestamp;
use tokio::time::timeout;

use super::answer::ReleaseFailure;
use super::handle::SessionHandle;
use super::last_output::last_output;
use crate::context::Context;
use crate::kill_table::Fate;
use crate::oom_watch;

/// How long the emergency thread may take for a release before the session's own task does it.
const EMERGENCY_PATIENCE: Duration = Duration::from_secs(2);

/// The exit code of a process killed by SIGKILL, as a shell gives it.
const KILLED: i32 = 128 + 9;

/// What a release records about the life that ended.
#[derive(Debug)]
pub(super) struct EndedLife {
    /// Whether its program ran and exited without being killed, so that its exit code is meaningful.
    pub(super) by_itself: bool,
    /// Exit code of a program that could not be run.
    pub(super) unrun_exit_code: Option<i32>,
    pub(super) cause: Cause,
    pub(super) failed_phase: Option<&'static str>,
    pub(super) started_at: Option<Timestamp>,
    pub(super) phases: Phases,
}

/// During a preemption the emergency thread releases: it has the certificate too, and two releases of
/// each session would only take longer. Returns how it released this one, or `None` if it does not in
/// time.
pub(super) async fn left_to_emergency(context: &Context, handle: &SessionHandle) -> Option<Ending> {
    context.table.closed()?;
    let mut fates = handle.fate.subscribe();
    let fate = timeout(EMERGENCY_PATIENCE, fates.wait_for(Option::is_some))
        .await
        .ok()?
        .ok()?;
    match &*fate {
        Some(Fate::Released(ending)) => Some(ending.clone()),
        Some(Fate::Unreleased) | None => None,
    }
}

/// Returns how a life ended. If the program exited without an order, the runtime is asked for its exit
/// code and, after a failure, whether the fence killed it, or for the end of its output.
pub(super) async fn ending(
    context: &Context,
    runtime: Option<&Arc<dyn Runtime>>,
    (key, handle): (&ContainerKey, &SessionHandle),
    life: EndedLife,
) -> Ending {
    let patience = context.options.bounds.exit_code;
    let mut exit_code = life.unrun_exit_code;
    let mut cause = life.cause;
    let (mut output, mut oom_kills) = (None, 0);
    if let Some(runtime) = runtime.filter(|_| life.by_itself) {
        // First, as a runtime may remove the cgroups once it has noticed the end.
        oom_kills = note_oom_kills(context, &**runtime, key, handle);
        let (asked, fenced) = tokio::join!(
            timeout(patience, runtime.exit_code(key, patience)),
            runtime.was_fenced(key),
        );
        exit_code = asked.ok().flatten();
        let by_fence = fenced && matches!(exit_code, None | Some(KILLED));
        if by_fence {
            cause = Cause::Asked(EndCause::NodeLost, FENCED.to_owned());
        // A runtime that does not answer one request will not answer the other.
        } else if let Some(code) = exit_code {
            let of_end = special_cause(&**runtime, (key, handle), code, oom_kills);
            cause = timeout(patience, of_end)
                .await
                .ok()
                .flatten()
                .unwrap_or(cause);
            if cause.outcome(exit_code).failed {
                output = last_output(&**runtime, key, patience).await;
            }
        }
    }
    let mut outcome = cause.outcome(exit_code);
    if oom_kills > 0 && outcome.failed && cause.end_cause() == EndCause::Exited {
        let killed =
            format!("; {oom_kills} of its processes were killed, because its memory ran out");
        outcome.reason.push_str(&killed);
    }
    // The runtime's error of a failed start may quote it already.
    if let Some(output) = output.filter(|output| !outcome.reason.contains(output)) {
        outcome.reason.push_str("; its last output: ");
        outcome.reason.push_str(&output);
    }
    Ending {
        failed_phase: life.failed_phase.map(str::to_owned),
        exit_code,
        started_at: life.started_at,
        phases: life.phases,
        ..Ending::now(outcome.failed, cause.end_cause(), outcome.reason)
    }
}

fn note_oom_kills(
    context: &Context,
    runtime: &dyn Runtime,
    key: &ContainerKey,
    handle: &SessionHandle,
) -> u64 {
    let kills = runtime.oom_kills(key).unwrap_or(0);
    if kills > 0 {
        oom_watch::note(context, handle, key, kills);
    }
    kills
}

/// Returns why the program ended, if something else than the program did that.
async fn special_cause(
    runtime: &dyn Runtime,
    (key, handle): (&ContainerKey, &SessionHandle),
    code: i32,
    oom_kills: u64,
) -> Option<Cause> {
    let signalled = *handle.signalled();
    if let Some(signal) = signalled.filter(|signal| code == 128 + signal.get()) {
        let why = format!("{signal} on request ended its program");
        return Some(Cause::Asked(EndCause::Killed, why));
    }
    if code != KILLED || (oom_kills == 0 && !runtime.out_of_memory(key).await) {
        return None;
    }
    let why = match handle.spec().memory_bytes {
        Some(limit) => format!(
            "the kernel killed its program: more memory than {}",
            size(limit)
        ),
        None => "the kernel killed its program: memory ran out".to_owned(),
    };
    Some(Cause::Asked(EndCause::OutOfMemory, why))
}

/// One try.
pub(super) async fn release(
    context: &Context,
    key: &ContainerKey,
    ending: Ending,
) -> Result<Ending, ReleaseFailure> {
    let release = Release {
        id: key.session.clone(),
        generation: key.generation,
        ending: ending.clone(),
    };
    let bound = context.options.bounds.registry;
    let slow = || {
        format!(
            "the registry did not record its release within {} s",
            bound.as_secs()
        )
    };
    let results = timeout(bound, context.registry.release(vec![release])).await;
    let why = match results.map(|mut results| results.pop()) {
        Ok(Some(Ok(()))) => return Ok(ending),
        Ok(Some(Err(RegistryError::Superseded { .. }))) => {
            return Err(ReleaseFailure::Superseded(ending));
        }
        Ok(Some(Err(error))) => conman_core::error_chain(&error),
        Ok(None) => "the registry returned no result".to_owned(),
        Err(_) => slow(),
    };
    let is_lost = ending.cause() == EndCause::NodeLost;
    Err(ReleaseFailure::Failed(why, is_lost.then_some(ending)))
}
