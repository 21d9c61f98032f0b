//! What a daemon finds of an earlier one that vanished.

use std::sync::Arc;
use std::time::Duration;

use crate::stage::flaky_registry::FlakyRegistry;
use crate::stage::{Stage, eventually, idle, program, session, web};
use conman_core::{EndCause, FENCED};
use conman_linux::PidFd;
use conman_proto::{EventKind, SessionRequest, SessionState};
use conman_registry::{ContainerIdentity, Phases, RecordState, Registry};
use conman_runtime::{ContainerKey, Lifecycle as _};
use conman_testkit::{Fault, Faults, ModelRegistry, Operation};
use futures_util::FutureExt as _;
use jiff::Timestamp;

#[test]
fn a_registry_that_does_not_answer_for_a_moment_is_asked_again() {
    let stage = Stage::new();
    let registry = Arc::new(FlakyRegistry::default());
    let boot = || stage.boot_on(stage.options(), registry.clone(), Duration::from_secs(30));
    let daemon = boot();
    let before = daemon.start("alice", &idle());
    daemon.vanish();

    registry.lose_next_list();
    let daemon = boot();
    assert_eq!(registry.refused(), 1);
    assert_eq!(daemon.show("alice").generation, before.generation);
    assert_eq!(daemon.faults().calls(Operation::Create), 0);
}

#[test]
fn a_lifetime_goes_on_under_the_next_daemon_whatever_the_clock_was_set_to() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let lives = |seconds| SessionRequest {
        max_lifetime_s: Some(seconds),
        ..idle()
    };
    daemon.start("long", &lives(86_400));
    daemon.start("short", &lives(5));
    eventually("the record to say running", || {
        matches!(daemon.record("long").state, RecordState::Running { .. }).then_some(())
    });
    let generation = daemon.record("long").generation;
    daemon.vanish();
    // As if the clock had been set on by half a century meanwhile.
    let state = RecordState::Running {
        started_at: Timestamp::UNIX_EPOCH,
        paused: false,
        phases: Phases::default(),
    };
    let id = session("long");
    let noted = stage.registry.set_state(&id, generation, state);
    noted.now_or_never().expect("at once").expect("noted");

    let daemon = stage.boot();
    let stopped = daemon.await_state("short", SessionState::Stopped);
    let reason = stopped.reason.expect("it says why");
    assert!(reason.contains("lifetime of 5 s"), "{reason}");
    assert_eq!(daemon.show("long").state, SessionState::Running);
}

#[test]
fn running_sessions_go_on_with_the_same_process_generation_and_times() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let before = daemon.start("alice", &web());
    eventually("the record to say running", || {
        matches!(daemon.record("alice").state, RecordState::Running { .. }).then_some(())
    });
    daemon.vanish();

    let daemon = stage.boot();
    let after = daemon.show("alice");
    assert_eq!(after, before);
    assert_eq!(daemon.faults().calls(Operation::Create), 0);
    assert!(daemon.story("alice").contains(&EventKind::SessionAdopted));
    daemon.run(async {
        let route = daemon
            .node
            .access()
            .route(&session("alice"), false)
            .await
            .expect("runs");
        route.connect(route.port).await.expect("it still answers");
    });
    let again = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &web(), true),
        )
        .expect("runs");
    assert!(!again.created);
    daemon
        .run(daemon.node.sessions().stop(&session("alice"), "deleted"))
        .expect("stopped");
    assert_eq!(stage.alive(), 0);
}

#[test]
fn adoption_asks_no_runtime_and_adopted_sessions_can_be_killed_while_it_hangs() {
    let stage = Stage::new();
    let daemon = stage.boot();
    for id in ["a", "b", "c"] {
        daemon.start(id, &idle());
    }
    eventually("the records to say running", || {
        ["a", "b", "c"]
            .iter()
            .all(|id| matches!(daemon.record(id).state, RecordState::Running { .. }))
            .then_some(())
    });
    daemon.vanish();

    let daemon = stage.boot();
    daemon.faults().hang();
    for id in ["a", "b", "c"] {
        assert_eq!(daemon.show(id).state, SessionState::Running);
        daemon
            .run(daemon.node.sessions().stop(&session(id), "deleted"))
            .expect("stopped");
    }
    assert_eq!(stage.alive(), 0);
}

#[test]
fn a_record_whose_process_is_gone_is_released_before_the_node_serves() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let pid = daemon.start("alice", &idle()).pid.expect("a process");
    eventually("the record to say running", || {
        matches!(daemon.record("alice").state, RecordState::Running { .. }).then_some(())
    });
    let process = PidFd::open(pid).expect("alive");
    daemon.vanish();
    process.kill().expect("killed");
    assert!(process.wait_dead(Duration::from_secs(10)).expect("polled"));

    let daemon = stage.boot();
    let shown = daemon.show("alice");
    assert_eq!(shown.state, SessionState::Stopped);
    assert!(
        shown
            .reason
            .as_deref()
            .is_some_and(|r| r.contains("while conman was not running"))
    );
    assert!(daemon.record("alice").state.is_ended());
    daemon.start("alice", &idle());
}

#[test]
fn what_the_fence_killed_has_lost_its_node_whether_a_daemon_saw_it_or_not() {
    let stage = Stage::new();
    let fenced = ["seen", "unseen", "unready"];
    let daemon = stage.boot_fenced(&fenced);
    let kill = |process: PidFd| {
        process.kill().expect("killed");
        assert!(process.wait_dead(Duration::from_secs(10)).expect("polled"));
    };
    let hold = |pid: Option<i32>| PidFd::open(pid.expect("a process")).expect("alive");
    let [seen, unseen, other] = ["seen", "unseen", "other"].map(|id| {
        let process = hold(daemon.start(id, &idle()).pid);
        eventually("the record to say running", || {
            matches!(daemon.record(id).state, RecordState::Running { .. }).then_some(())
        });
        process
    });
    let never_ready = SessionRequest {
        port: Some(Some(8080)),
        ..idle()
    };
    let starting = daemon.run(daemon.node.sessions().ensure(
        &session("unready"),
        &never_ready,
        false,
    ));
    assert!(starting.expect("begun").created);
    let unready = eventually("its process", || daemon.record("unready").container);
    let unready = hold(Some(unready.pid));
    kill(seen);
    let shown = daemon.await_state("seen", SessionState::Stopped);
    assert_eq!(shown.exit_code, Some(137));
    let story = daemon.story("seen");
    assert!(!story.contains(&EventKind::SessionExited), "{story:?}");
    daemon.vanish();
    for process in [unseen, unready, other] {
        kill(process);
    }

    let daemon = stage.boot_fenced(&fenced);
    for id in fenced {
        let shown = daemon.show(id);
        assert_eq!(shown.state, SessionState::Stopped, "{shown:?}");
        assert_eq!(shown.reason.as_deref(), Some(FENCED));
        let told = daemon.record(id).state.end_cause();
        assert_eq!(told, Some(EndCause::NodeLost), "{id}");
    }
    let told = daemon.record("other").state.end_cause();
    assert_eq!(told, Some(EndCause::Exited));
}

#[test]
fn a_node_serves_also_where_nobody_tells_what_the_fence_killed() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let process = PidFd::open(daemon.start("alice", &idle()).pid.expect("a process"));
    let process = process.expect("alive");
    eventually("the record to say running", || {
        matches!(daemon.record("alice").state, RecordState::Running { .. }).then_some(())
    });
    daemon.vanish();
    process.kill().expect("killed");
    assert!(process.wait_dead(Duration::from_secs(10)).expect("polled"));

    let daemon = stage.boot_with_faults(Faults::be_mute_about_fences);
    let told = daemon.record("alice").state.end_cause();
    assert_eq!(told, Some(EndCause::Exited));
    daemon.start("alice", &idle());
}

#[test]
fn a_pid_that_another_process_has_by_now_is_neither_adopted_nor_killed() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let bystander = daemon.start("bystander", &idle());
    let spec = bystander.spec.clone();
    let real = eventually("the identity", || daemon.record("bystander").container);
    let reused = ContainerIdentity {
        start_time_ticks: real.start_time_ticks - 1,
        ..real.clone()
    };
    let other_boot = ContainerIdentity {
        boot_id: "0".repeat(36),
        ..real
    };
    for (id, container) in [("alice", reused), ("bob", other_boot)] {
        daemon.run(async {
            let id = session(id);
            let claimed = stage.registry.claim(&id, &spec).await.expect("claimed");
            let noted = stage
                .registry
                .set_container(&id, claimed.generation, &container);
            noted.await.expect("noted");
        });
    }
    daemon.vanish();

    let daemon = stage.boot();
    // That one's machine has taken it along.
    let expected = [
        ("alice", SessionState::Failed),
        ("bob", SessionState::Stopped),
    ];
    for (id, state) in expected {
        assert_eq!(daemon.show(id).state, state, "{:?}", daemon.show(id));
        assert!(daemon.record(id).state.is_ended());
    }
    // Its record may not have said that it was ready.
    let shown = daemon.await_state("bystander", SessionState::Running);
    assert_eq!(shown.pid, bystander.pid);
}

#[test]
fn a_session_whose_machine_was_booted_anew_has_lost_its_node() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let spec = daemon.start("other", &idle()).spec;
    let container = ContainerIdentity {
        boot_id: "0".repeat(36),
        ..eventually("the identity", || daemon.record("other").container)
    };
    let running = RecordState::Running {
        started_at: jiff::Timestamp::UNIX_EPOCH,
        paused: false,
        phases: Phases::default(),
    };
    for (id, state) in [("running", Some(running)), ("starting", None)] {
        daemon.run(async {
            let id = session(id);
            let registry = &stage.registry;
            let claimed = registry.claim(&id, &spec).await.expect("claimed");
            let generation = claimed.generation;
            let noted = registry.set_container(&id, generation, &container).await;
            noted.expect("noted");
            if let Some(state) = state {
                let noted = registry.set_state(&id, generation, state).await;
                noted.expect("noted");
            }
        });
    }
    daemon.vanish();

    let daemon = stage.boot();
    for id in ["running", "starting"] {
        let cause = daemon.record(id).state.end_cause();
        assert_eq!(cause, Some(EndCause::NodeLost), "{id}");
        let reason = daemon.show(id).reason.expect("it has ended");
        assert!(reason.starts_with(conman_core::LOST), "{reason}");
    }
}

#[test]
fn a_program_that_was_not_ready_yet_gets_a_fresh_chance() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let gate = stage.state.path().join("gate");
    let script = format!(
        "while [ ! -e {} ]; do sleep 0.05; done; exec busybox httpd -f -p 8080 -h /etc",
        gate.display()
    );
    let request = SessionRequest {
        port: Some(Some(8080)),
        ..program(&script)
    };
    let before = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &request, false),
        )
        .expect("begun");
    eventually("the container's identity", || {
        daemon.record("alice").container
    });
    daemon.vanish();

    let daemon = stage.boot();
    let shown = daemon.show("alice");
    assert_eq!(
        (shown.state, shown.generation),
        (SessionState::Starting, before.session.generation)
    );
    std::fs::write(gate, "").expect("written");
    let shown = daemon.await_state("alice", SessionState::Running);
    assert_eq!(shown.generation, before.session.generation);
    assert_eq!(daemon.faults().calls(Operation::Start), 0);
}

#[test]
fn a_start_that_nobody_answered_before_the_crash_is_found_and_ended() {
    let stage = Stage::new();
    let daemon = stage.boot();
    // It runs, and the daemon vanishes before it hears of that.
    daemon.faults().next(
        Operation::Start,
        1,
        Fault::LoseAnswer {
            happens_after: Duration::ZERO,
        },
    );
    daemon.faults().always(Operation::Find, Fault::Hang);
    let node = Arc::clone(&daemon.node);
    daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    eventually("the call", || {
        (daemon.faults().calls(Operation::Start) == 1).then_some(())
    });
    let lost = daemon.record("alice").generation;
    daemon.vanish();

    let daemon = stage.boot();
    let shown = daemon.await_state("alice", SessionState::Failed);
    assert_eq!(shown.generation, lost);
    assert_eq!(stage.alive(), 0);
    let next = daemon.start("alice", &idle());
    assert!(next.generation > lost);
}

#[test]
fn a_stop_that_was_interrupted_is_finished() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let before = daemon.start("alice", &idle());
    let note = RecordState::Stuck {
        reason: "deleted".to_owned(),
        cause: None,
    };
    eventually("the record to say running", || {
        matches!(daemon.record("alice").state, RecordState::Running { .. }).then_some(())
    });
    daemon
        .run(
            stage
                .registry
                .set_state(&session("alice"), before.generation, note),
        )
        .expect("noted");
    daemon.vanish();

    let daemon = stage.boot();
    let shown = daemon.await_state("alice", SessionState::Stopped);
    assert_eq!(shown.reason.as_deref(), Some("deleted"));
    assert_eq!(stage.alive(), 0);
    assert!(daemon.record("alice").state.is_ended());
}

#[test]
fn containers_without_a_record_are_killed_and_removed_and_those_of_others_are_not() {
    let (stage, neighbour) = (Stage::new(), Stage::new());
    let other = neighbour.boot();
    other.start("alice", &idle());
    let daemon = stage.boot();
    let generation = daemon.start("alice", &idle()).generation;
    daemon.vanish();
    assert!(stage.alive() > 0);

    // The registry was lost.
    let empty = Arc::new(ModelRegistry::above(generation));
    let daemon = stage.boot_on(stage.options(), empty, Duration::from_secs(30));
    eventually("the orphan to be dead", || {
        (stage.alive() == 0).then_some(())
    });
    let key = ContainerKey {
        session: session("alice"),
        generation,
    };
    eventually("the orphan to be removed", || {
        daemon
            .run(daemon.runtime.find(&key))
            .expect("answered")
            .is_none()
            .then_some(())
    });
    assert!(daemon.story("alice").contains(&EventKind::OrphanEnded));
    assert_eq!(other.show("alice").state, SessionState::Running);
    assert!(neighbour.alive() > 0);
}

#[test]
fn what_a_dead_daemon_had_no_time_to_remove_is_removed() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon
        .faults()
        .always(Operation::Remove, Fault::Unavailable);
    let generation = daemon.start("alice", &idle()).generation;
    daemon
        .run(daemon.node.sessions().stop(&session("alice"), "deleted"))
        .expect("stopped");
    eventually("the failure to be told", || {
        daemon
            .story("alice")
            .contains(&EventKind::CleanupFailed)
            .then_some(())
    });
    daemon.vanish();

    let daemon = stage.boot();
    let key = ContainerKey {
        session: session("alice"),
        generation,
    };
    eventually("the container to be removed", || {
        daemon
            .run(daemon.runtime.find(&key))
            .expect("answered")
            .is_none()
            .then_some(())
    });
    assert_eq!(daemon.show("alice").state, SessionState::Stopped);
}

#[test]
fn an_orderly_end_leaves_the_sessions_to_the_next_daemon_or_stops_them() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let before = daemon.start("alice", &idle());
    daemon.run(daemon.node.shutdown(true));
    daemon.vanish();

    let daemon = stage.boot();
    assert_eq!(daemon.show("alice").pid, before.pid);
    daemon.run(daemon.node.shutdown(false));
    assert_eq!(stage.alive(), 0);
    assert!(daemon.record("alice").state.is_ended());
}
