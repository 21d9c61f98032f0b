//! Sessions from their start to their end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::stage::{Stage, bind_root, eventually, idle, program, session, web};
use conman_linux::PidFd;
use conman_node::{EnsureError, FailureKind, HostLimit};
use conman_proto::{
    EndCause, EventKind, LimitMet, RuntimeKind, Session, SessionRequest, SessionState,
};
use conman_registry::RecordState;
use conman_runtime::{ExecPlan, Lifecycle as _};
use conman_testkit::{Fault, Operation};

/// The cause of a session's end, and the phase in which its start failed.
fn end(shown: &Session) -> (EndCause, Option<&str>) {
    let end = shown.end.as_ref().expect("it has ended");
    (end.cause, end.phase.as_deref())
}

#[test]
fn a_thousand_simultaneous_ensures_of_one_id_make_one_container() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let ensures: Vec<_> = (0..1_000)
        .map(|_| {
            let node = Arc::clone(&daemon.node);
            daemon.spawn(async move {
                node.sessions()
                    .ensure(&session("alice"), &web(), true)
                    .await
            })
        })
        .collect();
    let mut created = 0;
    let mut generations = Vec::new();
    for ensure in ensures {
        let answer = daemon.run(ensure).expect("no panic").expect("it runs");
        assert_eq!(answer.session.state, SessionState::Running);
        assert!(answer.spec_matches);
        created += u32::from(answer.created);
        generations.push(answer.session.generation);
    }
    generations.dedup();
    assert_eq!((created, generations.len()), (1, 1));
    assert_eq!(daemon.faults().calls(Operation::Create), 1);
    assert_eq!(daemon.faults().calls(Operation::Start), 1);
}

#[test]
fn a_running_session_shows_its_process_its_record_and_phases_that_add_up() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let shown = daemon.start("alice", &web());
    let pid = shown.pid.expect("it has a process");
    let names: Vec<_> = shown.phases_ms.keys().map(String::as_str).collect();
    let expected = [
        "admit", "claim", "create", "prepare", "publish", "ready", "record", "start", "verify",
    ];
    assert_eq!(names, expected);
    assert_eq!(shown.url.as_deref(), Some("http://alice.localhost:7701/"));

    let record = eventually("the record to say running", || {
        Some(daemon.record("alice"))
            .filter(|record| matches!(record.state, RecordState::Running { .. }))
    });
    let container = record.container.expect("recorded");
    assert_eq!(container.pid, pid);
    assert!(container.start_time_ticks > 0 && container.boot_id.len() == 36);
    assert_eq!(
        daemon.story("alice"),
        [EventKind::SessionClaimed, EventKind::SessionReady]
    );
    let timeline = daemon.run(daemon.node.journal().timeline(&session("alice")));
    let told: f64 = timeline
        .expect("readable")
        .phases
        .iter()
        .map(|p| p.duration_ms)
        .sum();
    let shown: f64 = shown.phases_ms.values().sum();
    assert!((told - shown).abs() < 1e-6, "{told} {shown}");
}

#[test]
fn a_session_that_ended_starts_anew_in_a_greater_generation() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let first = daemon.start("alice", &idle());
    let report = daemon
        .run(daemon.node.sessions().stop(&session("alice"), "deleted"))
        .expect("stopped");
    assert_eq!(
        (report.state, report.generation),
        (SessionState::Stopped, first.generation)
    );
    assert!(report.dead_ms.expect("dead") <= report.released_ms.expect("released"));
    assert_eq!(daemon.show("alice").reason.as_deref(), Some("deleted"));
    assert!(daemon.record("alice").state.is_ended());

    let second = daemon.start("alice", &idle());
    assert!(second.generation > first.generation);
    assert_ne!(second.pid, first.pid);
    assert_eq!(second.state, SessionState::Running);
}

#[test]
fn an_ensure_of_a_stopping_session_waits_for_its_end_and_starts_it_anew() {
    let stage = Stage::new();
    let mut options = stage.options();
    options.bounds.exit_code = Duration::from_secs(3);
    let daemon = stage.boot_with(options);
    let first = daemon.start("alice", &idle());
    // The release waits for the exit code, as it does when a runtime is slow to notice.
    daemon.faults().next(Operation::ExitCode, 1, Fault::Hang);
    let pid = first.pid.expect("it has a process");
    conman_linux::PidFd::open(pid)
        .expect("alive")
        .kill()
        .expect("killed");
    daemon.await_state("alice", SessionState::Stopping);
    let node = Arc::clone(&daemon.node);
    let again = daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    let answer = daemon.run(again).expect("no panic").expect("it runs");
    assert!(answer.created && answer.session.generation > first.generation);
}

#[test]
fn a_running_session_keeps_its_spec_and_says_that_another_was_asked_for() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let first = daemon.start("alice", &idle());
    let other = SessionRequest {
        pids: Some(17),
        ..idle()
    };
    let answer = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &other, true),
        )
        .expect("runs");
    assert!(!answer.created && !answer.spec_matches);
    assert_eq!(answer.session.generation, first.generation);
    assert_eq!(answer.session.spec.pids, first.spec.pids);
}

#[test]
fn a_start_goes_on_when_whoever_asked_for_it_is_gone() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon
        .faults()
        .next(Operation::Create, 1, Fault::Delay(Duration::from_secs(2)));
    let node = Arc::clone(&daemon.node);
    let asked = daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    daemon.await_state("alice", SessionState::Starting);
    asked.abort();
    daemon.await_state("alice", SessionState::Running);
}

#[test]
fn without_waiting_an_ensure_answers_as_soon_as_the_start_is_recorded() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.faults().hang();
    let answer = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &idle(), false),
        )
        .expect("begun");
    assert!(answer.created);
    assert_eq!(answer.session.state, SessionState::Starting);
    assert_eq!(daemon.record("alice").generation, answer.session.generation);
    daemon.faults().resume();
    daemon.await_state("alice", SessionState::Running);
}

#[test]
fn a_refused_start_names_its_phase_and_its_cause_and_does_not_block_the_next() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let refusal = || Fault::Refuse("no space left".to_owned());
    for (operation, phase) in [(Operation::Create, "create"), (Operation::Start, "start")] {
        daemon.faults().next(operation, 1, refusal());
        let error = daemon
            .run(
                daemon
                    .node
                    .sessions()
                    .ensure(&session("alice"), &idle(), true),
            )
            .expect_err("refused");
        let EnsureError::StartFailed {
            kind,
            session: shown,
            ..
        } = &error
        else {
            panic!("{error:?}");
        };
        assert_eq!(
            (*kind, shown.state),
            (FailureKind::Refused, SessionState::Failed)
        );
        let reason = shown.reason.as_deref().expect("a reason");
        assert!(
            reason.starts_with(phase) && reason.contains("no space left"),
            "{reason}"
        );
        assert!(daemon.record("alice").state.is_ended());
        let came_to: Vec<_> = ["admit", "claim", "create", "prepare"]
            .into_iter()
            .filter(|ended| *ended != phase)
            .collect();
        let shown: Vec<_> = shown.phases_ms.keys().map(String::as_str).collect();
        assert_eq!(shown, came_to, "those that had ended when {phase} failed");
        daemon.run(daemon.node.journal().flush());
        let timeline = daemon.run(daemon.node.journal().timeline(&session("alice")));
        let generation = daemon.record("alice").generation;
        let mut told: Vec<_> = timeline
            .expect("readable")
            .phases
            .into_iter()
            .filter(|told| told.generation == generation)
            .map(|told| told.name)
            .collect();
        told.sort();
        assert_eq!(told, came_to);
    }
    daemon.start("alice", &idle());
}

#[test]
fn a_runtime_that_hangs_fails_the_start_in_bounded_time() {
    let stage = Stage::new();
    let mut options = stage.options();
    // Earlier than the check of the runtime finds it silent, which ends the start for another reason.
    options.bounds.create = Duration::from_secs(1);
    let daemon = stage.boot_with(options);
    daemon.faults().hang();
    let error = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &idle(), true),
        )
        .expect_err("nothing answers");
    let EnsureError::StartFailed {
        kind: FailureKind::TimedOut,
        session: shown,
        ..
    } = &error
    else {
        panic!("{error:?}");
    };
    assert!(
        shown
            .reason
            .as_deref()
            .is_some_and(|r| r.starts_with("create")),
        "{shown:?}"
    );
    daemon.faults().resume();
    // Until the next check of the runtime, which it answers.
    eventually("the runtime is used again", || {
        let sessions = daemon.node.sessions();
        let started = daemon.run(sessions.ensure(&session("alice"), &idle(), true));
        started.is_ok().then_some(())
    });
}

#[test]
fn a_program_that_does_not_answer_on_its_port_is_killed_and_the_reason_says_so() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let deaf = SessionRequest {
        port: Some(Some(9)),
        ready_timeout_s: Some(1),
        ..idle()
    };
    let error = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &deaf, true),
        )
        .expect_err("not ready");
    let EnsureError::StartFailed {
        kind: FailureKind::NotReady,
        session: shown,
        ..
    } = &error
    else {
        panic!("{error:?}");
    };
    assert_eq!(end(shown), (EndCause::StartFailed, Some("ready")));
    let reason = shown.reason.as_deref().expect("a reason");
    for words in ["ready: port 9", "nothing listens there", "ready_timeout_s"] {
        assert!(reason.contains(words), "{reason}");
    }
    assert_eq!(stage.alive(), 0);
}

#[test]
fn an_http_path_is_ready_only_with_success() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let asking = |path: &str| SessionRequest {
        ready_path: Some(path.to_owned()),
        ready_timeout_s: Some(8),
        ..web()
    };
    daemon.start("alice", &asking("/hostname"));
    let error = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("bob"), &asking("/no-such-file"), true),
        )
        .expect_err("404");
    assert!(error.to_string().contains("404"), "{error}");
}

#[test]
fn a_program_that_ends_before_it_is_ready_fails_with_its_exit_code() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let gate = stage.state.path().join("end");
    let script = format!(
        "until [ -e {} ]; do sleep 0.02; done; echo no such module >&2; exit 3",
        gate.display()
    );
    let broken = SessionRequest {
        port: Some(Some(8080)),
        ..program(&script)
    };
    let node = Arc::clone(&daemon.node);
    let asked = daemon.spawn(async move {
        let sessions = node.sessions();
        sessions.ensure(&session("alice"), &broken, true).await
    });
    // An earlier end would be one of its start.
    eventually("its container", || {
        let record = daemon.run(daemon.registry.get(&session("alice")));
        record.expect("readable")?.container
    });
    std::fs::write(&gate, "").expect("written");
    let error = daemon.run(asked).expect("no panic").expect_err("ended");
    let EnsureError::StartFailed {
        kind: FailureKind::Exited,
        session: shown,
        ..
    } = &error
    else {
        panic!("{error:?}");
    };
    assert_eq!(shown.exit_code, Some(3));
    assert_eq!(end(shown), (EndCause::Exited, Some("ready")));
    let reason = shown.reason.as_deref().expect("a reason");
    assert!(
        reason.ends_with("its last output: no such module"),
        "{reason}"
    );
}

#[test]
fn a_program_that_memory_ran_out_for_says_so_though_its_cgroups_go_with_the_notice_of_its_end() {
    let stage = Stage::new();
    let daemon = stage.boot_with_terminals();
    let pid = daemon.start("hungry", &idle()).pid;
    let process = PidFd::open(pid.expect("a process")).expect("alive");
    process.kill().expect("killed");
    let shown = daemon.await_state("hungry", SessionState::Failed);
    assert_eq!(shown.exit_code, Some(137));
    assert_eq!(end(&shown), (EndCause::OutOfMemory, None));
}

#[test]
fn a_program_that_ends_by_itself_is_released_as_stopped_or_failed() {
    let stage = Stage::new();
    let daemon = stage.boot();
    for (id, code, state) in [
        ("good", 0, SessionState::Stopped),
        ("bad", 7, SessionState::Failed),
    ] {
        let gate = stage.state.path().join(format!("end-{id}"));
        let request = program(&format!(
            "until [ -e {} ]; do sleep 0.02; done; exit {code}",
            gate.display()
        ));
        let answer = daemon.run(daemon.node.sessions().ensure(&session(id), &request, true));
        answer.expect("it ran");
        std::fs::write(&gate, "").expect("written");
        let shown = daemon.await_state(id, state);
        assert_eq!(shown.exit_code, Some(code));
        assert_eq!(end(&shown), (EndCause::Exited, None));
        assert!(daemon.record(id).state.is_ended());
        let mut story = daemon.story(id);
        // What is left is removed a moment later.
        story.retain(|kind| *kind != EventKind::SessionCleaned);
        assert_eq!(
            story,
            [
                EventKind::SessionClaimed,
                EventKind::SessionReady,
                EventKind::SessionDead,
                EventKind::SessionExited,
                EventKind::SessionReleased,
            ]
        );
    }
}

#[test]
fn a_session_is_killed_and_released_while_the_runtime_hangs() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("alice", &web());
    daemon.faults().hang();
    let report = daemon
        .run(daemon.node.sessions().stop(&session("alice"), "deleted"))
        .expect("stopped");
    assert_eq!(report.state, SessionState::Stopped);
    assert_eq!(stage.alive(), 0);
    assert!(daemon.record("alice").state.is_ended());
    daemon.faults().resume();
    eventually("what is left to be removed", || {
        daemon
            .story("alice")
            .contains(&EventKind::SessionCleaned)
            .then_some(())
    });
}

#[test]
fn a_start_whose_answer_was_lost_stays_owned_until_its_container_is_found_and_dead() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let happens_after = Duration::from_secs(3);
    daemon
        .faults()
        .next(Operation::Start, 1, Fault::LoseAnswer { happens_after });
    // Nothing can be asked, so that the start can neither be found nor taken back.
    daemon.faults().always(Operation::Find, Fault::Unavailable);
    let node = Arc::clone(&daemon.node);
    let asked = daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    daemon.await_state("alice", SessionState::Stopping);
    assert!(!daemon.record("alice").state.is_ended());
    let error = daemon.run(asked).expect("no panic").expect_err("lost");
    assert!(
        matches!(error, EnsureError::StartFailed { .. }),
        "{error:?}"
    );
    assert!(daemon.record("alice").state.is_ended());
    assert_eq!(stage.alive(), 0);

    daemon.faults().clear();
    let next = daemon.start("alice", &idle());
    let own = conman_observer::alive_below(&stage.cgroup("alice", next.generation)).len();
    assert_eq!(
        stage.alive(),
        own,
        "nothing of the lost start runs beside it"
    );
}

#[test]
fn a_lost_start_that_never_came_to_anything_is_released_once_its_container_is_removed() {
    let stage = Stage::new();
    let daemon = stage.boot();
    // Unavailable says nothing about whether the start was taken; here it was not.
    daemon
        .faults()
        .next(Operation::Start, 1, Fault::Unavailable);
    let error = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &idle(), true),
        )
        .expect_err("unanswered");
    let EnsureError::StartFailed { kind, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(*kind, FailureKind::RuntimeUnavailable);
    assert!(daemon.record("alice").state.is_ended());
    daemon.start("alice", &idle());
}

#[test]
fn a_container_that_is_made_once_its_session_has_ended_is_removed_after_that() {
    const MADE_AFTER: Duration = Duration::from_secs(2);
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon
        .faults()
        .next(Operation::Create, 1, Fault::Delay(MADE_AFTER));
    let begun = Instant::now();
    let asked = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("alice"), &idle(), false),
    );
    assert_eq!(asked.expect("begun").session.state, SessionState::Starting);
    eventually("the call", || {
        (daemon.faults().calls(Operation::Create) == 1).then_some(())
    });
    let stopped = daemon.run(daemon.node.sessions().stop(&session("alice"), "deleted"));
    assert_eq!(stopped.expect("answered").state, SessionState::Stopped);
    eventually("the removal", || {
        let story = daemon.story("alice");
        story.contains(&EventKind::SessionCleaned).then_some(())
    });
    // One that came before would have found nothing.
    assert!(begun.elapsed() >= MADE_AFTER, "{:?}", begun.elapsed());
    let left = daemon.run(daemon.runtime.list()).expect("a list");
    assert_eq!(left.len(), 0, "{left:?}");
}

#[test]
fn a_container_made_after_its_maker_gave_up_is_removed() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let happens_after = Duration::from_millis(300);
    daemon
        .faults()
        .next(Operation::Create, 1, Fault::LoseAnswer { happens_after });
    daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &idle(), true),
        )
        .expect_err("the answer was lost");
    let containers = stage.state.path().join("containers");
    let entries = || {
        let mut all = vec![containers.clone()];
        let mut files = 0;
        while let Some(dir) = all.pop() {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                files += 1;
                all.push(entry.path());
            }
        }
        files
    };
    eventually("the container to appear", || (entries() > 1).then_some(()));
    eventually("the container to be removed", || {
        (entries() <= 1).then_some(())
    });
}

#[test]
fn a_start_can_be_stopped_at_any_step() {
    let stage = Stage::new();
    let daemon = stage.boot();
    for operation in [Operation::Create, Operation::Start] {
        daemon
            .faults()
            .always(operation, Fault::Delay(Duration::from_secs(3)));
        let calls = daemon.faults().calls(operation);
        let node = Arc::clone(&daemon.node);
        let asked = daemon.spawn(async move {
            node.sessions()
                .ensure(&session("alice"), &idle(), true)
                .await
        });
        eventually("the call", || {
            (daemon.faults().calls(operation) > calls).then_some(())
        });
        let report = daemon.run(
            daemon
                .node
                .sessions()
                .stop(&session("alice"), "changed my mind"),
        );
        assert_eq!(report.expect("stopped").state, SessionState::Stopped);
        let error = daemon.run(asked).expect("no panic").expect_err("stopped");
        assert!(matches!(error, EnsureError::Stopped { .. }), "{error:?}");
        assert_eq!(stage.alive(), 0);
        assert!(daemon.record("alice").state.is_ended());
        daemon.faults().clear();
    }
    daemon.start("alice", &idle());
}

#[test]
fn beyond_a_limit_of_the_host_a_start_is_refused_by_the_limits_name() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("alice", &idle());
    let limit = HostLimit {
        max_sessions: 1,
        met: LimitMet {
            name: "kernel.pid_max".to_owned(),
            bounds: "ids of processes and threads".to_owned(),
            value: 400,
            used: 400,
            remedy: "sysctl -w kernel.pid_max=1000".to_owned(),
        },
    };
    let limited = |limit| {
        daemon
            .node
            .status()
            .limit_by_host(RuntimeKind::Process, limit)
    };
    limited(Some(limit.clone()));
    let error = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("bob"), &idle(), true),
        )
        .expect_err("full");
    let EnsureError::NoRoom { limit: met } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(**met, limit.met);
    assert!(error.is_retryable());
    for part in ["kernel.pid_max", "400", "sysctl -w"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    // Whoever looks at the host is told, and what runs is joined as ever.
    daemon.run(daemon.node.status().host_limit_met());
    daemon.start("alice", &idle());
    assert_eq!(daemon.node.sessions().occupancy().settled, 1);
    let shown = daemon.node.status().view().host_limit.expect("it is shown");
    assert_eq!((shown.max_sessions, shown.limit), (1, limit.met));
    limited(None);
    daemon.start("bob", &idle());
    assert_eq!(daemon.node.sessions().occupancy().settled, 2);
}

#[test]
fn beyond_max_sessions_a_start_is_refused_with_the_limit() {
    let stage = Stage::new();
    let mut options = stage.options();
    options.limits.max_sessions = 1;
    let daemon = stage.boot_with(options);
    daemon.start("alice", &idle());
    let error = daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("bob"), &idle(), true),
        )
        .expect_err("full");
    assert!(
        matches!(error, EnsureError::Full { max_sessions: 1 }),
        "{error:?}"
    );
    daemon.start("alice", &idle());
    daemon
        .run(daemon.node.sessions().stop(&session("alice"), "deleted"))
        .expect("stopped");
    daemon.start("bob", &idle());
}

#[test]
fn starts_beyond_max_starting_wait_and_show_it_as_their_admit_phase() {
    let stage = Stage::new();
    let mut options = stage.options();
    options.limits.max_starting = 1;
    let daemon = stage.boot_with(options);
    daemon
        .faults()
        .always(Operation::Create, Fault::Delay(Duration::from_secs(2)));
    let ensures = ["a", "b"].map(|id| {
        let node = Arc::clone(&daemon.node);
        daemon.spawn(async move { node.sessions().ensure(&session(id), &idle(), true).await })
    });
    let waits = ensures.map(|ensure| {
        let answer = daemon.run(ensure).expect("no panic").expect("it runs");
        answer.session.phases_ms["admit"]
    });
    let longest = waits[0].max(waits[1]);
    assert!(longest >= 150.0, "{waits:?}");
}

#[test]
fn of_the_ended_sessions_the_oldest_are_forgotten() {
    let stage = Stage::new();
    let mut options = stage.options();
    options.limits.max_stopped_kept = 2;
    let daemon = stage.boot_with(options);
    for id in ["a", "b", "c"] {
        daemon.start(id, &idle());
        daemon
            .run(daemon.node.sessions().stop(&session(id), "deleted"))
            .expect("stopped");
    }
    assert!(daemon.node.sessions().get(&session("a")).is_none());
    assert!(daemon.node.sessions().get(&session("b")).is_some());
    eventually("the registry to forget", || {
        daemon
            .run(daemon.registry.get(&session("a")))
            .expect("readable")
            .is_none()
            .then_some(())
    });
}

#[test]
fn a_bind_must_exist_and_lead_through_no_link_when_the_session_starts() {
    let stage = Stage::new();
    let root = bind_root(&stage);
    let mut options = stage.options();
    options.policy.bind_roots = vec![root.clone()];
    let daemon = stage.boot_with(options);
    std::fs::create_dir(root.join("alice")).expect("made");
    std::os::unix::fs::symlink("/etc", root.join("mallory")).expect("linked");
    let request = || SessionRequest {
        binds: Some(vec![format!("{}/{{id}}:/run/work", root.display())]),
        ..idle()
    };
    daemon.start("alice", &request());
    for (id, words) in [("mallory", "symbolic link"), ("bob", "does not exist")] {
        let error = daemon
            .run(
                daemon
                    .node
                    .sessions()
                    .ensure(&session(id), &request(), true),
            )
            .expect_err("refused");
        let EnsureError::StartFailed {
            kind: FailureKind::Bind,
            ..
        } = &error
        else {
            panic!("{error:?}");
        };
        assert!(error.to_string().contains(words), "{error}");
    }
    assert_eq!(daemon.faults().calls(Operation::Create), 1);
}

#[test]
fn an_idle_session_is_stopped_and_one_with_a_tunnel_or_a_command_is_not() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let request = SessionRequest {
        idle_timeout_s: Some(5),
        ..web()
    };
    daemon.start("idle", &request);
    daemon.start("busy", &request);
    daemon.start("working", &request);
    let plan = ExecPlan {
        command: vec!["sleep".to_owned(), "1000".to_owned()],
        ..ExecPlan::default()
    };
    let command = daemon.run(daemon.node.access().exec(&session("working"), plan));
    let command = command.expect("it begins");
    let route = daemon
        .run(daemon.node.access().route(&session("busy"), false))
        .expect("runs");
    let tunnel = route.activity.begin();
    let stopped = daemon.await_state("idle", SessionState::Stopped);
    assert_eq!(stopped.reason.as_deref(), Some("idle for 5 s"));
    assert_eq!(end(&stopped), (EndCause::Idle, None));
    assert_eq!(daemon.show("busy").connections, 1);
    assert_eq!(daemon.show("busy").state, SessionState::Running);
    assert_eq!(daemon.show("working").state, SessionState::Running);
    drop((tunnel, command));
    for (id, latest) in [("busy", "a connection"), ("working", "a command")] {
        let stopped = daemon.await_state(id, SessionState::Stopped);
        let reason = format!("idle for 5 s after {latest}");
        assert_eq!(stopped.reason, Some(reason));
    }
}

#[test]
fn a_session_is_stopped_at_the_end_of_its_longest_lifetime_whatever_it_does() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let request = SessionRequest {
        max_lifetime_s: Some(5),
        ..web()
    };
    daemon.start("alice", &request);
    let route = daemon
        .run(daemon.node.access().route(&session("alice"), false))
        .expect("runs");
    let _tunnel = route.activity.begin();
    let stopped = daemon.await_state("alice", SessionState::Stopped);
    assert!(
        stopped
            .reason
            .as_deref()
            .is_some_and(|r| r.contains("lifetime of 5 s"))
    );
    assert_eq!(end(&stopped), (EndCause::Lifetime, None));
    assert_eq!(
        route.closing.borrow().as_ref().map(|closing| closing.code),
        Some(1012)
    );
}

#[test]
fn a_bad_spec_names_every_field_and_touches_nothing() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let request = SessionRequest {
        cpus: Some(-1.0),
        pids: Some(0),
        ..idle()
    };
    let error = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("alice"), &request, true),
    );
    let EnsureError::BadSpec { errors, .. } = error.expect_err("invalid") else {
        panic!("another error")
    };
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(daemon.node.sessions().get(&session("alice")).is_none());
}
