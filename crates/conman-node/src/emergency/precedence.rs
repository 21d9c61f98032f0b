//! Processors for what dies.
//!
//! A killed process dies on the processors' time, and all sessions together are given as much of it
//! as any other single cgroup. Whoever is told of the deaths competes with those still to come: where
//! the containers are Docker's that is a shim, `runc` twice, and dockerd, for each of them.

use conman_core::naming::{self, CgroupDriver, Instance};
use conman_linux::{CgroupLayout, CgroupWeight};

/// Has the dying go first; the end of it puts back what was.
#[derive(Debug)]
pub(super) struct Precedence {
    instance: Instance,
    given: Option<CgroupWeight>,
}

impl Precedence {
    pub(super) fn new(instance: Instance) -> Self {
        Self {
            instance,
            given: None,
        }
    }

    /// From now on what is left of all sessions goes before everything else on the host: for when
    /// none of them runs a program any more.
    pub(super) fn give(&mut self) {
        if self.given.is_none() {
            let mut weight = weight(&self.instance);
            weight.raise();
            self.given = Some(weight);
        }
    }
}

impl Drop for Precedence {
    fn drop(&mut self) {
        if let Some(weight) = &mut self.given {
            weight.restore();
        }
    }
}

/// Takes back what a daemon has given that ended before its preemption did.
pub(super) fn take_back(instance: &Instance) {
    weight(instance).restore();
}

/// Of the cgroup that holds everything of an instance, whoever made it.
fn weight(instance: &Instance) -> CgroupWeight {
    let drivers = [CgroupDriver::Cgroupfs, CgroupDriver::Systemd];
    let paths = drivers.map(|driver| naming::instance_cgroup(instance, driver));
    // Where cgroups cannot be looked for there is nothing to do better.
    CgroupLayout::detect()
        .map(|layout| CgroupWeight::of(&layout, &paths))
        .unwrap_or_default()
}
