//! The machine is going: everything is killed, certified and released, whatever else happens.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::stage::frozen::Frozen;
use crate::stage::weights::{read, weights_of};
use crate::stage::{Daemon, Stage, eventually, idle, program, session, web};
use conman_core::naming::{CgroupDriver, instance_cgroup};
use conman_linux::{CgroupLayout, CgroupWeight};
use conman_node::{EnsureError, RouteError};
use conman_proto::{EventKind, NodeState, PreemptRequest, SessionRequest, SessionState};
use conman_registry::{EmbeddedOptions, EmbeddedRegistry, RecordState, Registry};
use conman_testkit::{Fault, Operation};
use rustix::fs::{CWD, RenameFlags, renameat_with};

fn request() -> PreemptRequest {
    PreemptRequest {
        reason: Some("a test".to_owned()),
        ..PreemptRequest::default()
    }
}

fn start_some(daemon: &Daemon, count: usize) -> Vec<String> {
    let ids: Vec<_> = (0..count).map(|number| format!("s{number}")).collect();
    for id in &ids {
        daemon.start(id, &idle());
    }
    ids
}

#[test]
fn every_session_is_dead_and_released_and_no_new_one_is_admitted() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let ids = start_some(&daemon, 8);
    daemon.start("web", &web());
    let route = daemon
        .run(daemon.node.access().route(&session("web"), false))
        .expect("runs");
    let report = daemon
        .run(daemon.node.preemption().preempt(&request(), "api"))
        .expect("a report");

    assert_eq!(
        (
            report.sessions,
            report.killed,
            report.certified,
            report.released
        ),
        (9, 9, 9, 9)
    );
    assert!(report.unreleased.is_empty());
    assert!(report.last_kill_ms <= report.last_certificate_ms);
    assert!(report.last_certificate_ms <= report.last_release_ms);
    assert_eq!(stage.alive(), 0);
    let closing = route.closing.borrow().clone().expect("tunnels end");
    assert_eq!(
        (closing.code, closing.reason()),
        (1012, "session is moving")
    );
    for id in &ids {
        let RecordState::Ended(ending) = daemon.record(id).state else {
            panic!("not released")
        };
        assert_eq!(
            (ending.failed, ending.reason.as_str()),
            (false, "preempted: a test")
        );
        let shown = daemon.await_state(id, SessionState::Stopped);
        assert_eq!(shown.reason.as_deref(), Some("preempted: a test"));
        assert_eq!(shown.pid, None);
    }
    assert_eq!(daemon.node.status().view().state, NodeState::Preempted);
    let refused = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("late"), &idle(), true),
    );
    assert!(
        matches!(refused, Err(EnsureError::Preempted { .. })),
        "{refused:?}"
    );
    assert_eq!(
        daemon.story("s0"),
        [
            EventKind::SessionClaimed,
            EventKind::SessionReady,
            EventKind::SessionKilled,
            EventKind::SessionDead,
            EventKind::SessionReleased,
        ]
    );
}

#[test]
fn it_works_while_every_thread_of_the_daemon_is_stuck_and_the_runtime_hangs() {
    let stage = Stage::new();
    let options = EmbeddedOptions::default();
    let registry = EmbeddedRegistry::open(&stage.state.path().join("registry"), options);
    let registry = Arc::new(registry.expect("a registry"));
    let daemon = stage.boot_on(stage.options(), registry.clone(), Duration::from_secs(30));
    let ids = start_some(&daemon, 8);
    daemon.faults().hang();

    // Both worker threads, and with them every task of the daemon, until the test has seen enough.
    let barrier = Arc::new(Barrier::new(3));
    let done = Arc::new(AtomicBool::new(false));
    for _ in 0..2 {
        let (barrier, done) = (Arc::clone(&barrier), Arc::clone(&done));
        daemon.spawn(async move {
            barrier.wait();
            while !done.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
    }
    barrier.wait();

    let emergency = daemon.node.preemption().clone();
    let pending = emergency
        .begin(&request(), "signal")
        .expect("the notice is taken");
    // A runtime of the test's own: the daemon's has no thread left.
    let own = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("tokio");
    let (report, records) = own.block_on(async {
        let report = pending.wait().await.expect("a report");
        (report, registry.list().await.expect("readable"))
    });
    assert_eq!((report.certified, report.released), (8, 8), "{report:?}");
    assert!(records.iter().all(|record| record.state.is_ended()));
    assert_eq!(stage.alive(), 0);

    done.store(true, Ordering::Relaxed);
    for id in &ids {
        let shown = daemon.await_state(id, SessionState::Stopped);
        assert_eq!(shown.reason.as_deref(), Some("preempted: a test"));
    }
}

#[test]
fn a_second_notice_gets_the_first_ones_report() {
    let stage = Stage::new();
    let daemon = stage.boot();
    start_some(&daemon, 3);
    let emergency = daemon.node.preemption();
    let notices = ["gce", "signal", "api"].map(|source| {
        emergency
            .begin(&request(), source)
            .expect("the notice is taken")
    });
    let reports = notices.map(|pending| daemon.run(pending.wait()).expect("a report"));
    assert_eq!(reports[0], reports[1]);
    assert_eq!(reports[0], reports[2]);
    assert_eq!(
        (reports[0].source.as_str(), reports[0].released),
        ("gce", 3)
    );
    let later = daemon
        .run(daemon.node.preemption().preempt(&request(), "admin"))
        .expect("a report");
    assert_eq!(later, reports[0]);
}

#[test]
fn a_dry_run_says_what_would_happen_and_does_nothing() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("plain", &idle());
    let graceful = SessionRequest {
        preempt_signal: Some("SIGTERM".to_owned()),
        preempt_grace_ms: Some(20_000),
        ..idle()
    };
    let pid = daemon.start("graceful", &graceful).pid;
    let plan = daemon.node.preemption().plan(Some(10_000));
    let planned: Vec<_> = plan
        .sessions
        .iter()
        .map(|s| (s.id.as_str(), s.pid, s.signal.as_deref()))
        .collect();
    let plain = daemon.show("plain").pid;
    assert_eq!(
        planned,
        [("graceful", pid, Some("SIGTERM")), ("plain", plain, None)]
    );
    assert!(
        plan.last_kill_ms < 10_000 && plan.last_kill_ms > 0,
        "{plan:?}"
    );
    assert_eq!(daemon.show("plain").state, SessionState::Running);
    assert_eq!(daemon.node.status().view().state, NodeState::Live);
}

#[test]
fn a_session_that_ends_within_its_grace_is_certified_early_and_the_others_are_killed() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let with_grace = |script: &str, grace_ms| SessionRequest {
        preempt_signal: Some("SIGTERM".to_owned()),
        preempt_grace_ms: Some(grace_ms),
        ..program(script)
    };
    let file = |name: &str| stage.state.path().join(name);
    let wait = "while :; do sleep 0.05; done";
    let polite = format!(
        "trap 'echo saved >{}; exit 0' TERM; : >{}; {wait}",
        file("saved").display(),
        file("polite").display()
    );
    let rude = format!("trap '' TERM; : >{}; {wait}", file("rude").display());
    daemon.start("polite", &with_grace(&polite, 20_000));
    daemon.start("rude", &with_grace(&rude, 700));
    for name in ["polite", "rude"] {
        eventually("the trap to be set", || file(name).exists().then_some(()));
    }
    let report = daemon
        .run(daemon.node.preemption().preempt(&request(), "api"))
        .expect("a report");
    assert_eq!((report.sessions, report.released), (2, 2), "{report:?}");
    assert_eq!(report.killed, 1);
    // Neither the polite one's 20 s were waited for, nor the rude one's grace cut.
    assert!(
        (700.0..15_000.0).contains(&report.last_release_ms.expect("released")),
        "{report:?}"
    );
    assert_eq!(
        std::fs::read_to_string(file("saved")).expect("it was given time"),
        "saved\n"
    );
}

/// Niceness and real-time priority (proc_pid_stat(5)) of this process's threads of that name.
fn ranks(name: &str) -> Vec<(i32, i32)> {
    let threads = std::fs::read_dir("/proc/self/task").expect("readable");
    let stats = threads.filter_map(|thread| {
        // It may have ended meanwhile.
        std::fs::read_to_string(thread.ok()?.path().join("stat")).ok()
    });
    let ranks = stats.filter_map(|stat| {
        let (before, fields) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        let number = |at: usize| fields[at].parse().expect("a number");
        before
            .ends_with(&format!("({name}"))
            .then(|| (number(16), number(37)))
    });
    ranks.collect()
}

#[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
fn frozen_or_skipped(name: &str, pid: i32) -> Option<Frozen> {
    let frozen = Frozen::new(name, &[pid]);
    frozen.inspect_err(|why| println!("skipped: {why}")).ok()
}

#[test]
fn what_dies_goes_before_everything_else_once_no_program_runs_on_in_its_grace() {
    let stage = Stage::new();
    let Some(weights) = weights_of(&stage) else {
        return;
    };
    let usual = read(&weights);
    let daemon = stage.boot();
    let (set, end) = (
        stage.state.path().join("set"),
        stage.state.path().join("end"),
    );
    let script = format!(
        "trap '' TERM; : >{}; until [ -e {} ]; do sleep 0.05; done",
        set.display(),
        end.display()
    );
    let with_grace = SessionRequest {
        preempt_signal: Some("SIGTERM".to_owned()),
        preempt_grace_ms: Some(60_000),
        ..program(&script)
    };
    daemon.start("polite", &with_grace);
    eventually("the trap to be set", || set.exists().then_some(()));
    let pid = daemon.start("slow", &idle()).pid.expect("it runs");
    let name = format!("conman-{}-slow", stage.instance);
    let Some(frozen) = frozen_or_skipped(&name, pid) else {
        return;
    };
    daemon.start("quick", &idle());

    let node = Arc::clone(&daemon.node);
    let notice = PreemptRequest {
        budget_ms: Some(300_000),
        ..request()
    };
    let report = daemon.spawn(async move { node.preemption().preempt(&notice, "api").await });
    daemon.await_state("quick", SessionState::Stopped);
    assert_eq!(read(&weights), usual, "a program runs on");
    std::fs::write(&end, "").expect("written");
    eventually("what dies to go first", || {
        read(&weights)
            .iter()
            .zip(&usual)
            .all(|(now, usual)| now != usual)
            .then_some(())
    });
    let usual_nice = rustix::process::getpriority_process(None).expect("readable");
    let goes_first = |(nice, realtime): &(i32, i32)| *realtime > 0 || *nice < usual_nice;
    assert!(ranks("conman-emergenc").iter().any(goes_first));
    assert!(!ranks("tokio-rt-worker").iter().any(goes_first));
    frozen.thaw();
    let report = daemon.run(report).expect("no panic").expect("a report");
    assert_eq!((report.sessions, report.released), (3, 3), "{report:?}");
    assert_eq!(read(&weights), usual, "it is over");
}

#[test]
fn what_a_daemon_raised_that_ended_meanwhile_is_taken_back_by_the_next() {
    let stage = Stage::new();
    let Some(weights) = weights_of(&stage) else {
        return;
    };
    let usual = read(&weights);
    let layout = CgroupLayout::detect().expect("mounted");
    let path = instance_cgroup(&stage.instance, CgroupDriver::Cgroupfs);
    assert!(CgroupWeight::of(&layout, &[path]).raise());
    assert_ne!(read(&weights), usual);
    let _daemon = stage.boot();
    eventually("the usual weight", || {
        (read(&weights) == usual).then_some(())
    });
}

#[test]
fn sessions_are_admitted_again_after_an_operator_says_so() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let before = daemon.start("alice", &idle());
    daemon
        .run(daemon.node.preemption().preempt(&request(), "api"))
        .expect("a report");
    let refused = daemon.run(daemon.node.access().route(&session("alice"), true));
    assert!(
        matches!(refused, Err(RouteError::NoPort { .. })),
        "{refused:?}"
    );
    let readmitted = daemon.run(daemon.node.preemption().readmit());
    readmitted.expect("the order is carried out");
    assert_eq!(daemon.node.status().view().state, NodeState::Live);
    let after = daemon.start("alice", &idle());
    assert!(after.generation > before.generation);
    // A new notice is a new preemption.
    let report = daemon
        .run(daemon.node.preemption().preempt(&request(), "api"))
        .expect("a report");
    assert_eq!((report.sessions, report.released), (1, 1));
}

#[test]
fn a_start_under_way_is_not_sent_or_is_killed_as_soon_as_it_appears() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.faults().for_session(
        Operation::Create,
        session("unsent"),
        Fault::Delay(Duration::from_secs(10)),
    );
    daemon.faults().for_session(
        Operation::Start,
        session("sent"),
        Fault::LoseAnswer {
            happens_after: Duration::from_millis(300),
        },
    );
    daemon.faults().always(Operation::Find, Fault::Hang);
    let asked = ["unsent", "sent"].map(|id| {
        let node = Arc::clone(&daemon.node);
        daemon.spawn(async move { node.sessions().ensure(&session(id), &idle(), true).await })
    });
    eventually("both calls", || {
        let calls = |operation| daemon.faults().calls(operation);
        (calls(Operation::Create) == 2 && calls(Operation::Start) == 1).then_some(())
    });
    let report = daemon
        .run(daemon.node.preemption().preempt(&request(), "api"))
        .expect("a report");
    assert_eq!((report.sessions, report.released), (2, 2), "{report:?}");
    assert_eq!(stage.alive(), 0);
    for ensure in asked {
        daemon
            .run(ensure)
            .expect("no panic")
            .expect_err("neither may run");
    }
    assert_eq!(
        daemon.faults().calls(Operation::Start),
        1,
        "the other start was never sent"
    );
    for id in ["unsent", "sent"] {
        assert!(daemon.record(id).state.is_ended());
    }
}

#[test]
fn a_start_that_never_appears_is_reported_and_never_released_as_dead() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.faults().next(Operation::Start, 1, Fault::Hang);
    daemon.faults().always(Operation::Find, Fault::Hang);
    let node = Arc::clone(&daemon.node);
    let _asked = daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    eventually("the call", || {
        (daemon.faults().calls(Operation::Start) == 1).then_some(())
    });
    let short = PreemptRequest {
        budget_ms: Some(100),
        ..request()
    };
    let report = daemon
        .run(daemon.node.preemption().preempt(&short, "api"))
        .expect("a report");
    assert_eq!(
        (report.released, report.unreleased.len()),
        (0, 1),
        "{report:?}"
    );
    assert!(
        report.unreleased[0].reason.contains("may still appear"),
        "{report:?}"
    );
    assert!(!daemon.record("alice").state.is_ended());
}

#[test]
fn a_preemption_outlives_its_daemon_until_it_is_taken_back() {
    let stage = Stage::new();
    let written = stage.state.path().join("preempted.json");
    let daemon = stage.boot();
    daemon.start("alice", &idle());
    let preempted = daemon.run(daemon.node.preemption().preempt(&request(), "api"));
    preempted.expect("a report");
    eventually("it to be written down", || written.exists().then_some(()));
    daemon.vanish();

    let daemon = stage.boot();
    assert_eq!(daemon.node.status().view().state, NodeState::Preempted);
    let refused = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("late"), &idle(), true),
    );
    let Err(EnsureError::Preempted { reason, .. }) = refused else {
        panic!("admitted: {refused:?}")
    };
    assert!(reason.contains("a test"), "{reason}");
    daemon
        .run(daemon.node.preemption().readmit())
        .expect("it stays");
    eventually("it to be forgotten", || (!written.exists()).then_some(()));
    daemon.vanish();
    let daemon = stage.boot();
    daemon.start("alice", &idle());
    daemon.vanish();

    // Of an earlier boot.
    let earlier = r#"{"version":2,"reason":"a test","boot_id":"another"}"#;
    std::fs::write(&written, earlier).expect("written");
    let daemon = stage.boot();
    assert_eq!(daemon.node.status().view().state, NodeState::Live);
}

#[test]
fn a_readmission_that_the_disk_refuses_to_note_is_noted_when_it_can_be() {
    let stage = Stage::new();
    let written = stage.state.path().join("preempted.json");
    let daemon = stage.boot();
    let preempted = daemon.run(daemon.node.preemption().preempt(&request(), "api"));
    preempted.expect("a report");
    eventually("it to be written down", || written.exists().then_some(()));
    // What is there instead cannot be removed.
    let obstacle = stage.state.path().join("obstacle");
    std::fs::create_dir(&obstacle).expect("made");
    let exchange = || renameat_with(CWD, &obstacle, CWD, &written, RenameFlags::EXCHANGE);
    exchange().expect("exchanged");
    daemon
        .run(daemon.node.preemption().readmit())
        .expect("it stays");
    daemon.start("alice", &idle());
    exchange().expect("exchanged");
    eventually("it to be forgotten", || (!written.exists()).then_some(()));
    daemon.vanish();
    let daemon = stage.boot();
    assert_eq!(daemon.show("alice").state, SessionState::Running);
    assert_eq!(daemon.node.status().view().state, NodeState::Live);
}

#[test]
fn a_daemon_that_dies_in_the_middle_of_a_preemption_leaves_it_to_the_next() {
    let stage = Stage::new();
    let written = stage.state.path().join("preempted.json");
    let daemon = stage.boot();
    let set = stage.state.path().join("set");
    let script = format!(
        "trap '' TERM; : >{}; while :; do sleep 0.05; done",
        set.display()
    );
    let with_grace = SessionRequest {
        preempt_signal: Some("SIGTERM".to_owned()),
        preempt_grace_ms: Some(60_000),
        ..program(&script)
    };
    daemon.start("slow", &with_grace);
    eventually("the trap to be set", || set.exists().then_some(()));
    let notice = PreemptRequest {
        budget_ms: Some(300_000),
        ..request()
    };
    let emergency = daemon.node.preemption();
    let report = emergency.begin(&notice, "api").expect("it is taken");
    eventually("it to be written down", || written.exists().then_some(()));
    assert!(stage.alive() > 0, "it is given time");
    drop(report);
    daemon.vanish();

    let daemon = stage.boot();
    assert_eq!(daemon.node.status().view().state, NodeState::Preempted);
}
