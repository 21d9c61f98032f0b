//! Whether a container's program could be executed at all.
//!
//! Docker says that a container runs as soon as its first process does. That is docker-init, which
//! forks and executes the program a moment later, and ends with an explanation where it cannot. So
//! a start is looked at until a process other than the first has executed something, or the first
//! has ended. The kernel tells both.

use std::sync::Arc;
use std::time::Duration;

use conman_linux::{Lineage, PidFd};
use tokio::time::Instant;

use super::Shared;
use crate::kernel_view::KernelView;
use crate::{ContainerKey, RuntimeError};

/// How long a busy machine may take from docker-init's beginning to the program's. Whatever has not
/// begun then is taken for running, as it is by Docker.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often is looked, at first and later: an idle machine takes a millisecond or two.
const FIRST_INTERVAL: Duration = Duration::from_millis(1);
const LAST_INTERVAL: Duration = Duration::from_millis(16);

/// What has become of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beginning {
    /// The program was executed, or nothing is known of it yet.
    Runs,
    /// The first process is dead.
    Ended,
}

/// Watches the start of the container whose first process is `init`, by Docker's word.
pub(super) async fn watch(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    init: i32,
) -> Result<Beginning, RuntimeError> {
    let deadline = Instant::now() + PATIENCE;
    let mut interval = FIRST_INTERVAL;
    loop {
        let (looking, of) = (Arc::clone(shared), key.clone());
        let look = move || Ok(look(&looking.kernel, &of, init));
        if let Some(beginning) = shared.on_blocking_thread("start", look).await? {
            return Ok(beginning);
        }
        if Instant::now() > deadline {
            tracing::debug!(container = %key, "nothing was executed yet");
            return Ok(Beginning::Runs);
        }
        tokio::time::sleep(interval).await;
        interval = (interval * 2).min(LAST_INTERVAL);
    }
}

/// `None` while it is open.
fn look(kernel: &KernelView, key: &ContainerKey, init: i32) -> Option<Beginning> {
    let has_executed = |pid: i32| Lineage::of(pid).is_ok_and(|lineage| lineage.has_executed);
    let pids = kernel.pids(key).unwrap_or_default();
    let others = pids.into_iter().filter(|pid| *pid != init);
    // What runc put in the place of docker-init, before that was executed itself, forks nothing
    // that stays in the container.
    if has_executed(init) && others.into_iter().any(has_executed) {
        return Some(Beginning::Runs);
    }
    // After the others: a program that was executed and has ended shows as an end.
    let is_dead = match PidFd::open(init) {
        Ok(process) => matches!(process.is_dead(), Ok(true)),
        Err(error) => error.proves_death(),
    };
    (is_dead || matches!(kernel.shows(key, init), Ok(false))).then_some(Beginning::Ended)
}
