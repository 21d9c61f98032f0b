//! Carrying out what the fence decides.

use std::io;

use super::{Control, boottime_ns, host_error};
use crate::fence::FenceStep;
use crate::ledger::Record;
use crate::protocol::{CallError, Message, Reply};

impl Control {
    /// Keeps the deadline for a later shim, before it is relied on.
    pub(super) fn keep_deadline(&mut self, until_ns: Option<u64>) -> Result<(), CallError> {
        let until_boottime_ns = until_ns.map(|until| until.max(self.fence.deadline().unwrap_or(0)));
        let written = self.note(&Record::Deadline { until_boottime_ns });
        written.map_err(host_error(
            "keep the deadline in",
            &self.options.state_file.to_string_lossy(),
        ))
    }

    pub(super) fn fence_reply(&self) -> Reply {
        Reply::Fence {
            state: self.fence.state(),
        }
    }

    pub(super) fn unfence(&mut self) -> Result<Reply, CallError> {
        if !self.fence.lift(boottime_ns()) {
            return Err(CallError::Fenced);
        }
        let cgroup = &self.options.fence_cgroup;
        self.freezer
            .thaw(cgroup)
            .map_err(host_error("thaw", cgroup))?;
        self.on_time();
        Ok(self.fence_reply())
    }

    /// Carries out what is due.
    pub(super) fn fence_on_time(&mut self) {
        let before = self.fence.state();
        let step = self.fence.on_time(boottime_ns());
        let cgroup = self.options.fence_cgroup.clone();
        if step == FenceStep::Freeze
            && let Err(error) = self.freezer.freeze(&cgroup)
        {
            tracing::error!(%error, "the fence cannot freeze");
        }
        if step != FenceStep::Nothing {
            // Without its cgroup there is nothing that could run.
            let frozen = self.freezer.is_frozen(&cgroup);
            let none = matches!(&frozen, Err(error) if error.kind() == io::ErrorKind::NotFound);
            if none || matches!(frozen, Ok(true)) {
                self.fence.proven();
            } else if step == FenceStep::KillUnfrozen {
                self.kill_unfrozen(&cgroup);
            }
        }
        if self.fence.state() != before {
            let state = self.fence.state();
            tracing::warn!(?state, "the fence");
            self.tell_subscribers(&Message::Fence { state });
        }
    }

    pub(super) fn kill_unfrozen(&self, cgroup: &str) {
        let children = self.freezer.children(cgroup).unwrap_or_default();
        for child in children {
            if !self.freezer.is_frozen(&child).unwrap_or(false)
                && let Err(error) = self.freezer.kill(&child)
            {
                tracing::error!(child, %error, "what does not freeze cannot be killed");
            }
        }
    }
}
