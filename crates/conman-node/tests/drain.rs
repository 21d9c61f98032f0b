//! A node is emptied in an orderly manner: in order, a few at a time, over restarts.

mod stage;

use conman_node::EnsureError;
use conman_proto::{DrainReport, DrainRequest, DrainState, EventKind, NodeState, SessionState};
use stage::{Daemon, Stage, eventually, idle, program, session, web};

fn request() -> DrainRequest {
    DrainRequest {
        reason: Some("new kernel".to_owned()),
        ..DrainRequest::default()
    }
}

fn await_drained(daemon: &Daemon) -> DrainReport {
    eventually("the node to be drained", || {
        let report = daemon.node.drain_report()?;
        (report.state == DrainState::Drained).then_some(report)
    })
}

#[test]
fn every_session_is_released_and_no_new_one_is_admitted_until_the_drain_is_taken_back() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let before = daemon.start("s0", &idle());
    for id in ["s1", "s2", "s3"] {
        daemon.start(id, &idle());
    }
    let begun = daemon
        .run(daemon.node.drain(&request()))
        .expect("it begins");
    assert_eq!(begun.reason, "new kernel");
    let late = daemon.run(daemon.node.ensure(&session("late"), &idle(), true));
    assert!(
        matches!(late, Err(EnsureError::Draining { .. })),
        "{late:?}"
    );

    let report = await_drained(&daemon);
    assert_eq!((report.released, report.remaining), (4, 0));
    assert!(report.unreleased.is_empty() && report.finished_at.is_some());
    assert_eq!(stage.alive(), 0);
    let shown = daemon.await_state("s0", SessionState::Stopped);
    assert_eq!(shown.reason.as_deref(), Some("drained: new kernel"));
    assert_eq!(daemon.node.view().state, NodeState::Draining);
    let again = daemon.run(daemon.node.drain(&DrainRequest::default()));
    assert_eq!(
        again.expect("it is told"),
        report,
        "asking again changes nothing"
    );

    daemon.run(daemon.node.undrain()).expect("it is taken back");
    daemon.run(daemon.node.undrain()).expect("nothing is to do");
    assert_eq!(daemon.node.drain_report(), None);
    assert_eq!(daemon.node.view().state, NodeState::Live);
    assert!(daemon.start("s0", &idle()).generation > before.generation);

    daemon.run(daemon.node.journal().flush());
    let page = daemon.run(daemon.node.journal().page(0, 1_000));
    let events = page.expect("readable").events.into_iter();
    let events: Vec<_> = events.map(|event| event.kind).collect();
    for kind in [
        EventKind::DrainStarted,
        EventKind::DrainFinished,
        EventKind::NodeUndrained,
    ] {
        assert!(events.contains(&kind), "{kind}: {events:?}");
    }
}

#[test]
fn sessions_that_nobody_uses_go_first() {
    let stage = Stage::new();
    let daemon = stage.boot();
    // The first by name, and used.
    daemon.start("a", &web());
    daemon.start("b", &idle());
    let route = daemon.run(daemon.node.route(&session("a"), false));
    let _used = route.expect("it runs").activity.begin();
    let one_at_a_time = DrainRequest {
        parallel: Some(1),
        ..request()
    };
    let plan = daemon.node.drain_plan(&one_at_a_time);
    let order: Vec<_> = plan.sessions.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(order, ["b", "a"]);
    assert_eq!(daemon.node.drain_report(), None, "a plan begins nothing");
    daemon
        .run(daemon.node.drain(&one_at_a_time))
        .expect("it begins");
    await_drained(&daemon);
    let ended = |id| daemon.show(id).ended_at.expect("it has ended");
    assert!(ended("b") <= ended("a"));
}

#[test]
fn a_program_gets_the_signal_and_the_time_that_the_operator_grants() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let file = |name: &str| stage.state.path().join(name);
    let polite = format!(
        "trap 'echo saved >{}; exit 0' TERM; : >{}; while :; do sleep 0.05; done",
        file("saved").display(),
        file("ready").display()
    );
    daemon.start("polite", &program(&polite));
    eventually("the trap to be set", || {
        file("ready").exists().then_some(())
    });
    let graceful = DrainRequest {
        signal: Some("SIGTERM".to_owned()),
        grace_ms: Some(3_600_000),
        ..request()
    };
    daemon.run(daemon.node.drain(&graceful)).expect("it begins");
    let report = await_drained(&daemon);
    assert_eq!(report.released, 1);
    let saved = std::fs::read_to_string(file("saved"));
    assert_eq!(saved.expect("it was given time"), "saved\n");
}

#[test]
fn a_daemon_that_is_restarted_goes_on_with_the_drain() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let ready = stage.state.path().join("ready");
    let rude = format!(
        "trap '' TERM; : >{}; while :; do sleep 0.05; done",
        ready.display()
    );
    daemon.start("rude", &program(&rude));
    eventually("the trap to be set", || ready.exists().then_some(()));
    let patient = DrainRequest {
        signal: Some("SIGTERM".to_owned()),
        grace_ms: Some(3_600_000),
        ..request()
    };
    daemon.run(daemon.node.drain(&patient)).expect("it begins");
    daemon.vanish();

    let daemon = stage.boot();
    let report = daemon.node.drain_report().expect("it goes on");
    assert_eq!(
        (report.state, report.reason.as_str()),
        (DrainState::Draining, "new kernel")
    );
    let late = daemon.run(daemon.node.ensure(&session("late"), &idle(), true));
    assert!(
        matches!(late, Err(EnsureError::Draining { .. })),
        "{late:?}"
    );
    // Who has had no turn, or whose time is not over, may still be kept.
    daemon.run(daemon.node.undrain()).expect("it is taken back");
    daemon.vanish();
    let daemon = stage.boot();
    assert_eq!(daemon.node.drain_report(), None);
    daemon.start("late", &idle());
}
