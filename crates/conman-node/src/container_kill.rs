//! Finds and kills the processes of a container whose start was sent and not answered, using only the
//! kernel.

use std::sync::Arc;

use conman_linux::{PidFd, is_namespace_init};
use conman_runtime::{ContainerKey, Runtime};

/// What one pass found.
#[derive(Debug, Default)]
pub(crate) struct ContainerKill {
    /// Processes to which SIGKILL was sent.
    pub(crate) killed: usize,
    /// The container's init, if it was among them. A container is started once and never again,
    /// so this init's death certificate is the container's.
    pub(crate) init: Option<Arc<PidFd>>,
}

/// Kills all processes in the container's cgroups. Each is opened before it is checked, so that the
/// signal cannot reach another process with a reused PID.
pub(crate) fn kill_container(runtime: &dyn Runtime, key: &ContainerKey) -> ContainerKill {
    let mut found = ContainerKill::default();
    // A process that is missed is found in the next pass.
    for pid in runtime.pids(key).unwrap_or_default() {
        let Ok(process) = PidFd::open(pid) else {
            continue;
        };
        if !runtime.owns_pid(key, pid) {
            continue;
        }
        let is_init = is_namespace_init(pid);
        if process.kill().is_ok_and(|sent| sent) {
            found.killed += 1;
        }
        if is_init {
            found.init = Some(Arc::new(process));
        }
    }
    found
}
