//! Upgrades to other protocols.

use crate::support::{Client, Fixture, RawBackend, status, until};

const ASK: &str = "GET /x HTTP/1.1\r\nHost: alice.localhost\r\nConnection: keep-alive, Upgrade\r\n\
    Upgrade: echo/1\r\n\r\n";
const AGREE: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo/1\r\n\
    X-Conman-Session: forged\r\nX-Kept: 1\r\n\r\n";

async fn setup() -> (Fixture, RawBackend) {
    let fixture = Fixture::new();
    let backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    (fixture, backend)
}

/// A tunnel of a protocol that nobody knows.
async fn tunnel(fixture: &Fixture, backend: &mut RawBackend) -> (Client, Client) {
    let mut client = fixture.connect().await;
    client.send(ASK).await;
    let mut session = backend.accept().await;
    let head = session.read_head().await;
    assert!(head.starts_with("GET /x HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("\r\nconnection: upgrade\r\n"), "{head}");
    assert!(head.contains("\r\nupgrade: echo/1\r\n"), "{head}");
    session.send(AGREE).await;
    let head = client.read_head().await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(
        head.contains("\r\nUpgrade: echo/1\r\n") && head.contains("X-Kept: 1"),
        "{head}"
    );
    assert!(!head.contains("x-conman"), "{head}");
    (client, session)
}

#[tokio::test]
async fn after_the_101_bytes_pass_both_ways_and_half_closes_too() {
    let (fixture, mut backend) = setup().await;
    let (mut client, mut session) = tunnel(&fixture, &mut backend).await;
    until("the tunnel", || fixture.proxy.stats().tunnels == 1).await;
    client.send("ping").await;
    session.read_until("ping").await;
    session.send("pong").await;
    client.read_until("pong").await;
    tokio::io::AsyncWriteExt::shutdown(&mut client.stream)
        .await
        .expect("open");
    assert_eq!(session.read_to_end().await, "");
    session.send("last words").await;
    drop(session);
    assert_eq!(client.read_to_end().await, "last words");
    until("the tunnel's end", || fixture.proxy.stats().tunnels == 0).await;
    until("the connection's end", || {
        fixture.proxy.stats().connections == 0
    })
    .await;
}

#[tokio::test]
async fn bytes_behind_either_head_come_first() {
    let (fixture, mut backend) = setup().await;
    let mut client = fixture.connect().await;
    client.send(format!("{ASK}early")).await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session.send(format!("{AGREE}first")).await;
    session.read_until("early").await;
    client.read_until("first").await;
    client.send("later").await;
    session.read_until("later").await;
}

#[tokio::test]
async fn nothing_behind_an_upgrade_reaches_the_session_before_it_agrees() {
    let (fixture, mut backend) = setup().await;
    let mut client = fixture.connect().await;
    client
        .send(format!(
            "{ASK}GET /s/bob/secret HTTP/1.1\r\nHost: localhost\r\n\r\n"
        ))
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    // A while later there is still nothing; a refusal then makes it an ordinary next request.
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    let mut byte = [0];
    let nothing = session.stream.try_read(&mut byte);
    assert_eq!(
        nothing.expect_err("no bytes").kind(),
        std::io::ErrorKind::WouldBlock
    );
    session
        .send("HTTP/1.1 426 Upgrade Required\r\nContent-Length: 2\r\nUpgrade: y\r\n\r\nno")
        .await;
    let head = client.read_head().await;
    assert_eq!(status(&head), "426");
    client.read_until("no").await;
    let next = client.read_head().await;
    assert_eq!(status(&next), "404", "{next}");
    assert_eq!(session.read_to_end().await, "");
}

#[tokio::test]
async fn an_ordinary_answer_to_an_upgrade_keeps_the_client_s_connection() {
    let (fixture, mut backend) = setup().await;
    let mut client = fixture.connect().await;
    for _ in 0..2 {
        client.send(ASK).await;
        let mut session = backend.accept().await;
        session.read_head().await;
        session
            .send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
            .await;
        client.read_until("2\r\nok\r\n0\r\n\r\n").await;
    }
}

#[tokio::test]
async fn wishes_that_are_no_proper_upgrade_are_forwarded_as_ordinary_requests() {
    let (fixture, mut backend) = setup().await;
    for request in [
        "POST / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\nhi",
        "GET / HTTP/1.0\r\nHost: alice.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nUpgrade: websocket\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket, x\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade\r\nUpgrade: x\r\nUpgrade: y\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade\r\nUpgrade: HTTP/2.0\r\n\r\n",
    ] {
        let mut client = fixture.connect().await;
        client.send(request).await;
        let mut session = backend.accept().await;
        let head = session.read_head().await;
        assert!(!head.contains("upgrade"), "{request:?} became {head}");
        // Even if the session plays along, there is no tunnel.
        session.send("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").await;
        let response = client.read_head().await;
        assert_eq!(status(&response), "502", "{request:?}: {response}");
    }
}

#[tokio::test]
async fn an_agreement_to_something_else_is_a_bad_gateway() {
    let (fixture, mut backend) = setup().await;
    for agreed in [
        "Upgrade: other\r\n",
        "Upgrade: echo/1\r\nUpgrade: other\r\n",
        "",
    ] {
        let mut client = fixture.connect().await;
        client.send(ASK).await;
        let mut session = backend.accept().await;
        session.read_head().await;
        session
            .send(format!(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\n{agreed}\r\n"
            ))
            .await;
        assert_eq!(status(&client.read_head().await), "502", "{agreed:?}");
        assert_eq!(session.read_to_end().await, "");
    }
}

#[tokio::test]
async fn a_tunnel_is_activity_until_it_ends() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let (client, session) = tunnel(&fixture, &mut backend).await;
    until("the tunnel", || fixture.proxy.stats().tunnels == 1).await;
    assert_eq!(alice.activity.in_flight(), 1);
    drop((client, session));
    until("the end", || alice.activity.in_flight() == 0).await;
}

#[tokio::test]
async fn tunnels_of_unknown_protocols_are_just_closed_when_their_session_goes() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let (mut client, mut session) = tunnel(&fixture, &mut backend).await;
    session.send("words").await;
    client.read_until("words").await;
    alice
        .closing
        .send_replace(Some(conman_core::Closing::service_restart("moving")));
    assert_eq!(client.read_to_end().await, "");
}

#[tokio::test]
async fn a_handshake_that_its_sessions_end_cuts_off_goes_to_the_next_one() {
    let (fixture, mut backend) = setup().await;
    let mut client = fixture.connect().await;
    client.send(ASK).await;
    drop(backend.accept().await);
    let head = client.read_head().await;
    assert_eq!(status(&head), "502", "the session is still there");

    let mut next = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client.send(ASK).await;
    let mut session = backend.accept().await;
    session.read_head().await;
    fixture.session("alice", next.address);
    alice
        .closing
        .send_replace(Some(conman_core::Closing::service_restart("moving")));
    drop(session);
    let mut session = next.accept().await;
    session.read_head().await;
    session.send(AGREE).await;
    let head = client.read_head().await;
    assert_eq!(status(&head), "101");
}
