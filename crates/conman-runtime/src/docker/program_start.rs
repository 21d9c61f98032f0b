//! Whether a container's program could be executed at all.
//!
//! Docker reports a container as running as soon as its first process, docker-init, runs. That
//! forks and executes the program a moment later, and ends with a message if it cannot. So a
//! start is watched in the kernel until a process other than the first has executed something, or
//! the first one has ended.

use std::sync::Arc;
use std::time::Duration;

use conman_linux::{Lineage, PidFd};
use tokio::time::Instant;

use super::Shared;
use crate::shared::kernel_view::KernelView;
use crate::{ContainerKey, RuntimeError};

/// Longest time from docker-init's start to the program's on a busy machine. A program that has
/// not started by then is taken for running, as Docker does.
const PATIENCE: Duration = Duration::from_secs(5);

/// First and later poll interval: an idle machine needs a millisecond or two.
const FIRST_INTERVAL: Duration = Duration::from_millis(1);
const LAST_INTERVAL: Duration = Duration::from_millis(16);

/// Result of watching a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgramStart {
    /// The program was executed, or it is still unknown.
    Runs,
    /// The first process is dead.
    Ended,
}

/// Watches the start of the container whose first process, as Docker reports, is `init`.
pub(super) async fn watch(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    init: i32,
) -> Result<ProgramStart, RuntimeError> {
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
            return Ok(ProgramStart::Runs);
        }
        tokio::time::sleep(interval).await;
        interval = (interval * 2).min(LAST_INTERVAL);
    }
}

/// `None` while it is undecided.
fn look(kernel: &KernelView, key: &ContainerKey, init: i32) -> Option<ProgramStart> {
    let has_executed = |pid: i32| Lineage::of(pid).is_ok_and(|lineage| lineage.has_executed);
    let pids = kernel.pids(key).unwrap_or_default();
    let others = pids.into_iter().filter(|pid| *pid != init);
    // The process that runc replaces by docker-init forks nothing that stays in the container
    // before it does so.
    if has_executed(init) && others.into_iter().any(has_executed) {
        return Some(ProgramStart::Runs);
    }
    // Checked after the others, so that a program that was executed and ended counts as an end.
    let is_dead = match PidFd::open(init) {
        Ok(process) => matches!(process.is_dead(), Ok(true)),
        Err(error) => error.proves_death(),
    };
    (is_dead || matches!(kernel.shows(key, init), Ok(false))).then_some(ProgramStart::Ended)
}
