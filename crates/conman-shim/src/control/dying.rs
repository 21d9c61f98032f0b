//! Processor time for killed containers.
//!
//! A killed container still needs processor time to die, and its limit may give all of its processes one
//! millisecond in 100 ms. The launcher lifts the limit: the kernel visits every cgroup of the host for
//! each change, and the fence must not wait for that.

use super::{Control, boottime_ns};

/// Most containers die sooner, and their limits are not changed.
const LIFT_AFTER_NS: u64 = 100_000_000;

impl Control {
    /// SIGKILL was sent to it. A command stays under its container's limit.
    pub(super) fn lift_limit_later(&mut self, name: &str) {
        let Some(container) = self.containers.get_mut(name) else {
            return;
        };
        if container.exec_in.is_some() || container.foreign || container.is_lifted {
            return;
        }
        container.is_lifted = true;
        let due = boottime_ns().saturating_add(LIFT_AFTER_NS);
        self.lifts.push_back((due, name.to_owned()));
        if self.lifts.len() == 1 {
            self.set_timer();
        }
    }

    pub(super) fn lift_due_limits(&mut self) {
        let now = boottime_ns();
        while let Some((due, name)) = self.lifts.pop_front() {
            if due > now {
                self.lifts.push_front((due, name));
                break;
            }
            if let Some(container) = self.containers.get(&name)
                && container.is_alive()
            {
                self.launching.lift_cpu_limit(&container.cgroup);
            }
        }
        self.launching.flush();
    }

    pub(super) fn next_lift_ns(&self) -> Option<u64> {
        self.lifts.front().map(|(due, _)| *due)
    }
}
