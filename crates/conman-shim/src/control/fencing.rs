//! Carrying out the fence's actions, on native and foreign containers alike: by cgroup.

use std::io;

use conman_core::ownership::{FenceAction, FenceEvent, Slot, SlotView};

use rustix::io::Errno;

use super::{Control, boottime_ns};
use crate::fence::{KeptFence, name_of, slot};
use crate::ledger::Record;
use crate::protocol::{FenceState, Message};

/// Pause between two checks whether everything is frozen, while clients wait for it.
const LOOK_NS: u64 = 2_000_000;

/// Pause between two checks when no client waits: before the fence has fired, and while containers that
/// are not frozen are being killed, which may take as long as a disk hangs.
const SLOW_LOOK_NS: u64 = 250_000_000;

/// Most killed containers that one log line names.
pub(super) const MAX_NAMED: usize = 10;

impl Control {
    pub(super) fn fence_state(&self) -> FenceState {
        self.fence.state(self.unverified.is_empty())
    }

    /// Whether everything is proven frozen or is dead.
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.fence_state(), FenceState::Fenced { .. })
    }

    /// Arms the fence with this state, and adds all that lives.
    pub(super) fn arm(&mut self, kept: Option<KeptFence>) {
        let fired = kept.is_some_and(|kept| kept.fired_ms.is_some());
        let view = |name: &str, present, cgroup: &str| SlotView {
            slot: slot(name),
            present,
            frozen: fired && self.is_held_frozen(cgroup) && self.is_within_reach(name),
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
        let condemned = self.condemned();
        self.fence.restore(boottime_ns(), kept, found, condemned);
    }

    /// Everything that must die, by an order or by the fence, including starts.
    fn condemned(&self) -> Vec<Slot> {
        let begun = self.containers.iter();
        let begun = begun
            .filter(|(_, one)| one.doomed || one.fenced)
            .filter(|(_, one)| one.is_alive() && one.exec_in.is_none())
            .map(|(name, _)| name.as_str());
        let starts = self.launching.pending.values();
        let starting = starts
            .filter(|start| start.killed && start.own.is_some())
            .map(|start| start.name.as_str());
        let left = self.launching.sweeps().filter(|(_, left)| left.killed);
        let left = left.filter_map(|(_, left)| left.name.as_deref());
        let names = begun.chain(starting).chain(left);
        let names = names.chain(self.condemned_early.iter());
        names.map(slot).collect()
    }

    /// Records the fence's state for a later shim. A shim without it freezes too early or stays closed, and
    /// never lets anything run too long, so a failure is only logged.
    pub(super) fn keep_fence(&mut self) {
        let state = self.fence.kept();
        if let Err(error) = self.note(&Record::Fence { state }) {
            tracing::error!(%error, "cannot record the fence's state for a later shim");
        }
    }

    /// Passes an event to the fence and carries out its actions. `false` when it refuses.
    pub(super) fn change(&mut self, event: FenceEvent) -> bool {
        if !self.fence.is_armed() {
            return true;
        }
        let before = self.fence.kept();
        let actions = self.fence.on(boottime_ns(), event);
        if self.fence.kept() != before {
            self.keep_fence();
        }
        self.carry_out_fence(actions)
    }

    fn carry_out_fence(&mut self, actions: Vec<FenceAction>) -> bool {
        let mut admitted = true;
        let mut killed = Vec::new();
        let mut undone = Vec::new();
        let fired = actions.contains(&FenceAction::Fired);
        for action in actions {
            match action {
                FenceAction::Opened(_) => {}
                FenceAction::Refused(_) => admitted = false,
                FenceAction::Fired => {
                    let done = self.fired();
                    undone.extend(
                        done.err()
                            .map(|error| ("freeze all containers", None, error)),
                    );
                }
                FenceAction::Freeze(slot) => {
                    let name = name_of(&slot);
                    if let Some(cgroup) = self.cgroup_of(&name) {
                        let done = unless_gone(self.freezer.freeze(&cgroup));
                        let of = || Some(name.clone());
                        undone.extend(done.err().map(|error| ("freeze", of(), error)));
                        let may_appear = self.containers.get(&name).filter(|one| one.may_appear());
                        let done = may_appear.map_or(Ok(()), |one| self.kill_strays(one));
                        undone.extend(done.err().map(|error| ("kill", of(), error)));
                        self.unverified.insert(name);
                    }
                }
                FenceAction::Thaw(slot) => {
                    let name = name_of(&slot);
                    self.unverified.remove(&name);
                    let done = self.thaw_slot(&name);
                    undone.extend(done.err().map(|error| ("thaw", Some(name), error)));
                }
                FenceAction::Kill(slot) => {
                    let name = name_of(&slot);
                    let by_itself = self.mark_fenced(&name);
                    let done = self.kill_slot(&name);
                    self.lift_limit_later(&name);
                    let of = || Some(name.clone());
                    undone.extend(done.err().map(|error| ("kill", of(), error)));
                    killed.extend(by_itself.then_some(name));
                }
                // It comes of an end, which is reported separately: to subscribers, as the failure of the
                // start, or by the answer that nothing of that name exists.
                FenceAction::Certificate(slot) => {
                    let was_looked_at = self.unverified.remove(&name_of(&slot));
                    if was_looked_at && self.unverified.is_empty() {
                        self.tell_fence();
                    }
                }
            }
        }
        if fired {
            self.release_parent();
        }
        // Last, since the log's reader may hang with the disk that keeps them from freezing.
        if fired {
            tracing::warn!("the fence's deadline has passed: freezing all containers");
        }
        if !killed.is_empty() {
            tracing::warn!(
                count = killed.len(),
                first = ?&killed[..killed.len().min(MAX_NAMED)],
                freeze_ms = self.fence.freeze_ms(),
                "the fence killed containers not proven frozen in time, or frozen for too long"
            );
        }
        for (what, name, error) in undone {
            tracing::error!(name, %error, "the fence cannot {what}");
        }
        admitted
    }

    /// Freezes everything with one order, before each container is ordered separately.
    fn freeze_parent(&self) -> io::Result<()> {
        let cgroup = &self.options.fence_cgroup;
        match self.freezer.freeze(cgroup) {
            // A daemon that ended with nothing in it has removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.freezer.ensure(cgroup)?;
                self.freezer.freeze(cgroup)
            }
            done => done,
        }
    }

    /// Undoes that order once each container is ordered, where frozen processes cannot be killed: a killed
    /// one could not be thawed alone below a frozen parent.
    pub(super) fn release_parent(&self) {
        if self.fence.is_closed()
            && !self.freezer.dies_frozen()
            && let Err(error) = unless_gone(self.freezer.thaw(&self.options.fence_cgroup))
        {
            tracing::error!(%error, "cannot thaw the containers that the fence kills");
        }
    }

    /// Freezes everything if an earlier shim's fence was closed, or may have been.
    pub(super) fn hold_if_closed(&self) {
        if self.fence.is_closed()
            && let Err(error) = self.freeze_parent()
        {
            tracing::error!(%error, "the fence cannot freeze all containers");
        }
    }

    /// Whether it is frozen by its own cgroup, not only by the parent.
    fn is_held_frozen(&self, cgroup: &str) -> bool {
        let is = |answer: io::Result<bool>| answer.unwrap_or(false);
        is(self.freezer.is_frozen(cgroup)) && is(self.freezer.is_ordered(cgroup))
    }

    fn fired(&self) -> io::Result<()> {
        let done = self.freeze_parent();
        // A start under way would delay the launcher, and its cgroup may not exist yet; what has begun of
        // it is killed and removed.
        self.launching.abort();
        done
    }

    fn thaw_slot(&self, name: &str) -> io::Result<()> {
        // What a client froze stays frozen until the client thaws it.
        if self.containers.get(name).is_some_and(|one| one.frozen) {
            return Ok(());
        }
        match self.cgroup_of(name) {
            Some(cgroup) => unless_gone(self.freezer.thaw(&cgroup)),
            None => Ok(()),
        }
    }

    fn kill_slot(&self, name: &str) -> io::Result<()> {
        unless_gone(match self.containers.get(name) {
            Some(container) if container.is_alive() => self.kill(container),
            Some(_) => Ok(()),
            None => match self.launching.left_of(name) {
                Some(left) => self.freezer.kill(&left.cgroup),
                None => Ok(()),
            },
        })
    }

    /// Records that only the fence kills it, so that its end is reported as such, even by a later shim. Not
    /// one whose death a client ordered here, nor one that is dead already.
    fn mark_fenced(&mut self, name: &str) -> bool {
        if self.unexplained.contains_key(name) {
            return false;
        }
        let Some(container) = self.containers.get_mut(name) else {
            return false;
        };
        if !container.is_alive() || container.doomed || container.fenced {
            return false;
        }
        container.fenced = true;
        self.keep(name);
        true
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
        let now = boottime_ns();
        if self.fence.next_wake_ns().is_some_and(|due| due <= now) {
            // If the shim itself was stopped, containers may have frozen since; they must not be killed.
            self.look_at_unverified();
            self.change(FenceEvent::Tick);
        }
        self.look_at_unverified();
        self.tell_fence();
    }

    fn look_at_unverified(&mut self) {
        let looked: Vec<String> = self
            .unverified
            .iter()
            .filter(|name| {
                let cgroup = self.cgroup_of(name);
                cgroup.is_some_and(|cgroup| self.is_held_frozen(&cgroup))
                    && self.is_within_reach(name)
            })
            .cloned()
            .collect();
        for name in looked {
            self.unverified.remove(&name);
            self.change(FenceEvent::FreezeVerified(slot(&name)));
        }
    }

    fn tell_fence(&mut self) {
        let state = self.fence_state();
        if state != self.told_fence {
            self.told_fence = state;
            self.publish(&Message::Fence { state });
        }
    }

    pub(super) fn next_fence_ns(&self, now_ns: u64) -> Option<u64> {
        let pause_ns = match self.fence.awaits_proof(now_ns) {
            true => LOOK_NS,
            false => SLOW_LOOK_NS,
        };
        let look = !self.unverified.is_empty();
        let look = look.then(|| now_ns.saturating_add(pause_ns));
        self.fence.next_wake_ns().into_iter().chain(look).min()
    }
}

/// Ignores errors for a cgroup that does not exist yet, or any more: it holds nothing.
pub(super) fn unless_gone(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // It was removed between its file's opening and the write.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => Ok(()),
        done => done,
    }
}
