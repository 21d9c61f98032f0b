//! Gives up ownership of what is proven dead.

use std::sync::Arc;

use conman_core::lifecycle::Cause;
use conman_registry::{Ending, Phase, RegistryError, Release};
use conman_runtime::{ContainerKey, Runtime};
use jiff::Timestamp;
use tokio::time::timeout;

use super::answer::ReleaseFailure;
use crate::context::Context;

/// What a release tells of the life that ended.
#[derive(Debug)]
pub(super) struct Obituary {
    pub(super) cause: Cause,
    pub(super) started_at: Option<Timestamp>,
    pub(super) phases: Vec<Phase>,
}

/// How a life ended. Asks the runtime for the exit code where the program ended by itself.
pub(super) async fn ending(
    context: &Context,
    runtime: Option<&Arc<dyn Runtime>>,
    key: &ContainerKey,
    obituary: Obituary,
) -> Ending {
    let exit_code = match (&obituary.cause, runtime) {
        (Cause::Exited | Cause::ExitedEarly, Some(runtime)) => {
            let patience = context.options.bounds.exit_code;
            timeout(patience, runtime.exit_code(key, patience))
                .await
                .ok()
                .flatten()
        }
        _ => None,
    };
    let outcome = obituary.cause.outcome(exit_code);
    Ending {
        failed: outcome.failed,
        reason: outcome.reason,
        exit_code,
        ended_at: Timestamp::now(),
        started_at: obituary.started_at,
        phases: obituary.phases,
    }
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
    match results.map(|mut results| results.pop()) {
        Ok(Some(Ok(()))) => Ok(ending),
        Ok(Some(Err(RegistryError::Superseded { .. }))) => Err(ReleaseFailure::Superseded(ending)),
        Ok(Some(Err(error))) => Err(ReleaseFailure::Failed(crate::error_chain(&error))),
        Ok(None) => Err(ReleaseFailure::Failed(
            "the registry said nothing".to_owned(),
        )),
        Err(_) => Err(ReleaseFailure::Failed(slow())),
    }
}
