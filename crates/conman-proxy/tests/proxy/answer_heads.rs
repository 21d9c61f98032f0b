//! Sessions that never complete an answer's head.

use std::time::Duration;

use conman_proxy::ProxyOptions;
use tokio::io::AsyncWriteExt as _;

use crate::support::{Client, Fixture, RawBackend, body, soon, status, until};

const GET: &str = "GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n";
const UPGRADE: &str = "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade\r\n\
    Upgrade: websocket\r\n\r\n";

/// A client whose request the session has read, and both.
async fn asked(fixture: &Fixture, request: &str) -> (Client, Client) {
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client.send(request).await;
    let mut session = backend.accept().await;
    session.read_head().await;
    (client, session)
}

/// Sends the piece again and again until the proxy closes the connection.
async fn until_cut(session: &mut Client, piece: &str, pause: Duration) {
    soon("the cut", async {
        while session.stream.write_all(piece.as_bytes()).await.is_ok() {
            tokio::time::sleep(pause).await;
        }
    })
    .await;
}

#[tokio::test]
async fn interim_answers_without_end_are_cut() {
    for request in [GET, UPGRADE] {
        let fixture = Fixture::new();
        let (mut client, mut session) = asked(&fixture, request).await;
        let interim = "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n";
        until_cut(&mut session, interim, Duration::ZERO).await;
        let answer = client.read_until("}").await;
        assert_eq!(status(&answer), "502", "{answer}");
        assert!(body(&answer).contains("interim answers"), "{answer}");
    }
}

#[tokio::test]
async fn a_head_that_a_session_trickles_is_cut() {
    for request in [GET, UPGRADE] {
        let fixture = Fixture::with_options(ProxyOptions {
            head_timeout: Duration::from_secs(1),
            ..ProxyOptions::default()
        });
        let (mut client, mut session) = asked(&fixture, request).await;
        session.send("HTTP/1.1 200 OK\r\nX-Slow: ").await;
        until_cut(&mut session, "x", Duration::from_millis(20)).await;
        let answer = client.read_until("}").await;
        assert_eq!(status(&answer), "502", "{answer}");
        assert!(body(&answer).contains("complete in time"), "{answer}");
        until("the end of the request", || {
            fixture.proxy.stats().tunnels == 0
        })
        .await;
    }
}

#[tokio::test]
async fn a_session_may_be_silent_before_and_between_heads_and_trickle_its_body() {
    let fixture = Fixture::with_options(ProxyOptions {
        head_timeout: Duration::from_millis(600),
        ..ProxyOptions::default()
    });
    let (mut client, mut session) = asked(&fixture, GET).await;
    let longer = Duration::from_millis(900);
    for _ in 0..2 {
        tokio::time::sleep(longer).await;
        session.send("HTTP/1.1 102 Processing\r\n\r\n").await;
    }
    tokio::time::sleep(longer).await;
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n")
        .await;
    for byte in ["a", "b", "c"] {
        tokio::time::sleep(longer).await;
        session.send(byte).await;
    }
    let answer = client.read_until("abc").await;
    assert_eq!(status(&answer), "200", "{answer}");
    // The connection is as good as before.
    client.send(GET).await;
    session.read_head().await;
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmore")
        .await;
    client.read_until("more").await;
}
