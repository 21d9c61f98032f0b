//! Tests of the dead-man fence.

use super::*;

fn slot() -> Slot {
    Slot {
        session: "s".into(),
        generation: 1,
    }
}

fn order(deadline: u64, slots: Vec<Slot>) -> FenceEvent {
    let deadline = BootTime(deadline);
    FenceEvent::Thaw { deadline, slots }
}

fn running() -> Fence {
    let mut fence = Fence::new(Timing::default());
    fence.on(BootTime(1), order(5_000, vec![]));
    fence.on(BootTime(2), FenceEvent::Open(slot()));
    fence.on(BootTime(3), FenceEvent::Appeared(slot()));
    fence
}

#[test]
fn the_deadline_freezes_and_an_extension_that_comes_late_does_not_thaw() {
    let mut fence = running();
    assert_eq!(fence.next_wake(), Some(BootTime(0)), "restored: look once");
    assert_eq!(fence.on(BootTime(4), FenceEvent::Tick), []);
    assert_eq!(fence.next_wake(), Some(BootTime(5_000)));
    let late = fence.on(BootTime(5_000), FenceEvent::Extend(BootTime(9_000)));
    assert_eq!(late, [FenceAction::Fired, FenceAction::Freeze(slot())]);
    assert!(fence.has_fired());
}

#[test]
fn what_is_not_verified_frozen_in_time_is_killed_until_it_is_dead() {
    let mut fence = running();
    fence.on(BootTime(5_000), FenceEvent::Tick);
    for now in [6_000, 6_250, 6_500] {
        assert!(fence.next_wake() <= Some(BootTime(now)));
        let actions = fence.on(BootTime(now), FenceEvent::Tick);
        assert_eq!(actions, [FenceAction::Kill(slot())]);
    }
    let actions = fence.on(BootTime(6_600), FenceEvent::Died(slot()));
    assert_eq!(actions, [FenceAction::Certificate(slot())]);
}

#[test]
fn what_is_asked_to_freeze_late_has_as_long_for_it_as_if_it_were_in_time() {
    let late = running();
    let kept = late.kept();
    let timing = Timing::default();
    // Either the same fence after a stall, or the next shim's, of which a third one knows when
    // it fired.
    let next = Fence::restored(timing, kept, BootTime(8_000), late.view());
    for mut fence in [late, next] {
        let actions = fence.on(BootTime(8_000), FenceEvent::Tick);
        assert_eq!(actions, [FenceAction::Fired, FenceAction::Freeze(slot())]);
        let at = BootTime(8_900);
        let mut third = Fence::restored(timing, fence.kept(), at, fence.view());
        let actions = third.on(at, FenceEvent::Tick);
        assert_eq!(actions, [FenceAction::Freeze(slot())]);
        for mut fence in [fence, third] {
            let actions = fence.on(BootTime(8_999), FenceEvent::Tick);
            assert!(!actions.contains(&FenceAction::Kill(slot())), "{actions:?}");
            let actions = fence.on(BootTime(9_000), FenceEvent::Tick);
            assert_eq!(actions, [FenceAction::Kill(slot())]);
        }
    }
}

#[test]
fn a_new_shim_keeps_what_is_frozen_frozen_and_freezes_the_rest() {
    let mut fence = running();
    fence.on(BootTime(5_000), FenceEvent::Tick);
    fence.on(BootTime(5_010), FenceEvent::FreezeVerified(slot()));
    let running = Slot {
        generation: 2,
        ..slot()
    };
    let mut found = fence.view();
    found.push(SlotView {
        slot: running.clone(),
        present: true,
        frozen: false,
        certified: false,
    });
    let timing = Timing::default();
    let mut fence = Fence::restored(timing, fence.kept(), BootTime(5_500), found);
    assert_eq!(fence.next_wake(), Some(BootTime(5_500)));
    let actions = fence.on(BootTime(5_500), FenceEvent::Tick);
    assert_eq!(actions, [FenceAction::Freeze(running.clone())]);
    // The time is counted from the deadline, not from the restart.
    let actions = fence.on(BootTime(6_000), FenceEvent::Tick);
    assert_eq!(actions, [FenceAction::Kill(running)]);
    let actions = fence.on(BootTime(7_000), order(9_000, vec![slot()]));
    assert_eq!(actions, [FenceAction::Thaw(slot())]);
}

#[test]
fn what_had_been_condemned_stays_so_whether_or_not_anything_of_it_is_found() {
    let before = running();
    let never = Slot {
        generation: 7,
        ..slot()
    };
    let later = Fence::restored(
        Timing::default(),
        before.kept(),
        BootTime(10),
        before.view(),
    );
    let mut later = later.condemned_before([slot(), never.clone()]);
    let actions = later.on(BootTime(10), FenceEvent::Tick);
    assert_eq!(actions, [FenceAction::Kill(slot())]);
    let actions = later.on(BootTime(11), FenceEvent::Open(never.clone()));
    assert_eq!(actions, [FenceAction::Refused(never)]);
    later.on(BootTime(20), FenceEvent::FreezeAll);
    let actions = later.on(BootTime(21), order(9_000, vec![slot()]));
    assert_eq!(actions, [], "it is not thawed");
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
    assert_eq!(actions, [FenceAction::Certificate(other.clone())]);
    assert_eq!(fence.on(BootTime(40), FenceEvent::Appeared(other)), []);
}

#[test]
fn a_slot_that_was_condemned_unopened_is_certified_and_stays_shut() {
    let mut fence = running();
    let unknown = Slot {
        generation: 7,
        ..slot()
    };
    let actions = fence.on(BootTime(10), FenceEvent::Condemn(unknown.clone()));
    assert_eq!(actions, [FenceAction::Certificate(unknown.clone())]);
    let actions = fence.on(BootTime(11), FenceEvent::Open(unknown.clone()));
    assert_eq!(actions, [FenceAction::Refused(unknown.clone())]);
    fence.on(BootTime(12), FenceEvent::Forget(unknown));
    assert_eq!(fence.view().len(), 1);
}
