//! Clients' orders to the fence.

use conman_core::ownership::{BootTime, FenceEvent};
use conman_shim_protocol::{CallError, Reply};

use super::cgroup_orders::unless_gone;
use super::{Control, boottime_ns};
use crate::fence::{KeptFence, slot, whole_ms};

/// Deadline of a thaw without one: longer than the thaw takes.
const THAW_MS: u64 = 60_000;

impl Control {
    pub(super) fn fence_reply(&self) -> Reply {
        Reply::Fence {
            state: self.fence.state(),
        }
    }

    /// Extends the deadline; the first call arms the fence.
    pub(super) fn extend_deadline(&mut self, until_ns: u64) -> Reply {
        if self.fence.is_armed() {
            self.change(FenceEvent::Extend(BootTime(whole_ms(until_ns))));
        } else {
            let kept = KeptFence {
                deadline_ms: whole_ms(until_ns),
                fired_ms: None,
                freeze_ms: None,
            };
            self.arm(Some(kept));
            self.record_fence();
        }
        self.on_time();
        self.fence_reply()
    }

    /// In force, and recorded for a later shim, before it is answered.
    pub(super) fn set_freeze_patience(&mut self, freeze_ms: u64) -> Reply {
        self.fence.set_freeze_ms(freeze_ms);
        self.record_fence();
        self.on_time();
        Reply::Done
    }

    /// Opens the fence: these containers, or all that need not die, run until the deadline, or without
    /// limit if there is none.
    pub(super) fn unfence(
        &mut self,
        until_ns: Option<u64>,
        names: Option<&[String]>,
    ) -> Result<Reply, CallError> {
        if !self.fence.is_armed() {
            return match until_ns {
                Some(until_ns) => Ok(self.extend_deadline(until_ns)),
                None => Ok(self.fence_reply()),
            };
        }
        if self.is_ending() {
            // It would run without a fence when this shim ends; the next shim opens its own fence.
            return Err(CallError::Fenced);
        }
        let deadline = BootTime(until_ns.map_or_else(|| self.later_deadline_ms(), whole_ms));
        let slots = match names {
            Some(names) => names.iter().map(|name| slot(name)).collect(),
            None => self.fence.slots(),
        };
        let was_closed = self.fence.is_closed();
        // If this shim dies before all is thawed, a later one closes the fence again, and the client that
        // opens it must thaw again. Otherwise containers would stay frozen under an open fence.
        self.fence.open_from(was_closed.then(boottime_ns));
        self.change(FenceEvent::Thaw { deadline, slots });
        let thawed = match self.fence.is_closed() {
            true => Err(CallError::Fenced),
            false => self.thaw_parent(),
        };
        self.fence.open_from(None);
        if let Err(error) = thawed {
            self.change(FenceEvent::FreezeAll);
            self.on_time();
            return Err(error);
        }
        if until_ns.is_none() {
            self.arm(None);
        }
        if until_ns.is_none() || was_closed {
            self.record_fence();
        }
        self.on_time();
        Ok(self.fence_reply())
    }

    /// Deadline for an order without one, removed once all is thawed. Later than the last, so that it is
    /// accepted, and finite, so that the next order is accepted if not all can be thawed.
    fn later_deadline_ms(&self) -> u64 {
        let last = self.fence.kept().map_or(0, |kept| kept.deadline_ms);
        let soon = whole_ms(boottime_ns()).saturating_add(THAW_MS);
        soon.max(last.saturating_add(1))
    }

    /// Thaws the parent cgroup, so that everything runs that is not frozen by its own cgroup.
    fn thaw_parent(&self) -> Result<(), CallError> {
        // What must stay frozen is frozen by its own cgroup, or nothing is thawed.
        for name in self.fence.unverified() {
            if let Some(cgroup) = self.cgroup_of(name) {
                let frozen = unless_gone(self.cgroups.freezer.freeze(&cgroup));
                frozen.map_err(CallError::host("freeze", name))?;
            }
        }
        let thawed = self.cgroups.thaw_all();
        thawed.map_err(CallError::host("thaw", &self.options.fence_cgroup))
    }

    pub(super) fn freeze_all(&mut self) -> Reply {
        if !self.fence.is_armed() {
            // Closed at once, and opened only by an order.
            return self.extend_deadline(boottime_ns());
        }
        self.change(FenceEvent::FreezeAll);
        self.on_time();
        self.fence_reply()
    }
}
