//! The dead-man fence: what the shim does whether or not a daemon lives.
//!
//! ```text
//!  Thawed ──deadline──▶ Asked ──verified──▶ Frozen ──order with a newer deadline──▶ Thawed
//!                         └─ +K ─▶ condemned ◀─ frozen_max, lost, stop ─┘
//!  condemned: killed again and again until its certificate, which is kept until forgotten
//! ```
//!
//! A slot is opened before its create is sent. What appears in a frozen slot is born frozen, as
//! the slot is the parent cgroup; so a late start never runs past the deadline. The whole value is
//! what a new shim restores from: whoever drives it persists it before acting.

use std::collections::BTreeMap;

use super::{BootTime, Slot, Timing};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FenceEvent {
    Tick,
    /// The daemon is about to send a create.
    Open(Slot),
    /// The daemon renewed in time. Never thaws.
    Extend(BootTime),
    /// The daemon renewed after the fence had fired, and still owns these.
    Thaw {
        deadline: BootTime,
        slots: Vec<Slot>,
    },
    /// Freeze everything now, whatever the deadline.
    FreezeAll,
    /// Kill it, and what may yet appear of it.
    Condemn(Slot),
    /// The daemon has dealt with its certificate.
    Forget(Slot),
    Appeared(Slot),
    /// The start is over: nothing can appear any more.
    StartOver(Slot),
    FreezeVerified(Slot),
    /// The pidfd became readable.
    Died(Slot),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FenceAction {
    /// Only now may the create be sent.
    Opened(Slot),
    Refused(Slot),
    Freeze(Slot),
    Thaw(Slot),
    Kill(Slot),
    /// To the daemon: nothing of it exists or can appear.
    Certificate(Slot),
    /// To the daemon: thawing now takes an explicit order.
    Fired,
}

/// What a daemon that has just started learns of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotView {
    pub slot: Slot,
    pub present: bool,
    pub certified: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freezer {
    Thawed,
    Asked,
    Frozen { since: BootTime },
}

#[derive(Debug, Clone)]
struct Held {
    freezer: Freezer,
    present: bool,
    may_appear: bool,
    condemned: bool,
    retry_at: BootTime,
}

impl Held {
    fn is_gone(&self) -> bool {
        !self.present && !self.may_appear
    }
}

#[derive(Debug, Clone)]
pub struct Fence {
    timing: Timing,
    deadline: BootTime,
    /// When it fired, until an order thaws.
    fired: Option<BootTime>,
    slots: BTreeMap<Slot, Held>,
}

impl Fence {
    /// Fired from the start: nothing runs before the first order.
    #[must_use]
    pub fn new(timing: Timing) -> Self {
        Self {
            timing,
            deadline: BootTime(0),
            fired: Some(BootTime(0)),
            slots: BTreeMap::new(),
        }
    }

    /// What a new shim makes of the state that the dead one persisted: orders may have been lost
    /// with it, so they are given again.
    #[must_use]
    pub fn restarted(mut self) -> Self {
        for held in self.slots.values_mut() {
            held.retry_at = BootTime(0);
        }
        self
    }

    #[must_use]
    pub fn has_fired(&self) -> bool {
        self.fired.is_some()
    }

    #[must_use]
    pub fn view(&self) -> Vec<SlotView> {
        self.slots
            .iter()
            .map(|(slot, held)| SlotView {
                slot: slot.clone(),
                present: held.present,
                certified: held.is_gone(),
            })
            .collect()
    }

    pub fn on(&mut self, now: BootTime, event: FenceEvent) -> Vec<FenceAction> {
        let mut actions = Vec::new();
        // The deadline comes first: an event that arrives late finds the fence fired.
        self.enforce(now, &mut actions);
        match event {
            FenceEvent::Tick => {}
            FenceEvent::Open(slot) => self.open(now, slot, &mut actions),
            FenceEvent::Extend(deadline) => {
                if self.fired.is_none() {
                    self.deadline = self.deadline.max(deadline);
                }
            }
            FenceEvent::Thaw { deadline, slots } => {
                if deadline > self.deadline && now < deadline {
                    self.thaw(deadline, &slots, &mut actions);
                }
            }
            FenceEvent::FreezeAll => {
                self.fire(now, &mut actions);
                self.enforce(now, &mut actions);
            }
            FenceEvent::Condemn(slot) => {
                if let Some(held) = self.slots.get_mut(&slot) {
                    held.condemned = true;
                    held.retry_at = now;
                    if held.is_gone() {
                        actions.push(FenceAction::Certificate(slot));
                    }
                }
                self.enforce(now, &mut actions);
            }
            FenceEvent::Forget(slot) => {
                if self.slots.get(&slot).is_some_and(Held::is_gone) {
                    self.slots.remove(&slot);
                }
            }
            FenceEvent::Appeared(slot) => {
                if let Some(held) = self.slots.get_mut(&slot) {
                    held.present = true;
                    held.may_appear = false;
                    held.retry_at = now;
                }
                self.enforce(now, &mut actions);
            }
            FenceEvent::StartOver(slot) => self.ended(slot, false, &mut actions),
            FenceEvent::FreezeVerified(slot) => {
                if let Some(held) = self.slots.get_mut(&slot)
                    && held.freezer == Freezer::Asked
                {
                    held.freezer = Freezer::Frozen { since: now };
                }
            }
            FenceEvent::Died(slot) => self.ended(slot, true, &mut actions),
        }
        actions
    }

    fn open(&mut self, now: BootTime, slot: Slot, actions: &mut Vec<FenceAction>) {
        if self.fired.is_some() || self.slots.contains_key(&slot) {
            actions.push(FenceAction::Refused(slot));
            return;
        }
        let held = Held {
            freezer: Freezer::Thawed,
            present: false,
            may_appear: true,
            condemned: false,
            retry_at: now,
        };
        self.slots.insert(slot.clone(), held);
        actions.push(FenceAction::Opened(slot));
    }

    fn thaw(&mut self, deadline: BootTime, slots: &[Slot], actions: &mut Vec<FenceAction>) {
        self.deadline = deadline;
        self.fired = None;
        for (slot, held) in &mut self.slots {
            if held.condemned || held.freezer == Freezer::Thawed || !slots.contains(slot) {
                continue;
            }
            held.freezer = Freezer::Thawed;
            actions.push(FenceAction::Thaw(slot.clone()));
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
        if self.fired.is_none() {
            self.fired = Some(now.min(self.deadline));
            actions.push(FenceAction::Fired);
        }
    }

    /// Everything that time alone demands.
    fn enforce(&mut self, now: BootTime, actions: &mut Vec<FenceAction>) {
        if now >= self.deadline {
            self.fire(now, actions);
        }
        for (slot, held) in &mut self.slots {
            if let Some(fired) = self.fired {
                if held.freezer == Freezer::Thawed {
                    held.freezer = Freezer::Asked;
                    held.retry_at = now;
                }
                if held.freezer == Freezer::Asked && now >= fired.plus(self.timing.freeze_ms) {
                    held.condemned = true;
                }
            }
            if let Freezer::Frozen { since } = held.freezer
                && now.since(since) >= self.timing.frozen_max_ms
            {
                held.condemned = true;
            }
            // A condemned slot is frozen as well, so that what appears in it late never runs.
            if held.condemned && held.may_appear && held.freezer == Freezer::Thawed {
                held.freezer = Freezer::Asked;
                held.retry_at = now;
            }
            if now < held.retry_at {
                continue;
            }
            if held.condemned && held.present {
                held.retry_at = now.plus(self.timing.retry_ms);
                actions.push(FenceAction::Kill(slot.clone()));
            } else if held.freezer == Freezer::Asked && !held.is_gone() {
                held.retry_at = now.plus(self.timing.retry_ms);
                actions.push(FenceAction::Freeze(slot.clone()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot() -> Slot {
        Slot {
            session: "s".into(),
            generation: 1,
        }
    }

    fn running() -> Fence {
        let mut fence = Fence::new(Timing::default());
        let order = |deadline| FenceEvent::Thaw {
            deadline: BootTime(deadline),
            slots: vec![],
        };
        fence.on(BootTime(1), order(5_000));
        fence.on(BootTime(2), FenceEvent::Open(slot()));
        fence.on(BootTime(3), FenceEvent::Appeared(slot()));
        fence
    }

    #[test]
    fn the_deadline_freezes_and_an_extension_that_comes_late_does_not_thaw() {
        let mut fence = running();
        let late = fence.on(BootTime(5_000), FenceEvent::Extend(BootTime(9_000)));
        assert_eq!(late, [FenceAction::Fired, FenceAction::Freeze(slot())]);
        assert!(fence.has_fired());
    }

    #[test]
    fn what_is_not_verified_frozen_in_time_is_killed_until_it_is_dead() {
        let mut fence = running();
        fence.on(BootTime(5_000), FenceEvent::Tick);
        for now in [6_000, 6_250, 6_500] {
            let actions = fence.on(BootTime(now), FenceEvent::Tick);
            assert_eq!(actions, [FenceAction::Kill(slot())]);
        }
        let actions = fence.on(BootTime(6_600), FenceEvent::Died(slot()));
        assert_eq!(actions, [FenceAction::Certificate(slot())]);
    }

    #[test]
    fn only_an_order_with_a_newer_deadline_thaws_even_after_a_restart() {
        let mut fence = running();
        fence.on(BootTime(5_000), FenceEvent::Tick);
        fence.on(BootTime(5_010), FenceEvent::FreezeVerified(slot()));
        let mut fence = fence.restarted();
        let order = |deadline| FenceEvent::Thaw {
            deadline: BootTime(deadline),
            slots: vec![slot()],
        };
        assert_eq!(fence.on(BootTime(7_000), order(5_000)), []);
        assert_eq!(fence.on(BootTime(7_000), order(6_999)), []);
        let actions = fence.on(BootTime(7_000), order(9_000));
        assert_eq!(actions, [FenceAction::Thaw(slot())]);
    }

    #[test]
    fn nothing_is_certified_while_its_start_may_still_appear() {
        let mut fence = running();
        let other = Slot {
            session: "t".into(),
            generation: 1,
        };
        fence.on(BootTime(10), FenceEvent::Open(other.clone()));
        let actions = fence.on(BootTime(20), FenceEvent::Condemn(other.clone()));
        assert_eq!(actions, [FenceAction::Freeze(other.clone())]);
        let actions = fence.on(BootTime(30), FenceEvent::StartOver(other.clone()));
        assert_eq!(actions, [FenceAction::Certificate(other)]);
    }
}
