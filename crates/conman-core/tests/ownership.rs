//! What must hold of the fence whatever it is told and whenever, and of the protocol's constants
//! whatever they are.
#![forbid(unsafe_code)]

use conman_core::ownership::{BootTime, Fence, FenceAction, FenceEvent, Slot, Timing};
use proptest::prelude::*;

fn slot() -> impl Strategy<Value = Slot> {
    ("[ab]", 1..3_u64).prop_map(|(session, generation)| Slot {
        session: session.as_str().into(),
        generation,
    })
}

#[derive(Debug, Clone)]
enum Step {
    Hear(FenceEvent),
    /// The shim dies, and the next one knows what was kept and what it sees.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let deadline = || (0..40_000_u64).prop_map(BootTime);
    let slots = || proptest::collection::vec(slot(), 0..4);
    let thaw = (deadline(), slots());
    let event = prop_oneof![
        Just(FenceEvent::Tick),
        Just(FenceEvent::FreezeAll),
        slot().prop_map(FenceEvent::Open),
        deadline().prop_map(FenceEvent::Extend),
        thaw.prop_map(|(deadline, slots)| FenceEvent::Thaw { deadline, slots }),
        slot().prop_map(FenceEvent::Condemn),
        slot().prop_map(FenceEvent::Forget),
        slot().prop_map(FenceEvent::Appeared),
        slot().prop_map(FenceEvent::StartOver),
        slot().prop_map(FenceEvent::FreezeVerified),
        slot().prop_map(FenceEvent::Died),
    ];
    prop_oneof![12 => event.prop_map(Step::Hear), 1 => Just(Step::Restart)]
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    proptest::collection::vec((0..1_500_u64, step()), 1..60)
}

proptest! {
    #[test]
    fn a_fence_that_fired_opens_and_thaws_nothing_without_an_order_with_a_newer_deadline(
        steps in steps()
    ) {
        let timing = Timing::default();
        let (mut fence, mut now) = (Fence::new(timing), BootTime(0));
        for (passes, step) in steps {
            now = now.plus(passes);
            let before = fence.kept();
            let Step::Hear(event) = step else {
                fence = Fence::restored(timing, before, now, fence.view());
                prop_assert_eq!(fence.kept(), before);
                continue;
            };
            let shut = before.fired.is_some() || now >= before.deadline;
            let order = match &event {
                FenceEvent::Thaw { deadline, slots } => {
                    let newer = *deadline > before.deadline && *deadline > now;
                    newer.then(|| slots.clone())
                }
                _ => None,
            };
            for action in fence.on(now, event) {
                match action {
                    FenceAction::Thaw(slot) => {
                        let ordered = order.as_ref().is_some_and(|slots| slots.contains(&slot));
                        prop_assert!(ordered, "{slot:?} thawed without an order");
                    }
                    FenceAction::Opened(slot) => prop_assert!(!shut, "{slot:?} opened"),
                    _ => {}
                }
            }
            let after = fence.kept();
            prop_assert!(after.deadline >= before.deadline);
            prop_assert!(after.fired.is_some() || order.is_some() || !shut);
            prop_assert!(after.fired.is_some() || now < after.deadline);
        }
    }

    #[test]
    fn whatever_is_present_at_the_bound_was_seen_frozen_or_is_being_killed(
        opened in proptest::collection::btree_set(slot(), 1..4),
        frozen in proptest::collection::btree_set(slot(), 0..4),
        late in 0..=Timing::default().shim_restart_ms,
        next in any::<bool>(),
    ) {
        let timing = Timing::default();
        let mut fence = Fence::new(timing);
        let order = FenceEvent::Thaw { deadline: BootTime(timing.fence_ms), slots: Vec::new() };
        fence.on(BootTime(1), order);
        for slot in &opened {
            fence.on(BootTime(2), FenceEvent::Open(slot.clone()));
            fence.on(BootTime(3), FenceEvent::Appeared(slot.clone()));
        }
        // The shim itself may be late, or the next one be as late as it may.
        let fires = BootTime(timing.fence_ms + late);
        if next {
            fence = Fence::restored(timing, fence.kept(), fires, fence.view());
        }
        fence.on(fires, FenceEvent::Tick);
        for slot in &frozen {
            fence.on(fires, FenceEvent::FreezeVerified(slot.clone()));
        }
        let mut killed = |at| -> Vec<Slot> {
            let actions = fence.on(at, FenceEvent::Tick).into_iter();
            let kills = actions.filter_map(|action| match action {
                FenceAction::Kill(slot) => Some(slot),
                _ => None,
            });
            kills.collect()
        };
        let ends = fires.plus(timing.freeze_ms);
        prop_assert!(ends.0 + timing.kill_ms <= timing.bound_ms());
        prop_assert_eq!(killed(BootTime(ends.0 - 1)), [], "before it had its time to freeze");
        let killed = killed(ends);
        for slot in opened {
            prop_assert_eq!(killed.contains(&slot), !frozen.contains(&slot));
        }
    }

    #[test]
    fn constants_pass_just_when_the_fence_ends_before_a_takeover_on_the_worst_clocks(
        fence_ms in 0..60_000_u64,
        others in (0..5_000_u64, 0..5_000_u64, 0..5_000_u64),
        takeover_ms in 0..120_000_u64,
        drift_ppm in 0..1_100_000_u64,
        pause_ms in 0..30_000_u64,
    ) {
        let timing = Timing {
            fence_ms,
            shim_restart_ms: others.0,
            freeze_ms: others.1,
            kill_ms: others.2,
            takeover_ms,
            drift_ppm,
            ..Timing::default()
        };
        let million = 1_000_000_i128;
        let bound = i128::from(fence_ms + others.0 + others.1 + others.2);
        let (drift, pause) = (i128::from(drift_ppm), i128::from(pause_ms) * million);
        let ends = bound * (million + drift);
        let taken = i128::from(takeover_ms) * (million - drift);
        match timing.slack_ms() {
            Ok(slack_ms) => {
                prop_assert!(ends < taken);
                prop_assert!(pause_ms > slack_ms || ends + pause <= taken);
            }
            // What does not leave one whole millisecond is refused as well.
            Err(error) => {
                prop_assert!(ends + million > taken - million);
                prop_assert!(error.missing_ms > 0);
            }
        }
    }

    #[test]
    fn constants_of_any_size_are_judged(
        sizes in proptest::array::uniform6(prop_oneof![Just(u64::MAX), any::<u64>()])
    ) {
        let [fence_ms, shim_restart_ms, freeze_ms, kill_ms, takeover_ms, drift_ppm] = sizes;
        let timing = Timing {
            fence_ms,
            shim_restart_ms,
            freeze_ms,
            kill_ms,
            takeover_ms,
            drift_ppm,
            ..Timing::default()
        };
        prop_assert!(timing.slack_ms().is_err() || drift_ppm < 1_000_000);
    }
}
