//! What no node takes, or not the one that has it.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use conman_auth::Scope;
use conman_proto::{
    EnsureResponse, Generation, NodeList, NodeRuntime, NodeStanding, RuntimeKind, Session,
    SessionState, StopReport,
};
use conman_registry::PeerStanding;
use conman_testkit::{Fault, Operation};
use futures_util::StreamExt as _;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{Method, StatusCode};

use super::world::{Node, World, nowhere, secret, two};
use crate::stage::session;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_refuses_this_one_is_passed_over_and_named_with_the_remedy() {
    let world = World::new();
    let a = Node::join(&world, "a").await;
    let b = Node::join_with(&world, "b", &secret("fedcba9876543210")).await;
    let _c = Node::join(&world, "c").await;
    world.announced("a", |a| a.draining = true);
    // Whichever of the two comes first for each of them.
    for number in 0..8 {
        let started = a.ensure(&format!("s{number}")).await;
        assert_eq!(started.session.node, "c");
    }
    world.announced("c", |c| c.draining = true);
    b.ensure("alice").await;
    let shown = a.api.get(&session("alice")).await;
    let put = a.put("alice").await;
    let placed = a.put("bob").await;
    let uri = "/v1/nodes/b/preempt";
    let told = a.api.call(Method::POST, uri, r#"{"dry_run": true}"#).await;
    for answer in [shown, put, placed, told] {
        let problem = answer.problem();
        assert_eq!(
            (answer.status, problem.slug()),
            (StatusCode::BAD_GATEWAY, "node-refuses"),
            "{}",
            answer.text()
        );
        for part in ["node `a`", "node `b`", "`fleet.secret_file`"] {
            assert!(problem.detail.contains(part), "{}", problem.detail);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_the_sessions_node_would_refuse_is_not_even_read_by_another() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    b.ensure("alice").await;
    // More than any spec has, and less than a command may bring.
    const MUCH: usize = 300_000;
    for (method, uri, status, is_read) in [
        (
            Method::PUT,
            session("alice"),
            StatusCode::PAYLOAD_TOO_LARGE,
            false,
        ),
        (
            Method::PUT,
            session("bob"),
            StatusCode::PAYLOAD_TOO_LARGE,
            false,
        ),
        (
            Method::POST,
            "/v1/nodes/b/preempt".to_owned(),
            StatusCode::PAYLOAD_TOO_LARGE,
            false,
        ),
        // What has no body to be read may bring what it likes.
        (Method::GET, session("alice"), StatusCode::OK, false),
        // It is no command, which only who has read it knows.
        (
            Method::POST,
            "/v1/sessions/alice/exec".to_owned(),
            StatusCode::BAD_REQUEST,
            true,
        ),
    ] {
        let read = Arc::new(AtomicBool::new(false));
        let reading = Arc::clone(&read);
        let body = futures_util::stream::iter([0]).map(move |_| {
            reading.store(true, Ordering::Relaxed);
            Ok::<_, std::convert::Infallible>("x".repeat(MUCH))
        });
        let mut request = a.api.request(Scope::Admin, method, &uri);
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, "application/json".parse().expect("valid"));
        headers.insert(CONTENT_LENGTH, MUCH.into());
        *request.body_mut() = Body::from_stream(body);
        let answer = a.api.send(request).await;
        assert_eq!(answer.status, status, "{uri}: {}", answer.text());
        assert_eq!(read.load(Ordering::Relaxed), is_read, "{uri}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_no_node_takes_is_refused_with_every_nodes_reason() {
    let (world, a, _b) = two().await;
    world.announced("a", |a| a.draining = true);
    world.announced("b", |b| b.max_sessions = 0);
    let answer = a.put("alice").await;
    let problem = answer.problem();
    assert_eq!(
        (answer.status, problem.slug()),
        (StatusCode::SERVICE_UNAVAILABLE, "no-node")
    );
    for part in ["node `a` is draining", "node `b` has its 0 sessions"] {
        assert!(problem.detail.contains(part), "{}", problem.detail);
    }
    world.announced("b", |b| {
        b.max_sessions = 10;
        b.labels.insert("pool".to_owned(), "gpu".to_owned());
    });
    world.change("b", |b| b.is_late = true);
    let detail = a.put("alice").await.problem().detail;
    assert!(detail.contains("node `b` is late to renew"), "{detail}");
    let nodes: NodeList = a.api.get("/v1/nodes").await.json();
    let b = nodes.nodes.iter().find(|node| node.name == "b");
    let b = b.and_then(|b| b.fleet.as_ref()).expect("of the fleet");
    assert_eq!(b.standing, NodeStanding::Late);
    world.change("b", |b| b.is_late = false);
    world.announced("a", |a| a.draining = false);
    let uri = format!("{}?node_label=pool%3Dgpu", session("alice"));
    let answer = a
        .api
        .call(Method::PUT, &uri, r#"{"template": "idle"}"#)
        .await;
    let started = answer.json::<EnsureResponse>().session;
    assert_eq!(started.node, "b");
    // Whoever starts it anew has to know.
    assert_eq!(started.spec.node_labels["pool"], "gpu");
    let in_body = r#"{"template": "idle", "node_labels": {"pool": "gpu"}}"#;
    let answer = a.api.call(Method::PUT, &session("carol"), in_body).await;
    assert_eq!(answer.json::<EnsureResponse>().session.node, "b");
    let uri = format!("{}?node_label=pool", session("bob"));
    let answer = a
        .api
        .call(Method::PUT, &uri, r#"{"template": "idle"}"#)
        .await;
    assert_eq!(answer.problem().slug(), "bad-query");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_cannot_be_reached_is_named_with_what_becomes_of_its_sessions() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    b.ensure("alice").await;
    b.ensure("bob").await;
    let stopped = b.api.call(Method::DELETE, &session("bob"), "").await;
    assert_eq!(stopped.status, StatusCode::OK);
    world.announced("b", |b| b.peer_url = Some(nowhere()));
    let answer = a.api.get(&session("alice")).await;
    let problem = answer.problem();
    assert_eq!(problem.slug(), "node-unreachable");
    assert!(
        problem.detail.contains("node `b` at 127.0.0.1:"),
        "{}",
        problem.detail
    );
    // Once it is declared dead, its record tells what there is to tell.
    world.change("b", |b| b.standing = PeerStanding::Fenced);
    let shown: Session = a.api.get(&session("alice")).await.json();
    assert_eq!(
        (shown.node.as_str(), shown.state),
        ("b", SessionState::Frozen)
    );
    let exec = format!("{}/exec", session("alice"));
    let run = r#"{"command": ["true"]}"#;
    let problem = a.api.call(Method::POST, &exec, run).await.problem();
    assert_eq!((problem.slug(), problem.status), ("session-moves", 503));
    // No node has it, and whoever is asked to ends it.
    let ended: StopReport = a
        .api
        .call(Method::DELETE, &session("alice"), "")
        .await
        .json();
    assert_eq!(ended.state, SessionState::Stopped);
    let now: Session = a.api.get(&session("alice")).await.json();
    assert_eq!(
        (
            now.node.as_str(),
            now.state,
            now.generation > shown.generation
        ),
        ("a", SessionState::Stopped, true)
    );
    // What has ended there can be called off, so that nothing starts it by its record.
    let called_off: StopReport = a.api.call(Method::DELETE, &session("bob"), "").await.json();
    assert_eq!(called_off.state, SessionState::Stopped);
    let gone = a.api.get(&session("bob")).await;
    assert_eq!(gone.status, StatusCode::NOT_FOUND);
    assert!(problem.retryable, "{}", problem.detail);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_requests_wait_for_a_node_than_there_are_places() {
    let world = World::new();
    let a = Node::join_waiting(&world, "a", &world.secret, 1).await;
    let b = Node::join(&world, "b").await;
    for id in ["alice", "bob"] {
        world.start_on_b(&b, id).await;
    }
    world.announced("b", |b| b.peer_url = Some(nowhere()));
    let (alice, bob) = (pin!(a.put("alice")), pin!(a.put("bob")));
    let either = futures_util::future::select(alice, bob).await;
    let (refused, waiting) = either.factor_first();
    let problem = refused.problem();
    assert_eq!((problem.slug(), problem.status), ("too-many-waiting", 503));
    assert!(problem.detail.contains("node `b`"), "{}", problem.detail);
    world.change("b", |b| b.standing = PeerStanding::Fenced);
    let started: EnsureResponse = waiting.await.json();
    assert_eq!(started.session.node, "a");
}

/// The most that are asked where they have no room are fewer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_put_is_started_by_whichever_node_has_its_image() {
    let world = World::new();
    let mut without = Vec::new();
    for name in ["a", "b", "c", "d", "e"] {
        let node = Node::join(&world, name).await;
        let lacks = Fault::LackImage("idle:1".to_owned());
        node.api.faults.always(Operation::Create, lacks);
        without.push(node);
    }
    let answer = without[0].put("alice").await;
    let problem = answer.problem();
    assert_eq!(
        (answer.status, problem.slug()),
        (StatusCode::UNPROCESSABLE_ENTITY, "no-such-image"),
        "{}",
        answer.text()
    );
    assert!(problem.detail.contains("idle:1"), "{}", problem.detail);
    let tried: Vec<_> = without
        .iter()
        .map(|node| node.api.faults.calls(Operation::Create))
        .collect();
    assert_eq!(tried, [1; 5], "each was asked, once");
    let _has = Node::join(&world, "f").await;
    for (number, node) in without.iter().enumerate() {
        let started = node.ensure(&format!("s{number}")).await;
        assert_eq!(started.session.node, "f");
    }
    // Rather one that may not be well than none.
    world.announced("f", |told| {
        let view = told.view.as_mut().expect("it shows itself");
        view.runtime_error = Some("made so by a test".to_owned());
    });
    assert_eq!(without[0].ensure("bob").await.session.node, "f");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_runtime_does_not_answer_is_not_preferred_for_having_nothing_to_do() {
    let (world, a, b) = two().await;
    let ails = |name, error: Option<&str>| {
        world.announced(name, |told| {
            let view = told.view.as_mut().expect("it shows itself");
            view.runtime_error = error.map(str::to_owned);
        });
    };
    ails("b", Some("made so by a test"));
    world.announced("a", |a| a.load.sessions = 50);
    for number in 0..4 {
        let started = b.ensure(&format!("s{number}")).await;
        assert_eq!(started.session.node, "a");
    }
    // Before nobody is, it is asked: it may be well again.
    ails("a", Some("made so by a test"));
    assert_eq!(b.ensure("alice").await.session.node, "b");
    ails("a", None);
    ails("b", None);
    assert_eq!(a.ensure("bob").await.session.node, "b");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_put_is_started_by_whichever_node_has_its_runtime() {
    let world = World::new();
    let native = RuntimeKind::Native;
    let a = Node::join_naming(&world, "a", native).await;
    let b = Node::join_naming(&world, "b", native).await;
    // As an earlier version, which tells of its default runtime alone.
    let tell = |name: &str, runtimes: &[NodeRuntime]| {
        world.announced(name, |told| {
            let view = told.view.as_mut().expect("it shows itself");
            view.runtimes = runtimes.to_vec();
        });
    };
    let process = NodeRuntime {
        runtime: RuntimeKind::Process,
        error: None,
        answered_ago_ms: Some(0),
    };
    let shown = a.api.node.status().view().runtimes;
    assert!(
        matches!(&shown[..], [one] if one.runtime == RuntimeKind::Process && one.error.is_none())
    );
    for told in [&[][..], &[process]] {
        tell("a", told);
        tell("b", told);
        let answer = a.put("alice").await;
        let problem = answer.problem();
        assert_eq!(
            (problem.slug(), problem.status),
            ("no-such-runtime", 422),
            "{problem:?}"
        );
        assert!(problem.detail.contains("native"), "{}", problem.detail);
    }
    let detail = a.put("alice").await.problem().detail;
    for node in ["a", "b"] {
        let has = format!("node `{node}` has no native runtime, only process");
        assert!(detail.contains(&has), "{detail}");
    }
    let c = Node::join(&world, "c").await;
    world.announced("c", |told| {
        let view = told.view.as_mut().expect("it shows itself");
        view.runtimes[0].runtime = native;
    });
    // A node that is drained may be the one that has it.
    world.announced("c", |c| c.draining = true);
    let problem = a.put("alice").await.problem();
    assert_eq!(problem.slug(), "no-node", "{problem:?}");
    assert!(problem.retryable, "{problem:?}");
    world.announced("c", |c| c.draining = false);
    for (number, told) in [true, false].into_iter().enumerate() {
        if !told {
            for name in ["a", "b", "c"] {
                tell(name, &[]);
            }
        }
        for node in [&a, &b] {
            let name = format!("{number}-{}", node.api.node.name());
            let started = node.ensure(&format!("s{name}")).await.session;
            assert_eq!(started.node, "c");
        }
    }
    drop(c);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_knows_that_it_lacks_the_image_begins_nothing() {
    let (world, a, b) = two().await;
    for node in [&a, &b] {
        let lacks = Fault::LackImage("idle:1".to_owned());
        node.api.faults.always(Operation::LookForImage, lacks);
    }
    for number in 0..4 {
        let name = format!("s{number}");
        let problem = a.put(&name).await.problem();
        assert_eq!(problem.slug(), "no-such-image", "{problem:?}");
        assert!(problem.detail.contains("idle:1"), "{}", problem.detail);
        let shown = a.api.get(&session(&name)).await;
        assert_eq!(shown.status, StatusCode::NOT_FOUND);
    }
    for node in [&a, &b] {
        assert_eq!(node.api.faults.calls(Operation::Create), 0);
    }
    let _has = Node::join(&world, "c").await;
    // The generations of all sessions are counted together.
    for number in 1..=4 {
        let started = a.ensure(&format!("s{number}")).await.session;
        assert_eq!(started.node, "c");
        assert_eq!(Some(started.generation), Generation::new(number));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_node_that_has_no_room_may_have_the_image_nobody_is_told_that_none_has_it() {
    let (_world, a, b) = two().await;
    let lacks = Fault::LackImage("idle:1".to_owned());
    a.api.faults.always(Operation::Create, lacks);
    // The others do not know yet.
    let drained = b.api.call(Method::POST, "/v1/nodes/self/drain", "{}").await;
    assert_eq!(drained.status, StatusCode::ACCEPTED);
    for number in 0..4 {
        let answer = a.put(&format!("s{number}")).await;
        assert_eq!(
            answer.problem().slug(),
            "node-draining",
            "{}",
            answer.text()
        );
    }
}
