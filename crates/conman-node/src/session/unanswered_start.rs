//! Finds out the result of a start that was not answered.

use std::sync::Arc;
use std::time::Duration;

use conman_runtime::{ContainerKey, FoundContainer, Runtime, RuntimeError};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::answer::StartOutcome;
use crate::container_kill::kill_container;

/// Interval between polls for processes while the runtime is asked.
const KILL_INTERVAL: Duration = Duration::from_millis(10);

/// One try. The runtime bounds its calls itself, too.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);

/// One try: kills what the kernel shows of the container, and asks the runtime whether there is, or can
/// be, more.
pub(crate) async fn resolve(runtime: Arc<dyn Runtime>, key: ContainerKey) -> StartOutcome {
    tokio::select! {
        // The kernel's view comes first, whatever the runtime says.
        biased;
        // Cancel safe: it only kills.
        pid = kill_init(&*runtime, &key) => StartOutcome::Found { pid },
        // Cancel safe: the calls read, or remove what must not run.
        answer = timeout(TRY_TIMEOUT, ask(&*runtime, &key)) => {
            answer.unwrap_or_else(|_| StartOutcome::Unknown(format!(
                "{} did not report the outcome of the start within {} s",
                runtime.kind(),
                TRY_TIMEOUT.as_secs()
            )))
        }
    }
}

/// Kills every process that the start creates. Completes with the init's PID once that was killed.
pub(super) async fn kill_init(runtime: &dyn Runtime, key: &ContainerKey) -> i32 {
    let mut ticks = interval(KILL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        if let Some(init) = kill_container(runtime, key).init {
            return init.pid();
        }
        ticks.tick().await;
    }
}

async fn ask(runtime: &dyn Runtime, key: &ContainerKey) -> StartOutcome {
    let unknown = |error: &RuntimeError| StartOutcome::Unknown(conman_core::error_chain(error));
    match runtime.find(key).await {
        Err(error) => unknown(&error),
        // It was created before its start was sent, so its absence means that it was removed.
        Ok(None) => once_empty(runtime, key, StartOutcome::Gone),
        Ok(Some(FoundContainer { pid: Some(pid), .. })) => StartOutcome::Found { pid },
        // It ran and ended. A container is started once.
        Ok(Some(FoundContainer {
            exit_code: Some(_), ..
        })) => once_empty(runtime, key, StartOutcome::Ended),
        // Created and not started: not yet, or never. Without the container it is never.
        Ok(Some(_)) => match runtime.remove(std::slice::from_ref(key)).await.pop() {
            Some(Ok(())) => {
                StartOutcome::Unknown("its container was removed; checking again".into())
            }
            Some(Err(error)) => unknown(&error),
            None => StartOutcome::Unknown("the runtime returned no result for the removal".into()),
        },
    }
}

/// The runtime says that nothing runs; the kernel must say so too.
fn once_empty(runtime: &dyn Runtime, key: &ContainerKey, verdict: StartOutcome) -> StartOutcome {
    match runtime.pids(key).as_deref() {
        Ok([]) => verdict,
        Ok(pids) => StartOutcome::Unknown(format!("its cgroup still holds processes: {pids:?}")),
        Err(error) => StartOutcome::Unknown(format!("cannot read its cgroup: {error}")),
    }
}
