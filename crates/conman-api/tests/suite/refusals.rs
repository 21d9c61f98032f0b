//! What is wrong with a request is told as a problem that names the field and what is allowed.

use crate::stage::{Answer, Stage, plain, session};
use axum::body::Body;
use conman_auth::Scope;
use conman_node::HostLimit;
use conman_proto::{LimitMet, Problem, RuntimeKind};
use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Method, StatusCode};

fn assert_refused(answer: &Answer, status: u16, slug: &str, field: &str, part: &str) {
    let problem: Problem = answer.problem();
    assert_eq!(
        (problem.status, problem.slug()),
        (status, slug),
        "{problem:?}"
    );
    let fields: Vec<_> = problem
        .errors
        .iter()
        .map(|error| error.field.as_str())
        .collect();
    if !field.is_empty() {
        assert!(fields.contains(&field), "{field}: {problem:?}");
    }
    assert!(problem.detail.contains(part), "{part}: {problem:?}");
}

#[tokio::test]
async fn bad_bodies_name_the_field_and_the_allowed_values() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let cases = [
        (
            r#"{"template": "idel"}"#,
            422,
            "bad-spec",
            "template",
            "idle",
        ),
        (
            r#"{"templat": "idle"}"#,
            422,
            "bad-body",
            "templat",
            "did you mean `template`?",
        ),
        (r#"{"image": "a b"}"#, 422, "bad-spec", "image", ""),
        (
            r#"{"template": "idle", "port": 0}"#,
            422,
            "bad-spec",
            "port",
            "1 to 65535",
        ),
        (
            r#"{"template": "idle", "port": 65536}"#,
            422,
            "bad-body",
            "port",
            "0 to 65535",
        ),
        (
            r#"{"template": "idle", "memory_bytes": 1}"#,
            422,
            "bad-spec",
            "memory_bytes",
            "6291456",
        ),
        (
            r#"{"template": "idle", "cpus": 0}"#,
            422,
            "bad-spec",
            "cpus",
            "0.01",
        ),
        (
            r#"{"template": "idle", "pids": -1}"#,
            422,
            "bad-body",
            "pids",
            "0 to 4294967295",
        ),
        (
            r#"{"template": "idle", "env": {"A=": ""}}"#,
            422,
            "bad-spec",
            "env.A=",
            "",
        ),
        (
            r#"{"template": "idle", "binds": ["/etc:/x"]}"#,
            422,
            "bad-spec",
            "binds[0]",
            "",
        ),
        (
            r#"{"template": "idle", "network": "hosts"}"#,
            422,
            "bad-body",
            "network",
            "\"loopback\"",
        ),
        (r#"{"template":"#, 400, "bad-json", "", "line 1"),
        ("[]", 422, "bad-body", "body", "object"),
    ];
    for (body, status, slug, field, part) in cases {
        let answer = api.call(Method::PUT, &session("a"), body).await;
        assert_refused(&answer, status, slug, field, part);
    }
    assert_eq!(api.get(&session("a")).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn bad_paths_and_parameters_name_themselves() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let cases = [
        ("/v1/sessions/A", 400, "bad-path", "id", "a-z, 0-9 and '-'"),
        (
            "/v1/sessions/a%2fb",
            400,
            "bad-path",
            "id",
            "a-z, 0-9 and '-'",
        ),
        ("/v1/sessions/%ff", 400, "bad-path", "id", ""),
        ("/v1/sessions/a?x=1", 400, "bad-query", "x", "not known"),
        (
            "/v1/sessions/a/timeline?x=1",
            400,
            "bad-query",
            "x",
            "not known",
        ),
        (
            "/v1/sessions?stat=running",
            400,
            "bad-query",
            "stat",
            "`state`",
        ),
        (
            "/v1/sessions?state=runing",
            400,
            "bad-query",
            "state",
            "running",
        ),
        ("/v1/sessions?limit=0", 400, "bad-query", "limit", "1000"),
        ("/v1/sessions?limit=1001", 400, "bad-query", "limit", "1000"),
        ("/v1/sessions?cursor=A", 400, "bad-query", "cursor", "next"),
        ("/v1/sessions?label=%3D", 400, "bad-query", "label", ""),
        (
            "/v1/events?after=-1",
            400,
            "bad-query",
            "after",
            "id of an event",
        ),
        (
            "/v1/events?after=x&follow=maybe",
            400,
            "bad-query",
            "follow",
            "`true`",
        ),
        (
            "/v1/events?limit=5",
            400,
            "bad-query",
            "limit",
            "follow=false",
        ),
        ("/v1/events?session=A", 400, "bad-query", "session", "a-z"),
        ("/v1/nodes/other", 404, "no-such-node", "", "self"),
        ("/v1/nodes?x", 400, "bad-query", "x", "not known"),
        ("/v1/templates?x", 400, "bad-query", "x", "not known"),
        ("/v1/sessions/a", 404, "no-such-session", "", "`a`"),
        ("/v1/sessions/a/timeline", 404, "no-such-session", "", "`a`"),
        ("/v2", 404, "no-such-route", "", "openapi.json"),
        ("/v1/sessions/", 404, "no-such-route", "", "openapi.json"),
    ];
    for (uri, status, slug, field, part) in cases {
        assert_refused(&api.get(uri).await, status, slug, field, part);
    }
}

#[tokio::test]
async fn bad_requests_to_routes_of_other_scopes_name_themselves() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let exec = "/v1/sessions/a/exec";
    let execs = "/v1/sessions/a/execs";
    let attach = "/v1/sessions/a/attach";
    let cases = [
        (
            Method::GET,
            "/v1/sessions/a/logs?tail=x",
            "",
            400,
            "bad-query",
            "tail",
        ),
        (
            Method::GET,
            "/v1/sessions/a/logs?format=xml",
            "",
            400,
            "bad-query",
            "format",
        ),
        (
            Method::GET,
            "/v1/sessions/a/logs",
            "",
            404,
            "no-such-session",
            "",
        ),
        (Method::GET, exec, "", 400, "bad-query", "request"),
        (
            Method::GET,
            "/v1/sessions/a/exec?request=%7B%7D",
            "",
            422,
            "bad-body",
            "command",
        ),
        (
            Method::GET,
            "/v1/sessions/a/exec?request=%7B%22command%22:%5B%22a%22%5D%7D",
            "",
            426,
            "upgrade-required",
            "",
        ),
        (
            Method::POST,
            exec,
            r#"{"command": []}"#,
            422,
            "bad-body",
            "command",
        ),
        (
            Method::POST,
            exec,
            r#"{"command": "ls"}"#,
            422,
            "bad-body",
            "command",
        ),
        (
            Method::POST,
            exec,
            r#"{"command": ["ls"], "cwd": "/"}"#,
            422,
            "bad-body",
            "cwd",
        ),
        (
            Method::POST,
            exec,
            r#"{"command": ["ls"], "tty": true}"#,
            422,
            "bad-body",
            "tty",
        ),
        (
            Method::POST,
            exec,
            r#"{"command": ["ls"]}"#,
            404,
            "no-such-session",
            "",
        ),
        (Method::GET, attach, "", 426, "upgrade-required", ""),
        (
            Method::GET,
            "/v1/sessions/a/attach?columns=0&rows=5",
            "",
            400,
            "bad-query",
            "columns",
        ),
        (
            Method::GET,
            "/v1/sessions/a/attach?columns=5&rows=65536",
            "",
            400,
            "bad-query",
            "rows",
        ),
        (
            Method::GET,
            "/v1/sessions/a/attach?columns=80",
            "",
            400,
            "bad-query",
            "rows",
        ),
        (
            Method::GET,
            "/v1/sessions/a/attach?after=-1&scrollback=maybe",
            "",
            400,
            "bad-query",
            "after",
        ),
        (
            Method::GET,
            "/v1/sessions/a/attach?after=-1&scrollback=maybe",
            "",
            400,
            "bad-query",
            "scrollback",
        ),
        (Method::GET, execs, "", 404, "no-such-session", ""),
        (
            Method::POST,
            execs,
            r#"{"command": ["sh"], "stdin": "x"}"#,
            422,
            "bad-body",
            "stdin",
        ),
        (
            Method::POST,
            execs,
            r#"{"command": ["sh"], "timeout_ms": 604800001}"#,
            422,
            "bad-body",
            "timeout_ms",
        ),
        (
            Method::POST,
            execs,
            r#"{"command": ["sh"], "tty": true}"#,
            404,
            "no-such-session",
            "",
        ),
        (
            Method::POST,
            "/v1/sessions/a/execs/0123456789ab/signal?signal=SIGNOT",
            "",
            400,
            "bad-query",
            "signal",
        ),
        (
            Method::DELETE,
            "/v1/sessions/a/execs/1",
            "",
            400,
            "bad-path",
            "exec",
        ),
        (
            Method::DELETE,
            "/v1/sessions/a/execs/0123456789ab",
            "",
            404,
            "no-such-session",
            "",
        ),
        (
            Method::DELETE,
            "/v1/sessions/a",
            "",
            404,
            "no-such-session",
            "",
        ),
        (
            Method::POST,
            "/v1/sessions/a/token",
            r#"{"ttl_s": 0}"#,
            422,
            "bad-body",
            "ttl_s",
        ),
        (
            Method::POST,
            "/v1/sessions/a/token",
            r#"{"ttl": 9}"#,
            422,
            "bad-body",
            "ttl",
        ),
        (
            Method::POST,
            "/v1/nodes/x/preempt",
            "",
            404,
            "no-such-node",
            "",
        ),
        (
            Method::POST,
            "/v1/nodes/x/readmit",
            "",
            404,
            "no-such-node",
            "",
        ),
        (
            Method::POST,
            "/v1/nodes/self/preempt",
            r#"{"budget_ms": 3600001}"#,
            422,
            "bad-body",
            "budget_ms",
        ),
        (
            Method::POST,
            "/v1/nodes/self/preempt",
            r#"{"reason": "two\nlines"}"#,
            422,
            "bad-body",
            "reason",
        ),
        (
            Method::POST,
            "/v1/nodes/self/preempt",
            r#"{"dryrun": true}"#,
            422,
            "bad-body",
            "dryrun",
        ),
        (Method::DELETE, "/v1/nodes/x", "", 404, "no-such-node", ""),
        (
            Method::DELETE,
            "/v1/nodes/self",
            "",
            409,
            "node-not-lost",
            "",
        ),
        (
            Method::POST,
            "/v1/nodes/x/drain",
            "",
            404,
            "no-such-node",
            "",
        ),
        (
            Method::POST,
            "/v1/nodes/x/undrain",
            "",
            404,
            "no-such-node",
            "",
        ),
        (
            Method::GET,
            "/v1/nodes/x/drain",
            "",
            404,
            "no-such-node",
            "",
        ),
        (
            Method::GET,
            "/v1/nodes/self/drain",
            "",
            404,
            "not-draining",
            "",
        ),
        (
            Method::POST,
            "/v1/nodes/self/drain",
            r#"{"parallel": 0}"#,
            422,
            "bad-body",
            "parallel",
        ),
        (
            Method::POST,
            "/v1/nodes/self/drain",
            r#"{"parallel": 257}"#,
            422,
            "bad-body",
            "parallel",
        ),
        (
            Method::POST,
            "/v1/nodes/self/drain",
            r#"{"signal": "SIGKILL"}"#,
            422,
            "bad-body",
            "signal",
        ),
        (
            Method::POST,
            "/v1/nodes/self/drain",
            r#"{"grace_ms": 3600001}"#,
            422,
            "bad-body",
            "grace_ms",
        ),
        (
            Method::POST,
            "/v1/nodes/self/drain",
            r#"{"reason": "two\nlines"}"#,
            422,
            "bad-body",
            "reason",
        ),
    ];
    for (method, uri, body, status, slug, field) in cases {
        assert_refused(&api.call(method, uri, body).await, status, slug, field, "");
    }
}

#[tokio::test]
async fn a_wrong_method_is_told_the_right_ones() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let answer = api.call(Method::TRACE, &session("a"), "").await;
    assert_refused(&answer, 405, "method-not-allowed", "", "DELETE");
    let allowed = answer.headers[ALLOW].to_str().expect("text");
    for method in ["GET", "HEAD", "PUT", "DELETE"] {
        assert!(allowed.contains(method), "{allowed}");
    }
}

#[tokio::test]
async fn a_body_that_is_too_large_or_no_json_is_refused() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let large = format!(r#"{{"image": "{}"}}"#, "x".repeat(300 * 1024));
    let answer = api.call(Method::PUT, &session("a"), &large).await;
    assert_refused(&answer, 413, "body-too-large", "", "262144");
    // The same without a length announced.
    let mut request = api.request(Scope::Admin, Method::PUT, &session("a"));
    request
        .headers_mut()
        .insert(CONTENT_TYPE, "application/json".parse().expect("valid"));
    let chunks = large
        .into_bytes()
        .chunks(1024)
        .map(<[u8]>::to_vec)
        .collect::<Vec<_>>();
    let chunks = chunks.into_iter().map(Ok::<_, std::io::Error>);
    *request.body_mut() = Body::from_stream(futures_util::stream::iter(chunks));
    assert_refused(
        &api.send(request).await,
        413,
        "body-too-large",
        "",
        "262144",
    );
    for (content_type, part) in [
        (Some("text/plain"), "`text/plain`"),
        (None, "no Content-Type"),
    ] {
        let mut request = api.request(Scope::Admin, Method::PUT, &session("a"));
        if let Some(content_type) = content_type {
            let value = content_type.parse().expect("valid");
            request.headers_mut().insert(CONTENT_TYPE, value);
        }
        *request.body_mut() = Body::from("{}");
        assert_refused(
            &api.send(request).await,
            415,
            "unsupported-media-type",
            "",
            part,
        );
    }
}

#[tokio::test]
async fn every_operation_is_closed_to_who_has_no_token_or_too_little_scope() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let description = serde_json::to_value(conman_api::openapi()).expect("JSON");
    for (path, item) in description["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("operations") {
            let uri = path.replace("{id}", "self");
            let method: Method = method.to_uppercase().parse().expect("a method");
            let needed = match operation["x-conman-scope"].as_str() {
                None => continue,
                Some(scope) => scope.parse::<Scope>().expect("a scope"),
            };
            let answer = api.send(plain(method.clone(), &uri)).await;
            assert_eq!(answer.problem().status, 401, "{method} {uri}");
            assert!(
                answer.headers.contains_key(WWW_AUTHENTICATE),
                "{method} {uri}"
            );
            for scope in [Scope::Read, Scope::Frontend] {
                if scope < needed {
                    let answer = api.send(api.request(scope, method.clone(), &uri)).await;
                    assert_eq!(answer.problem().status, 403, "{scope} {method} {uri}");
                }
            }
        }
    }
    let answer = api.send(plain(Method::GET, "/nowhere")).await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn the_admin_socket_takes_no_token_but_the_right_user() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let own = nix::unistd::geteuid().as_raw();
    let request = || plain(Method::POST, "/v1/nodes/self/readmit");
    assert_eq!(
        api.send_to_admin(request(), own).await.status,
        StatusCode::OK
    );
    assert_eq!(
        api.send_to_admin(request(), own + 1).await.problem().status,
        403
    );
}

#[tokio::test]
async fn a_page_or_a_host_from_elsewhere_gets_nothing_not_even_a_probe() {
    let stage = Stage::new();
    let api = stage.boot().await;
    for uri in ["/healthz", "/v1/sessions"] {
        for (name, value) in [("host", "evil.example"), ("origin", "http://evil.example")] {
            let mut request = api.request(Scope::Admin, Method::GET, uri);
            let name = http::HeaderName::from_static(name);
            request
                .headers_mut()
                .insert(name, value.parse().expect("valid"));
            assert_eq!(
                api.send(request).await.problem().status,
                403,
                "{uri} {value}"
            );
        }
    }
}

#[tokio::test]
async fn a_runtime_that_does_not_answer_is_a_503_with_its_reason() {
    use conman_testkit::{Fault, Operation};
    let stage = Stage::new();
    let api = stage.boot().await;
    api.faults.always(Operation::Create, Fault::Unavailable);
    let answer = api
        .call(Method::PUT, &session("a"), r#"{"template": "idle"}"#)
        .await;
    assert_refused(
        &answer,
        503,
        "runtime-unavailable",
        "",
        "made unavailable by a test",
    );
    assert!(answer.headers.contains_key(RETRY_AFTER));
    assert!(answer.problem().retryable);
}

#[tokio::test]
async fn a_preempted_node_is_not_ready_and_admits_nothing_until_readmitted() {
    let stage = Stage::new();
    let api = stage.boot().await;
    assert_eq!(
        api.send(plain(Method::GET, "/readyz")).await.status,
        StatusCode::OK
    );
    let answer = api.call(Method::POST, "/v1/nodes/self/preempt", "").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let ready = api.send(plain(Method::GET, "/readyz")).await;
    assert_refused(&ready, 503, "node-not-ready", "", "readmit");
    assert!(ready.headers.contains_key(RETRY_AFTER));
    let answer = api
        .call(Method::PUT, &session("a"), r#"{"template": "idle"}"#)
        .await;
    assert_refused(&answer, 503, "node-preempted", "", "");
    let answer = api
        .call(Method::POST, "/v1/nodes/test-node/readmit", "")
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    api.start("a").await;
}

#[tokio::test]
async fn a_session_beyond_a_limit_is_refused_by_the_limits_name_value_and_remedy() {
    let stage = Stage::new();
    let api = stage
        .boot_with(|options| options.limits.max_sessions = 1)
        .await;
    api.start("a").await;
    let idle = r#"{"template": "idle"}"#;
    let answer = api.call(Method::PUT, &session("b"), idle).await;
    assert_refused(&answer, 503, "node-full", "", "max_sessions");
    let limit = answer.problem().limit.expect("a limit");
    assert_eq!(
        (limit.name.as_str(), limit.value),
        ("limits.max_sessions", 1)
    );

    let stage = Stage::new();
    let api = stage.boot().await;
    let met = LimitMet {
        name: "kernel.pid_max".to_owned(),
        bounds: "ids of processes and threads".to_owned(),
        value: 400,
        used: 399,
        remedy: "sysctl -w kernel.pid_max=1000".to_owned(),
    };
    let limit = HostLimit {
        max_sessions: 0,
        met: met.clone(),
    };
    api.node
        .status()
        .limit_by_host(RuntimeKind::Process, Some(limit));
    let answer = api.call(Method::PUT, &session("a"), idle).await;
    assert_refused(
        &answer,
        503,
        "host-full",
        "",
        "sysctl -w kernel.pid_max=1000",
    );
    assert!(answer.headers.contains_key(RETRY_AFTER));
    let problem = answer.problem();
    assert_eq!(problem.limit.as_deref(), Some(&met));
    assert!(problem.retryable);
    let json: serde_json::Value = answer.json();
    assert_eq!(json["limit"]["name"], "kernel.pid_max");
    let node: conman_proto::Node = api.get("/v1/nodes/self").await.json();
    assert_eq!(node.host_limit.map(|host| host.limit), Some(met));
    assert_eq!(api.get(&session("a")).await.status, StatusCode::NOT_FOUND);
}
