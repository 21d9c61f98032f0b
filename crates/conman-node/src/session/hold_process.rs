//! Opens a container's init.

use std::sync::Arc;

use conman_linux::PidFd;
use conman_runtime::{ContainerKey, Runtime};

use super::answer::{Hold, StepFailure};
use crate::error::FailureKind;
use crate::phases;

/// Opens a pidfd first and verifies then, so that the verified process is the one that is held. Reads
/// only procfs.
pub(super) fn hold(runtime: &dyn Runtime, key: &ContainerKey, pid: i32) -> Hold {
    match PidFd::open_identified(pid) {
        Ok((process, identity)) => {
            let ours = runtime.owns_pid(key, pid);
            // A process that died in between is in no cgroup any more.
            match process.is_dead() {
                Ok(true) => Hold::Vanished,
                _ if ours => Hold::Held(Arc::new(process), identity),
                _ => Hold::NotOurs,
            }
        }
        Err(error) if error.proves_death() => Hold::Vanished,
        Err(error) => Hold::Failed(StepFailure::new(
            FailureKind::Host,
            phases::VERIFY,
            format_args!("{}; see to the host", conman_core::error_chain(&error)),
        )),
    }
}
