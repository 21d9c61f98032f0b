//! Every order of events that a driver may report, and the orders that matter.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn slot(session: &str, generation: u64) -> Slot {
    Slot {
        session: session.into(),
        generation,
    }
}

fn begun() -> Preemption {
    let mut machine = Preemption::default();
    let notice = Event::Notice {
        origin: Origin::Operator,
        noticed_at: ms(0),
        deadline: ms(2_000),
    };
    assert_eq!(machine.on(ms(0), notice), [Action::Close]);
    assert_eq!(machine.on(ms(0), Event::Tick), [Action::ReadTable]);
    machine
}

fn running(session: &str, grace_ms: u64) -> (SessionName, TableStage) {
    let stage = TableStage::Running {
        generation: 1,
        grace: ms(grace_ms),
        shares_files: session == "shares",
    };
    (session.into(), stage)
}

fn killed(machine: &mut Preemption, now: u64, session: &str) -> Vec<Action> {
    let event = Event::KillSent {
        slot: slot(session, 1),
        result: KillResult::Sent,
    };
    machine.on(ms(now), event)
}

fn certify(machine: &mut Preemption, now: u64, slot: Slot) -> Vec<Action> {
    machine.on(
        ms(now),
        Event::Certificates(vec![(slot, Certificate::Empty)]),
    )
}

#[test]
fn all_are_killed_before_anything_else_and_released_by_their_certificates() {
    let mut machine = begun();
    let sent = ("b".into(), TableStage::Sent { generation: 1 });
    let table = vec![running("a", 0), sent, running("c", 0)];
    assert_eq!(
        machine.on(ms(0), Event::Table(table)),
        [
            Action::Kill(vec![slot("a", 1), slot("c", 1)]),
            Action::Search(slot("b", 1)),
        ]
    );
    assert_eq!(
        killed(&mut machine, 1, "a"),
        [
            Action::NoteKilled(slot("a", 1)),
            Action::AwaitDeath(slot("a", 1)),
            Action::RaisePriority,
        ]
    );
    assert_eq!(
        certify(&mut machine, 2, slot("a", 1)),
        [
            Action::NoteDead(slot("a", 1), Certificate::Empty),
            Action::Release(vec![slot("a", 1)]),
        ]
    );
    assert_eq!(certify(&mut machine, 2, slot("b", 1)), []);
}

#[test]
fn a_release_is_repeated_until_it_is_recorded_or_refused() {
    let mut machine = begun();
    let table = vec![("a".into(), TableStage::Reserved { generation: 7 })];
    let release = vec![Action::Release(vec![slot("a", 7)])];
    assert_eq!(machine.on(ms(0), Event::Table(table)), release);
    let answer = |result| Event::ReleasesAnswered(vec![(slot("a", 7), result)]);
    assert_eq!(machine.on(ms(1), answer(ReleaseResult::Unavailable)), []);
    assert_eq!(machine.next_wake(), Some(ms(21)));
    assert_eq!(machine.on(ms(21), Event::Tick), release);
    assert_eq!(
        machine.on(ms(22), answer(ReleaseResult::Recorded)),
        [Action::NoteReleased(slot("a", 7)), Action::Finish]
    );
    assert_eq!(machine.outcome().released, 1);
    assert_eq!(machine.outcome().last_release, Some(ms(22)));
}

#[test]
fn a_grace_ends_with_a_kill_and_a_second_notice_shortens_it() {
    let mut machine = begun();
    let table = vec![running("a", 900)];
    assert_eq!(
        machine.on(ms(0), Event::Table(table)),
        [Action::Warn(slot("a", 1)), Action::AwaitDeath(slot("a", 1))]
    );
    assert_eq!(machine.next_wake(), Some(ms(900)));
    let second = Event::Notice {
        origin: Origin::Operator,
        noticed_at: ms(100),
        deadline: ms(300),
    };
    assert_eq!(machine.on(ms(100), second), []);
    assert_eq!(machine.next_wake(), Some(ms(200)));
    assert_eq!(
        machine.on(ms(200), Event::Tick),
        [
            Action::Kill(vec![slot("a", 1)]),
            Action::CloseThrough(ms(300))
        ]
    );
    killed(&mut machine, 200, "a").clear();
    assert_eq!(machine.on(ms(300), Event::Tick), [Action::Finish]);
    assert_eq!(
        machine.outcome().unreleased,
        [("a".into(), Some(1), Unreleased::NotDead)]
    );
}

#[test]
fn a_claim_is_found_in_the_registry_or_given_up_after_a_while() {
    for found in [true, false] {
        let mut machine = begun();
        let table = vec![("a".into(), TableStage::Claiming)];
        assert_eq!(machine.on(ms(0), Event::Table(table.clone())), []);
        machine
            .on(ms(0), Event::TableHandled { took: ms(1) })
            .clear();
        assert_eq!(machine.next_wake(), Some(ms(8)));
        assert_eq!(
            machine.on(ms(8), Event::Tick),
            [Action::ReadTable, Action::LookUpClaims(vec!["a".into()])]
        );
        let claims = found.then(|| slot("a", 3)).into_iter().collect();
        let actions = machine.on(ms(9), Event::ClaimsFound(claims));
        if found {
            assert_eq!(actions, [Action::Release(vec![slot("a", 3)])]);
        } else {
            let actions = machine.on(ms(1_000), Event::Tick);
            let closes = Action::CloseThrough(ms(2_000));
            assert_eq!(actions, [Action::ReadTable, closes, Action::Finish]);
        }
    }
}

#[test]
fn a_certificate_of_another_generation_releases_nothing() {
    let mut machine = begun();
    machine
        .on(ms(0), Event::Table(vec![running("a", 0)]))
        .clear();
    killed(&mut machine, 1, "a").clear();
    assert_eq!(certify(&mut machine, 2, slot("a", 2)), []);
    assert_eq!(machine.outcome().certified, 0);
}

#[test]
fn a_failed_kill_is_reported_and_not_released() {
    let mut machine = begun();
    machine
        .on(ms(0), Event::Table(vec![running("a", 0)]))
        .clear();
    let failed = Event::KillSent {
        slot: slot("a", 1),
        result: KillResult::Failed("EPERM".to_owned()),
    };
    assert_eq!(machine.on(ms(1), failed), [Action::Finish]);
    let why = Unreleased::Failed("EPERM".to_owned());
    assert_eq!(machine.outcome().unreleased, [("a".into(), Some(1), why)]);
}

#[test]
fn a_withdrawn_notice_reopens_at_the_end_and_a_later_one_gets_the_result() {
    let mut machine = begun();
    assert_eq!(
        machine.on(ms(1), Event::Readmit(Origin::Operator)),
        [Action::ForgetNotice]
    );
    assert_eq!(
        machine.on(ms(2), Event::Table(Vec::new())),
        [Action::Finish, Action::Reopen]
    );
    let mut machine = begun();
    machine.on(ms(1), Event::Table(Vec::new())).clear();
    let again = Event::Notice {
        origin: Origin::Operator,
        noticed_at: ms(2),
        deadline: ms(2_002),
    };
    assert_eq!(machine.on(ms(2), again), [Action::Answer]);
    assert_eq!(
        machine.on(ms(3), Event::Readmit(Origin::Operator)),
        [Action::ForgetNotice, Action::Reopen]
    );
}

#[test]
fn what_does_not_die_is_proven_to_exit_unless_it_shares_files() {
    let mut machine = begun();
    let table = vec![running("a", 0), running("b", 0), running("shares", 0)];
    machine.on(ms(0), Event::Table(table)).clear();
    for session in ["a", "b", "shares"] {
        killed(&mut machine, 1, session).clear();
    }
    certify(&mut machine, 2, slot("b", 1)).clear();
    assert_eq!(machine.next_wake(), Some(ms(201)));
    assert_eq!(
        machine.on(ms(201), Event::Tick),
        [Action::ProveExit(slot("a", 1))]
    );
    let exiting = vec![(slot("a", 1), Certificate::Exiting)];
    let actions = machine.on(ms(210), Event::Certificates(exiting));
    assert_eq!(
        actions,
        [Action::NoteDead(slot("a", 1), Certificate::Exiting)],
        "it is in the next batch"
    );
    // The later certificate of the empty namespace changes nothing.
    assert_eq!(certify(&mut machine, 900, slot("a", 1)), []);
}

#[test]
fn what_passes_through_is_closed_in_time_although_a_session_does_not_die() {
    let mut machine = begun();
    let table = vec![running("shares", 0)];
    machine.on(ms(0), Event::Table(table)).clear();
    killed(&mut machine, 1, "shares").clear();
    assert_eq!(machine.on(ms(201), Event::Tick), []);
    assert_eq!(machine.next_wake(), Some(ms(1_000)));
    assert_eq!(
        machine.on(ms(1_000), Event::Tick),
        [Action::CloseThrough(ms(2_000))]
    );
    assert_eq!(machine.next_wake(), Some(ms(2_000)));
    assert_eq!(machine.on(ms(2_000), Event::Tick), [Action::Finish]);
}

#[test]
fn a_second_notice_that_leaves_less_time_brings_the_closing_forward() {
    let notice = |noticed_at, deadline| Event::Notice {
        origin: Origin::Operator,
        noticed_at: ms(noticed_at),
        deadline: ms(deadline),
    };
    let mut machine = Preemption::default();
    machine.on(ms(0), notice(0, 30_000)).clear();
    let table = vec![running("shares", 0)];
    machine.on(ms(0), Event::Table(table)).clear();
    killed(&mut machine, 1, "shares").clear();
    assert_eq!(machine.on(ms(201), Event::Tick), []);
    assert_eq!(machine.next_wake(), Some(ms(27_500)));
    assert_eq!(machine.on(ms(1_000), notice(1_000, 5_000)), []);
    assert_eq!(machine.next_wake(), Some(ms(3_000)));
    assert_eq!(
        machine.on(ms(3_000), Event::Tick),
        [Action::CloseThrough(ms(5_000))]
    );
    // A third one cannot close it twice.
    assert_eq!(machine.on(ms(3_000), notice(3_000, 4_000)), []);
    assert_eq!(machine.on(ms(3_500), Event::Tick), []);
}

fn any_slot() -> impl Strategy<Value = Slot> {
    ("[ab]", 1_u64..3).prop_map(|(session, generation)| slot(&session, generation))
}

fn any_stage() -> impl Strategy<Value = TableStage> {
    prop_oneof![
        Just(TableStage::Claiming),
        (1_u64..3).prop_map(|generation| TableStage::Reserved { generation }),
        (1_u64..3).prop_map(|generation| TableStage::Sent { generation }),
        (1_u64..3, 0_u64..30).prop_map(|(generation, grace)| TableStage::Running {
            generation,
            grace: ms(grace),
            shares_files: grace % 2 == 0,
        }),
    ]
}

fn any_event() -> impl Strategy<Value = Event> {
    let kill = prop_oneof![
        Just(KillResult::Sent),
        Just(KillResult::DeadAlready),
        Just(KillResult::Failed("why".to_owned())),
    ];
    let release = prop_oneof![
        Just(ReleaseResult::Recorded),
        Just(ReleaseResult::Unavailable),
        Just(ReleaseResult::Refused("why".to_owned())),
    ];
    prop_oneof![
        Just(Event::Tick),
        Just(Event::TableChanged),
        Just(Event::Readmit(Origin::Operator)),
        Just(Event::Notice {
            origin: Origin::Operator,
            noticed_at: ms(0),
            deadline: ms(60),
        }),
        proptest::collection::btree_map("[ab]", any_stage(), 0..3).prop_map(|table| {
            let table = table.into_iter();
            Event::Table(table.map(|(name, stage)| (name.into(), stage)).collect())
        }),
        any_slot().prop_map(Event::NotWarned),
        (any_slot(), kill).prop_map(|(slot, result)| Event::KillSent { slot, result }),
        (any_slot(), any::<bool>(), any::<bool>())
            .prop_map(|(slot, killed, init)| { Event::Searched { slot, killed, init } }),
        any_slot().prop_map(|slot| Event::Certificates(vec![(slot, Certificate::Empty)])),
        (any_slot(), release)
            .prop_map(|(slot, result)| Event::ReleasesAnswered(vec![(slot, result)])),
        any_slot().prop_map(|slot| Event::ClaimsFound(vec![slot])),
    ]
}

proptest! {
    /// Whatever is reported in whatever order, a release has its certificate, or never ran.
    #[test]
    fn nothing_is_released_without_proof(
        events in proptest::collection::vec((0_u64..10, any_event()), 1..60),
    ) {
        let mut machine = begun();
        let (mut now, mut proven) = (0, BTreeSet::new());
        for (step, event) in events {
            now += step;
            match &event {
                Event::Certificates(of) => proven.extend(of.iter().map(|(slot, _)| slot.clone())),
                Event::ClaimsFound(of) => proven.extend(of.clone()),
                Event::Table(entries) => for (session, stage) in entries {
                    if let TableStage::Reserved { generation } = stage {
                        proven.insert(slot(session, *generation));
                    }
                },
                _ => {}
            }
            for action in machine.on(ms(now), event) {
                if let Action::Release(slots) = action {
                    prop_assert!(slots.iter().all(|slot| proven.contains(slot)), "{slots:?}");
                }
            }
            prop_assert!(machine.run.counts_are_right());
            if let Some(wake) = machine.next_wake() {
                machine.on(wake.max(ms(now)), Event::Tick).clear();
                prop_assert!(machine.run.waits_for_table() || machine.next_wake() != Some(wake));
            }
        }
    }
}
