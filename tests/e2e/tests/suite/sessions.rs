//! Ensure, get, list and stop.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use conman_e2e::{BUSYBOX, Conman, docker_shared, eventually};
use conman_proto::{EnsureResponse, SessionList, SessionState};
use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde_json::json;

/// Ensures that are under way at a time; each has a connection of its own, and the API takes
/// 1,024.
const AT_ONCE: usize = 1_000;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_simultaneous_ensures_of_one_id_make_one_container() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let request = json!({"template": "tiny"});
    let ensures = (0..AT_ONCE).map(|_| {
        let (api, request) = (api.clone(), request.clone());
        tokio::spawn(async move { api.ensure("one", &request).await })
    });
    let answers: Vec<EnsureResponse> = join_all(ensures)
        .await
        .into_iter()
        .map(|answer| answer.expect("every ensure is answered"))
        .collect();
    assert_eq!(answers.len(), AT_ONCE);
    let same: BTreeSet<_> = answers
        .iter()
        .map(|answer| (answer.session.generation, answer.session.pid))
        .collect();
    assert_eq!(same.len(), 1, "{same:?}");
    assert_eq!(answers.iter().filter(|answer| answer.created).count(), 1);
    assert!(answers.iter().all(|answer| answer.spec_matches));
    assert_eq!(docker.containers_of(&conman.instance()).await.len(), 1);
}

#[tokio::test]
async fn a_running_session_keeps_its_spec_and_an_ensure_with_another_one_is_told() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let first = api
        .ensure("s", &json!({"template": "tiny", "pids": 32}))
        .await;
    assert!(first.created && first.spec_matches);
    let other = api
        .ensure("s", &json!({"template": "tiny", "pids": 33}))
        .await;
    assert!(!other.created && !other.spec_matches);
    assert_eq!(other.session.spec, first.session.spec);
    assert_eq!(other.session.generation, first.session.generation);
    assert_eq!(other.session.pid, first.session.pid);
    let same = api
        .ensure("s", &json!({"template": "tiny", "pids": 32}))
        .await;
    assert!(!same.created && same.spec_matches);
}

#[tokio::test]
async fn stop_answers_when_the_container_is_dead_and_the_next_start_has_a_greater_generation() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    // More than an init, so that the certificate has something to certify.
    let request = json!({"image": BUSYBOX,
        "command": ["sh", "-c", "sleep 1000001 & sleep 1000002 & exec sleep 1000003"]});
    let first = api.ensure("s", &request).await.session;
    let pid = first.pid.expect("a running session has a process");
    eventually("every process runs", Duration::from_secs(30), async || {
        conman.processes().len() >= 3
    })
    .await;
    let report = api.stop("s").await;
    assert_eq!(report.state, SessionState::Stopped);
    assert_eq!(report.generation, first.generation);
    let (dead, released) = (report.dead_ms, report.released_ms);
    assert!(dead.is_some() && dead <= released, "{report:?}");
    assert_eq!(conman.processes(), []);
    assert!(!runs(pid));
    let stopped = api.session("s").await;
    assert_eq!(stopped.state, SessionState::Stopped);
    assert_eq!(stopped.pid, None);
    // Stopping what is stopped is what was asked for, too.
    assert_eq!(api.stop("s").await.generation, first.generation);

    let second = api.ensure("s", &request).await;
    assert!(second.created);
    assert!(second.session.generation > first.generation);
    assert_ne!(second.session.pid, first.pid);
    let instance = conman.instance();
    eventually(
        "the first container is removed",
        Duration::from_secs(60),
        async || {
            let left = docker.containers_of(&instance).await;
            left == [format!("conman-{instance}-s-{}", second.session.generation)]
        },
    )
    .await;
}

/// Whether a process is there and no zombie.
fn runs(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test]
async fn a_session_that_nobody_made_is_not_found() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    for (method, path) in [
        (Method::GET, "/v1/sessions/nobody"),
        (Method::DELETE, "/v1/sessions/nobody"),
        (Method::GET, "/v1/sessions/nobody/timeline"),
        (Method::GET, "/v1/sessions/nobody/logs"),
    ] {
        let problem = conman.api().send(method, path, None).await.problem();
        assert_eq!(problem.status, 404, "{path}");
        assert_eq!(problem.slug(), "no-such-session", "{path}");
        assert!(problem.detail.contains("nobody"), "{}", problem.detail);
    }
}

#[tokio::test]
async fn lists_are_filtered_by_state_and_label_and_come_in_pages_ordered_by_id() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    for (id, owner) in [
        ("d", "ann"),
        ("a", "bob"),
        ("c", "ann"),
        ("b", "ann"),
        ("e", "bob"),
    ] {
        let request =
            json!({"template": "tiny", "labels": {"owner": owner, format!("id-{id}"): "x"}});
        api.ensure(id, &request).await;
    }
    api.stop("b").await;
    let ids = async |query: &str| -> Vec<String> {
        let answer = api.get(&format!("/v1/sessions?{query}")).await;
        let list: SessionList = answer.expect(StatusCode::OK);
        list.sessions
            .iter()
            .map(|session| session.id.to_string())
            .collect()
    };
    assert_eq!(ids("").await, ["a", "b", "c", "d", "e"]);
    assert_eq!(ids("state=running").await, ["a", "c", "d", "e"]);
    assert_eq!(ids("state=stopped").await, ["b"]);
    assert_eq!(
        ids("state=stopped&state=running&label=owner=ann").await,
        ["b", "c", "d"]
    );
    assert_eq!(ids("label=owner=bob").await, ["a", "e"]);
    assert_eq!(ids("label=owner&label=id-c").await, ["c"]);
    assert_eq!(ids("node=self&label=owner=nobody").await, [""; 0]);

    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let answer = api.get(&format!("/v1/sessions?limit=2{cursor}")).await;
        let page: SessionList = answer.expect(StatusCode::OK);
        assert!(page.sessions.len() <= 2);
        seen.extend(page.sessions.iter().map(|session| session.id.to_string()));
        let Some(next) = page.next else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(seen, ["a", "b", "c", "d", "e"]);

    for (query, field) in [
        ("state=sleeping", "state"),
        ("limit=0", "limit"),
        ("wrong=1", "wrong"),
    ] {
        let problem = api.get(&format!("/v1/sessions?{query}")).await.problem();
        assert_eq!(problem.status, 400, "{query}");
        assert_eq!(problem.errors[0].field, field, "{problem:?}");
    }
}

#[tokio::test]
async fn bad_requests_are_refused_with_every_wrong_field_and_the_allowed_values() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let refused = async |body: serde_json::Value| {
        let problem = api.put("/v1/sessions/s", &body).await.problem();
        assert_eq!(problem.status, 422, "{problem:?}");
        let errors = problem.errors.into_iter();
        errors
            .map(|error| (error.field, error.message))
            .collect::<BTreeMap<_, _>>()
    };
    let unknown = refused(json!({"template": "tinny"})).await;
    assert!(unknown["template"].contains("tiny"), "{unknown:?}");
    let many = refused(
        json!({"image": "-bad", "pids": 0, "port": 8080, "ready_path": "x",
        "memory_bytes": 1, "env": {"A=B": "x"}}),
    )
    .await;
    for field in ["image", "pids", "ready_path", "memory_bytes"] {
        assert!(many.contains_key(field), "{field}: {many:?}");
    }
    assert!(
        many.keys().any(|field| field.starts_with("env")),
        "{many:?}"
    );
    let misspelt = api
        .put("/v1/sessions/s", &json!({"imagee": "x"}))
        .await
        .problem();
    assert_eq!(misspelt.status, 422);
    assert!(misspelt.detail.contains("image"), "{}", misspelt.detail);
    let id = api
        .put("/v1/sessions/Not_An_Id", &json!({}))
        .await
        .problem();
    assert_eq!(id.status, 400);
    assert!(id.detail.contains("a-z"), "{}", id.detail);
    // Nothing of all this was started.
    let list: SessionList = api.get("/v1/sessions").await.expect(StatusCode::OK);
    assert_eq!(list.sessions, []);
}

#[tokio::test]
async fn two_installations_on_one_host_leave_each_other_alone() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut one = Conman::start(&docker).await;
    let other = Conman::start(&docker).await;
    assert_ne!(one.instance(), other.instance());
    let request = json!({"template": "tiny"});
    let of_one = one.api().ensure("same", &request).await.session;
    let of_other = other.api().ensure("same", &request).await.session;
    assert_ne!(of_one.pid, of_other.pid);

    // A crash and the sweep for orphans afterwards, a stop, and a preemption.
    one.restart_after_crash().await;
    assert_eq!(one.api().session("same").await.pid, of_one.pid);
    other.api().stop("same").await;
    let kept = one.api().session("same").await;
    assert_eq!((kept.state, kept.pid), (SessionState::Running, of_one.pid));
    other.api().ensure("again", &request).await;
    let preempted = one.admin().post("/v1/nodes/self/preempt", &json!({})).await;
    assert_eq!(preempted.status, StatusCode::OK);
    assert_eq!(one.processes(), []);
    let again = other.api().session("again").await;
    assert_eq!(again.state, SessionState::Running);
    assert!(!other.processes().is_empty());
}
