//! What is asked of any node about a session is answered by the session's own.

use std::time::Duration;

use conman_api::{ServeOptions, serve_tcp};
use conman_auth::Scope;
use conman_proto::{
    EXEC_PROTOCOL, ExecChannel, ExecResult, Generation, Session, SessionList, SessionState,
    StopReport, Timeline,
};
use conman_registry::Located;
use conman_watchdog::TaskProgress;
use futures_util::{SinkExt as _, StreamExt as _};
use http::header::{AUTHORIZATION, HOST, SEC_WEBSOCKET_PROTOCOL};
use http::{Method, Request, StatusCode};
use http_body_util::Empty;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::net::TcpListener;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_util::sync::CancellationToken;

use super::world::two;
use crate::stage::{PATIENCE, session};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_asked_of_one_node_the_sessions_own_node_answers() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    let started = a.ensure("alice").await;
    assert!(
        started.created && started.session.node == "b",
        "{started:?}"
    );
    world.announced("a", |a| a.draining = false);

    let shown: Session = a.api.get(&session("alice")).await.json();
    assert_eq!(
        (shown.node.as_str(), shown.state),
        ("b", SessionState::Running)
    );
    let again = a.ensure("alice").await;
    assert!(!again.created && again.session.generation == started.session.generation);
    // It runs before it has written anything.
    let log = async {
        loop {
            let path = "/v1/sessions/alice/logs";
            let request = a.api.request(Scope::Frontend, Method::GET, path);
            let log = a.api.send(request).await.text();
            if !log.is_empty() {
                return log;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let log = tokio::time::timeout(PATIENCE, log).await;
    assert_eq!(log.expect("it writes"), "hello\n");
    let exec = a
        .api
        .call(
            Method::POST,
            "/v1/sessions/alice/exec",
            r#"{"command": ["cat"], "stdin": "hi"}"#,
        )
        .await;
    let result: ExecResult = exec.json();
    assert_eq!((result.exit_code, result.stdout.as_str()), (0, "hi"));
    let timeline: Timeline = a.api.get("/v1/sessions/alice/timeline").await.json();
    assert!(!timeline.events.is_empty());
    let stopped: StopReport = a
        .api
        .call(Method::DELETE, &session("alice"), "")
        .await
        .json();
    assert_eq!(stopped.state, SessionState::Stopped);
    assert!(
        !b.api
            .node
            .sessions()
            .is_live(&"alice".parse().expect("an id"))
    );
    // It is b's still, and b is the one that knows.
    let shown: Session = a.api.get(&session("alice")).await.json();
    assert_eq!(
        (shown.node.as_str(), shown.state),
        ("b", SessionState::Stopped)
    );
}

/// One that has just joined, for as long as the others have not heard where it listens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_of_a_node_that_has_just_joined_waits_for_its_word() {
    let (world, a, b) = two().await;
    let started = b.ensure("alice").await;
    assert_eq!(started.session.node, "b");
    for (method, path, body) in [
        (Method::GET, session("alice"), ""),
        (
            Method::POST,
            "/v1/nodes/b/drain".to_owned(),
            r#"{"dry_run": true}"#,
        ),
    ] {
        let mut told = None;
        world.change("b", |b| told = b.announcement.take());
        let tells = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            world.change("b", |b| b.announcement = told);
        };
        let (answer, ()) = tokio::join!(a.api.call(method, &path, body), tells);
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_are_asked_for_one_session_at_once_start_it_once() {
    let (_world, a, b) = two().await;
    for number in 0..10 {
        let id = format!("s{number}");
        let (one, other) = tokio::join!(a.ensure(&id), b.ensure(&id));
        assert_eq!(one.session.node, other.session.node);
        assert_eq!(one.session.generation, other.session.generation);
        assert!(one.created != other.created, "{one:?} {other:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_taken_for_the_owner_and_is_not_says_so_before_it_does_anything() {
    let (_world, a, b) = two().await;
    let alice = b.ensure("alice").await.session;
    for (method, wanted) in [
        (Method::GET, StatusCode::OK),
        (Method::DELETE, StatusCode::OK),
    ] {
        let stale = Located {
            node: "b".to_owned(),
            // Of a life that is none.
            generation: Generation::new(alice.generation.get() + 100).expect("not zero"),
            released: false,
        };
        a.seen.believe(&alice.id, stale.clone());
        let answer = a.api.call(method, &session("alice"), "").await;
        assert_eq!(answer.status, wanted, "{}", answer.text());
        assert!(!a.seen.believes(&alice.id, &stale));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_nobodys_any_more_is_placed_and_not_started_by_its_former_node() {
    let (world, a, b) = two().await;
    let former = b.ensure("alice").await.session;
    b.api.call(Method::DELETE, &session("alice"), "").await;
    world.announced("b", |b| b.draining = true);
    let stale = Located {
        node: "b".to_owned(),
        generation: former.generation,
        released: false,
    };
    a.seen.believe(&former.id, stale);
    let present = a.ensure("alice").await.session;
    assert_eq!(present.node, "a");
    assert!(present.generation > former.generation);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_life_that_has_ended_does_not_answer_for_the_one_that_goes_on_elsewhere() {
    let (world, a, b) = two().await;
    let former = b.ensure("alice").await.session;
    b.api.call(Method::DELETE, &session("alice"), "").await;
    // It goes on at a, and b is asked by one who does not know yet.
    world.announced("b", |b| b.draining = true);
    let present = a.ensure("alice").await.session;
    assert!(present.node == "a" && present.generation > former.generation);
    let to = world.address_of_b();
    let client = world.client("c");
    let request = Request::delete(session("alice"))
        .header("x-conman-caller", "admin test")
        .header("x-conman-generation", former.generation.get())
        .body(Empty::<bytes::Bytes>::new())
        .expect("a request");
    let answer = client.request(&to, request).await.expect("an answer");
    assert_eq!(answer.status(), StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(answer.headers()["x-conman-misdirected"], "not-owner");
    assert!(a.api.node.sessions().is_live(&present.id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_may_at_another_node_what_they_may_here() {
    let (world, a, b) = two().await;
    b.ensure("alice").await;
    let request = a
        .api
        .request(Scope::Read, Method::DELETE, &session("alice"));
    assert_eq!(a.api.send(request).await.status, StatusCode::FORBIDDEN);
    // A node that would ask for more than its caller may is refused by the other as well.
    let to = world.address_of_b();
    let client = world.client("a");
    for (caller, status) in [
        (Some("read test"), StatusCode::FORBIDDEN),
        (None, StatusCode::BAD_REQUEST),
    ] {
        let mut request = Request::delete(session("alice")).header("x-conman-generation", "1");
        if let Some(caller) = caller {
            request = request.header("x-conman-caller", caller);
        }
        let request = request
            .body(Empty::<bytes::Bytes>::new())
            .expect("a request");
        let answer = client.request(&to, request).await.expect("an answer");
        assert_eq!(answer.status(), status, "{caller:?}");
    }
    assert!(
        b.api
            .node
            .sessions()
            .is_live(&"alice".parse().expect("an id"))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_in_a_session_of_another_node_is_spoken_with_through_both() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    b.ensure("alice").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let shutdown = CancellationToken::new();
    let options = ServeOptions::default();
    tokio::spawn(serve_tcp(
        listener,
        a.api.tcp_router(),
        options,
        shutdown.clone(),
        TaskProgress::unwatched("API"),
    ));
    let asked = r#"{"command": ["cat"]}"#;
    let query = utf8_percent_encode(asked, NON_ALPHANUMERIC);
    let uri = format!("ws://{address}/v1/sessions/alice/exec?request={query}");
    let mut request = uri.into_client_request().expect("a request");
    let headers = request.headers_mut();
    headers.insert(HOST, "127.0.0.1:7700".parse().expect("valid"));
    let bearer = format!("Bearer {}", a.api.token(Scope::Frontend));
    headers.insert(AUTHORIZATION, bearer.parse().expect("valid"));
    headers.insert(
        SEC_WEBSOCKET_PROTOCOL,
        EXEC_PROTOCOL.parse().expect("valid"),
    );
    let connecting = tokio_tungstenite::connect_async(request);
    let (mut socket, _) = tokio::time::timeout(PATIENCE, connecting)
        .await
        .expect("in time")
        .expect("connected");
    let message = |channel: ExecChannel, payload: &[u8]| {
        Message::binary([&[channel as u8][..], payload].concat())
    };
    for payload in [&b"over two nodes"[..], b""] {
        let sent = socket.send(message(ExecChannel::Stdin, payload)).await;
        sent.expect("open");
    }
    let mut output = Vec::new();
    let conversation = async {
        while let Some(Ok(message)) = socket.next().await {
            let bytes = message.into_data();
            if bytes.first() == Some(&(ExecChannel::Stdout as u8)) {
                output.extend_from_slice(&bytes[1..]);
            }
        }
    };
    tokio::time::timeout(PATIENCE, conversation)
        .await
        .expect("it ends");
    assert_eq!(output, b"over two nodes");
    shutdown.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_of_any_size_reaches_the_sessions_own_node() {
    let (world, a, b) = two().await;
    world.start_on_b(&b, "alice").await;
    // More than any buffered body may have.
    let content = "x".repeat(8 << 20);
    let path = "/v1/sessions/alice/files?path=/tmp/x";
    let answer = a.api.call(Method::PUT, path, &content).await;
    // From the runtime of the other node, which has no files.
    assert_eq!(answer.problem().slug(), "not-supported");
    let path = "/v1/sessions/nobody/files?path=/tmp/x";
    let answer = a.api.call(Method::PUT, path, &content).await;
    assert_eq!(answer.problem().slug(), "no-such-session");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_changed_by_any_node_and_its_record_has_the_change() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    // Without a name, too, another node starts it.
    let body = r#"{"template": "idle"}"#;
    let made = a.api.call(Method::POST, "/v1/sessions", body).await;
    assert_eq!(made.status, StatusCode::CREATED, "{}", made.text());
    let made: Session = made.json();
    assert_eq!(made.node, "b");
    let path = session(made.id.as_str());
    let body = r#"{"labels": {"team": "red"}, "expires_at": "2099-01-31T18:00:00Z"}"#;
    let changed = a.api.call(Method::PATCH, &path, body).await;
    assert_eq!(changed.status, StatusCode::OK, "{}", changed.text());
    let shown: Session = b.api.get(&path).await.json();
    assert_eq!(shown.spec.labels["team"], "red");
    let listed: SessionList = a.api.get("/v1/sessions?label=team=red").await.json();
    assert_eq!(listed.sessions.len(), 1);
    assert_eq!(listed.sessions[0].spec, shown.spec);
}
