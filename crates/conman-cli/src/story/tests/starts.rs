//! Stories of starts: under way, and failed.

use super::*;

const CLAIMED: &str = "starting python:demo with docker";

const LOGS: &str = "`conman logs alice` shows what it printed, while its log is kept; \
    `conman logs -f alice` right after its next start shows that in any case.";

#[track_caller]
fn assert_has(told: &str, parts: &[&str]) {
    for part in parts {
        assert!(told.contains(part), "{part}: {told}");
    }
}

#[test]
fn a_session_that_is_starting() {
    let starting = session(7, SessionState::Starting, None);
    let scene = Scene::new()
        .at(0, SessionClaimed, CLAIMED)
        .phases(7, &WHOLE_START[..6]);
    assert_told(
        &scene.text(Some(&starting), 5_000),
        "\
alice is starting on n1, for 5 s: waiting for the program to be ready (`ready`)
Generation 7 was requested at 2026-03-01 12:00:00.000 UTC (5 s ago)
Start: 5.00 s so far (claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 4.67 s)
Longest: waiting for the program to be ready (`ready`), 4.67 s

Events:
2026-03-01 12:00:00.000 UTC session_claimed starting python:demo with docker (on n1)

Next:
Its start fails if it is not ready within 1 min of its start.
`conman events --session alice` shows what happens.",
    );
}

#[test]
fn a_start_under_way_has_its_phases_from_the_session() {
    let mut starting = session(7, SessionState::Starting, None);
    for (name, ms) in [("start", 203.0), ("start.cgroup", 3.0), ("claim", 1.4)] {
        starting.phases_ms.insert(name.to_owned(), ms);
    }
    let told = Scene::new().text(Some(&starting), 5_000);
    let start = "Start: 5.00 s so far (claim 1.4 ms, start 203 ms, verify 4.80 s)\n";
    assert_has(&told, &[": verifying the process (`verify`)\n", start]);
}

#[test]
fn a_start_with_a_pool_shows_its_way() {
    let mut running = session(7, SessionState::Running, None);
    running.started_at = Some(at(810));
    running.spec.pool = 2;
    let shown = |running: &Session| started().text(Some(running), 200_000);
    assert_has(
        &shown(&running),
        &["No container made ahead was ready (`pool`)"],
    );
    running.phases_ms.insert("start.ahead".to_owned(), 0.4);
    assert_has(&shown(&running), &["It took a container made ahead\n"]);
    running.spec.pool = 0;
    assert!(!shown(&running).contains("made ahead"));
}

#[test]
fn a_start_that_failed_because_the_program_never_answered() {
    let mut failed = ended(
        SessionState::Failed,
        NOT_READY,
        EndCause::StartFailed,
        Some("ready"),
    );
    let scene = Scene::new()
        .at(0, SessionClaimed, CLAIMED)
        .phases(7, &WHOLE_START[..6])
        .at(60_331, SessionKilled, "SIGKILL: the start failed")
        .at(60_343, SessionDead, "its PID namespace is empty")
        .at(60_346, SessionFailed, NOT_READY)
        .at(60_346, SessionReleased, NOT_READY)
        .at(61_000, SessionCleaned, "removed what its container left");
    let told = scene.text(Some(&failed), 90_000);
    let told = told.replace(NOT_READY, "<reason>").replace(LOGS, "<logs>");
    assert_told(
        &told,
        "\
alice failed on n1: its start failed while waiting for the program to be ready (`ready`)
Reason: <reason>
Generation 7 was requested at 2026-03-01 12:00:00.000 UTC (1 min 30 s ago)
Start: 1 min until it ended (claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 1 min)
Longest: waiting for the program to be ready (`ready`), 1 min

Events:
2026-03-01 12:00:00.000 UTC session_claimed starting python:demo with docker (on n1)
2026-03-01 12:01:00.331 UTC +1 min session_killed SIGKILL: the start failed
2026-03-01 12:01:00.343 UTC +12 ms session_dead its PID namespace is empty
2026-03-01 12:01:00.346 UTC +3.0 ms session_failed <reason>
2026-03-01 12:01:00.346 UTC +0.0 ms session_released <reason>
2026-03-01 12:01:01.000 UTC +654 ms session_cleaned removed what its container left

Next:
Check that its program listens on port 8080 within 1 min, not on another port; --ready-timeout gives it longer.
<logs>
<again>",
    );
    failed.spec.ready_path = Some("/healthy".to_owned());
    let told = scene.text(Some(&failed), 90_000);
    assert_has(&told, &["It is ready once it answers GET /healthy with"]);
}

#[test]
fn a_start_that_failed_before_any_phase_was_told() {
    let reason = "create: image `python:demo` is not on this node; load it first";
    let failed = ended(
        SessionState::Failed,
        reason,
        EndCause::StartFailed,
        Some("create"),
    );
    let scene = Scene::new()
        .at(0, SessionClaimed, CLAIMED)
        .at(31, SessionFailed, reason)
        .at(31, SessionReleased, reason);
    assert_told(
        &scene.text(Some(&failed), 5_000).replace(reason, "<reason>"),
        "\
alice failed on n1: its start failed while creating the container (`create`)
Reason: <reason>
Generation 7 was requested at 2026-03-01 12:00:00.000 UTC (5 s ago)
Start: 31 ms until it ended (create 31 ms)
Longest: creating the container (`create`), 31 ms

Events:
2026-03-01 12:00:00.000 UTC session_claimed starting python:demo with docker (on n1)
2026-03-01 12:00:00.031 UTC +31 ms session_failed <reason>
2026-03-01 12:00:00.031 UTC +0.0 ms session_released <reason>

Next:
Check its image `python:demo` and its spec: the runtime could not make the container.
<again>",
    );
}

#[test]
fn a_start_whose_program_ended_at_once() {
    let reason = "the program ended before it was ready, with exit code 3";
    let mut failed = ended(
        SessionState::Failed,
        reason,
        EndCause::Exited,
        Some("ready"),
    );
    failed.exit_code = Some(3);
    let scene = Scene::new()
        .at(0, SessionClaimed, CLAIMED)
        .at(406, SessionDead, "its PID namespace is empty")
        .at(408, SessionFailed, reason)
        .at(408, SessionReleased, reason);
    assert_has(
        &scene.text(Some(&failed), 5_000),
        &[
            "alice failed on n1: its start failed while waiting for the program to be ready \
             (`ready`), with exit code 3\n",
            "Start: 406 ms until it ended (ready 406 ms)\n",
            "Check its command and arguments: its program must stay running.",
            LOGS,
            AGAIN,
        ],
    );
}

#[test]
fn a_start_whose_failure_the_journal_does_not_tell_yet() {
    let failed = ended(
        SessionState::Failed,
        NOT_READY,
        EndCause::StartFailed,
        Some("ready"),
    );
    let scene = Scene::new()
        .at(0, SessionClaimed, CLAIMED)
        .at(60_331, SessionKilled, "SIGKILL: the start failed")
        .at(60_343, SessionDead, "its PID namespace is empty");
    assert_has(
        &scene.text(Some(&failed), 60_400),
        &[
            "alice failed on n1: its start failed while waiting",
            &format!("Reason: {NOT_READY}\n"),
            "Start: 1 min until it ended",
            "Check that its program listens on port 8080",
        ],
    );
}

#[test]
fn a_session_that_is_starting_and_whose_process_is_known() {
    let mut starting = session(7, SessionState::Starting, None);
    starting.pid = Some(4711);
    let scene = Scene::new().at(0, SessionClaimed, CLAIMED);
    let told = scene.text(Some(&starting), 5_000);
    let now = "for 5 s: waiting for the program to be ready (`ready`)\n";
    assert_has(&told, &[now]);
    starting.pid = None;
    let told = scene.text(Some(&starting), 5_000);
    assert_has(&told, &["for 5 s: recording the ownership (`claim`)\n"]);
}
