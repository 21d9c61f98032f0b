//! Carrying out what the fence decides.

use std::io;

use conman_linux::boot_id;
use rustix::time::{Itimerspec, TimerfdTimerFlags, timerfd_settime};

use super::{Control, boottime_ns, host_error, timespec};
use crate::fence::FenceStep;
use crate::protocol::{CallError, Message, Reply};

impl Control {
    /// Takes up the deadline that an earlier shim of this boot was given.
    pub(super) fn resume_deadline(&mut self) {
        let text = std::fs::read_to_string(&self.options.deadline_file).unwrap_or_default();
        let mut words = text.split_ascii_whitespace();
        let same_boot = words.next() == boot_id().ok().as_deref();
        let until_ns = words.next().and_then(|word| word.parse().ok());
        if let (true, Some(until_ns)) = (same_boot, until_ns) {
            self.fence.extend(until_ns);
            self.fence_on_time();
        }
    }

    /// Keeps the deadline for a later shim, before it is relied on: the file changes first.
    pub(super) fn keep_deadline(&self, until_ns: Option<u64>) -> Result<(), CallError> {
        let written = boot_id().and_then(|boot| {
            let text = until_ns.map_or(String::new(), |until| format!("{boot} {until}\n"));
            // By a rename, so that no shim ever reads half of it.
            let fresh = self.options.deadline_file.with_extension("new");
            std::fs::write(&fresh, text)?;
            std::fs::rename(&fresh, &self.options.deadline_file)
        });
        written.map_err(host_error(
            "keep the deadline in",
            &self.options.deadline_file.to_string_lossy(),
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
        self.fence_on_time();
        Ok(self.fence_reply())
    }

    /// Carries out what is due and sets the timer for what comes next.
    pub(super) fn fence_on_time(&mut self) {
        // A timer that has run off stays readable until it is set or read.
        let mut count = [0_u8; 8];
        let _ = rustix::io::read(&self.timer, &mut count);
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
        self.set_timer();
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

    pub(super) fn set_timer(&self) {
        let at = self.fence.next_wake_ns(boottime_ns()).unwrap_or(0);
        let value = Itimerspec {
            it_interval: timespec(0),
            it_value: timespec(at),
        };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &value) {
            tracing::error!(%error, "the fence's timer cannot be set");
        }
    }
}
