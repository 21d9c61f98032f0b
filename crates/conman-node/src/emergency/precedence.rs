//! Processors for the thread that kills, and for what dies.
//!
//! A killed process dies on the processors' time, and all sessions together are given as much of it
//! as any other single cgroup. Whoever is told of the deaths competes with those still to come, and
//! with this thread: where the containers are Docker's that is a shim, `runc` twice, and dockerd, for
//! each of them.

use conman_core::naming::{self, CgroupDriver, Instance};
use conman_linux::{
    CgroupLayout, CgroupWeight, run_as_ordinary_thread, run_before_ordinary_threads,
};

/// Scheduling priority of the thread between preemptions (setpriority(2)), and in one where it is
/// given no real-time: before the daemon's own workers, and before what shares their cgroup.
const NICE: i32 = -15;

/// The weight of the cgroup that holds everything of an instance. Found before it is needed: the
/// table of mounts is another thing that those who die compete for.
#[derive(Debug, Clone)]
pub(super) struct Weight(CgroupWeight);

impl Weight {
    /// Takes back what a daemon has given that ended before its preemption did.
    pub(super) fn of(instance: &Instance) -> Self {
        let drivers = [CgroupDriver::Cgroupfs, CgroupDriver::Systemd];
        let paths = drivers.map(|driver| naming::instance_cgroup(instance, driver));
        // Where cgroups cannot be looked for there is nothing to do better.
        let mut weight = CgroupLayout::detect()
            .map(|layout| CgroupWeight::of(&layout, &paths))
            .unwrap_or_default();
        weight.restore();
        Self(weight)
    }
}

/// The calling thread's, for as long as there is no preemption.
pub(super) fn be_quick() {
    // Without the capability it competes like any other.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
}

/// Has the calling thread go first, and on demand what dies; the end of it puts back what was.
///
/// Not for longer than a preemption: a real-time thread keeps some kernels from giving out processor
/// time by cgroups.
#[derive(Debug)]
pub(super) struct Precedence {
    weight: Weight,
    given: bool,
}

impl Precedence {
    pub(super) fn take(weight: &Weight) -> Self {
        // Without the capability it competes like any other.
        let _ = run_before_ordinary_threads();
        Self {
            weight: weight.clone(),
            given: false,
        }
    }

    /// From now on what is left of all sessions goes before everything else on the host but this
    /// thread: for when none of them runs a program any more.
    pub(super) fn give(&mut self) {
        if !self.given {
            self.weight.0.raise();
            self.given = true;
        }
    }
}

impl Drop for Precedence {
    fn drop(&mut self) {
        if self.given {
            self.weight.0.restore();
        }
        // It was ordinary before.
        let _ = run_as_ordinary_thread();
    }
}
