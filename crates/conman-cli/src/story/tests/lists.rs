//! The lists of events and of earlier generations.

use super::*;

#[test]
fn the_present_generation_comes_first_and_then_every_earlier_one() {
    let mut scene = Scene::new();
    for number in 1..=3 {
        let begin = i64::try_from(number).expect("small") * 1_000;
        scene = scene.event(number, begin, SessionClaimed, "claimed").event(
            number,
            begin + 500,
            SessionReleased,
            "idle for 60 s",
        );
    }
    scene = scene.because(EndCause::Idle);
    scene.0.truncated = true;
    let mut running = session(4, SessionState::Running, None);
    running.started_at = Some(at(9_000));
    assert_told(
        &scene.text(Some(&running), 10_000),
        "\
alice is running on n1, for 1 s
Generation 4 was requested at 2026-03-01 12:00:00.000 UTC (10 s ago)
Its oldest events are no longer in the journal

Earlier:
generation 3 on n1: started at 2026-03-01 12:00:03.000 UTC; ended at 2026-03-01 12:00:03.500 UTC: it had no connections: idle for 60 s
generation 2 on n1: started at 2026-03-01 12:00:02.000 UTC; ended at 2026-03-01 12:00:02.500 UTC: idle for 60 s
generation 1 on n1: started at 2026-03-01 12:00:01.000 UTC; ended at 2026-03-01 12:00:01.500 UTC: idle for 60 s

Next:
It is reached at http://alice.localhost:7701/.
`conman exec -it alice -- sh` opens a shell in it.",
    );
}

#[test]
fn freezes_and_pauses_and_missing_events_are_told() {
    let lapsed = "all sessions are frozen until the node owns them again: no answer";
    let scene = Scene::new()
        .of_node(-2_000, NodeFrozen, "before its start")
        .of_node(-1_000, NodeThawed, "thawed")
        .at(0, SessionClaimed, "starting")
        .at(100, SessionReady, "ready")
        .at(5_000, SessionPaused, "paused: on request")
        .at(6_000, SessionResumed, "resumed")
        .of_node(7_000, EventsLost, "events may be missing before this one")
        .of_node(8_000, NodeFrozen, lapsed);
    let frozen = session(7, SessionState::Frozen, None);
    let story = scene.text(Some(&frozen), 10_000);
    for part in [
        "alice is frozen on n1: its node cannot prove at present that it owns it\n",
        "2026-03-01 12:00:05.000 UTC +4.90 s session_paused paused: on request\n",
        "2026-03-01 12:00:06.000 UTC +1.00 s session_resumed resumed\n",
        "2026-03-01 12:00:07.000 UTC +1.00 s events_lost events may be missing before",
        &format!("2026-03-01 12:00:08.000 UTC +1.00 s node_frozen {lapsed}\n"),
        "\nWait: it continues once its node owns it again.",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
    for never in ["before its start", "starts it again"] {
        assert!(!story.contains(never), "{never}: {story}");
    }
}

#[test]
fn of_very_many_events_the_latest_are_shown() {
    let mut scene = started();
    for number in 0..200 {
        scene = scene.at(1_000 + number, SessionPaused, "paused");
    }
    let story = scene.text(None, 10_000);
    let command = "2 earlier ones: `conman events --session alice --no-follow`";
    assert!(story.contains(command), "{story}");
    assert_eq!(story.matches(" session_").count(), 200, "{story}");
    assert!(!story.contains("session_claimed"), "{story}");
}
