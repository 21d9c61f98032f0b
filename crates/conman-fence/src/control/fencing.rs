//! The fence's state from what lives, its timer, and the proof that everything is frozen.

use conman_core::ownership::{FenceEvent, Slot, SlotView};

use super::{Control, boottime_ns};
use crate::fence::{KeptFence, slot};

impl Control {
    /// Arms the fence with this state, and adds all that lives.
    pub(super) fn arm(&mut self, kept: Option<KeptFence>) {
        let fired = kept.is_some_and(|kept| kept.fired_ms.is_some());
        let view = |name: &str, present, cgroup: &str| SlotView {
            slot: slot(name),
            present,
            frozen: fired && self.is_proven_frozen(name, cgroup),
            certified: false,
        };
        let begun = self.containers.iter();
        let begun = begun
            .filter(|(_, one)| one.is_alive() && one.exec_in.is_none())
            .map(|(name, one)| view(name, one.pid != 0, &one.cgroup));
        let starts = self.launching.pending.values();
        let starting = starts
            .filter(|start| start.own.is_some() && self.containers.get(&start.name).is_none())
            .map(|start| view(&start.name, false, &start.cgroup));
        let left = self.launching.sweeps();
        let left = left.filter_map(|(_, left)| Some(view(left.name.as_ref()?, true, &left.cgroup)));
        let found = begun.chain(starting).chain(left).collect();
        let to_be_killed = self.to_be_killed();
        self.fence.restore(boottime_ns(), kept, found, to_be_killed);
    }

    /// Everything that must die, by an order or by the fence, including starts.
    fn to_be_killed(&self) -> Vec<Slot> {
        let begun = self.containers.iter();
        let begun = begun
            .filter(|(_, one)| one.kill_pending || one.fenced)
            .filter(|(_, one)| one.is_alive() && one.exec_in.is_none())
            .map(|(name, _)| name.as_str());
        let starts = self.launching.pending.values();
        let starting = starts
            .filter(|start| start.killed && start.own.is_some())
            .map(|start| start.name.as_str());
        let left = self.launching.sweeps().filter(|(_, left)| left.killed);
        let left = left.filter_map(|(_, left)| left.name.as_deref());
        let names = begun.chain(starting).chain(left);
        let names = names.chain(self.forbidden_starts.iter());
        names.map(slot).collect()
    }

    /// Freezes everything if an earlier shim's fence was closed, or may have been.
    pub(super) fn hold_if_closed(&self) {
        if self.fence.is_closed()
            && let Err(error) = self.cgroups.freeze_all()
        {
            tracing::error!(%error, "the fence cannot freeze all containers");
        }
    }

    /// Undoes that once each container is ordered separately.
    pub(super) fn release_if_closed(&self) {
        if self.fence.is_closed()
            && let Err(error) = self.cgroups.release_all()
        {
            tracing::error!(%error, "cannot thaw the containers that the fence kills");
        }
    }

    /// Whether its own cgroup is frozen, and with it all of the container.
    fn is_proven_frozen(&self, name: &str, cgroup: &str) -> bool {
        let container = self.containers.get(name);
        self.cgroups.is_held_frozen(cgroup)
            && container.is_none_or(|one| self.cgroups.freezes_all_of(one))
    }

    pub(super) fn cgroup_of(&self, name: &str) -> Option<String> {
        if let Some(container) = self.containers.get(name) {
            return Some(container.cgroup.clone());
        }
        let mut starts = self.launching.pending.values();
        let start = starts.find(|start| start.name == name);
        let cgroup = start.map(|start| &start.cgroup);
        let left = || self.launching.left_of(name).map(|left| &left.cgroup);
        cgroup.or_else(left).cloned()
    }

    /// Carries out what is due.
    pub(super) fn fence_on_time(&mut self) {
        if self.fence.is_due(boottime_ns()) {
            // If the shim itself was stopped, containers may have frozen since; they must not be killed.
            self.check_unverified();
            self.change(FenceEvent::Tick);
        }
        self.check_unverified();
        let changed = self.fence.publish_change();
        self.carry_out(changed);
    }

    fn check_unverified(&mut self) {
        let proven = |name: &String| {
            let cgroup = self.cgroup_of(name);
            cgroup.is_some_and(|cgroup| self.is_proven_frozen(name, &cgroup))
        };
        let proven: Vec<String> = self
            .fence
            .unverified()
            .filter(|name| proven(name))
            .cloned()
            .collect();
        let now_ns = boottime_ns();
        for name in proven {
            let effects = self.fence.verified(now_ns, &name);
            self.carry_out(effects);
        }
        self.fence.checked(now_ns);
    }
}
