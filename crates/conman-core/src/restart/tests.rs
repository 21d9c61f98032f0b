//! Tests of which sessions are restarted automatically.

use conman_proto::SessionRequest;

use super::*;
use crate::placement::turn;
use crate::{SpecPolicy, resolve};

const NOW: i64 = 1_000_000;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

fn id() -> SessionId {
    "alice".parse().expect("an id")
}

fn spec(on_node_loss: OnNodeLoss) -> ResolvedSpec {
    let request = SessionRequest {
        image: Some("a:b".to_owned()),
        on_node_loss: Some(on_node_loss),
        ..SessionRequest::default()
    };
    resolve(&SpecPolicy::default(), &id(), &request).expect("valid")
}

fn after(count: u32, since: i64) -> ResolvedSpec {
    ResolvedSpec {
        restarted: Some(Restarted {
            from: "n0".to_owned(),
            because: NodeLoss::Preempted,
            count,
            since: at(since),
        }),
        ..spec(OnNodeLoss::Restart)
    }
}

fn stopped(cause: EndCause) -> Ownerless {
    Ownerless::Ended {
        cause,
        ran: true,
        exit_code: None,
    }
}

const FAILED_START: Ownerless = Ownerless::Ended {
    cause: EndCause::StartFailed,
    ran: false,
    exit_code: None,
};

fn verdict(spec: &ResolvedSpec, end: Ownerless) -> Verdict {
    judge(spec, at(NOW - 100), "n1", end, at(NOW))
}

#[test]
fn what_lost_its_node_is_restarted_where_its_spec_says_so() {
    let ends = [
        (Ownerless::NodeGone, NodeLoss::Lost),
        (stopped(EndCause::Preempted), NodeLoss::Preempted),
        (stopped(EndCause::Drained), NodeLoss::Drained),
        (stopped(EndCause::NodeLost), NodeLoss::Lost),
    ];
    for (end, because) in ends {
        let expected = Restarted {
            from: "n1".to_owned(),
            because,
            count: 1,
            since: at(NOW),
        };
        let restart = spec(OnNodeLoss::Restart);
        assert_eq!(
            verdict(&restart, end),
            Verdict::Restart(expected),
            "{end:?}"
        );
        assert_eq!(verdict(&spec(OnNodeLoss::Wait), end), Verdict::No);
    }
}

#[test]
fn a_session_whose_time_is_over_is_not_restarted_automatically() {
    let until = |second| ResolvedSpec {
        expires_at: Some(at(second)),
        ..spec(OnNodeLoss::Restart)
    };
    assert_eq!(verdict(&until(NOW), Ownerless::NodeGone), Verdict::No);
    let later = verdict(&until(NOW + 1), Ownerless::NodeGone);
    assert!(matches!(later, Verdict::Restart(_)), "{later:?}");
}

#[test]
fn what_was_stopped_or_ended_by_itself_stays_so() {
    let exited = |ran| Ownerless::Ended {
        cause: EndCause::Exited,
        ran,
        exit_code: Some(1),
    };
    for end in [
        stopped(EndCause::Deleted),
        stopped(EndCause::Idle),
        stopped(EndCause::Lifetime),
        exited(true),
        exited(false),
        FAILED_START,
    ] {
        assert_eq!(verdict(&spec(OnNodeLoss::Restart), end), Verdict::No);
    }
    // Earlier restarts do not matter either.
    let restarted = after(1, NOW - 50);
    for end in [stopped(EndCause::Deleted), exited(true), exited(false)] {
        assert_eq!(verdict(&restarted, end), Verdict::No, "{end:?}");
    }
}

#[test]
fn a_restart_that_failed_is_tried_again_whoever_ordered_it() {
    let Verdict::Restart(next) = verdict(&after(2, NOW - 150), FAILED_START) else {
        panic!("it is tried again");
    };
    assert_eq!((next.count, next.since), (3, at(NOW - 150)));
    let node = (next.from.as_str(), next.because);
    assert_eq!(node, ("n0", NodeLoss::Preempted), "the one that it lost");
}

#[test]
fn what_took_its_node_stays_known_until_a_start_that_a_connection_asked_for_succeeds() {
    let (wait, now) = (spec(OnNodeLoss::Wait), at(NOW));
    let drained = stopped(EndCause::Drained);
    let first = asked_for(&wait, drained, Some("n1"), false, now).expect("it lost its node");
    let expected = Restarted {
        from: "n1".to_owned(),
        because: NodeLoss::Drained,
        count: 0,
        since: now,
    };
    assert_eq!(first, expected);
    let failed = ResolvedSpec {
        restarted: Some(first.clone()),
        ..wait.clone()
    };
    assert_eq!(lost_by(&failed, FAILED_START), Some(NodeLoss::Drained));
    assert_eq!(
        verdict(&failed, FAILED_START),
        Verdict::No,
        "no client waits"
    );
    let next = asked_for(&failed, FAILED_START, Some("n2"), false, at(NOW + 5));
    assert_eq!(next, Some(first));
    // Its node was declared dead, and the record does not say so.
    let lost = asked_for(&wait, FAILED_START, Some("n1"), true, now).expect("it lost its node");
    assert_eq!(lost.because, NodeLoss::Lost);
    // It became ready, or ended by itself: a later failure is not a loss.
    for end in [stopped(EndCause::Exited), stopped(EndCause::Deleted)] {
        assert_eq!(lost_by(&failed, end), None);
        assert_eq!(asked_for(&failed, end, Some("n2"), false, now), None);
    }
    // It is restarted automatically as often as any other.
    let restart = ResolvedSpec {
        on_node_loss: OnNodeLoss::Restart,
        ..failed
    };
    let Verdict::Restart(next) = verdict(&restart, FAILED_START) else {
        panic!("it is to be restarted");
    };
    assert_eq!((next.count, next.from.as_str()), (1, "n1"));
    let often = after(MAX_RESTARTS, NOW - 200);
    let asked = asked_for(&often, FAILED_START, Some("n1"), false, now);
    assert_eq!(asked.map(|asked| asked.count), Some(MAX_RESTARTS));
}

#[test]
fn a_restart_that_the_registry_took_too_long_for_is_tried_again() {
    let unrecorded = Ownerless::Ended {
        cause: EndCause::Unrecorded,
        ran: false,
        exit_code: None,
    };
    let next = verdict(&after(1, NOW - 200), unrecorded);
    assert!(matches!(next, Verdict::Restart(_)), "{next:?}");
    let first = verdict(&spec(OnNodeLoss::Restart), unrecorded);
    assert_eq!(first, Verdict::No, "it never was on a node that went");
}

#[test]
fn a_session_that_is_restarted_too_often_in_a_short_time_is_given_up() {
    let often = after(MAX_RESTARTS, NOW - 200);
    let given_up = Verdict::GivenUp {
        count: MAX_RESTARTS,
    };
    for end in [Ownerless::NodeGone, FAILED_START] {
        assert_eq!(verdict(&often, end), given_up);
    }
    let long_ago = after(MAX_RESTARTS, NOW - 101 - WINDOW_S);
    let Verdict::Restart(next) = verdict(&long_ago, Ownerless::NodeGone) else {
        panic!("it has run for long since");
    };
    assert_eq!((next.count, next.since), (1, at(NOW)));
}

#[test]
fn of_the_live_nodes_each_has_a_turn_of_its_own() {
    let nodes = ["n1", "n2", "n3", "n4"];
    let mut first = std::collections::BTreeSet::<&str>::new();
    for number in 0..64 {
        let id: SessionId = format!("s{number}").parse().expect("an id");
        let mut turns: Vec<_> = nodes
            .iter()
            .map(|me| turn(me, &nodes, id.as_str()))
            .collect();
        first.extend(
            nodes
                .iter()
                .filter(|me| turn(me, &nodes, id.as_str()) == Some(0)),
        );
        turns.sort();
        assert_eq!(turns, [Some(0), Some(1), Some(2), Some(3)]);
    }
    assert_eq!(first.len(), nodes.len(), "none has to do all");
    assert_eq!(turn("n9", &nodes, "alice"), None);
}

#[test]
fn the_first_restarts_at_once_and_the_next_when_it_did_not() {
    let generation = Generation::FIRST;
    let (mut first, mut second) = (Watch::default(), Watch::default());
    let id = id();
    assert!(first.is_due(0, (&id, generation), 0, 1));
    assert!(!first.is_due(1, (&id, generation), 0, 1), "it is under way");
    assert!(!second.is_due(0, (&id, generation), 1, 1));
    assert!(!second.is_due(TURN_MS - 1, (&id, generation), 1, 1));
    assert!(second.is_due(TURN_MS, (&id, generation), 1, 1));
}

#[test]
fn what_no_node_takes_is_tried_again_after_longer_and_longer() {
    let generation = Generation::FIRST;
    let mut watch = Watch::default();
    let id = id();
    let mut now_ms = 0;
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let began = now_ms;
        while !watch.is_due(now_ms, (&id, generation), 0, 1) {
            now_ms += 1;
        }
        pauses.push(now_ms - began);
        watch.tried(now_ms, &id);
    }
    assert_eq!(
        pauses,
        [
            0,
            1_000,
            2_000,
            4_000,
            8_000,
            16_000,
            LONGEST_PAUSE_MS,
            LONGEST_PAUSE_MS
        ]
    );
}

#[test]
fn restarts_that_follow_each_other_are_further_and_further_apart() {
    let generation = Generation::FIRST;
    let id = id();
    for (count, pause_ms) in [(1, 0), (2, 1_000), (3, 2_000), (5, 8_000)] {
        let mut watch = Watch::default();
        assert_eq!(watch.is_due(0, (&id, generation), 0, count), pause_ms == 0);
        if pause_ms > 0 {
            assert!(!watch.is_due(pause_ms - 1, (&id, generation), 0, count));
            assert!(watch.is_due(pause_ms, (&id, generation), 0, count));
        }
    }
}

#[test]
fn what_has_an_owner_again_is_forgotten_and_a_later_loss_is_a_new_one() {
    let mut watch = Watch::default();
    let id = id();
    let next = Generation::new(9).expect("not zero");
    assert!(watch.is_due(0, (&id, Generation::FIRST), 0, 1));
    watch.keep(|_| false);
    assert!(!watch.is_idle(), "it is under way");
    watch.tried(10, &id);
    assert!(watch.is_due(11, (&id, next), 0, 1), "lost once more");
    watch.tried(12, &id);
    watch.keep(|_| false);
    assert!(watch.is_idle());
}
