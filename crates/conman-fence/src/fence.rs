//! The fence part: [`conman_core::ownership::Fence`] by names and nanoseconds, and the proof that
//! everything is frozen. It takes the time and events, and returns effects; it has no clock and no I/O.
//!
//! ```text
//!           first deadline           deadline, or an order            all proven frozen or dead
//! unarmed ────────────────▶ armed ─────────────────────────▶ freezing ───────────────────▶ fenced
//!    ▲                      │   ▲ ── not proven in time: killed ─┘                            │
//!    └──── disarmed ────────┘   └──────────────── only an order thaws ────────────────────────┘
//! ```
//! It is unarmed at first, as with a registry that no other node can take over from. The first deadline
//! arms it with all that lives.

use std::collections::BTreeSet;
use std::time::Duration;

use conman_core::ownership::{
    BootTime, Fence, FenceAction, FenceEvent, Kept, Slot, SlotView, Timing,
};
use conman_shim_protocol::FenceState;
use serde::{Deserialize, Serialize};

use crate::effect::Effect;

const NS_IN_MS: u64 = 1_000_000;

/// Pause between two checks whether everything is frozen, while clients wait for it.
const CHECK_NS: u64 = 2_000_000;

/// Pause between two checks when no client waits: before the fence has fired, and while containers that
/// are not frozen are being killed, which may take as long as a disk hangs.
const SLOW_CHECK_NS: u64 = 250_000_000;

/// The state of an armed fence that outlives the shim, as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptFence {
    pub(crate) deadline_ms: u64,
    /// When it fired; `None` after an order to thaw.
    pub(crate) fired_ms: Option<u64>,
    /// How long it waits for proof that everything is frozen; `None` if no client set it, so that the
    /// shim's arguments apply.
    pub(crate) freeze_ms: Option<u64>,
}

/// The fence, or none while it is unarmed. Times are nanoseconds on CLOCK_BOOTTIME.
#[derive(Debug)]
pub(crate) struct DeadManFence {
    timing: Timing,
    fence: Option<Fence>,
    /// Since when it is being opened, in whole milliseconds, while not all is thawed.
    opening_ms: Option<u64>,
    /// Containers that were ordered to freeze and are not proven frozen.
    unverified: BTreeSet<String>,
    /// When those were last checked.
    checked_ns: u64,
    /// The state that subscribers got last.
    published: FenceState,
}

impl DeadManFence {
    pub(crate) fn new(freeze_patience: Duration, frozen_max: Duration) -> Self {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let timing = Timing {
            freeze_ms: ms(freeze_patience),
            frozen_max_ms: ms(frozen_max),
            ..Timing::default()
        };
        Self {
            timing,
            fence: None,
            opening_ms: None,
            unverified: BTreeSet::new(),
            checked_ns: 0,
            published: FenceState::Unarmed,
        }
    }

    pub(crate) fn freeze_ms(&self) -> u64 {
        self.timing.freeze_ms
    }

    pub(crate) fn set_freeze_ms(&mut self, freeze_ms: u64) {
        self.timing.freeze_ms = freeze_ms;
        if let Some(fence) = &mut self.fence {
            fence.set_freeze_ms(freeze_ms);
        }
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.fence.is_some()
    }

    /// Whether nothing may start.
    pub(crate) fn is_closed(&self) -> bool {
        self.fence.as_ref().is_some_and(Fence::has_fired)
    }

    /// Whether nothing lives or may yet appear.
    pub(crate) fn holds_nothing(&self) -> bool {
        let slots = self.fence.as_ref().map(Fence::view).unwrap_or_default();
        slots.iter().all(|view| view.certified)
    }

    /// Whether it has fired and still waits for proof that everything is frozen.
    fn awaits_proof(&self, now_ns: u64) -> bool {
        let kept = self.fence.as_ref().map(Fence::kept);
        let fired = kept.and_then(|kept| kept.fired);
        fired.is_some_and(|at| whole_ms(now_ns) < at.0.saturating_add(self.timing.freeze_ms))
    }

    pub(crate) fn state(&self) -> FenceState {
        let Some(fence) = &self.fence else {
            return FenceState::Unarmed;
        };
        let kept = fence.kept();
        let Some(fired) = kept.fired else {
            return FenceState::Armed {
                until_boottime_ns: ns(kept.deadline),
            };
        };
        let since_boottime_ns = ns(fired);
        let settled = |view: &SlotView| view.frozen || view.certified;
        if self.unverified.is_empty() && fence.view().iter().all(settled) {
            FenceState::Fenced { since_boottime_ns }
        } else {
            FenceState::Freezing { since_boottime_ns }
        }
    }

    /// Whether everything is proven frozen or is dead.
    pub(crate) fn is_settled(&self) -> bool {
        matches!(self.state(), FenceState::Fenced { .. })
    }

    /// Restores the recorded state, with what lives and what must die; `None` disarms the fence.
    pub(crate) fn restore(
        &mut self,
        now_ns: u64,
        kept: Option<KeptFence>,
        found: Vec<SlotView>,
        to_be_killed: Vec<Slot>,
    ) {
        if let Some(freeze_ms) = kept.and_then(|kept| kept.freeze_ms) {
            self.timing.freeze_ms = freeze_ms;
        }
        if kept.is_none() {
            self.unverified.clear();
        }
        let timing = self.timing;
        self.fence = kept.map(|kept| {
            let kept = Kept {
                deadline: BootTime(kept.deadline_ms),
                fired: kept.fired_ms.map(BootTime),
            };
            let fence = Fence::restored(timing, kept, BootTime(whole_ms(now_ns)), found);
            fence.condemned_before(to_be_killed)
        });
    }

    /// Sets since when it is being opened; `None` once all is thawed. A later shim takes that time for the
    /// deadline: it closes at once, with the usual time to freeze.
    pub(crate) fn open_from(&mut self, now_ns: Option<u64>) {
        self.opening_ms = now_ns.map(whole_ms);
    }

    /// The state to record.
    pub(crate) fn kept(&self) -> Option<KeptFence> {
        self.fence.as_ref().map(|fence| {
            let kept = fence.kept();
            let opening_ms = self.opening_ms.filter(|_| kept.fired.is_none());
            KeptFence {
                deadline_ms: opening_ms.unwrap_or(kept.deadline.0),
                fired_ms: kept.fired.map(|at| at.0),
                freeze_ms: Some(self.timing.freeze_ms),
            }
        })
    }

    /// Takes an event. Returns whether the fence admits it, and the effects; none while unarmed.
    pub(crate) fn on(&mut self, now_ns: u64, event: FenceEvent) -> (bool, Vec<Effect>) {
        let (before, mut effects) = (self.kept(), Vec::new());
        let Some(fence) = &mut self.fence else {
            return (true, effects);
        };
        let actions = fence.on(BootTime(whole_ms(now_ns)), event);
        if self.kept() != before {
            effects.push(Effect::RecordFence);
        }
        let (mut admitted, fired) = (true, actions.contains(&FenceAction::Fired));
        for action in actions {
            match action {
                FenceAction::Opened(_) => {}
                FenceAction::Refused(_) => admitted = false,
                FenceAction::Fired => effects.push(Effect::FreezeAll),
                FenceAction::Freeze(slot) => {
                    self.unverified.insert(name_of(&slot));
                    effects.push(Effect::Freeze(name_of(&slot)));
                }
                FenceAction::Thaw(slot) => {
                    self.unverified.remove(&name_of(&slot));
                    effects.push(Effect::Thaw(name_of(&slot)));
                }
                FenceAction::Kill(slot) => effects.push(Effect::Kill(name_of(&slot))),
                // It comes of an end, which is reported separately: to subscribers, as the failure of the
                // start, or by the answer that nothing of that name exists.
                FenceAction::Certificate(slot) => {
                    if self.unverified.remove(&name_of(&slot)) && self.unverified.is_empty() {
                        effects.extend(self.publish_change());
                    }
                }
            }
        }
        effects.extend(fired.then_some(Effect::ReleaseAll));
        if fired && self.unverified.is_empty() {
            // Nothing that is due later would publish it.
            effects.extend(self.publish_change());
        }
        (admitted, effects)
    }

    /// Publishes the state if subscribers have another one.
    pub(crate) fn publish_change(&mut self) -> Option<Effect> {
        let state = self.state();
        let changed = state != self.published;
        self.published = state;
        changed.then_some(Effect::Publish(state))
    }

    /// Containers that were ordered to freeze and are not proven frozen.
    pub(crate) fn unverified(&self) -> impl Iterator<Item = &String> {
        self.unverified.iter()
    }

    /// They were checked.
    pub(crate) fn checked(&mut self, now_ns: u64) {
        self.checked_ns = now_ns;
    }

    /// It is proven frozen.
    pub(crate) fn verified(&mut self, now_ns: u64, name: &str) -> Vec<Effect> {
        self.unverified.remove(name);
        self.on(now_ns, FenceEvent::FreezeVerified(slot(name))).1
    }

    /// Whether a tick is due.
    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        self.next_wake_ns().is_some_and(|due_ns| due_ns <= now_ns)
    }

    fn next_wake_ns(&self) -> Option<u64> {
        self.fence.as_ref().and_then(Fence::next_wake).map(ns)
    }

    /// When a tick or a check of what is not proven frozen is due.
    pub(crate) fn next_due_ns(&self, now_ns: u64) -> Option<u64> {
        let pause_ns = match self.awaits_proof(now_ns) {
            true => CHECK_NS,
            false => SLOW_CHECK_NS,
        };
        let check_ns = self.checked_ns.saturating_add(pause_ns);
        let check = (!self.unverified.is_empty()).then_some(check_ns);
        self.next_wake_ns().into_iter().chain(check).min()
    }

    /// All known slots.
    pub(crate) fn slots(&self) -> Vec<Slot> {
        let views = self.fence.as_ref().map(Fence::view).unwrap_or_default();
        views.into_iter().map(|view| view.slot).collect()
    }
}

/// In the fence's unit, rounded down: a deadline may be early, never late.
pub(crate) fn whole_ms(ns: u64) -> u64 {
    ns / NS_IN_MS
}

fn ns(at: BootTime) -> u64 {
    at.0.saturating_mul(NS_IN_MS)
}

/// `SESSION.GENERATION` as a slot; any other name is one without a generation.
pub(crate) fn slot(name: &str) -> Slot {
    let parsed = name.rsplit_once('.').and_then(|(session, text)| {
        let generation: u64 = text.parse().ok()?;
        // A number may have more than one spelling, such as 07.
        (generation > 0 && generation.to_string() == text).then_some((session, generation))
    });
    let (session, generation) = parsed.unwrap_or((name, 0));
    Slot {
        session: session.into(),
        generation,
    }
}

/// The name that [`slot`] came from.
pub(crate) fn name_of(slot: &Slot) -> String {
    if slot.generation == 0 {
        return slot.session.to_string();
    }
    format!("{}.{}", slot.session, slot.generation)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = NS_IN_MS;

    fn found(name: &str, present: bool) -> SlotView {
        SlotView {
            slot: slot(name),
            present,
            frozen: false,
            certified: false,
        }
    }

    fn fence_waiting(freeze_ms: u64) -> DeadManFence {
        DeadManFence::new(Duration::from_millis(freeze_ms), Duration::from_secs(900))
    }

    fn armed() -> DeadManFence {
        let mut fence = fence_waiting(100);
        let kept = KeptFence {
            deadline_ms: 1_000,
            fired_ms: None,
            freeze_ms: None,
        };
        let living = vec![found("a.1", true), found("b.1", false)];
        fence.restore(MS, Some(kept), living, Vec::new());
        fence.on(MS, FenceEvent::Tick);
        fence
    }

    #[test]
    fn unarmed_it_demands_nothing_and_closes_nothing() {
        let mut fence = fence_waiting(100);
        assert_eq!(fence.on(u64::MAX, FenceEvent::Tick), (true, vec![]));
        assert_eq!(fence.on(1, FenceEvent::FreezeAll), (true, vec![]));
        assert!(!fence.is_closed() && !fence.is_armed());
        assert_eq!(fence.next_wake_ns(), None);
        assert_eq!(fence.state(), FenceState::Unarmed);
        assert_eq!(fence.kept(), None);
    }

    #[test]
    fn armed_it_freezes_what_lives_at_the_deadline() {
        let mut fence = armed();
        assert_eq!(fence.next_wake_ns(), Some(1_000 * MS));
        assert_eq!(fence.on(999 * MS, FenceEvent::Tick), (true, vec![]));
        let effects = fence.on(1_000 * MS, FenceEvent::Tick).1;
        let expected = [
            Effect::RecordFence,
            Effect::FreezeAll,
            Effect::Freeze("a.1".to_owned()),
            Effect::Freeze("b.1".to_owned()),
            Effect::ReleaseAll,
        ];
        assert_eq!(effects, expected);
        assert!(fence.is_closed());
        let since_boottime_ns = 1_000 * MS;
        assert_eq!(fence.state(), FenceState::Freezing { since_boottime_ns });
        assert_eq!(fence.next_due_ns(1_001 * MS), Some(CHECK_NS));
        assert!(fence.unverified().eq(&["a.1", "b.1"]));
        fence.checked(1_001 * MS);
        assert_eq!(
            fence.next_due_ns(1_001 * MS),
            Some(1_001 * MS + CHECK_NS),
            "not at once again"
        );
        assert_eq!(fence.verified(1_001 * MS, "a.1"), []);
        let effects = fence.on(1_001 * MS, FenceEvent::StartOver(slot("b.1"))).1;
        let state = FenceState::Fenced { since_boottime_ns };
        assert_eq!(effects, [Effect::Publish(state)]);
        assert_eq!(fence.state(), state);
        assert_eq!(fence.publish_change(), None);
    }

    #[test]
    fn proof_is_awaited_from_the_deadline_until_the_rest_is_killed() {
        let mut fence = armed();
        assert!(!fence.awaits_proof(999 * MS));
        fence.on(1_000 * MS, FenceEvent::Tick);
        assert!(fence.awaits_proof(1_099 * MS));
        assert!(!fence.awaits_proof(1_100 * MS));
    }

    #[test]
    fn a_later_shim_finds_it_fired() {
        let mut fence = armed();
        fence.on(1_000 * MS, FenceEvent::Tick);
        let text = serde_json::to_string(&fence.kept()).expect("written");
        let mut later = fence_waiting(100);
        let kept = serde_json::from_str(&text).expect("read");
        later.restore(1_050 * MS, kept, vec![found("a.1", true)], Vec::new());
        assert!(later.is_closed());
        let effects = later.on(1_050 * MS, FenceEvent::Tick).1;
        assert_eq!(effects, [Effect::Freeze("a.1".to_owned())]);
    }

    #[test]
    fn another_patience_holds_for_what_freezes_already_and_for_a_later_shim() {
        let mut fence = armed();
        fence.set_freeze_ms(10_000);
        fence.on(1_000 * MS, FenceEvent::Tick);
        fence.set_freeze_ms(300);
        let kills = |(_, effects): (bool, Vec<Effect>)| {
            let kills = effects.into_iter();
            kills
                .filter(|effect| matches!(effect, Effect::Kill(_)))
                .count()
        };
        let mut later = fence_waiting(10_000);
        let living = vec![found("a.1", true)];
        later.restore(1_299 * MS, fence.kept(), living, Vec::new());
        assert_eq!(later.freeze_ms(), 300);
        for fence in [&mut fence, &mut later] {
            assert_eq!(kills(fence.on(1_299 * MS, FenceEvent::Tick)), 0);
            assert_eq!(kills(fence.on(1_300 * MS, FenceEvent::Tick)), 1);
        }
    }

    #[test]
    fn a_later_shim_closes_one_that_was_being_opened_and_gives_all_as_long_to_freeze_as_ever() {
        let mut fence = armed();
        fence.on(1_000 * MS, FenceEvent::Tick);
        fence.open_from(Some(50_000 * MS));
        assert!(fence.kept().is_some_and(|kept| kept.fired_ms.is_some()));
        let thaw = FenceEvent::Thaw {
            deadline: BootTime(60_000),
            slots: vec![slot("a.1")],
        };
        fence.on(50_000 * MS, thaw);
        assert!(!fence.is_closed());
        let mut later = fence_waiting(100);
        later.restore(
            50_001 * MS,
            fence.kept(),
            vec![found("a.1", true)],
            Vec::new(),
        );
        let effects = later.on(50_001 * MS, FenceEvent::Tick).1;
        let expected = [
            Effect::RecordFence,
            Effect::FreezeAll,
            Effect::Freeze("a.1".to_owned()),
            Effect::ReleaseAll,
        ];
        assert_eq!(effects, expected);
        fence.open_from(None);
        later.restore(
            50_001 * MS,
            fence.kept(),
            vec![found("a.1", true)],
            Vec::new(),
        );
        assert_eq!(later.on(50_001 * MS, FenceEvent::Tick), (true, vec![]));
        assert_eq!(later.next_wake_ns(), Some(60_000 * MS));
    }

    proptest! {
        #[test]
        fn a_slot_keeps_its_name(name in "[a-z0-9.-]{1,12}") {
            prop_assert_eq!(name_of(&slot(&name)), name);
        }
    }
}
