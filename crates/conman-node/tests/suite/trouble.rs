//! Processes that do not die, and a registry that cannot write.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::stage::flaky_registry::FlakyRegistry;
use crate::stage::frozen::Frozen;
use crate::stage::silent::Silent;
use crate::stage::{Daemon, Stage, eventually, idle, session, web, web_from};
use conman_core::{EndCause, FENCED};
use conman_linux::{Cgroups, PidFd};
use conman_node::{EnsureError, FailureKind, NodeOptions, RouteError, StopError};
use conman_proto::{EventKind, Generation, NodeState, PreemptRequest, ResolvedSpec, SessionState};
use conman_registry::{RecordState, Registry as _};
use conman_runtime::{ContainerKey, ContainerPlan, Lifecycle as _};
use conman_testkit::Operation;
use futures_util::FutureExt as _;

fn quick(stage: &Stage) -> NodeOptions {
    let mut options = stage.options();
    options.bounds.stuck_after = Duration::from_millis(400);
    options
}

fn freeze(stage: &Stage, daemon: &Daemon, id: &str) -> Option<Frozen> {
    let cgroups = Cgroups::detect().expect("the host has cgroups");
    let pids = cgroups.pids_below(&stage.cgroup(id, daemon.show(id).generation));
    let frozen = Frozen::new(&format!("conman-{}-frozen", stage.instance), &pids);
    frozen.inspect_err(|why| say_skipped(why)).ok()
}

#[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
fn say_skipped(why: &str) {
    println!("skipped: {why}");
}

#[test]
fn what_does_not_die_is_stuck_with_its_reason_and_released_when_it_is_dead() {
    let stage = Stage::new();
    let daemon = stage.boot_with(quick(&stage));
    daemon.start("alice", &web_from("web"));
    let Some(frozen) = freeze(&stage, &daemon, "alice") else {
        return;
    };

    let report = daemon
        .run(daemon.node.sessions().stop(&session("alice"), "deleted"))
        .expect("answered");
    assert_eq!((report.state, report.dead_ms), (SessionState::Stuck, None));
    let reason = report.reason.expect("a reason");
    assert!(reason.contains("killed, and not dead: process"), "{reason}");
    assert!(!daemon.record("alice").state.is_ended());
    eventually("the record to say stuck", || {
        matches!(daemon.record("alice").state, RecordState::Stuck { .. }).then_some(())
    });
    let error = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("alice"), &idle(), true),
    );
    assert!(matches!(error, Err(EnsureError::Stuck { .. })), "{error:?}");
    let error = daemon.run(daemon.node.access().route(&session("alice"), true));
    assert!(matches!(error, Err(RouteError::Stuck { .. })), "{error:?}");

    frozen.thaw();
    let shown = daemon.await_state("alice", SessionState::Stopped);
    assert_eq!(shown.reason.as_deref(), Some("deleted"));
    assert!(daemon.record("alice").state.is_ended());
    assert!(daemon.story("alice").contains(&EventKind::SessionStuck));
    daemon.start("alice", &idle());
}

#[test]
fn a_preemption_reports_what_does_not_die_and_releases_the_rest() {
    let stage = Stage::new();
    let daemon = stage.boot_with(quick(&stage));
    daemon.start("alice", &idle());
    daemon.start("bob", &idle());
    let Some(frozen) = freeze(&stage, &daemon, "alice") else {
        return;
    };

    let request = PreemptRequest {
        budget_ms: Some(5_000),
        ..PreemptRequest::default()
    };
    let report = daemon
        .run(daemon.node.preemption().preempt(&request, "api"))
        .expect("a report");
    assert_eq!(
        (report.sessions, report.released, report.unreleased.len()),
        (2, 1, 1)
    );
    let left = &report.unreleased[0];
    assert_eq!(left.id, session("alice"));
    assert!(
        left.reason.contains("killed, and not dead"),
        "{}",
        left.reason
    );
    assert!(!daemon.record("alice").state.is_ended());
    daemon.await_state("bob", SessionState::Stopped);
    daemon.await_state("alice", SessionState::Stuck);

    frozen.thaw();
    let shown = daemon.await_state("alice", SessionState::Stopped);
    assert_eq!(
        shown.reason.as_deref(),
        Some("preempted: preemption notice")
    );
    assert!(daemon.record("alice").state.is_ended());
}

/// A session that a preemption could not end, and that was deleted then.
fn deleted_while_stuck(stage: &Stage) -> Option<(Daemon, Frozen)> {
    let daemon = stage.boot_with(quick(stage));
    daemon.start("alice", &idle());
    let frozen = freeze(stage, &daemon, "alice")?;
    let request = PreemptRequest {
        budget_ms: Some(100),
        ..PreemptRequest::default()
    };
    let report = daemon.run(daemon.node.preemption().preempt(&request, "api"));
    assert_eq!(report.expect("a report").unreleased.len(), 1);
    daemon.await_state("alice", SessionState::Stuck);
    let cause = || daemon.record("alice").state.end_cause();
    let expected = Some(EndCause::Preempted);
    eventually("the record to say stuck", || {
        (cause() == expected).then_some(())
    });
    let report = daemon.run(daemon.node.sessions().stop(&session("alice"), "deleted"));
    assert_eq!(report.expect("answered").state, SessionState::Stuck);
    assert_eq!(cause(), Some(EndCause::Deleted), "it is written down");
    let RecordState::Stuck { reason, .. } = daemon.record("alice").state else {
        panic!("it is stuck");
    };
    assert_eq!(reason, "deleted", "in words, too");
    Some((daemon, frozen))
}

/// What a conman that knows no causes goes by.
fn says_deleted(daemon: &Daemon) {
    let RecordState::Ended(ending) = daemon.record("alice").state else {
        panic!("it has ended");
    };
    assert_eq!(ending.reason, "deleted");
}

fn ends_deleted(daemon: &Daemon, frozen: &Frozen) {
    frozen.thaw();
    eventually("alice to be released", || {
        daemon.record("alice").state.is_ended().then_some(())
    });
    let cause = daemon.record("alice").state.end_cause();
    assert_eq!(cause, Some(EndCause::Deleted));
    says_deleted(daemon);
}

#[test]
fn what_is_deleted_while_it_is_stuck_and_preempted_then_is_told_as_deleted_in_words_as_well() {
    let stage = Stage::new();
    let daemon = stage.boot_with(quick(&stage));
    daemon.start("alice", &idle());
    let Some(frozen) = freeze(&stage, &daemon, "alice") else {
        return;
    };
    let report = daemon.run(daemon.node.sessions().stop(&session("alice"), "deleted"));
    assert_eq!(report.expect("answered").state, SessionState::Stuck);
    let request = PreemptRequest::default();
    let report = daemon.run(async {
        let thawing = async {
            // The preemption has begun, and hunts what it cannot kill.
            while daemon.node.status().view().state != NodeState::Preempted {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            frozen.thaw();
        };
        let (report, ()) = tokio::join!(daemon.node.preemption().preempt(&request, "api"), thawing);
        report
    });
    assert_eq!(report.expect("a report").released, 1);
    says_deleted(&daemon);
}

#[test]
fn what_is_deleted_while_its_node_cannot_end_it_is_not_what_the_node_took() {
    let stage = Stage::new();
    if let Some((daemon, frozen)) = deleted_while_stuck(&stage) {
        ends_deleted(&daemon, &frozen);
    }
}

#[test]
fn what_is_deleted_while_it_cannot_end_stays_so_for_the_next_daemon() {
    let stage = Stage::new();
    if let Some((daemon, frozen)) = deleted_while_stuck(&stage) {
        daemon.vanish();
        ends_deleted(&stage.boot(), &frozen);
    }
}

fn boot_flaky(stage: &Stage) -> (Daemon, Arc<FlakyRegistry>) {
    let registry = Arc::new(FlakyRegistry::default());
    let daemon = stage.boot_on(quick(stage), registry.clone(), Duration::from_secs(30));
    (daemon, registry)
}

/// With a node that does not wait for its registry for long.
fn boot_impatient(stage: &Stage) -> (Daemon, Arc<FlakyRegistry>) {
    let registry = Arc::new(FlakyRegistry::default());
    let mut options = quick(stage);
    options.bounds.registry = Duration::from_millis(700);
    let daemon = stage.boot_on(options, registry.clone(), Duration::from_secs(30));
    (daemon, registry)
}

#[test]
fn a_release_that_somebody_else_made_and_forgot_counts_as_one() {
    let stage = Stage::new();
    let (daemon, registry) = boot_flaky(&stage);
    for id in ["alice", "bob"] {
        daemon.start(id, &idle());
    }
    registry.forget_what_is_released();
    let notice = PreemptRequest::default();
    let report = daemon
        .run(daemon.node.preemption().preempt(&notice, "api"))
        .expect("a report");
    assert_eq!((report.certified, report.released), (2, 2), "{report:?}");
    assert!(report.unreleased.is_empty(), "{report:?}");
}

#[test]
fn a_start_that_cannot_be_recorded_is_refused_and_leaves_no_trace() {
    let stage = Stage::new();
    let (daemon, registry) = boot_flaky(&stage);
    registry.fill(true);
    let error = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("alice"), &idle(), true),
    );
    let Err(error @ EnsureError::Registry { .. }) = error else {
        panic!("{error:?}")
    };
    assert!(error.is_retryable());
    assert!(daemon.node.sessions().get(&session("alice")).is_none());
    registry.fill(false);
    daemon.start("alice", &idle());
}

#[test]
fn a_claim_whose_answer_was_lost_does_not_keep_the_session_from_starting() {
    let stage = Stage::new();
    let (daemon, registry) = boot_flaky(&stage);
    registry.lose_next_claim();
    daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &idle(), true),
        )
        .expect_err("lost");
    let lost = daemon.record("alice").generation;
    assert!(daemon.start("alice", &idle()).generation > lost);
}

#[test]
fn a_container_that_cannot_be_recorded_is_killed() {
    let stage = Stage::new();
    let (daemon, registry) = boot_impatient(&stage);
    daemon.faults().next(
        conman_testkit::Operation::Start,
        1,
        conman_testkit::Fault::Delay(Duration::from_secs(2)),
    );
    daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &idle(), false),
        )
        .expect("begun");
    registry.fill(true);
    eventually("the bound on recording to pass", || {
        (daemon.show("alice").state != SessionState::Starting).then_some(())
    });
    registry.fill(false);
    let shown = daemon.await_state("alice", SessionState::Failed);
    assert!(
        shown
            .reason
            .as_deref()
            .is_some_and(|r| r.starts_with("record:")),
        "{shown:?}"
    );
    assert_eq!(stage.alive(), 0);
    let error = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("alice"), &idle(), true),
    );
    error.expect("the next one starts");
}

#[test]
fn a_kill_does_not_wait_for_a_full_disk_and_the_release_is_tried_until_it_is_recorded() {
    let stage = Stage::new();
    let (daemon, registry) = boot_flaky(&stage);
    daemon.start("alice", &idle());
    registry.fill(true);
    let stopping = {
        let node = Arc::clone(&daemon.node);
        daemon.spawn(async move { node.sessions().stop(&session("alice"), "deleted").await })
    };
    eventually("the session to be dead", || {
        (stage.alive() == 0).then_some(())
    });
    let before = registry.refused();
    eventually("a second try", || {
        (registry.refused() > before + 1).then_some(())
    });
    assert!(!daemon.show("alice").state.is_ended());
    registry.fill(false);
    daemon.run(stopping).expect("no panic").expect("answered");
    daemon.await_state("alice", SessionState::Stopped);
}

#[test]
fn what_the_fence_killed_is_told_as_that_also_while_its_release_is_tried_in_vain() {
    let stage = Stage::new();
    let (daemon, registry) = boot_flaky(&stage);
    daemon.faults().fence(session("alice"));
    let pid = daemon.start("alice", &idle()).pid.expect("a process");
    eventually("the record to say running", || {
        matches!(daemon.record("alice").state, RecordState::Running { .. }).then_some(())
    });
    registry.fill(true);
    PidFd::open(pid).expect("alive").kill().expect("killed");
    eventually("the session to tell what killed it", || {
        let shown = daemon.show("alice");
        assert!(!shown.state.is_ended(), "{shown:?}");
        let reason = shown.reason.unwrap_or_default();
        reason.starts_with(FENCED).then_some(())
    });
    registry.fill(false);
    let shown = daemon.await_state("alice", SessionState::Stopped);
    assert_eq!(shown.reason.as_deref(), Some(FENCED));
    let told = daemon.record("alice").state.end_cause();
    assert_eq!(told, Some(EndCause::NodeLost));
}

#[test]
fn who_connects_to_what_ends_is_told_of_its_end_once_it_has_ended() {
    let stage = Stage::new();
    let (daemon, registry) = boot_flaky(&stage);
    daemon.start("alice", &web());
    registry.fill(true);
    let node = Arc::clone(&daemon.node);
    let stopping =
        daemon.spawn(async move { node.sessions().stop(&session("alice"), "deleted").await });
    daemon.await_state("alice", SessionState::Stopping);
    let alice = session("alice");
    let mut asking = Box::pin(daemon.node.access().route(&alice, false));
    let held = daemon.run(async { (&mut asking).now_or_never().is_none() });
    assert!(held, "it has not ended yet");
    registry.fill(false);
    daemon.run(stopping).expect("no panic").expect("stopped");
    let refused = daemon.run(asking);
    // Where another node takes it, that is known by now.
    assert!(
        matches!(&refused, Err(RouteError::Ended { state, .. }) if state.is_ended()),
        "{refused:?}"
    );
}

#[test]
fn a_preemption_goes_on_trying_to_release_while_the_disk_is_full() {
    let stage = Stage::new();
    let (daemon, registry) = boot_flaky(&stage);
    daemon.start("alice", &idle());
    registry.fill(true);
    let pending = daemon
        .node
        .preemption()
        .begin(&PreemptRequest::default(), "api");
    eventually("a few tries", || (registry.refused() > 3).then_some(()));
    assert_eq!(stage.alive(), 0);
    registry.fill(false);
    let report = daemon
        .run(pending.expect("taken").wait())
        .expect("a report");
    assert_eq!((report.certified, report.released), (1, 1));
    let refused = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("bob"), &idle(), true),
    );
    assert!(
        matches!(refused, Err(EnsureError::Preempted { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_registry_that_does_not_answer_fails_the_start_in_bounded_time() {
    let stage = Stage::new();
    let (daemon, registry) = boot_impatient(&stage);
    registry.answer_no_claims(true);
    for _ in 0..2 {
        let error = daemon.run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &idle(), true),
        );
        assert!(
            matches!(error, Err(EnsureError::RegistrySlow { .. })),
            "{error:?}"
        );
    }
    assert!(daemon.node.sessions().get(&session("alice")).is_none());
    registry.answer_no_claims(false);
    daemon.start("bob", &idle());
}

#[test]
fn a_preemption_releases_claims_whose_answers_nobody_took() {
    let stage = Stage::new();
    let (daemon, registry) = boot_flaky(&stage);
    registry.answer_no_claims(true);
    let node = Arc::clone(&daemon.node);
    let asked = daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    eventually("the claim to be recorded", || {
        daemon
            .run(daemon.registry.get(&session("alice")))
            .expect("readable")
    });
    let report = daemon
        .run(
            daemon
                .node
                .preemption()
                .preempt(&PreemptRequest::default(), "api"),
        )
        .expect("report");
    assert_eq!((report.sessions, report.released), (1, 1), "{report:?}");
    assert!(daemon.record("alice").state.is_ended());
    let error = daemon.run(asked).expect("no panic");
    assert!(
        matches!(error, Err(EnsureError::Preempted { .. })),
        "{error:?}"
    );
}

/// With a node that waits for its registry for as long as a loaded machine takes.
fn boot_patient(stage: &Stage) -> (Daemon, Arc<FlakyRegistry>) {
    let registry = Arc::new(FlakyRegistry::default());
    let mut options = stage.options();
    options.bounds.registry = Duration::from_secs(60);
    let daemon = stage.boot_on(options, registry.clone(), Duration::from_secs(30));
    (daemon, registry)
}

#[test]
fn a_start_that_the_registry_no_longer_allows_is_not_sent() {
    let stage = Stage::new();
    let (daemon, registry) = boot_patient(&stage);
    registry.lose_what_is_claimed();
    let error = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("alice"), &idle(), true),
    );
    let error = error.expect_err("it is another node's");
    assert!(
        matches!(
            &error,
            EnsureError::StartFailed {
                kind: FailureKind::Registry,
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(daemon.faults().calls(Operation::Start), 0);
}

#[test]
fn a_start_waits_until_the_registry_can_tell_whose_it_is() {
    let stage = Stage::new();
    let (daemon, registry) = boot_patient(&stage);
    registry.be_unsure(true);
    let node = Arc::clone(&daemon.node);
    let ensure = daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    eventually("the registry to be asked twice", || {
        (registry.asked() >= 2).then_some(())
    });
    assert_eq!(daemon.faults().calls(Operation::Start), 0);
    registry.be_unsure(false);
    let ensured = daemon.run(ensure).expect("no panic").expect("it runs");
    assert_eq!(ensured.session.state, SessionState::Running);
}

/// Some spec as the node has resolved it.
fn resolved(daemon: &Daemon) -> ResolvedSpec {
    daemon.start("model", &idle());
    daemon.record("model").spec
}

/// A start that is recorded, by whom no life of the node knows.
fn recorded(daemon: &Daemon, id: &str) -> Generation {
    let spec = resolved(daemon);
    let claimed = daemon.run(daemon.registry.claim(&session(id), &spec));
    claimed.expect("free").generation
}

#[test]
fn an_order_to_end_what_cannot_be_looked_up_is_kept_until_it_can() {
    let stage = Stage::new();
    let (daemon, registry) = boot_patient(&stage);
    let generation = recorded(&daemon, "alice");
    registry.be_unreadable(true);
    daemon
        .node
        .sessions()
        .condemn(&session("alice"), generation, "it was lost");
    eventually("the look to fail", || {
        (registry.refused() > 0).then_some(())
    });
    registry.be_unreadable(false);
    eventually("alice to be released", || {
        daemon.record("alice").state.is_ended().then_some(())
    });
}

#[test]
fn an_order_to_end_a_life_that_waits_for_its_generation_ends_it_once_it_has_one() {
    let stage = Stage::new();
    let (daemon, registry) = boot_patient(&stage);
    registry.hold_claims(true);
    let node = Arc::clone(&daemon.node);
    daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    let generation = eventually("the claim to be recorded", || {
        let record = daemon
            .run(registry.get(&session("alice")))
            .expect("readable");
        record.map(|record| record.generation)
    });
    let why = "its ownership was lost";
    daemon
        .node
        .sessions()
        .condemn(&session("alice"), generation, why);
    registry.hold_claims(false);
    let reason = eventually("alice to end", || {
        let shown = daemon.node.sessions().get(&session("alice"))?;
        shown.state.is_ended().then_some(shown.reason)
    });
    assert_eq!(reason.as_deref(), Some(why));
    assert!(daemon.record("alice").state.is_ended());
}

#[test]
fn a_life_is_this_nodes_once_its_claim_is_answered_and_who_waits_for_that_is_told() {
    let stage = Stage::new();
    let (daemon, registry) = boot_patient(&stage);
    registry.hold_claims(true);
    let node = Arc::clone(&daemon.node);
    let starting = daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    let alice = session("alice");
    eventually("the life to begin", || {
        daemon.node.sessions().is_live(&alice).then_some(())
    });
    assert!(!daemon.node.sessions().owns(&alice));
    let mut claimed = Box::pin(daemon.node.sessions().claimed(&alice));
    let waits = daemon.run(async { (&mut claimed).now_or_never().is_none() });
    assert!(waits, "nobody has answered yet");
    registry.hold_claims(false);
    daemon.run(claimed);
    assert!(daemon.node.sessions().owns(&alice));
    daemon.run(starting).expect("no panic").expect("started");
}

#[test]
fn a_life_that_another_node_was_first_for_is_not_said_to_have_never_been() {
    let stage = Stage::new();
    let (daemon, registry) = boot_patient(&stage);
    registry.hold_claims(true);
    let node = Arc::clone(&daemon.node);
    daemon.spawn(async move {
        node.sessions()
            .ensure(&session("alice"), &idle(), true)
            .await
    });
    eventually("the life to begin", || {
        daemon
            .node
            .sessions()
            .is_live(&session("alice"))
            .then_some(())
    });
    let alice = session("alice");
    let mut stopping = Box::pin(daemon.node.sessions().stop(&alice, "deleted"));
    let waits = daemon.run(async { (&mut stopping).now_or_never().is_none() });
    assert!(waits, "nobody has answered yet");
    registry.lose_claims_to_another();
    registry.hold_claims(false);
    let stopped = daemon.run(stopping);
    assert!(
        matches!(stopped, Err(StopError::Moved { .. })),
        "{stopped:?}"
    );
}

fn files_dir(stage: &Stage, key: &ContainerKey) -> PathBuf {
    let name = format!("{}.{}", key.session, key.generation);
    stage.state.path().join("files").join(name)
}

/// Has the runtime start what the node knows nothing of.
fn started_unasked(
    stage: &Stage,
    daemon: &Daemon,
    id: &str,
    generation: Generation,
) -> ContainerKey {
    let key = ContainerKey {
        session: session(id),
        generation,
    };
    let plan = ContainerPlan {
        files_dir: files_dir(stage, &key),
        spec: resolved(daemon),
        binds: Vec::new(),
        key: key.clone(),
    };
    daemon.run(daemon.runtime.create(&plan)).expect("made");
    let started = daemon.run(daemon.runtime.start(&key)).expect("started");
    assert!(
        daemon
            .runtime
            .pids(&key)
            .expect("seen")
            .contains(&started.pid)
    );
    key
}

#[test]
fn what_no_record_knows_is_ended_by_order_and_the_registry_is_told() {
    let stage = Stage::new();
    let (daemon, registry) = boot_patient(&stage);
    let generation = Generation::new(7_000).expect("not zero");
    let key = started_unasked(&stage, &daemon, "ghost", generation);
    daemon
        .node
        .sessions()
        .condemn(&session("ghost"), generation, "it was lost");
    eventually("the registry to be told", || {
        registry
            .was_released(&session("ghost"), generation)
            .then_some(())
    });
    let left = daemon.runtime.pids(&key).expect("seen");
    assert!(left.is_empty(), "told while it runs: {left:?}");
}

#[test]
fn what_is_ended_by_order_and_has_an_unreadable_record_is_proven_dead_and_released() {
    let stage = Stage::new();
    let (daemon, registry) = boot_patient(&stage);
    let generation = recorded(&daemon, "alice");
    let key = started_unasked(&stage, &daemon, "alice", generation);
    registry.be_garbled();
    daemon
        .node
        .sessions()
        .condemn(&session("alice"), generation, "it is not known");
    eventually("the registry to be told", || {
        registry
            .was_released(&session("alice"), generation)
            .then_some(())
    });
    let left = daemon.runtime.pids(&key).expect("seen");
    assert!(left.is_empty(), "told while it runs: {left:?}");
}

#[test]
fn a_runtime_that_hangs_holds_up_the_end_of_nothing_but_what_may_be_its_own() {
    let stage = Stage::new();
    let registry = Arc::new(FlakyRegistry::default());
    let docker = Arc::new(Silent::default());
    let daemon = stage.boot_beside(docker.clone(), registry.clone());
    let generation = Generation::new(7_000).expect("not zero");
    let condemn = |id: &str| {
        let why = "it was lost";
        daemon
            .node
            .sessions()
            .condemn(&session(id), generation, why);
    };
    let is_told_of = |id: &str| registry.was_released(&session(id), generation);

    // Some runtime was asked to make these, and it is not the one that answers.
    let unknown: Vec<ContainerKey> = (0..20)
        .map(|number| ContainerKey {
            session: session(&format!("unknown{number}")),
            generation,
        })
        .collect();
    for key in &unknown {
        std::fs::create_dir_all(files_dir(&stage, key)).expect("made");
        condemn(key.session.as_str());
    }
    eventually("Docker to be asked", || {
        docker.was_asked_for(&unknown[0]).then_some(())
    });
    let key = started_unasked(&stage, &daemon, "ghost", generation);
    for id in ["ghost", "nothing"] {
        condemn(id);
        eventually("the registry to be told", || is_told_of(id).then_some(()));
    }
    let left = daemon.runtime.pids(&key).expect("seen");
    assert!(left.is_empty(), "told while it runs: {left:?}");
    for key in &unknown {
        assert!(!is_told_of(key.session.as_str()), "{key}");
    }

    docker.answer();
    for key in &unknown {
        let told = || is_told_of(key.session.as_str()).then_some(());
        eventually("the registry to be told", told);
    }
}

#[test]
fn a_claim_that_nobody_knows_is_given_up_only_once_nothing_of_it_runs() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let generation = recorded(&daemon, "alice");
    let key = started_unasked(&stage, &daemon, "alice", generation);

    let shown = daemon.start("alice", &idle());
    assert!(shown.generation > generation);
    let left = daemon.runtime.pids(&key).expect("seen");
    assert!(left.is_empty(), "two of alice run: {left:?}");
}

#[test]
fn an_order_to_end_an_earlier_generation_leaves_the_present_one_alone() {
    let stage = Stage::new();
    let daemon = stage.boot();
    let first = daemon.start("alice", &idle()).generation;
    daemon
        .run(daemon.node.sessions().stop(&session("alice"), "deleted"))
        .expect("stopped");
    let second = daemon.start("alice", &idle()).generation;
    daemon
        .node
        .sessions()
        .condemn(&session("alice"), first, "it was lost");
    daemon
        .node
        .sessions()
        .condemn(&session("bob"), first, "it was lost");
    let shown = daemon.show("alice");
    assert_eq!(
        (shown.generation, shown.state),
        (second, SessionState::Running)
    );
    let report = daemon.run(daemon.node.sessions().stop(&session("alice"), "deleted"));
    assert_eq!(report.expect("stopped").generation, second);
}
