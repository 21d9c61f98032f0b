//! One container or command, as the shim and its ledger know it.

use std::io;
use std::path::PathBuf;
use std::rc::Rc;

use conman_linux::{PidFd, Signal, SignalNumber, signal_group, signal_process};
use conman_shim_protocol::{CommandView, ContainerState, ContainerView};
use serde::{Deserialize, Serialize};

use crate::log_bounds::BoundedLog;

/// What is kept of a command besides its streams. Serialized in this form for a later shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptCommand {
    pub(crate) label: String,
    pub(crate) inner_pid: Option<i32>,
    /// When it is killed, on CLOCK_BOOTTIME.
    pub(crate) deadline_ns: Option<u64>,
    pub(crate) timed_out: bool,
}

/// A container from the order to start it until its end is acknowledged. Serialized in this form for a
/// later shim.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Container {
    pub(crate) cgroup: String,
    /// 0 before its clone.
    pub(crate) pid: i32,
    /// With the PID and the boot, identifies the process.
    pub(crate) start_ticks: u64,
    /// First of its range of ids; `None` for a command.
    pub(crate) ids: Option<u32>,
    /// Its directory, removed when its start is interrupted; `None` for a command.
    pub(crate) scratch: Option<PathBuf>,
    /// The container it is a command in.
    pub(crate) exec_in: Option<String>,
    /// Of a command that is kept.
    pub(crate) kept: Option<KeptCommand>,
    /// The client whose connection's end ends it; only of a command, and of a client of this shim.
    #[serde(default)]
    pub(crate) client: Option<u64>,
    pub(crate) state: ContainerState,
    /// The logs to bound; none for a command, or with a terminal.
    pub(crate) logs: Vec<BoundedLog>,
    /// Whether a client ordered its freezing.
    pub(crate) frozen: bool,
    /// Another program starts it.
    #[serde(rename = "foreign")]
    pub(crate) external: bool,
    /// It must be killed, with every process that appears of a start by another program.
    #[serde(rename = "doomed")]
    pub(crate) kill_pending: bool,
    /// The fence kills it; no client ordered that.
    pub(crate) fenced: bool,
    /// It is made ahead, and no start that has taken it is answered: in no list, and its end is not reported.
    #[serde(skip)]
    pub(crate) ahead: bool,
    /// Its CPU limit is lifted, or will be.
    #[serde(skip)]
    pub(crate) is_lifted: bool,
    /// Set if an earlier shim started it, so that it is no child.
    #[serde(skip)]
    pub(crate) held: Option<Rc<PidFd>>,
}

impl Container {
    /// A container whose start is ordered.
    pub(crate) fn starting(
        cgroup: &str,
        ids: Option<u32>,
        scratch: Option<PathBuf>,
        exec_in: Option<String>,
    ) -> Self {
        Self {
            cgroup: cgroup.to_owned(),
            pid: 0,
            start_ticks: 0,
            ids,
            scratch,
            exec_in,
            kept: None,
            client: None,
            logs: Vec::new(),
            state: ContainerState::Launching,
            frozen: false,
            external: false,
            kill_pending: false,
            fenced: false,
            ahead: false,
            is_lifted: false,
            held: None,
        }
    }

    /// Its process was created.
    pub(crate) fn begun(self, pid: i32, start_ticks: u64) -> Self {
        Self {
            pid,
            start_ticks,
            ..self
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.state.is_alive()
    }

    /// Whether another program may start it, or has, without having reported it.
    pub(crate) fn may_appear(&self) -> bool {
        self.external && self.state == ContainerState::Launching
    }

    /// Sends a signal to its first process only.
    pub(crate) fn signal(&self, signal: impl Into<SignalNumber>) -> io::Result<()> {
        match &self.held {
            Some(process) => {
                process.signal(signal).map_err(io::Error::other)?;
                Ok(())
            }
            // A child that has not been reaped keeps its PID.
            None => signal_process(self.pid, signal),
        }
    }

    /// Sends SIGKILL to a command that has not ended, and to its process group.
    pub(crate) fn kill_group(&self) -> io::Result<()> {
        let is_dead = |process: &Rc<PidFd>| process.is_dead().unwrap_or(true);
        if !self.held.as_ref().is_some_and(is_dead) {
            // It fails before its first process leads one.
            let _ = signal_group(self.pid, Signal::SIGKILL);
        }
        self.signal(Signal::SIGKILL)
    }

    /// When a kept command is killed.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        self.kept.as_ref()?.deadline_ns
    }

    pub(crate) fn command_view(
        &self,
        name: &str,
        output_bytes: Option<u64>,
    ) -> Option<CommandView> {
        let kept = self.kept.as_ref()?;
        Some(CommandView {
            name: name.to_owned(),
            state: self.state,
            inner_pid: kept.inner_pid,
            timed_out: kept.timed_out,
            output_bytes,
            label: kept.label.clone(),
        })
    }

    pub(crate) fn view(&self, name: &str) -> ContainerView {
        ContainerView {
            name: name.to_owned(),
            pid: self.pid,
            state: self.state,
            exec_in: self.exec_in.clone(),
            foreign: self.external,
            // One that was about to exit may have been first.
            fenced: self.fenced
                && match self.state {
                    ContainerState::Launching | ContainerState::Running | ContainerState::Lost => {
                        true
                    }
                    ContainerState::Signalled { signal } => signal == Signal::SIGKILL as i32,
                    ContainerState::Exited { .. } => false,
                },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_before_the_fence_killed_it_is_not_told_as_killed_by_it() {
        let mut container = Container::starting("/conman-x/a", None, None, None).begun(7, 1);
        container.fenced = true;
        for (state, fenced) in [
            (ContainerState::Running, true),
            (ContainerState::Signalled { signal: 9 }, true),
            (ContainerState::Lost, true),
            (ContainerState::Signalled { signal: 11 }, false),
            (ContainerState::Exited { code: 0 }, false),
        ] {
            container.state = state;
            assert_eq!(container.view("a").fenced, fenced, "{state:?}");
        }
    }
}
