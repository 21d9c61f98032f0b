//! Starts that cannot succeed end in a clear state and stand in nobody's way.

use std::time::{Duration, Instant};

use conman_e2e::{Api, BUSYBOX, Conman, docker_shared, eventually, eventually_some};
use conman_proto::{Problem, Session, SessionState};
use serde_json::{Value, json};

/// A machine with more to do than it has processors may be so much later than it should.
const SLACK: Duration = Duration::from_secs(60);

/// Ensures a session that cannot start: the problem that answers, and the session afterwards.
async fn fail(api: &Api, id: &str, request: Value) -> (Problem, Session) {
    let answer = api.put(&format!("/v1/sessions/{id}"), &request).await;
    assert!(!answer.status.is_success(), "{}", answer.text());
    (answer.problem(), api.session(id).await)
}

/// The id is as good as new: a spec that works starts, with a greater generation.
async fn starts_all_the_same(api: &Api, failed: &Session) {
    let id = failed.id.as_str();
    let next = api.ensure(id, &json!({"template": "tiny"})).await;
    assert!(next.created);
    assert_eq!(next.session.state, SessionState::Running);
    assert!(next.session.generation > failed.generation);
}

#[tokio::test]
async fn an_unknown_image_is_named_in_a_422_and_in_the_failed_session() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let (problem, session) = fail(&api, "s", json!({"image": "no-such-image:ever"})).await;
    assert_eq!((problem.status, problem.slug()), (422, "no-such-image"));
    assert!(problem.detail.contains("no-such-image:ever"), "{problem:?}");
    assert!(!problem.retryable);
    assert_eq!(session.state, SessionState::Failed);
    let reason = session.reason.as_deref().unwrap_or_default();
    assert!(reason.contains("no-such-image:ever"), "{reason}");
    starts_all_the_same(&api, &session).await;
}

#[tokio::test]
async fn an_unknown_command_is_named_in_the_problem_and_in_the_failed_session() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let request = json!({"image": BUSYBOX, "command": ["no-such-program", "x"], "port": 8080});
    let (problem, session) = fail(&api, "s", request).await;
    assert_eq!(
        (problem.status, problem.slug()),
        (422, "start-refused"),
        "{problem:?}"
    );
    assert!(!problem.retryable);
    assert!(problem.detail.contains("no-such-program"), "{problem:?}");
    assert_eq!(session.state, SessionState::Failed);
    let reason = session.reason.as_deref().unwrap_or_default();
    assert!(reason.contains("no-such-program"), "{reason}");
    let instance = conman.instance();
    eventually("nothing is left of it", SLACK, async || {
        docker.containers_of(&instance).await.is_empty()
    })
    .await;
    starts_all_the_same(&api, &session).await;
}

#[tokio::test]
async fn an_unknown_command_of_a_session_without_a_port_fails_it_by_name_too() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let request = json!({"image": BUSYBOX, "command": ["no-such-program", "x"]});
    let (problem, session) = fail(&api, "s", request).await;
    assert_eq!(
        (problem.status, problem.slug()),
        (422, "start-refused"),
        "{problem:?}"
    );
    assert_eq!(session.state, SessionState::Failed);
    let reason = session.reason.as_deref().unwrap_or_default();
    assert!(reason.contains("no-such-program"), "{reason}");
    starts_all_the_same(&api, &session).await;
}

#[tokio::test]
async fn a_program_that_ends_before_its_port_answers_is_a_failed_start_with_its_exit_code() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let request = json!({"image": BUSYBOX, "command": ["sh", "-c", "exit 7"], "port": 8080});
    let (problem, session) = fail(&api, "s", request).await;
    assert_eq!(
        (problem.status, problem.slug()),
        (502, "start-exited"),
        "{problem:?}"
    );
    assert!(problem.detail.contains('7'), "{}", problem.detail);
    assert_eq!(session.state, SessionState::Failed);
    assert_eq!(session.exit_code, Some(7));
    starts_all_the_same(&api, &session).await;
}

#[tokio::test]
async fn a_program_that_ends_by_itself_is_stopped_or_failed_by_its_exit_code() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    for (id, code, state) in [
        ("well", 0, SessionState::Stopped),
        ("badly", 3, SessionState::Failed),
    ] {
        // It ends when told, so that it surely runs before.
        let script = format!("until [ -e /tmp/end ]; do sleep 0.1; done; exit {code}");
        let request = json!({"image": BUSYBOX, "command": ["sh", "-c", script]});
        api.ensure(id, &request).await;
        let told = json!({"command": ["touch", "/tmp/end"]});
        // Its end may overtake the answer.
        let _ = api.post(&format!("/v1/sessions/{id}/exec"), &told).await;
        let session = eventually_some("it has ended", SLACK, async || {
            let session = api.session(id).await;
            (session.state == state).then_some(session)
        })
        .await;
        assert_eq!(session.exit_code, Some(code), "{session:?}");
        assert_eq!(session.pid, None);
        assert!(session.ended_at.is_some());
    }
}

#[tokio::test]
async fn a_port_that_never_answers_fails_the_start_within_its_bound() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let bound = Duration::from_secs(2);
    let asked = Instant::now();
    let request = json!({"template": "tiny", "port": 8080, "ready_timeout_s": bound.as_secs()});
    let (problem, session) = fail(&api, "s", request).await;
    let took = asked.elapsed();
    assert_eq!((problem.status, problem.slug()), (504, "start-not-ready"));
    assert!(problem.detail.contains("8080"), "{}", problem.detail);
    assert!(took >= bound, "given up after {took:?}");
    assert!(took < bound + SLACK, "given up only after {took:?}");
    assert_eq!(session.state, SessionState::Failed);
    assert_eq!(conman.processes(), []);
    starts_all_the_same(&api, &session).await;
}

#[tokio::test]
async fn an_error_status_at_the_ready_path_is_not_ready() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let request =
        json!({"template": "python", "ready_path": "/nothing-here", "ready_timeout_s": 20});
    let (problem, session) = fail(&api, "s", request).await;
    assert_eq!(problem.slug(), "start-not-ready");
    assert!(problem.detail.contains("404"), "{}", problem.detail);
    assert_eq!(session.state, SessionState::Failed);
    let ready = json!({"template": "python", "ready_path": "/"});
    let ready = api.ensure("s", &ready).await.session;
    assert_eq!(ready.state, SessionState::Running);
}

#[tokio::test]
async fn starts_that_never_become_ready_do_not_hold_up_others_and_can_be_stopped() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder()
        .set("limits", "max_starting = 1")
        .start(&docker)
        .await;
    let api = conman.api();
    let never = json!({"template": "tiny", "port": 8080, "ready_timeout_s": 600});
    for id in ["never-a", "never-b", "never-c"] {
        let answer = api
            .put(&format!("/v1/sessions/{id}?wait=false"), &never)
            .await;
        assert_eq!(answer.status, 202, "{}", answer.text());
    }
    eventually("all of them run", SLACK, async || {
        conman.processes().len() >= 3
    })
    .await;
    let started = api.ensure("s", &json!({"template": "tiny"})).await;
    assert_eq!(started.session.state, SessionState::Running);
    for id in ["never-a", "never-b", "never-c"] {
        assert_eq!(api.session(id).await.state, SessionState::Starting);
    }
    for id in ["never-a", "never-b", "never-c"] {
        assert_eq!(api.stop(id).await.state, SessionState::Stopped);
    }
}

#[tokio::test]
async fn sessions_end_after_their_idle_timeout_and_their_longest_lifetime() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    for (id, request, word) in [
        (
            "idle",
            json!({"template": "python", "idle_timeout_s": 1}),
            "idle",
        ),
        (
            "old",
            json!({"template": "tiny", "max_lifetime_s": 1}),
            "lifetime",
        ),
    ] {
        let generation = api.ensure(id, &request).await.session.generation;
        let session = eventually_some("it is stopped", SLACK, async || {
            let session = api.session(id).await;
            (session.state == SessionState::Stopped).then_some(session)
        })
        .await;
        assert_eq!(session.generation, generation);
        let reason = session.reason.unwrap_or_default();
        assert!(reason.contains(word), "{reason}");
    }
    assert_eq!(conman.processes(), []);
}
