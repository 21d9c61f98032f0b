//! Header fields and bodies that pass the proxy, and those that do not.

use conman_proxy::ProxyOptions;

use crate::support::{Fixture, RawBackend, body, serve_echo_head, soon, status, until};

#[tokio::test]
async fn a_session_learns_who_asks_and_nobody_can_forge_that() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    let response = fixture
        .exchange(
            "GET / HTTP/1.1\r\nHost: alice.localhost\r\nX-Conman-Session: bob\r\n\
             X_Conman_Generation: 99\r\nX-Forwarded-For: 192.0.2.1\r\nForwarded: for=192.0.2.1\r\n\
             Connection: close, X-Secret-Hop\r\nX-Secret-Hop: 1\r\nKeep-Alive: 5\r\n\
             Proxy-Connection: close\r\nTE: gzip, trailers\r\nCookie: a=b\r\nUpgrade: h2c\r\n\
             HTTP2-Settings: AAA\r\n\r\n",
        )
        .await;
    let mut fields: Vec<&str> = body(&response)
        .split("\r\n")
        .skip(1)
        .filter(|l| !l.is_empty())
        .collect();
    fields.sort_unstable();
    assert_eq!(
        fields,
        [
            "connection: te",
            "cookie: a=b",
            "host: alice.localhost",
            "te: trailers",
            "x-conman-generation: 7",
            "x-conman-session: alice",
            "x-forwarded-for: 127.0.0.1",
            "x-forwarded-host: alice.localhost",
            "x-forwarded-proto: http",
        ]
    );
}

#[tokio::test]
async fn a_trusted_front_is_believed() {
    let fixture = Fixture::with_options(ProxyOptions {
        trust_forwarded: true,
        ..ProxyOptions::default()
    });
    fixture.session("alice", serve_echo_head().await);
    let response = fixture
        .exchange(
            "GET /s/alice/ HTTP/1.1\r\nHost: inner\r\nX-Forwarded-For: 192.0.2.1\r\n\
             X-Forwarded-Proto: https\r\nX-Forwarded-Host: public\r\nX-Forwarded-Prefix: /t\r\n\
             Connection: close\r\n\r\n",
        )
        .await;
    for field in [
        "x-forwarded-for: 192.0.2.1, 127.0.0.1",
        "x-forwarded-proto: https",
        "x-forwarded-host: public",
        "x-forwarded-prefix: /t/s/alice",
    ] {
        assert!(
            body(&response).contains(&format!("\r\n{field}\r\n")),
            "{field}: {response}"
        );
    }
}

/// What the client gets when the session sends `answer` and then closes.
async fn through(request_line: &str, answer: &str) -> String {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let request = format!("{request_line}\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n");
    let client = fixture.exchange(&request);
    let session = async {
        let mut session = backend.accept().await;
        session.read_head().await;
        session.send(answer).await;
    };
    tokio::join!(client, session).0
}

#[tokio::test]
async fn an_answer_s_hop_by_hop_fields_end_at_the_proxy() {
    let response = through(
        "GET / HTTP/1.1",
        "HTTP/1.1 418 Short And Stout\r\nConnection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 1\r\n\
         X-Conman-Session: forged\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 2\r\n\r\nok",
    )
    .await;
    assert!(
        response.starts_with("HTTP/1.1 418 Short And Stout\r\n"),
        "{response}"
    );
    let lower = response.to_ascii_lowercase();
    for gone in ["x-hop", "keep-alive", "x-conman"] {
        assert!(!lower.contains(gone), "{gone}: {response}");
    }
    assert!(
        lower.contains("set-cookie: a=1\r\nset-cookie: b=2\r\n"),
        "{response}"
    );
    assert!(
        lower.contains("content-length: 2\r\n") && response.ends_with("ok"),
        "{response}"
    );
}

#[tokio::test]
async fn an_answer_s_fields_keep_their_spelling() {
    let response = through(
        "GET / HTTP/1.1",
        "HTTP/1.1 200 OK\r\nX-MyApp-ID: 1\r\nETag: \"a\"\r\nset-cookie: a=1\r\n\
         WWW-Authenticate: Basic\r\nContent-Length: 2\r\n\r\nok",
    )
    .await;
    for field in [
        "X-MyApp-ID: 1",
        "ETag: \"a\"",
        "set-cookie: a=1",
        "WWW-Authenticate: Basic",
        "Content-Length: 2",
    ] {
        let line = format!("\r\n{field}\r\n");
        assert!(response.contains(&line), "{field}: {response}");
    }
}

#[tokio::test]
async fn two_hundred_fields_pass_in_both_directions() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let fields = "X-A: b\r\n".repeat(198);
    let request =
        format!("GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n{fields}\r\n");
    let session = async {
        let mut session = backend.accept().await;
        let head = session.read_head().await;
        assert_eq!(head.matches("x-a: b").count(), 198, "{head}");
        let answer = format!("HTTP/1.1 204 No Content\r\n{fields}X-A: b\r\nX-A: b\r\n\r\n");
        session.send(answer).await;
    };
    let (answer, ()) = tokio::join!(fixture.exchange(&request), session);
    assert_eq!(status(&answer), "204", "{answer}");
    assert_eq!(answer.matches("X-A: b").count(), 200, "{answer}");
}

#[tokio::test]
async fn answers_with_ambiguous_lengths_are_made_unambiguous_or_refused() {
    let both = through(
        "GET / HTTP/1.1",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    )
    .await;
    assert!(
        !both.to_ascii_lowercase().contains("content-length"),
        "{both}"
    );
    assert!(both.ends_with("5\r\nhello\r\n0\r\n\r\n"), "{both}");
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nabcd",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        "SSH-2.0-OpenSSH_9.2p1\r\n\r\n",
        "",
    ] {
        let response = through("GET / HTTP/1.1", answer).await;
        assert_eq!(status(&response), "502", "{answer:?}: {response}");
        assert!(response.contains("application/problem+json"), "{response}");
    }
}

#[tokio::test]
async fn heads_without_bodies_keep_what_they_say_of_lengths() {
    let head = through(
        "HEAD / HTTP/1.1",
        "HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n",
    )
    .await;
    assert!(
        head.contains("Content-Length: 12345\r\n") && body(&head).is_empty(),
        "{head}"
    );
    let twice = through(
        "HEAD / HTTP/1.1",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
    )
    .await;
    assert_eq!((status(&twice), body(&twice)), ("200", ""), "{twice}");
    let not_modified = through(
        "GET / HTTP/1.1",
        "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n",
    )
    .await;
    assert!(
        not_modified.contains("ETag: \"x\"") && body(&not_modified).is_empty(),
        "{not_modified}"
    );
    let no_content = through(
        "GET / HTTP/1.1",
        "HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    )
    .await;
    assert_eq!(
        (status(&no_content), body(&no_content)),
        ("204", ""),
        "{no_content}"
    );
}

#[tokio::test]
async fn an_answer_of_http_1_0_is_passed_on_as_1_1() {
    let response = through(
        "GET / HTTP/1.1",
        "HTTP/1.0 200 OK\r\nServer: old\r\n\r\nto the end",
    )
    .await;
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert!(
        response.ends_with("\r\n\r\nA\r\nto the end\r\n0\r\n\r\n"),
        "{response}"
    );
}

#[tokio::test]
async fn a_session_that_dies_while_it_answers_leaves_no_whole_answer() {
    for (request_line, answer) in [
        (
            "GET / HTTP/1.1",
            "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart",
        ),
        (
            "GET / HTTP/1.1",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n",
        ),
    ] {
        let response = through(request_line, answer).await;
        assert_eq!(status(&response), "200", "{response}");
        assert!(
            response.contains("part") && !response.ends_with("0\r\n\r\n"),
            "{response}"
        );
        let lower = response.to_ascii_lowercase();
        assert!(!lower.contains("content-length: 4\r\n"), "{response}");
    }
    // Here the connection's end is the answer's, so only a reset shows that it was cut.
    let old = through(
        "GET / HTTP/1.0",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n",
    )
    .await;
    assert!(old.ends_with("[reset]"), "{old}");
}

#[tokio::test]
async fn an_answer_that_ends_with_its_connection_is_cut_when_the_session_is_known_to_be_dead() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session.send("HTTP/1.0 200 OK\r\n\r\npart").await;
    client.read_until("part\r\n").await;
    alice
        .closing
        .send_replace(Some(conman_core::Closing::service_restart("moving")));
    drop(session);
    assert_eq!(client.read_to_end().await, "");
}

#[tokio::test]
async fn a_port_that_refuses_is_a_bad_gateway_with_advice() {
    let fixture = Fixture::new();
    let backend = RawBackend::new().await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let closed = listener.local_addr().expect("bound");
    drop((listener, backend));
    fixture.session("alice", closed);
    let response = fixture.get("/", "alice.localhost").await;
    assert_eq!(status(&response), "502");
    assert!(body(&response).contains("connection-refused"), "{response}");
    assert!(body(&response).contains("logs"), "{response}");
}

#[tokio::test]
async fn requests_and_long_answers_count_as_activity_until_they_end() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    assert_eq!(alice.activity.in_flight(), 1);
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        .await;
    client.read_until("hello").await;
    assert_eq!(alice.activity.in_flight(), 1);
    session.send("world").await;
    client.read_until("world").await;
    until("the end of the request", || alice.activity.in_flight() == 0).await;
    assert_eq!(alice.activity.begun(), 1);

    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    session.read_head().await;
    drop(client);
    until("the end of an abandoned request", || {
        alice.activity.in_flight() == 0
    })
    .await;
    let closed = session.read_to_end().await;
    assert_eq!(closed, "", "the session learns of it");
}

#[tokio::test]
async fn many_requests_on_one_connection_are_answered_in_order() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    let mut client = fixture.connect().await;
    let mut pipelined = String::new();
    for number in 0..20 {
        pipelined += &format!("GET /{number} HTTP/1.1\r\nHost: alice.localhost\r\n\r\n");
    }
    client.send(pipelined).await;
    for number in 0..20 {
        assert_eq!(status(&client.read_head().await), "200");
        let echoed = client.read_head().await;
        assert!(
            echoed.starts_with(&format!("GET /{number} HTTP/1.1\r\n")),
            "{echoed}"
        );
    }
    soon("close", async { drop(client) }).await;
}
