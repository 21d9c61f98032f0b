//! Checks periodically whether the runtimes answer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_proto::RuntimeKind;
use conman_runtime::RuntimeInfo;
use tokio::time::{sleep, timeout};

use crate::context::Context;

/// The task's name for the watchdog.
pub(crate) const NAME: &str = "runtime health";

const INTERVAL: Duration = Duration::from_secs(10);

/// Time after which a runtime counts as not answering.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct RuntimeHealth {
    /// The last answer of each runtime, or why there was none.
    latest: Mutex<BTreeMap<RuntimeKind, Result<RuntimeInfo, String>>>,
}

impl RuntimeHealth {
    /// A panic cannot leave a partial change: each change is one map operation.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<RuntimeKind, Result<RuntimeInfo, String>>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why a runtime cannot start sessions at present.
    pub(crate) fn error(&self, kind: RuntimeKind) -> Option<String> {
        self.lock().get(&kind)?.as_ref().err().cloned()
    }

    pub(crate) fn warnings(&self) -> Vec<String> {
        self.lock()
            .values()
            .flat_map(|latest| match latest {
                Ok(info) => info.warnings.clone(),
                Err(error) => vec![error.clone()],
            })
            .collect()
    }
}

/// Checks until it is aborted.
pub(crate) async fn run(context: Arc<Context>, health: Arc<RuntimeHealth>) {
    let pulse = context.options.vitals.task(NAME);
    loop {
        pulse.beat().await;
        for (kind, runtime) in &context.runtimes {
            let asked = pulse.wait(PATIENCE, timeout(PATIENCE, runtime.info()));
            let latest = match asked.await {
                Ok(Ok(info)) => Ok(info),
                Ok(Err(error)) => Err(conman_core::error_chain(&error)),
                Err(_) => Err(format!(
                    "{kind} did not answer within {} s",
                    PATIENCE.as_secs()
                )),
            };
            say_change(*kind, health.lock().get(kind), &latest);
            health.lock().insert(*kind, latest);
        }
        pulse.wait(INTERVAL, sleep(INTERVAL)).await;
    }
}

fn say_change(
    kind: RuntimeKind,
    before: Option<&Result<RuntimeInfo, String>>,
    now: &Result<RuntimeInfo, String>,
) {
    match (before, now) {
        (Some(Ok(_)) | None, Err(error)) => {
            tracing::warn!(runtime = %kind, error, "the runtime does not answer");
        }
        (Some(Err(_)), Ok(_)) => tracing::info!(runtime = %kind, "the runtime answers again"),
        (None, Ok(info)) => {
            tracing::info!(runtime = %kind, version = info.version, "the runtime answers");
            for warning in &info.warnings {
                tracing::warn!(runtime = %kind, "{warning}");
            }
        }
        (Some(Ok(_)), Ok(_)) | (Some(Err(_)), Err(_)) => {}
    }
}
