//! Large and slow bodies in both directions.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::DefaultBodyLimit;
use axum::response::IntoResponse;
use axum::response::sse::{Event, Sse};
use axum::routing::{get, post};
use conman_proxy::ProxyOptions;
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{Client, Fixture, RawBackend, body, serve, soon, status};

const MIB: usize = 1 << 20;
const UPLOAD: usize = 256 * MIB;

/// Resident memory of this process, the proxy and both peers included.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages: usize = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("a number of pages");
    pages * 4096
}

async fn count(body: Body) -> String {
    let mut stream = body.into_data_stream();
    let mut total = 0;
    while let Some(chunk) = stream.next().await {
        total += chunk.expect("a whole body").len();
    }
    total.to_string()
}

/// Where all that is uploaded is counted.
pub(crate) fn counting() -> Router {
    Router::new()
        .route("/", post(count))
        .layer(DefaultBodyLimit::disable())
}

/// Uploads much to a session that counts it, by each new connection that `connect` gives.
pub(crate) async fn upload_at_constant_memory(connect: impl AsyncFn() -> Client) {
    let chunk = vec![b'x'; MIB];
    for head in [
        format!("Content-Length: {UPLOAD}\r\n\r\n"),
        "Transfer-Encoding: chunked\r\n\r\n".to_owned(),
    ] {
        let chunked = head.contains("chunked");
        let mut client = connect().await;
        client
            .send(format!(
                "POST / HTTP/1.1\r\nHost: alice.localhost\r\n{head}"
            ))
            .await;
        let before = resident_bytes();
        let mut most = before;
        for _ in 0..UPLOAD / MIB {
            if chunked {
                client.send("100000\r\n").await;
            }
            client.send(&chunk).await;
            if chunked {
                client.send("\r\n").await;
            }
            most = most.max(resident_bytes());
        }
        if chunked {
            client.send("0\r\n\r\n").await;
        }
        assert_eq!(status(&client.read_head().await), "200");
        client.read_until(&UPLOAD.to_string()).await;
        // Half of what passed: other tests of this process allocate meanwhile, tens of MiB.
        assert!(
            most - before < UPLOAD / 2,
            "{} MiB more",
            (most - before) / MIB
        );
    }
}

#[tokio::test]
async fn a_large_upload_passes_at_constant_memory() {
    let fixture = Fixture::new();
    fixture.session("alice", serve(counting()).await);
    upload_at_constant_memory(async || fixture.connect().await).await;
}

#[tokio::test]
async fn a_large_download_passes_at_the_pace_of_its_reader() {
    let router = Router::new().route(
        "/",
        get(|| async {
            let chunk = Bytes::from(vec![b'x'; MIB]);
            let chunks = stream::iter((0..64).map(move |_| Ok::<_, Infallible>(chunk.clone())));
            Body::from_stream(chunks)
        }),
    );
    let fixture = Fixture::new();
    fixture.session("alice", serve(router).await);
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n")
        .await;
    client.read_head().await;
    let mut buffer = vec![0; 64 * 1024];
    let mut total = 0;
    loop {
        let read = soon("bytes", client.stream.read(&mut buffer))
            .await
            .expect("no reset");
        if read == 0 {
            break;
        }
        total += buffer[..read].iter().filter(|&&byte| byte == b'x').count();
    }
    assert_eq!(total, 64 * MIB);
}

#[tokio::test]
async fn server_sent_events_arrive_one_by_one() {
    let (sender, receiver) = tokio::sync::mpsc::channel::<String>(4);
    let receiver = std::sync::Mutex::new(Some(receiver));
    let receiver = std::sync::Arc::new(receiver);
    let router = Router::new().route(
        "/",
        get(move || {
            let receiver = receiver.lock().expect("no panic while held").take();
            let mut receiver = receiver.expect("asked once");
            async move {
                let events = stream::poll_fn(move |cx| receiver.poll_recv(cx));
                Sse::new(events.map(|data| Ok::<_, Infallible>(Event::default().data(data))))
                    .into_response()
            }
        }),
    );
    let fixture = Fixture::with_options(ProxyOptions {
        // Silence between events is no fault.
        idle_timeout: Duration::from_millis(50),
        write_stall_timeout: Duration::from_millis(50),
        body_stall_timeout: Duration::from_millis(50),
        ..ProxyOptions::default()
    });
    let alice = fixture.session("alice", serve(router).await);
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    client.read_head().await;
    for number in 0..3 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        sender
            .send(format!("event {number}"))
            .await
            .expect("the stream lives");
        client
            .read_until(&format!("data: event {number}\n\n"))
            .await;
    }
    assert_eq!(alice.activity.in_flight(), 1);
}

#[tokio::test]
async fn both_directions_stream_at_once() {
    let router = Router::new()
        .route("/", post(|body: Body| async move { body }))
        .layer(DefaultBodyLimit::disable());
    let fixture = Fixture::new();
    fixture.session("alice", serve(router).await);
    let mut client = fixture.connect().await;
    client
        .send("POST / HTTP/1.1\r\nHost: alice.localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    client.send("4\r\nping\r\n").await;
    client.read_until("4\r\nping\r\n").await;
    client.send("5\r\nagain\r\n").await;
    client.read_until("5\r\nagain\r\n").await;
    client.send("0\r\n\r\n").await;
    client.read_until("0\r\n\r\n").await;
}

#[tokio::test]
async fn trailers_pass_in_both_directions_without_forgeries() {
    let router = Router::new().route(
        "/",
        post(|body: Body| async move {
            let collected = body.collect().await.expect("a whole body");
            let mut names: Vec<String> = collected
                .trailers()
                .map(|trailers| trailers.keys().map(ToString::to_string).collect())
                .unwrap_or_default();
            names.sort_unstable();
            names.join(",")
        }),
    );
    let fixture = Fixture::new();
    fixture.session("alice", serve(router).await);
    let response = fixture
        .exchange(
            "POST / HTTP/1.1\r\nHost: alice.localhost\r\nTransfer-Encoding: chunked\r\n\
             Trailer: X-Sum, X-Conman-Session\r\nConnection: close\r\n\r\n\
             2\r\nok\r\n0\r\nX-Sum: 1\r\nX-Conman-Session: bob\r\n\r\n",
        )
        .await;
    assert_eq!(
        (status(&response), body(&response)),
        ("200", "x-sum"),
        "{response}"
    );

    let mut backend = RawBackend::new().await;
    fixture.session("bob", backend.address);
    let client = fixture.exchange(
        "GET / HTTP/1.1\r\nHost: bob.localhost\r\nTE: trailers\r\nConnection: close, te\r\n\r\n",
    );
    let session = async {
        let mut session = backend.accept().await;
        session.read_head().await;
        session
            .send(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n\
                 2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n",
            )
            .await;
    };
    let (response, ()) = tokio::join!(client, session);
    assert!(
        response.ends_with("2\r\nok\r\n0\r\nx-sum: 1\r\n\r\n"),
        "{response}"
    );
}

#[tokio::test]
async fn a_body_is_asked_for_only_once_the_session_wants_it() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let request = "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 4\r\n\
         Expect: 100-Continue\r\n\r\n";
    let mut client = fixture.connect().await;
    client.send(request).await;
    let mut session = backend.accept().await;
    let head = session.read_head().await;
    assert!(head.contains("\r\nexpect: 100-Continue\r\n"), "{head}");
    session.send("HTTP/1.1 100 Continue\r\n\r\n").await;
    assert_eq!(status(&client.read_head().await), "100");
    client.send("body").await;
    session.read_until("body").await;
    session.send("HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!(status(&client.read_head().await), "204");
}

/// A client that waits for the word to send its body, and the session, which has read the head.
async fn waiting_to_continue() -> ((Fixture, RawBackend), Client, Client) {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send(
            "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 4\r\n\
             Expect: 100-continue\r\n\r\n",
        )
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    ((fixture, backend), client, session)
}

#[tokio::test]
async fn a_refused_body_is_never_asked_for() {
    let (_stage, mut client, mut session) = waiting_to_continue().await;
    session
        .send("HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
        .await;
    let mut response = client.read_head().await;
    if status(&response) == "100" {
        // This test was late, and the proxy's patience over.
        response = client.read_head().await;
    }
    assert_eq!(status(&response), "413", "{response}");
}

#[tokio::test]
async fn a_session_that_never_says_continue_gets_the_body_all_the_same() {
    let (_stage, mut client, mut session) = waiting_to_continue().await;
    assert_eq!(status(&client.read_head().await), "100");
    client
        .stream
        .write_all(b"body")
        .await
        .expect("the proxy reads");
    session.read_until("body").await;
}

#[tokio::test]
async fn an_answer_that_comes_instead_of_a_continue_arrives_whole() {
    let (_stage, mut client, mut session) = waiting_to_continue().await;
    session
        .send("HTTP/1.1 413 Content Too Large\r\nContent-Length: 10\r\n\r\nfirst")
        .await;
    client.read_until("first").await;
    // The connection's task runs again, with the body still kept back.
    session.send("other").await;
    client.read_until("other").await;
}
