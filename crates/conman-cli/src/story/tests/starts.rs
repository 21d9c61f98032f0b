//! Stories of starts: under way, and failed.

use super::*;

#[test]
fn a_session_that_is_starting() {
    let starting = session(7, SessionState::Starting, None);
    let scene = Scene::new()
        .at(0, SessionClaimed, "starting python:demo with docker")
        .phases(7, &WHOLE_START[..6]);
    assert_told(&scene.told(Some(&starting), 5_000),
"\
alice is starting, for 5 s.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (5 s ago), on n1.
It has been starting for 5.00 s: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 4.67 s so far.
What took longest was waiting for the program to be ready (`ready`): 4.67 s, 93 % of the whole.
Of it all conman itself took 2.9 ms, the container runtime 324 ms, the program 4.67 s.
It is now waiting for the program to be ready (`ready`).
-> Its start fails if it is not ready within 1 min of its start.
-> `conman events --session alice` shows what happens.");
}

#[test]
fn a_start_that_failed_because_the_program_never_answered() {
    let failed = ended(
        SessionState::Failed,
        NOT_READY,
        EndCause::StartFailed,
        Some("ready"),
    );
    let scene = Scene::new()
        .at(0, SessionClaimed, "starting python:demo with docker")
        .phases(7, &WHOLE_START[..6])
        .at(60_331, SessionKilled, "SIGKILL: the start failed")
        .at(60_343, SessionDead, "its PID namespace is empty")
        .at(60_346, SessionFailed, NOT_READY)
        .at(60_346, SessionReleased, NOT_READY)
        .at(61_000, SessionCleaned, "removed what its container left");
    assert_told(&scene.told(Some(&failed), 90_000),
"\
alice failed to start.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (1 min 30 s ago), on n1.
The start lasted 1 min: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 1 min until it failed.
What took longest was waiting for the program to be ready (`ready`): 1 min, 99 % of the whole.
Of it all conman itself took 2.9 ms, the container runtime 324 ms, the program 1 min.
It failed while waiting for the program to be ready (`ready`): port 8080 was not ready within 60 s (connection refused); see that the program listens there, or raise ready_timeout_s.
12 ms after SIGKILL it was certified dead, 15 ms after SIGKILL it was released.
What its container left is removed.
-> Check that its program listens on port 8080 within 1 min, not on another port; --ready-timeout gives it longer.
-> Its output was removed with its container; `conman logs -f alice` right after its next start shows it.
-> `conman run alice` starts it again.");
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
        .at(0, SessionClaimed, "starting python:demo with docker")
        .at(31, SessionFailed, reason)
        .at(31, SessionReleased, reason);
    assert_told(&scene.told(Some(&failed), 5_000),
"\
alice failed to start.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (5 s ago), on n1.
The start lasted 31 ms until it failed.
It failed while creating the container (`create`): image `python:demo` is not on this node; load it first.
-> Check its image `python:demo` and its spec: the runtime could not make the container.
-> `conman run alice` starts it again.");
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
        .at(0, SessionClaimed, "starting python:demo with docker")
        .at(406, SessionDead, "its PID namespace is empty")
        .at(408, SessionFailed, reason)
        .at(408, SessionReleased, reason)
        .at(700, SessionCleaned, "removed what its container left");
    assert_told(&scene.told(Some(&failed), 5_000),
"\
alice failed to start.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (5 s ago), on n1.
The start lasted 406 ms until it failed.
It failed while waiting for the program to be ready (`ready`): the program ended before it was ready, with exit code 3.
It was certified dead and released.
What its container left is removed.
-> Check its command and arguments: its program must stay running.
-> Its output was removed with its container; `conman logs -f alice` right after its next start shows it.
-> `conman run alice` starts it again.");
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
        .at(0, SessionClaimed, "starting python:demo with docker")
        .at(60_331, SessionKilled, "SIGKILL: the start failed")
        .at(60_343, SessionDead, "its PID namespace is empty");
    assert_told(&scene.told(Some(&failed), 60_400),
"\
alice failed to start.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (1 min ago), on n1.
The start lasted 1 min until it failed.
It failed while waiting for the program to be ready (`ready`): port 8080 was not ready within 60 s (connection refused); see that the program listens there, or raise ready_timeout_s.
12 ms after SIGKILL it was certified dead.
What its container left is still being removed.
-> Check that its program listens on port 8080 within 1 min, not on another port; --ready-timeout gives it longer.
-> `conman logs alice` shows what it printed.
-> `conman run alice` starts it again.");
}

#[test]
fn a_session_that_is_starting_and_whose_process_is_known() {
    let mut starting = session(7, SessionState::Starting, None);
    starting.pid = Some(4711);
    let claimed = "starting python:demo with docker";
    let scene = Scene::new().at(0, SessionClaimed, claimed);
    assert_told(
        &scene.told(Some(&starting), 5_000),
        "\
alice is starting, for 5 s.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (5 s ago), on n1.
It is now waiting for the program to be ready (`ready`).
-> Its start fails if it is not ready within 1 min of its start.
-> `conman events --session alice` shows what happens.",
    );
}
