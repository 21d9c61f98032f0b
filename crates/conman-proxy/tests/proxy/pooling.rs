//! Connections to sessions that are used again.

use std::time::Duration;

use conman_proxy::ProxyOptions;

use crate::support::{Client, Fixture, RawBackend, status, until};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

async fn ask(client: &mut Client) {
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
}

#[tokio::test]
async fn requests_follow_each_other_on_one_connection_to_the_session() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    ask(&mut client).await;
    let mut session = backend.accept().await;
    for _ in 0..5 {
        session.read_head().await;
        session.send(OK).await;
        client.read_until("ok").await;
        ask(&mut client).await;
    }
    session.read_head().await;
    assert_eq!(alice.connections(), 1);
}

#[tokio::test]
async fn a_new_generation_gets_new_connections_only() {
    let fixture = Fixture::new();
    let mut old = RawBackend::new().await;
    let mut new = RawBackend::new().await;
    let alice = fixture.session("alice", old.address);
    let mut client = fixture.connect().await;
    ask(&mut client).await;
    let mut old_session = old.accept().await;
    let head = old_session.read_head().await;
    assert!(head.contains("x-conman-generation: 7\r\n"), "{head}");
    old_session.send(OK).await;
    client.read_until("ok").await;

    alice.restart(new.address);
    ask(&mut client).await;
    let mut new_session = new.accept().await;
    let head = new_session.read_head().await;
    assert!(head.contains("x-conman-generation: 8\r\n"), "{head}");
    new_session.send(OK).await;
    client.read_until("ok").await;
    assert_eq!(
        old_session.read_to_end().await,
        "",
        "the old one is closed, nothing sent on it"
    );
}

#[tokio::test]
async fn an_idle_connection_that_the_session_closed_is_replaced_unnoticed() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    for _ in 0..20 {
        ask(&mut client).await;
        let mut session = backend.accept().await;
        session.read_head().await;
        session.send(OK).await;
        client.read_until("ok").await;
        // Closed without notice, at the very moment at which the next request comes.
        drop(session);
    }
}

/// A session whose connection is idle, the client that has used it, and the connection itself.
async fn idle(fixture: &Fixture, backend: &mut RawBackend) -> (Client, Client) {
    let mut client = fixture.connect().await;
    ask(&mut client).await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session.send(OK).await;
    client.read_until("ok").await;
    (client, session)
}

#[tokio::test]
async fn a_request_that_is_not_repeatable_is_never_sent_again() {
    for request in [
        "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 1\r\n\r\nx",
    ] {
        let fixture = Fixture::new();
        let mut backend = RawBackend::new().await;
        let alice = fixture.session("alice", backend.address);
        let (mut client, mut session) = idle(&fixture, &mut backend).await;
        client.send(request).await;
        session.read_head().await;
        drop(session);
        let response = client.read_head().await;
        assert_eq!(status(&response), "502", "{response}");
        assert_eq!(alice.connections(), 1);
        assert!(backend.try_accept().is_none());
    }
}

#[tokio::test]
async fn a_repeatable_request_survives_the_end_of_a_connection_that_was_idle() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let (mut client, mut session) = idle(&fixture, &mut backend).await;
    ask(&mut client).await;
    session.read_head().await;
    drop(session);
    let mut session = backend.accept().await;
    session.read_head().await;
    session.send(OK).await;
    let response = client.read_until("ok").await;
    assert_eq!(status(&response), "200", "{response}");

    // A new connection that is closed shows a fault of the session.
    drop(session);
    until("the end of both connections", || alice.connections() == 2).await;
    let mut client = fixture.connect().await;
    ask(&mut client).await;
    let mut session = backend.accept().await;
    session.read_head().await;
    drop(session);
    let response = client.read_head().await;
    assert_eq!(status(&response), "502", "{response}");
    assert!(backend.try_accept().is_none());
}

#[tokio::test]
async fn idle_connections_are_closed_after_their_time() {
    let fixture = Fixture::with_options(ProxyOptions {
        pool_idle_timeout: Duration::from_millis(50),
        ..ProxyOptions::default()
    });
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    ask(&mut client).await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session.send(OK).await;
    client.read_until("ok").await;
    assert_eq!(session.read_to_end().await, "");
}

#[tokio::test]
async fn a_connection_in_use_is_not_shared() {
    let fixture = Fixture::with_options(ProxyOptions {
        ..ProxyOptions::default()
    });
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let mut clients = Vec::new();
    let mut sessions = Vec::new();
    for _ in 0..4 {
        let mut client = fixture.connect().await;
        ask(&mut client).await;
        let mut session = backend.accept().await;
        session.read_head().await;
        clients.push(client);
        sessions.push(session);
    }
    assert_eq!(alice.activity.in_flight(), 4);
    for (client, session) in clients.iter_mut().zip(&mut sessions) {
        session.send(OK).await;
        client.read_until("ok").await;
    }
    until("the end of all", || alice.activity.in_flight() == 0).await;
}
