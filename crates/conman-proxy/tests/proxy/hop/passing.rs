//! What passes by way of another node, either way.

use std::sync::atomic::Ordering;

use conman_core::Closing;
use conman_proxy::ProxyOptions;
use futures_util::{SinkExt as _, StreamExt as _};
use tokio_tungstenite::tungstenite::Message;

use super::nodes::{Believed, Entry, Owner, upload};
use crate::streaming::{counting, upload_at_constant_memory};
use crate::support::{TestSession, body, serve, serve_echo_head, soon, status};

#[tokio::test]
async fn a_session_sees_the_client_and_nothing_of_the_hop() {
    let owner = Owner::of_echo().await;
    let entry = Entry::new(&Believed::new(owner.address));
    let answer = entry
        .exchange(
            "GET /s/alice/a/b?c HTTP/1.1\r\nHost: conman.test\r\nConnection: close\r\n\
             X-Conman-Hop: 1\r\nX-Conman-Peer: me\r\nX-Conman-Caller: admin\r\nX-Conman-Generation: 1\r\n\
             X_Conman_Session: bob\r\nX-Forwarded-For: 6.6.6.6\r\nCookie: a=b\r\n\r\n",
        )
        .await;
    assert_eq!(status(&answer), "200", "{answer}");
    let head = body(&answer);
    let mut lines: Vec<&str> = head.trim_end().split("\r\n").collect();
    lines[1..].sort_unstable();
    assert_eq!(
        lines,
        [
            "GET /a/b?c HTTP/1.1",
            "cookie: a=b",
            "host: conman.test",
            "x-conman-generation: 7",
            "x-conman-session: alice",
            "x-forwarded-for: 127.0.0.1",
            "x-forwarded-host: conman.test",
            "x-forwarded-prefix: /s/alice",
            "x-forwarded-proto: http",
        ]
    );
}

#[tokio::test]
async fn a_session_answers_at_the_path_of_the_nodes_liveness_check() {
    let owner = Owner::of_echo().await;
    let entry = Entry::new(&Believed::new(owner.address));
    let answer = entry
        .exchange(
            "GET /peer/liveness HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n",
        )
        .await;
    assert_eq!(status(&answer), "200", "{answer}");
    assert!(body(&answer).starts_with("GET /peer/liveness "), "{answer}");
}

#[tokio::test]
async fn requests_for_many_sessions_of_a_node_share_its_connections() {
    let owner = Owner::new().await;
    let target = serve_echo_head().await;
    for id in ["alice", "bob"] {
        owner.own(id, &TestSession::new(target), true);
    }
    let entry = Entry::new(&Believed::new(owner.address));
    let mut client = entry.connect().await;
    for id in ["alice", "bob", "alice", "bob"] {
        client
            .send(format!("GET /s/{id}/ HTTP/1.1\r\nHost: x\r\n\r\n"))
            .await;
        let head = client.read_head().await;
        assert_eq!(status(&head), "200", "{head}");
        let echoed = client.read_head().await;
        assert!(
            echoed.contains(&format!("x-conman-session: {id}\r\n")),
            "{echoed}"
        );
    }
    assert_eq!(owner.accepted.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn an_upload_reaches_the_session_whole_and_without_an_expect_of_the_hop() {
    let (owner, mut backend) = Owner::of_alice().await;
    let entry = Entry::new(&Believed::new(owner.address));
    let mut client = entry.connect().await;
    client.send(upload(10, "")).await;
    client.send("0123456789").await;
    let mut session = backend.accept().await;
    let head = session.read_head().await;
    assert!(
        !head.contains("expect") && !head.contains("x-conman-expect"),
        "{head}"
    );
    assert!(head.contains("content-length: 10\r\n"), "{head}");
    session.read_until("0123456789").await;
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Conman-Misdirected: not-owner\r\n\r\nok")
        .await;
    let answer = client.read_to_end().await;
    assert_eq!((status(&answer), body(&answer)), ("200", "ok"), "{answer}");
}

#[tokio::test]
async fn a_client_that_waits_for_leave_to_send_its_body_gets_the_sessions() {
    let (owner, mut backend) = Owner::of_alice().await;
    let entry = Entry::new(&Believed::new(owner.address));
    let mut client = entry.connect().await;
    client.send(upload(4, "Expect: 100-continue\r\n")).await;
    let mut session = backend.accept().await;
    let head = session.read_head().await;
    assert!(head.contains("expect: 100-continue\r\n"), "{head}");
    session.send("HTTP/1.1 100 Continue\r\n\r\n").await;
    let leave = client.read_head().await;
    assert!(leave.starts_with("HTTP/1.1 100"), "{leave}");
    client.send("body").await;
    session.read_until("body").await;
    session.send("HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!(status(&client.read_to_end().await), "204");
}

#[tokio::test]
async fn a_head_that_one_node_has_just_accepted_the_other_accepts_as_well() {
    let (owner, mut backend) = Owner::of_alice().await;
    let entry = Entry::new(&Believed::new(owner.address));
    let start = "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n";
    let most = ProxyOptions::default();
    let many = "A: b\r\n".repeat(most.max_headers - 2);
    let long = "x".repeat(most.max_head_bytes - start.len() - 200);
    for head in [
        format!("{start}{many}\r\n"),
        format!("{start}X-Long: {long}\r\n\r\n"),
    ] {
        let mut client = entry.connect().await;
        client.send(head).await;
        let answered = async {
            let mut session = backend.accept().await;
            session.read_head().await;
            session.send("HTTP/1.1 204 No Content\r\n\r\n").await;
        };
        let (answer, ()) = tokio::join!(client.read_to_end(), answered);
        assert_eq!(status(&answer), "204", "{answer}");
    }
}

#[tokio::test]
async fn an_answer_by_way_of_another_node_keeps_its_two_hundred_fields_and_their_spelling() {
    let (owner, mut backend) = Owner::of_alice().await;
    let entry = Entry::new(&Believed::new(owner.address));
    let answered = async {
        let mut session = backend.accept().await;
        session.read_head().await;
        let fields = "X-MyApp-ID: 1\r\n".repeat(200);
        let answer = format!("HTTP/1.1 204 No Content\r\n{fields}\r\n");
        session.send(answer).await;
    };
    let request = "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n";
    let (answer, ()) = tokio::join!(entry.exchange(request), answered);
    assert_eq!(status(&answer), "204", "{answer}");
    assert_eq!(answer.matches("X-MyApp-ID: 1").count(), 200, "{answer}");
}

#[tokio::test]
async fn a_websocket_by_way_of_another_node_is_closed_by_the_sessions_farewell() {
    let owner = Owner::new().await;
    let echo = axum::Router::new().route(
        "/ws",
        axum::routing::any(|upgrade: axum::extract::ws::WebSocketUpgrade| async move {
            upgrade.on_upgrade(|mut socket| async move {
                while let Some(Ok(message)) = socket.recv().await {
                    if socket.send(message).await.is_err() {
                        return;
                    }
                }
            })
        }),
    );
    let alice = TestSession::new(serve(echo).await);
    owner.own("alice", &alice, true);
    let entry = Entry::new(&Believed::new(owner.address));
    let url = format!("ws://{}/s/alice/ws", entry.0.local_addr());
    let (mut socket, _) = soon("a socket", tokio_tungstenite::connect_async(url))
        .await
        .expect("connected");
    for text in ["one", &"two".repeat(50_000)] {
        soon("sending", socket.send(Message::text(text)))
            .await
            .expect("open");
        let echoed = soon("an echo", socket.next()).await.expect("open");
        assert_eq!(echoed.expect("a message"), Message::text(text));
    }
    assert_eq!(alice.activity.in_flight(), 1);
    assert_eq!(
        (entry.0.stats().tunnels, owner.proxy.stats().tunnels),
        (1, 1)
    );
    let closing = Closing::service_restart("moves");
    alice.closing.send_replace(Some(closing));
    let last = soon("the farewell", socket.next())
        .await
        .expect("a message");
    match last.expect("a message") {
        Message::Close(Some(frame)) => {
            assert_eq!(
                (u16::from(frame.code), frame.reason.as_str()),
                (1012, "moves")
            );
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_large_upload_passes_by_way_of_another_node_at_constant_memory() {
    let owner = Owner::new().await;
    let alice = TestSession::new(serve(counting()).await);
    owner.own("alice", &alice, true);
    let entry = Entry::new(&Believed::new(owner.address));
    upload_at_constant_memory(async || entry.connect().await).await;
}
