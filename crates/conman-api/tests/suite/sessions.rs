//! A session's life through the API.

use crate::stage::{Stage, plain, session};
use conman_auth::Scope;
use conman_proto::{
    ConnectToken, EnsureResponse, ExecResult, LogLine, LogStream, NodeList, Session, SessionList,
    SessionState, StopReport, TemplateList, Timeline,
};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use http::{Method, StatusCode};

#[tokio::test]
async fn a_session_is_started_shown_and_stopped() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let body = r#"{"template": "idle", "labels": {"team": "blue"}}"#;
    let answer = api.call(Method::PUT, &session("alice"), body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!(answer.headers[X_CONTENT_TYPE_OPTIONS], "nosniff");
    assert_eq!(answer.headers[CACHE_CONTROL], "no-store");
    let started: EnsureResponse = answer.json();
    assert!(started.created && started.spec_matches);
    let again: EnsureResponse = api.call(Method::PUT, &session("alice"), body).await.json();
    assert!(!again.created);
    assert_eq!(again.session.generation, started.session.generation);
    let shown: Session = api.get(&session("alice")).await.json();
    assert_eq!(shown.state, SessionState::Running);
    assert_eq!(shown.spec.labels["team"], "blue");

    let answer = api.call(Method::DELETE, &session("alice"), "").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let report: StopReport = answer.json();
    assert_eq!(report.state, SessionState::Stopped);
    assert!(report.dead_ms.is_some() && report.released_ms.is_some());
    let shown: Session = api.get(&session("alice")).await.json();
    assert_eq!(shown.state, SessionState::Stopped);
    assert!(shown.reason.expect("a reason").contains("token `admin`"));
    let timeline: Timeline = api.get("/v1/sessions/alice/timeline").await.json();
    assert!(!timeline.events.is_empty() && !timeline.phases.is_empty());
}

#[tokio::test]
async fn the_values_of_env_are_hidden_from_callers_that_may_only_read() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let body = r#"{"template": "idle", "env": {"KEY": "secret-1"}}"#;
    let answer = api.call(Method::PUT, &session("alice"), body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    for uri in [&session("alice"), "/v1/sessions"] {
        let shown = api.get(uri).await.text();
        assert!(shown.contains(r#""KEY":"***""#), "{shown}");
        assert!(!shown.contains("secret-1"), "{shown}");
        let request = api.request(Scope::Frontend, Method::GET, uri);
        let shown = api.send(request).await.text();
        assert!(shown.contains(r#""KEY":"secret-1""#), "{shown}");
    }
}

#[tokio::test]
async fn a_start_that_is_not_waited_for_is_accepted() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let uri = "/v1/sessions/alice?wait=false";
    let answer = api.call(Method::PUT, uri, r#"{"template": "idle"}"#).await;
    let started: EnsureResponse = answer.json();
    let expected = match started.session.state {
        SessionState::Starting => StatusCode::ACCEPTED,
        _ => StatusCode::OK,
    };
    assert_eq!(answer.status, expected);
    assert!(started.created);
}

#[tokio::test]
async fn sessions_are_listed_by_page_label_state_and_node() {
    let stage = Stage::new();
    let api = stage.boot().await;
    for id in ["a", "b", "c"] {
        let body = format!(r#"{{"template": "idle", "labels": {{"name": "{id}"}}}}"#);
        let answer = api.call(Method::PUT, &session(id), body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }
    let ids = async |query: &str| {
        let list: SessionList = api.get(&format!("/v1/sessions?{query}")).await.json();
        let ids: Vec<String> = list.sessions.iter().map(|it| it.id.to_string()).collect();
        (ids.join(" "), list.next)
    };
    let (first, next) = ids("limit=2").await;
    assert_eq!(first, "a b");
    let cursor = next.expect("one more page");
    assert_eq!(
        ids(&format!("limit=2&cursor={cursor}")).await,
        ("c".to_owned(), None)
    );
    assert_eq!(ids("label=name%3Db").await.0, "b");
    assert_eq!(ids("label=name&label=name=c").await.0, "c");
    assert_eq!(ids("node=self&state=running").await.0, "a b c");
    assert_eq!(ids("node=elsewhere").await.0, "");
    assert_eq!(ids("state=stopped&state=failed").await.0, "");
}

#[tokio::test]
async fn a_log_is_read_as_text_and_as_lines() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    // The program prints after it was started; following waits for its first line.
    let logs = async |query: &str| {
        let uri = format!("/v1/sessions/a/logs?{query}");
        api.send(api.request(Scope::Frontend, Method::GET, &uri))
            .await
    };
    let mut lines: Vec<LogLine> = Vec::new();
    while lines.is_empty() {
        let answer = logs("format=json&timestamps").await;
        assert_eq!(answer.headers[CONTENT_TYPE], "application/x-ndjson");
        lines = answer
            .text()
            .lines()
            .map(|line| serde_json::from_str(line).expect("a line is JSON"))
            .collect();
    }
    assert_eq!(lines[0].text, "hello");
    assert_eq!(lines[0].stream, LogStream::Stdout);
    assert!(lines[0].at.is_some());
    let answer = logs("tail=5").await;
    assert_eq!(answer.text(), "hello\n");
    assert_eq!(answer.headers[CONTENT_TYPE], "text/plain; charset=utf-8");
}

#[tokio::test]
async fn a_command_runs_with_input_environment_and_exit_code() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let exec = async |body: &str| api.call(Method::POST, "/v1/sessions/a/exec", body).await;
    let body = r#"{"command": ["sh", "-c", "cat; echo $NAME; echo no >&2; exit 7"],
        "env": {"NAME": "bob"}, "stdin": "hi\n"}"#;
    let result: ExecResult = exec(body).await.json();
    assert_eq!((result.exit_code, result.stdout.as_str()), (7, "hi\nbob\n"));
    assert_eq!((result.stderr.as_str(), result.truncated), ("no\n", false));

    let answer = exec(r#"{"command": ["no-such-program"]}"#).await;
    assert_eq!(answer.problem().slug(), "no-such-command");
    let answer = exec(r#"{"command": ["sleep", "1000"], "timeout_ms": 1}"#).await;
    assert_eq!(answer.problem().slug(), "exec-timed-out");
    api.call(Method::DELETE, &session("a"), "").await;
    assert_eq!(
        exec(r#"{"command": ["true"]}"#).await.problem().slug(),
        "not-running"
    );
}

#[tokio::test]
async fn a_connect_token_names_the_url_of_the_session() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let answer = api
        .call(Method::POST, "/v1/sessions/new/token", r#"{"ttl_s": 60}"#)
        .await;
    let made: ConnectToken = answer.json();
    let url = made.url.expect("it may get a port");
    assert!(
        url.ends_with(&format!("?conman_token={}", made.token)),
        "{url}"
    );
    api.start("portless").await;
    let made: ConnectToken = api
        .call(Method::POST, "/v1/sessions/portless/token", "")
        .await
        .json();
    assert_eq!(made.url, None);
}

#[tokio::test]
async fn the_node_its_templates_and_its_probes_are_shown() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let list: NodeList = api.get("/v1/nodes").await.json();
    assert_eq!(list.nodes[0].name, "test-node");
    let templates: TemplateList = api.get("/v1/templates").await.json();
    assert_eq!(templates.templates[0].name, "idle");
    for uri in [
        "/v1/nodes/self",
        "/v1/nodes/test-node",
        "/metrics",
        "/",
        "/v1/openapi.json",
    ] {
        assert_eq!(api.get(uri).await.status, StatusCode::OK, "{uri}");
    }
    for uri in ["/healthz", "/readyz"] {
        assert_eq!(
            api.send(plain(Method::GET, uri)).await.status,
            StatusCode::OK,
            "{uri}"
        );
    }
}
