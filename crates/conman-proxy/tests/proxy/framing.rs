use crate::support::{Fixture, RawBackend, status, until};

/// A tunnel would be a fine place to hide a request in; so would each of these.
const AMBIGUOUS: [&str; 16] = [
    "Content-Length: 5\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 5",
    "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: 5\r\nContent-Length: 5",
    "Content-Length: 5, 5",
    "Content-Length: +5",
    "Content-Length: -1",
    "Content-Length: 5 5",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding:\x0bchunked",
    "X-Folded: a\r\n b",
    "X-Bare: a\nContent-Length: 5",
];

#[tokio::test]
async fn ambiguous_heads_are_refused_and_never_forwarded() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    for fields in AMBIGUOUS {
        let smuggled = "GET /smuggled HTTP/1.1\r\nHost: alice.localhost\r\n\r\n";
        let response = fixture
            .exchange(format!(
                "POST / HTTP/1.1\r\nHost: alice.localhost\r\n{fields}\r\n\r\n0\r\n\r\n{smuggled}"
            ))
            .await;
        assert_eq!(status(&response), "400", "{fields:?}: {response}");
        assert_eq!(
            response.matches("HTTP/1.1 ").count(),
            1,
            "one answer, then closed: {response}"
        );
    }
    assert_eq!(alice.connections(), 0);
    assert!(backend.try_accept().is_none());
}

#[tokio::test]
async fn other_malformed_requests_are_refused() {
    let fixture = Fixture::new();
    let backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    for request in [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nHost: alice.localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nhost: bob.localhost\r\n\r\n",
        "GET / HTTP/1.0\r\nHost: alice.localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET / HTTP/1.1\nHost: alice.localhost\n\n",
        "GET /\x01 HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nX: \x00\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\nno colon\r\n\r\n",
        "GET / HTTP/1.1\r\n: empty\r\nHost: alice.localhost\r\n\r\n",
        "G\u{e9}T / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
        "GET / HTTP/9.9\r\nHost: alice.localhost\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\u{fc}\x03\x03 a TLS hello\r\n\r\n",
    ] {
        let response = fixture.exchange(request).await;
        assert_eq!(status(&response), "400", "{request:?}: {response}");
    }
    let http_2 = fixture
        .exchange("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await;
    assert!(!http_2.contains(" 200 "), "{http_2}");
    assert_eq!(alice.connections(), 0);
}

#[tokio::test]
async fn a_broken_chunk_ends_the_request_and_the_connection() {
    for chunk in [
        "z\r\n",
        "5\r\nhelloXX",
        "5\nhello\r\n",
        "fffffffffffffffff\r\n",
        "5;a\nb\r\n",
        "0\r\nA:\nb\r\n",
    ] {
        let fixture = Fixture::new();
        let mut backend = RawBackend::new().await;
        let alice = fixture.session("alice", backend.address);
        let request = format!(
            "POST / HTTP/1.1\r\nHost: alice.localhost\r\nTransfer-Encoding: chunked\r\n\r\n\
             3\r\nabc\r\n{chunk}0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: alice.localhost\r\n\r\n"
        );
        let response = fixture.exchange(request).await;
        assert_eq!(status(&response), "400", "{chunk:?}: {response}");
        assert_eq!(response.matches("HTTP/1.1 ").count(), 1, "{response}");
        if alice.connections() > 0 {
            let mut session = backend.accept().await;
            let seen = session.read_to_end().await;
            assert!(
                !seen.contains("\r\n0\r\n\r\n"),
                "the body must not look whole: {seen}"
            );
            assert!(!seen.contains("smuggled"), "{seen}");
        }
    }
}

#[tokio::test]
async fn a_chunked_get_keeps_its_body_and_what_follows_is_a_request() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send(
            "GET /1 HTTP/1.1\r\nHost: alice.localhost\r\nTransfer-Encoding: Chunked\r\n\r\n\
             5;x=y\r\nhello\r\n0\r\n\r\nGET /2 HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
        )
        .await;
    let mut session = backend.accept().await;
    let first = session.read_until("0\r\n\r\n").await;
    assert!(first.starts_with("GET /1 HTTP/1.1\r\n"), "{first}");
    assert!(first.contains("transfer-encoding: chunked\r\n"), "{first}");
    assert!(
        first.ends_with("\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
        "{first}"
    );
    session.send("HTTP/1.1 204 No Content\r\n\r\n").await;
    client.read_head().await;
    let second = session.read_head().await;
    assert!(second.starts_with("GET /2 HTTP/1.1\r\n"), "{second}");
    session.send("HTTP/1.1 204 No Content\r\n\r\n").await;
    client.read_head().await;
    until("the end of both", || alice.activity.in_flight() == 0).await;
    assert_eq!(alice.connections(), 1);
}

#[tokio::test]
async fn lengths_arrive_as_they_were_sent() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    for (request, expected) in [
        (
            "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 0\r\n\r\n",
            "content-length: 0\r\n",
        ),
        (
            "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 3\r\n\r\nabc",
            "content-length: 3\r\n",
        ),
        (
            "GET / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 3\r\n\r\nabc",
            "content-length: 3\r\n",
        ),
    ] {
        client.send(request).await;
        let mut session = backend.accept().await;
        let head = session.read_head().await;
        assert!(head.contains(expected), "{head}");
        assert!(!head.contains("transfer-encoding"), "{head}");
        if request.ends_with("abc") {
            session.read_until("abc").await;
        }
        session
            .send("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            .await;
        client.read_head().await;
    }
}
