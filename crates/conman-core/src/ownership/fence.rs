//! The dead-man fence: what the shim does whether or not a daemon is alive.
//!
//! ```text
//!  Thawed ──deadline──▶ Asked ──verified──▶ Frozen ──order with a newer deadline──▶ Thawed
//!                         └─ +K ─▶ condemned ◀─ frozen_max, lost, stop ─┘
//!  condemned: killed repeatedly until its certificate, which is kept until forgotten
//! ```
//!
//! A slot is opened, which creates its cgroup, before its create is sent. A process that appears in
//! a frozen slot is frozen from the start, so a late start never runs past the deadline. The driver
//! saves [`Fence::kept`], where a new shim finds it, before it executes any action.
//! [`Fence::restored`] needs only that and the state of the slots' cgroups. The driver also saves
//! the condemned slots ([`Fence::condemned_before`]), above all those that never had a cgroup.
//!
//! The cost of an event does not depend on the number of slots; only the deadline, an order for all
//! slots, and [`FenceEvent::Tick`] visit every slot.

use std::collections::{BTreeMap, BTreeSet};

use super::{BootTime, Slot, Timing};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FenceEvent {
    /// Due at [`Fence::next_wake`]; extra ticks do no harm.
    Tick,
    /// The daemon is about to send a create.
    Open(Slot),
    /// The daemon renewed in time. Never thaws.
    Extend(BootTime),
    /// The daemon renewed after the fence had fired, and still owns these slots.
    Thaw {
        deadline: BootTime,
        slots: Vec<Slot>,
    },
    /// Freeze everything now, whatever the deadline.
    FreezeAll,
    /// Kill it, and everything that may still appear in it.
    Condemn(Slot),
    /// The daemon has processed its certificate.
    Forget(Slot),
    Appeared(Slot),
    /// The start has ended: nothing can appear any more.
    StartOver(Slot),
    /// It was seen frozen after the last [`FenceAction::Freeze`].
    FreezeVerified(Slot),
    /// The pidfd became readable.
    Died(Slot),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FenceAction {
    /// The create must not be sent before this.
    Opened(Slot),
    Refused(Slot),
    Freeze(Slot),
    Thaw(Slot),
    Kill(Slot),
    /// For the daemon: nothing of it exists or can appear.
    Certificate(Slot),
    /// For the daemon: thawing needs an explicit order from here on.
    Fired,
}

/// The state of a slot, reported to the daemon by its shim, or read by a new shim from the slot's
/// cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotView {
    pub slot: Slot,
    pub present: bool,
    pub frozen: bool,
    /// Nothing of it exists or can appear.
    pub certified: bool,
}

/// The state that is saved across restarts of the shim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    pub deadline: BootTime,
    /// When the fence fired; cleared by a thaw order.
    pub fired: Option<BootTime>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freezer {
    Thawed,
    Asked,
    Frozen { since: BootTime },
}

#[derive(Debug, Clone)]
struct FencedSlot {
    freezer: Freezer,
    /// Found by this shim at its start: a freeze ordered by the previous shim may still take
    /// effect.
    found: bool,
    present: bool,
    may_appear: bool,
    condemned: bool,
    retry_at: BootTime,
}

impl FencedSlot {
    /// A slot in which nothing exists or can appear: it is not opened before it is forgotten.
    const SHUT: Self = Self {
        freezer: Freezer::Thawed,
        found: false,
        present: false,
        may_appear: false,
        condemned: true,
        retry_at: BootTime(0),
    };

    fn is_gone(&self) -> bool {
        !self.present && !self.may_appear
    }

    /// Takes the actions that are due; returns when to check again.
    fn tend(
        &mut self,
        slot: &Slot,
        now: BootTime,
        fired: Option<BootTime>,
        timing: &Timing,
        actions: &mut Vec<FenceAction>,
    ) -> Option<BootTime> {
        if self.is_gone() {
            return None;
        }
        // A condemned slot is frozen too, so that a process that appears late never runs.
        let shut = fired.is_some() || (self.condemned && self.may_appear);
        if shut && self.freezer == Freezer::Thawed {
            self.freezer = Freezer::Asked;
            self.retry_at = now;
        }
        let condemned_at = match (self.freezer, fired) {
            (Freezer::Asked, Some(fired)) => Some(fired.plus(timing.freeze_ms)),
            (Freezer::Frozen { since }, _) => Some(since.plus(timing.frozen_max_ms)),
            _ => None,
        };
        if !self.condemned && condemned_at.is_some_and(|at| now >= at) {
            self.condemned = true;
            self.retry_at = now;
        }
        let kills = self.condemned && self.present;
        let freezes = !kills && self.freezer == Freezer::Asked;
        if (kills || freezes) && now >= self.retry_at {
            self.retry_at = now.plus(timing.retry_ms);
            let slot = slot.clone();
            actions.push(if kills {
                FenceAction::Kill(slot)
            } else {
                FenceAction::Freeze(slot)
            });
        }
        let retry = (kills || freezes).then_some(self.retry_at);
        let condemned_at = condemned_at.filter(|_| !self.condemned);
        retry.into_iter().chain(condemned_at).min()
    }
}

#[derive(Debug, Clone)]
pub struct Fence {
    timing: Timing,
    kept: Kept,
    slots: BTreeMap<Slot, FencedSlot>,
    /// No slot needs a check before this.
    wake: Option<BootTime>,
}

impl Fence {
    /// Fired from the start: nothing runs before the first order.
    #[must_use]
    pub fn new(timing: Timing) -> Self {
        let kept = Kept {
            deadline: BootTime(0),
            fired: Some(BootTime(0)),
        };
        Self::restored(timing, kept, BootTime(0), Vec::new())
    }

    /// State of a new shim, from what the previous one saved and the state of every slot's cgroup.
    #[must_use]
    pub fn restored(timing: Timing, kept: Kept, now: BootTime, found: Vec<SlotView>) -> Self {
        let held = |view: SlotView| {
            let held = FencedSlot {
                freezer: match view.frozen {
                    true => Freezer::Frozen {
                        since: kept.fired.unwrap_or(now),
                    },
                    false => Freezer::Thawed,
                },
                found: true,
                present: view.present,
                may_appear: !view.present && !view.certified,
                condemned: false,
                retry_at: now,
            };
            (view.slot, held)
        };
        Self {
            timing,
            kept,
            slots: found.into_iter().map(held).collect(),
            wake: Some(now),
        }
    }

    /// For a restored fence: these slots were condemned before. Those that were found are killed
    /// from the next tick on; the others stay closed, because a delayed start of theirs may still
    /// be ordered.
    #[must_use]
    pub fn condemned_before(mut self, slots: impl IntoIterator<Item = Slot>) -> Self {
        for slot in slots {
            self.slots.entry(slot).or_insert(FencedSlot::SHUT).condemned = true;
        }
        self
    }

    /// Changes K, also for slots that are already being frozen.
    pub fn set_freeze_ms(&mut self, freeze_ms: u64) {
        self.timing.freeze_ms = freeze_ms;
        // Anything due by it is due at the next tick.
        self.wake = Some(BootTime(0));
    }

    /// The driver saves it, where a new shim finds it, before it executes any action.
    #[must_use]
    pub fn kept(&self) -> Kept {
        self.kept
    }

    #[must_use]
    pub fn has_fired(&self) -> bool {
        self.kept.fired.is_some()
    }

    /// When a [`FenceEvent::Tick`] is due.
    #[must_use]
    pub fn next_wake(&self) -> Option<BootTime> {
        let deadline = (!self.has_fired()).then_some(self.kept.deadline);
        self.wake.into_iter().chain(deadline).min()
    }

    #[must_use]
    pub fn view(&self) -> Vec<SlotView> {
        let view = |(slot, held): (&Slot, &FencedSlot)| SlotView {
            slot: slot.clone(),
            present: held.present,
            frozen: matches!(held.freezer, Freezer::Frozen { .. }),
            certified: held.is_gone(),
        };
        self.slots.iter().map(view).collect()
    }

    pub fn on(&mut self, now: BootTime, event: FenceEvent) -> Vec<FenceAction> {
        let mut actions = Vec::new();
        // The deadline comes first: a late event finds the fence fired.
        if now >= self.kept.deadline {
            self.fire(now, &mut actions);
        }
        match event {
            FenceEvent::Tick => self.tend_all(now, &mut actions),
            FenceEvent::Open(slot) => self.open(now, slot, &mut actions),
            FenceEvent::Extend(deadline) => {
                if !self.has_fired() {
                    self.kept.deadline = self.kept.deadline.max(deadline);
                }
            }
            FenceEvent::Thaw { deadline, slots } => {
                if deadline > self.kept.deadline && now < deadline {
                    self.thaw(deadline, slots, &mut actions);
                }
            }
            FenceEvent::FreezeAll => self.fire(now, &mut actions),
            FenceEvent::Condemn(slot) => self.condemn(now, slot, &mut actions),
            FenceEvent::Forget(slot) => {
                if self.slots.get(&slot).is_some_and(FencedSlot::is_gone) {
                    self.slots.remove(&slot);
                }
            }
            FenceEvent::Appeared(slot) => {
                // A certified slot stays certified: late events never revive it.
                if let Some(held) = self.slots.get_mut(&slot)
                    && !held.is_gone()
                {
                    held.present = true;
                    held.may_appear = false;
                    held.retry_at = now;
                    self.tend(now, &slot, &mut actions);
                }
            }
            FenceEvent::StartOver(slot) => self.ended(slot, false, &mut actions),
            FenceEvent::FreezeVerified(slot) => {
                if let Some(held) = self.slots.get_mut(&slot)
                    && held.freezer == Freezer::Asked
                {
                    held.freezer = Freezer::Frozen { since: now };
                    self.tend(now, &slot, &mut actions);
                }
            }
            FenceEvent::Died(slot) => self.ended(slot, true, &mut actions),
        }
        actions
    }

    fn open(&mut self, now: BootTime, slot: Slot, actions: &mut Vec<FenceAction>) {
        if self.has_fired() || self.slots.contains_key(&slot) {
            actions.push(FenceAction::Refused(slot));
            return;
        }
        let held = FencedSlot {
            freezer: Freezer::Thawed,
            found: false,
            present: false,
            may_appear: true,
            condemned: false,
            retry_at: now,
        };
        self.slots.insert(slot.clone(), held);
        actions.push(FenceAction::Opened(slot));
    }

    fn thaw(&mut self, deadline: BootTime, slots: Vec<Slot>, actions: &mut Vec<FenceAction>) {
        self.kept = Kept {
            deadline,
            fired: None,
        };
        for slot in slots.into_iter().collect::<BTreeSet<_>>() {
            if let Some(held) = self.slots.get_mut(&slot)
                && !held.condemned
                && (held.freezer != Freezer::Thawed || held.found)
            {
                held.freezer = Freezer::Thawed;
                held.found = false;
                actions.push(FenceAction::Thaw(slot));
            }
        }
    }

    /// A slot that was never opened, or was forgotten, is certified at once, and is not opened
    /// before it is forgotten again.
    fn condemn(&mut self, now: BootTime, slot: Slot, actions: &mut Vec<FenceAction>) {
        let held = self.slots.entry(slot.clone()).or_insert(FencedSlot::SHUT);
        held.condemned = true;
        held.retry_at = now;
        if held.is_gone() {
            actions.push(FenceAction::Certificate(slot));
        } else {
            self.tend(now, &slot, actions);
        }
    }

    fn ended(&mut self, slot: Slot, died: bool, actions: &mut Vec<FenceAction>) {
        if let Some(held) = self.slots.get_mut(&slot) {
            held.may_appear = false;
            held.present &= !died;
            if held.is_gone() {
                actions.push(FenceAction::Certificate(slot));
            }
        }
    }

    fn fire(&mut self, now: BootTime, actions: &mut Vec<FenceAction>) {
        if !self.has_fired() {
            // K counts from here, even if this is late: B includes that time, and no freeze was
            // ordered before.
            self.kept.fired = Some(now);
            actions.push(FenceAction::Fired);
            self.tend_all(now, actions);
        }
    }

    fn tend(&mut self, now: BootTime, slot: &Slot, actions: &mut Vec<FenceAction>) {
        if let Some(held) = self.slots.get_mut(slot) {
            let wake = held.tend(slot, now, self.kept.fired, &self.timing, actions);
            self.wake = self.wake.into_iter().chain(wake).min();
        }
    }

    fn tend_all(&mut self, now: BootTime, actions: &mut Vec<FenceAction>) {
        let mut wakes = None;
        for (slot, held) in &mut self.slots {
            let wake = held.tend(slot, now, self.kept.fired, &self.timing, actions);
            wakes = wakes.into_iter().chain(wake).min();
        }
        self.wake = wakes;
    }
}

#[cfg(test)]
mod tests;
