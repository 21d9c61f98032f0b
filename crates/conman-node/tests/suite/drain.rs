//! A node is emptied in an orderly manner: in order, a few at a time, over restarts.

use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use crate::stage::{Daemon, Stage, eventually, idle, program, session, web};
use async_trait::async_trait;
use conman_core::EndCause;
use conman_linux::PidFd;
use conman_node::{EnsureError, NotHere, Relocate, RouteError};
use conman_proto::{
    DrainReport, DrainRequest, DrainState, Event, EventKind, Generation, NodeState, OnNodeLoss,
    ResolvedSpec, SessionId, SessionRequest, SessionState,
};
use conman_registry::RecordState;
use futures_util::FutureExt as _;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use tokio::sync::Semaphore;

fn request() -> DrainRequest {
    DrainRequest {
        reason: Some("new kernel".to_owned()),
        ..DrainRequest::default()
    }
}

fn await_drained(daemon: &Daemon) -> DrainReport {
    eventually("the node to be drained", || {
        let report = daemon.node.drain().report()?;
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
        .run(daemon.node.drain().begin(&request()))
        .expect("it begins");
    assert_eq!(begun.reason, "new kernel");
    let late = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("late"), &idle(), true),
    );
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
    assert_eq!(daemon.node.status().view().state, NodeState::Draining);
    let again = daemon.run(daemon.node.drain().begin(&DrainRequest::default()));
    assert_eq!(
        again.expect("it is told"),
        report,
        "asking again changes nothing"
    );

    daemon
        .run(daemon.node.drain().cancel())
        .expect("it is taken back");
    daemon
        .run(daemon.node.drain().cancel())
        .expect("nothing is to do");
    assert_eq!(daemon.node.drain().report(), None);
    assert_eq!(daemon.node.status().view().state, NodeState::Live);
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
    let route = daemon.run(daemon.node.access().route(&session("a"), false));
    let _used = route.expect("it runs").activity.begin();
    let one_at_a_time = DrainRequest {
        parallel: Some(1),
        ..request()
    };
    let plan = daemon.node.drain().plan(&one_at_a_time);
    let order: Vec<_> = plan.sessions.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(order, ["b", "a"]);
    assert_eq!(daemon.node.drain().report(), None, "a plan begins nothing");
    daemon
        .run(daemon.node.drain().begin(&one_at_a_time))
        .expect("it begins");
    await_drained(&daemon);
    let ended = |id| daemon.show(id).ended_at.expect("it has ended");
    assert!(ended("b") <= ended("a"));
}

/// Other nodes that take a session once they are let.
#[derive(Debug)]
struct Slow {
    asked: Semaphore,
    lets: Semaphore,
}

#[async_trait]
impl Relocate for Slow {
    async fn relocate(&self, _id: &SessionId, _generation: Generation) -> Result<String, String> {
        self.asked.add_permits(1);
        let let_go = self.lets.acquire().await;
        let_go.map_err(|error| error.to_string())?.forget();
        Ok("other".to_owned())
    }

    fn may_run_elsewhere(&self, id: &SessionId, _spec: &ResolvedSpec) -> bool {
        id.as_str() != "pinned"
    }
}

#[test]
fn sessions_go_as_planned_and_wait_for_no_node_that_takes_another() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let slow = Arc::new(Slow {
        asked: Semaphore::new(0),
        lets: Semaphore::new(0),
    });
    daemon
        .node
        .drain()
        .relocate_by(Arc::clone(&slow) as Arc<dyn Relocate>);
    for id in ["c", "a", "b"] {
        let mut restarted = idle();
        restarted.on_node_loss = Some(OnNodeLoss::Restart);
        daemon.start(id, &restarted);
    }
    let one_at_a_time = DrainRequest {
        parallel: Some(1),
        ..request()
    };
    let plan = daemon.node.drain().plan(&one_at_a_time);
    let planned: Vec<_> = plan.sessions.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(planned, ["a", "b", "c"]);
    let last = plan.sessions.last().expect("three");
    assert!(last.at_ms > 0 && plan.predicted_ms > last.at_ms + last.grace_ms);
    daemon
        .run(daemon.node.drain().begin(&one_at_a_time))
        .expect("it begins");
    // None has been taken yet.
    eventually("all to be stopped", || {
        (slow.asked.available_permits() == 3).then_some(())
    });
    assert_eq!(stage.alive(), 0);
    let ended = |id| daemon.show(id).ended_at.expect("it has ended");
    assert!(ended("a") <= ended("b") && ended("b") <= ended("c"));
    let report = daemon.node.drain().report().expect("it goes on");
    assert_eq!(report.state, DrainState::Draining);
    slow.lets.add_permits(3);
    let report = await_drained(&daemon);
    assert_eq!((report.released, report.moved.len()), (3, 3));
}

#[test]
fn a_program_that_asks_for_no_time_gets_some_with_the_signal_that_the_operator_names() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let file = |name: &str| stage.state.path().join(name);
    daemon.start("polite", &program(&polite(&stage)));
    eventually("the trap to be set", || {
        file("ready").exists().then_some(())
    });
    let named = DrainRequest {
        signal: Some("SIGTERM".to_owned()),
        ..request()
    };
    let at_once = DrainRequest {
        grace_ms: Some(0),
        ..named.clone()
    };
    let warning = |request| {
        let plan = daemon.node.drain().plan(request);
        let only = plan.sessions.into_iter().next().expect("one");
        (only.signal, only.grace_ms)
    };
    assert_eq!(warning(&named), (Some("SIGTERM".to_owned()), 10_000));
    assert_eq!(warning(&at_once), (None, 0), "none is sent");
    daemon
        .run(daemon.node.drain().begin(&named))
        .expect("it begins");
    await_drained(&daemon);
    let saved = std::fs::read_to_string(file("saved"));
    assert_eq!(saved.expect("it was sent"), "saved\n");
}

/// Says that it is ready, and saves when it is asked to end.
fn polite(stage: &Stage) -> String {
    let file = |name: &str| stage.state.path().join(name);
    format!(
        "trap 'echo saved >{}; exit 0' TERM; : >{}; while :; do sleep 0.05; done",
        file("saved").display(),
        file("ready").display()
    )
}

#[test]
fn a_program_gets_the_signal_and_the_time_that_the_operator_grants() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let file = |name: &str| stage.state.path().join(name);
    daemon.start("polite", &program(&polite(&stage)));
    eventually("the trap to be set", || {
        file("ready").exists().then_some(())
    });
    let graceful = DrainRequest {
        signal: Some("SIGTERM".to_owned()),
        grace_ms: Some(3_600_000),
        ..request()
    };
    daemon
        .run(daemon.node.drain().begin(&graceful))
        .expect("it begins");
    let report = await_drained(&daemon);
    assert_eq!(report.released, 1);
    let saved = std::fs::read_to_string(file("saved"));
    assert_eq!(saved.expect("it was given time"), "saved\n");
    // It has done as it was told, so another node is to have it.
    let record = daemon.record("polite");
    assert_eq!(record.state.end_cause(), Some(EndCause::Drained));
    let shown = daemon.show("polite");
    assert_eq!(shown.reason.as_deref(), Some("drained: new kernel"));
}

/// Says that it has been told to go, and obeys once the file `obey` is there.
fn slow(stage: &Stage) -> String {
    let file = |name: &str| stage.state.path().join(name);
    format!(
        "trap ': >{}; while ! [ -e {} ]; do sleep 0.05; done; exit 0' TERM; : >{}; \
         while :; do sleep 0.05; done",
        file("told").display(),
        file("obey").display(),
        file("ready").display()
    )
}

/// `first` has been told to go, and `other` runs; then the daemon is gone.
fn told_and_left(stage: &Stage) -> [PidFd; 2] {
    let daemon = stage.boot();
    let file = |name: &str| stage.state.path().join(name);
    let first = daemon.start("first", &program(&slow(stage)));
    let other = daemon.start("other", &idle());
    eventually("the trap to be set", || {
        file("ready").exists().then_some(())
    });
    eventually("the records to say running", || {
        let is_running = |id| matches!(daemon.record(id).state, RecordState::Running { .. });
        (is_running("first") && is_running("other")).then_some(())
    });
    // One at a time, by name.
    let in_turn = DrainRequest {
        signal: Some("SIGTERM".to_owned()),
        grace_ms: Some(3_600_000),
        parallel: Some(1),
        ..request()
    };
    daemon
        .run(daemon.node.drain().begin(&in_turn))
        .expect("it begins");
    eventually("one to be told", || file("told").exists().then_some(()));
    daemon.vanish();
    [first, other].map(|one| PidFd::open(one.pid.expect("a process")).expect("alive"))
}

#[test]
fn a_program_that_does_as_it_was_told_while_no_daemon_runs_is_for_another_node() {
    let stage = Stage::new();
    let [first, other] = told_and_left(&stage);
    std::fs::write(stage.state.path().join("obey"), "").expect("written");
    assert!(other.kill().expect("sent"));
    for process in [first, other] {
        assert!(process.wait_dead(Duration::from_secs(30)).expect("polled"));
    }

    let daemon = stage.boot();
    let record = daemon.record("first");
    assert_eq!(record.state.end_cause(), Some(EndCause::Drained));
    let shown = daemon.show("first");
    assert_eq!(shown.reason.as_deref(), Some("drained: new kernel"));
    let record = daemon.record("other");
    assert_eq!(record.state.end_cause(), Some(EndCause::Exited));
}

#[test]
fn a_program_that_does_as_it_was_told_under_the_next_daemon_is_for_another_node() {
    let stage = Stage::new();
    let [_first, other] = told_and_left(&stage);
    // The drain was taken back: nobody tells it again.
    std::fs::remove_file(stage.state.path().join("drain.json")).expect("removed");
    let daemon = stage.boot();
    assert_eq!(daemon.node.drain().report(), None);
    std::fs::write(stage.state.path().join("obey"), "").expect("written");
    assert!(other.kill().expect("sent"));
    for (id, cause) in [("first", EndCause::Drained), ("other", EndCause::Exited)] {
        let ended = || Some(daemon.record(id).state).filter(RecordState::is_ended);
        let ended = eventually("its record to say ended", ended);
        assert_eq!(ended.end_cause(), Some(cause), "{id}");
    }
}

#[test]
fn a_start_that_a_drain_ends_is_for_another_node() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let never_ready = SessionRequest {
        port: Some(Some(8080)),
        ..idle()
    };
    let starting = {
        let node = Arc::clone(&daemon.node);
        daemon.spawn(async move {
            node.sessions()
                .ensure(&session("alice"), &never_ready, true)
                .await
        })
    };
    eventually("its process", || {
        let known = daemon.node.sessions().get(&session("alice"));
        known.and_then(|session| session.pid)
    });
    daemon
        .run(daemon.node.drain().begin(&request()))
        .expect("it begins");
    let refused = daemon.run(starting).expect("no panic");
    let Err(error @ EnsureError::Draining { .. }) = &refused else {
        panic!("{refused:?}");
    };
    assert!(error.is_retryable(), "{error}");
}

#[test]
fn who_connects_to_what_goes_and_has_closed_its_port_waits_for_its_end() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let served = SessionRequest {
        port: Some(Some(8080)),
        ..program(
            "busybox httpd -f -p 8080 -h /etc & trap 'kill $!' TERM; while :; do sleep 0.05; done",
        )
    };
    daemon.start("alice", &served);
    let alice = session("alice");
    let find = || Box::pin(daemon.node.access().route(&alice, false));
    let route = daemon.run(find()).expect("it serves");
    assert!(!daemon.run(route.has_closed()), "nobody told it to go");
    let patient = DrainRequest {
        signal: Some("SIGTERM".to_owned()),
        grace_ms: Some(3_600_000),
        ..request()
    };
    daemon
        .run(daemon.node.drain().begin(&patient))
        .expect("it begins");
    eventually("the port to be closed", || {
        daemon.run(route.has_closed()).then_some(())
    });
    assert_eq!(daemon.show("alice").state, SessionState::Running);
    let turned = daemon
        .node
        .access()
        .own_route(&alice, route.generation)
        .expect_err("other nodes wait as well");
    assert!(matches!(turned, NotHere::NotReady), "{turned:?}");
    let mut waiting = find();
    let held = daemon.run(async { (&mut waiting).now_or_never().is_none() });
    assert!(held, "it has not ended yet");
    route.process.kill().expect("killed");
    let refused = daemon.run(waiting);
    assert!(
        matches!(&refused, Err(RouteError::Ended { state, .. }) if state.is_ended()),
        "{refused:?}"
    );
    let record = daemon.record("alice");
    assert_eq!(record.state.end_cause(), Some(EndCause::Drained));
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
    daemon
        .run(daemon.node.drain().begin(&patient))
        .expect("it begins");
    daemon.vanish();

    let daemon = stage.boot();
    let report = daemon.node.drain().report().expect("it goes on");
    assert_eq!(
        (report.state, report.reason.as_str()),
        (DrainState::Draining, "new kernel")
    );
    let late = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("late"), &idle(), true),
    );
    assert!(
        matches!(late, Err(EnsureError::Draining { .. })),
        "{late:?}"
    );
    // Who has had no turn, or whose time is not over, may still be kept.
    daemon
        .run(daemon.node.drain().cancel())
        .expect("it is taken back");
    daemon.vanish();
    let daemon = stage.boot();
    assert_eq!(daemon.node.drain().report(), None);
    daemon.start("late", &idle());
}

#[test]
fn a_node_that_cannot_write_it_down_is_drained_all_the_same_and_writes_it_down_when_it_can() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("alice", &idle());
    // As on a disk without room.
    let obstacle = stage.state.path().join("drain.json.new");
    let written = stage.state.path().join("drain.json");
    std::fs::create_dir(&obstacle).expect("made");
    let drain = || daemon.run(daemon.node.drain().begin(&request()));
    drain().expect("it begins");
    assert_eq!(await_drained(&daemon).released, 1);
    assert!(!written.exists());
    daemon.run(daemon.node.journal().flush());
    let page = daemon.run(daemon.node.journal().page(0, 1_000));
    let events = page.expect("readable").events;
    let told = |part| events.iter().any(|event| event.message.contains(part));
    assert!(told("would not continue the drain"), "{events:?}");

    // What was taken back is not written down any more.
    daemon
        .run(daemon.node.drain().cancel())
        .expect("it is taken back");
    daemon.start("alice", &idle());
    drain().expect("it begins");
    daemon
        .run(daemon.node.drain().cancel())
        .expect("it is taken back");
    std::fs::remove_dir(&obstacle).expect("removed");
    drain().expect("it begins");
    daemon
        .run(daemon.node.drain().cancel())
        .expect("it is taken back");
    assert!(!written.exists());

    std::fs::create_dir(&obstacle).expect("made");
    drain().expect("it begins");
    await_drained(&daemon);
    std::fs::remove_dir(&obstacle).expect("removed");
    eventually("it to be written down", || written.exists().then_some(()));
    daemon.vanish();
    let daemon = stage.boot();
    let report = daemon.node.drain().report().expect("it goes on");
    assert_eq!(report.reason, "new kernel");
}

#[test]
fn a_disk_that_does_not_answer_holds_up_no_drain() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("alice", &idle());
    // Whoever opens it for writing waits for a reader, for as long as it takes.
    let obstacle = stage.state.path().join("drain.json.new");
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, &obstacle, FileType::Fifo, mode, 0).expect("made");
    daemon
        .run(daemon.node.drain().begin(&request()))
        .expect("it begins");
    assert_eq!(await_drained(&daemon).released, 1);
    let refused = daemon.run(daemon.node.drain().cancel());
    let refused = refused.expect_err("what is under way may be written yet");
    assert!(format!("{refused:?}").contains("TimedOut"), "{refused:?}");

    // It does answer: what was held up ends, and the next ones are made.
    let read = std::fs::File::options()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(&obstacle)
        .expect("opened");
    eventually("the drain to be taken back", || {
        daemon.run(daemon.node.drain().cancel()).ok()
    });
    drop(read);
    daemon.start("alice", &idle());
    daemon.vanish();
    let daemon = stage.boot();
    assert_eq!(daemon.node.drain().report(), None);
}

#[test]
fn a_rebalance_stops_a_session_that_comes_back_once_and_does_not_count_it() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let drain = daemon.node.drain();
    let others = Arc::new(Slow {
        asked: Semaphore::new(0),
        lets: Semaphore::new(0),
    });
    drain.relocate_by(others as Arc<dyn Relocate>);
    for id in ["a", "b"] {
        daemon.start(id, &idle());
    }
    assert!(daemon.run(async { drain.rebalance(9) }));
    let told = eventually("both have come back, and the end is noted", || {
        for id in ["a", "b"] {
            if daemon.show(id).state == SessionState::Stopped {
                daemon.start(id, &idle());
            }
        }
        daemon.run(daemon.node.journal().flush());
        let page = daemon.run(daemon.node.journal().page(0, 1_000));
        let mut events = page.expect("readable").events.into_iter();
        let finished = |event: &Event| event.kind == EventKind::RebalanceFinished;
        events.find(finished).map(|event| event.message)
    });
    assert!(told.starts_with("moved 0 of 9"), "{told}");
    // A node numbers the starts of all its sessions: two at first, and one more of each.
    for id in ["a", "b"] {
        let shown = daemon.show(id);
        assert!(shown.generation.get() <= 4, "{shown:?}");
    }
}

#[test]
fn a_rebalance_moves_as_many_as_it_is_told_idle_ones_first_and_none_that_runs_only_here() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let drain = daemon.node.drain();
    let others = Arc::new(Slow {
        asked: Semaphore::new(0),
        lets: Semaphore::new(2),
    });
    drain.relocate_by(Arc::clone(&others) as Arc<dyn Relocate>);
    let ids = ["a", "b", "c", "d", "pinned"];
    for (memory_mib, id) in ids.iter().rev().enumerate() {
        let mut restarted = idle();
        restarted.on_node_loss = Some(OnNodeLoss::Restart);
        restarted.memory_bytes = Some((32 + memory_mib as u64) << 20);
        daemon.start(id, &restarted);
    }
    let planned = |count| {
        let plan = drain.rebalance_plan(count);
        let ids = plan.sessions.iter().map(|one| one.id.to_string());
        (ids.collect::<Vec<_>>(), plan.predicted_ms)
    };
    let (lightest, predicted_ms) = planned(2);
    assert_eq!(lightest, ["d", "c"]);
    assert!(predicted_ms >= 200, "ten a second at most: {predicted_ms}");
    assert_eq!(planned(9).0, ["d", "c", "b", "a"]);
    assert_eq!(planned(0), (Vec::new(), 0));
    let running = || {
        let states = ids.map(|id| daemon.show(id).state);
        ids.iter()
            .zip(states)
            .filter(|(_, state)| *state == SessionState::Running)
            .map(|(id, _)| *id)
            .collect::<Vec<_>>()
    };
    assert_eq!(running(), ids, "a plan begins nothing");

    assert!(daemon.run(async { drain.rebalance(2) }));
    let again = daemon.run(async { drain.rebalance(4) });
    assert!(!again, "the first one is carried out");
    eventually("the end to be noted", || {
        daemon.run(daemon.node.journal().flush());
        let page = daemon.run(daemon.node.journal().page(0, 1_000));
        let mut events = page.expect("readable").events.into_iter();
        events.find(|event| event.kind == EventKind::RebalanceFinished)
    });
    assert_eq!(running(), ["a", "b", "pinned"]);
    assert_eq!(drain.report(), None, "the node admits sessions");
    daemon.start("new", &idle());
}
