//! Processor time for the thread that kills, and for dying processes.
//!
//! A killed process needs processor time to die, and all sessions together get as much as any other
//! single cgroup. Processes that are notified of the deaths compete with the remaining kills and with
//! this thread: with Docker these are a shim, `runc` twice, and dockerd, for each container.

use conman_core::naming::{self, CgroupDriver, Instance};
use conman_linux::{
    CgroupLayout, CgroupWeight, run_as_ordinary_thread, run_before_ordinary_threads,
};

/// Nice value of the thread between preemptions (setpriority(2)), and during one if it gets no
/// real-time priority: it runs before the daemon's workers and other processes in their cgroup.
const NICE: i32 = -15;

/// The weight of the cgroup that holds everything of an instance. Found in advance: reading the mount
/// table would compete with dying processes.
#[derive(Debug, Clone)]
pub(super) struct Weight(CgroupWeight);

impl Weight {
    /// Undoes the raise of an earlier daemon that ended before its preemption did.
    pub(super) fn of(instance: &Instance) -> Self {
        let drivers = [CgroupDriver::Cgroupfs, CgroupDriver::Systemd];
        let paths = drivers.map(|driver| naming::instance_cgroup(instance, driver));
        // Without a view of the cgroups there is nothing to raise.
        let mut weight = CgroupLayout::detect()
            .map(|layout| CgroupWeight::of(&layout, &paths))
            .unwrap_or_default();
        weight.restore();
        Self(weight)
    }
}

/// Sets the calling thread's priority outside preemptions.
pub(super) fn be_quick() {
    // Without the capability the thread keeps its ordinary priority.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
}

/// Runs the calling thread before all others and, on request, raises the weight of dying processes. Both
/// are undone on drop.
///
/// Not held for longer than a preemption: a real-time thread keeps some kernels from distributing
/// processor time by cgroups.
#[derive(Debug)]
pub(super) struct KillPriority {
    weight: Weight,
    given: bool,
}

impl KillPriority {
    pub(super) fn take(weight: &Weight) -> Self {
        // Without the capability the thread keeps its ordinary priority.
        let _ = run_before_ordinary_threads();
        Self {
            weight: weight.clone(),
            given: false,
        }
    }

    /// From now on the remaining processes of all sessions run before everything else on the host except
    /// this thread. Called when no session runs a program any more.
    pub(super) fn give(&mut self) {
        if !self.given {
            self.weight.0.raise();
            self.given = true;
        }
    }
}

impl Drop for KillPriority {
    fn drop(&mut self) {
        if self.given {
            self.weight.0.restore();
        }
        // It was an ordinary thread before.
        let _ = run_as_ordinary_thread();
    }
}
