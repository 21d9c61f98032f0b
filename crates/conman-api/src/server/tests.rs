//! Tests of the server's bounds on requests and connections.

use axum::routing::get;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Semaphore;

use super::*;

async fn answer_to(options: ServeOptions, request: &[u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let shutdown = CancellationToken::new();
    let router = Router::new().route("/", get(|| async { "hello" }));
    let progress = TaskProgress::unwatched("API");
    let serving = serve_tcp(listener, router, options, shutdown.clone(), progress);
    let server = tokio::spawn(serving);
    let mut stream = TcpStream::connect(address).await.expect("connected");
    stream.write_all(request).await.expect("sent");
    let mut answer = Vec::new();
    // A reset after the answer is as good an end as a close.
    let _ = stream.read_to_end(&mut answer).await;
    shutdown.cancel();
    server.await.expect("no panic");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn too_many_headers_and_too_large_ones_are_refused_with_431() {
    let many = format!(
        "GET / HTTP/1.1\r\nhost: x\r\n{}\r\n",
        "a: b\r\n".repeat(200)
    );
    let large = format!(
        "GET / HTTP/1.1\r\nhost: x\r\na: {}\r\n\r\n",
        "b".repeat(70_000)
    );
    for request in [many, large] {
        let answer = answer_to(ServeOptions::default(), request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
}

#[tokio::test]
async fn a_head_that_never_ends_is_cut() {
    let options = ServeOptions {
        header_timeout: Duration::from_millis(50),
        ..ServeOptions::default()
    };
    let answer = answer_to(options, b"GET / HTTP/1.1\r\nhost: x\r\n").await;
    assert!(!answer.contains("200"), "{answer}");
}

#[tokio::test]
async fn a_kept_alive_connection_that_stays_idle_is_closed() {
    let options = ServeOptions {
        header_timeout: Duration::from_secs(1),
        ..ServeOptions::default()
    };
    let answer = answer_to(options, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.ends_with("hello"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_unix_peer_is_told_by_its_credentials() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).expect("bound");
    let shutdown = CancellationToken::new();
    let router = Router::new().route(
        "/",
        get(|peer: axum::Extension<Peer>| async move { format!("{:?}", peer.0) }),
    );
    let options = ServeOptions::default();
    let progress = TaskProgress::unwatched("API");
    let serving = serve_unix(listener, router, options, shutdown.clone(), progress);
    let server = tokio::spawn(serving);
    let mut stream = UnixStream::connect(&path).await.expect("connected");
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    shutdown.cancel();
    server.await.expect("no panic");
    let uid =
        std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").expect("procfs"));
    assert!(answer.contains(&format!("Unix {{ uid: {uid}")), "{answer}");
}

#[tokio::test]
async fn connections_without_a_request_keep_nobody_out_and_known_callers_stay() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let shutdown = CancellationToken::new();
    let known = async |axum::Extension(place): axum::Extension<Arc<Place>>| place.known();
    let router = Router::new()
        .route("/probe", get(async || ()))
        .route("/known", get(known));
    let options = ServeOptions {
        // No connection times out within the test.
        header_timeout: Duration::from_secs(3_600),
        ..ServeOptions::default()
    };
    let progress = TaskProgress::unwatched("API");
    let serving = serve_tcp(listener, router, options, shutdown.clone(), progress);
    let server = tokio::spawn(serving);
    let connect = async || TcpStream::connect(address).await.expect("connected");
    let ask = async |stream: &mut TcpStream, path: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = [0; 15];
        stream.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
        // The rest of the head.
        let mut rest = [0; 1_024];
        assert_ne!(stream.read(&mut rest).await.expect("a head"), 0);
    };
    let (mut known, mut probe) = (connect().await, connect().await);
    ask(&mut known, "/known").await;
    ask(&mut probe, "/probe").await;
    let mut flood = Vec::new();
    for number in 0..1_300 {
        let mut stream = connect().await;
        if number % 2 == 0 {
            stream.write_all(b"GET /pro").await.expect("sent");
        }
        flood.push(stream);
        if number % 100 == 0 {
            ask(&mut connect().await, "/probe").await;
        }
    }
    ask(&mut connect().await, "/probe").await;
    let mut first = Vec::new();
    // A reset is as good an end as a close.
    let _ = flood[0].read_to_end(&mut first).await;
    assert!(first.is_empty(), "the oldest had to leave");
    // Neither a connection with a known caller nor one with an answer is closed.
    ask(&mut known, "/known").await;
    ask(&mut probe, "/probe").await;
    shutdown.cancel();
    drop((flood, known, probe));
    server.await.expect("no panic");
}

#[tokio::test]
async fn shutdown_lets_a_request_in_flight_finish() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let shutdown = CancellationToken::new();
    let (entered, release) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let handler = {
        let (entered, release) = (Arc::clone(&entered), Arc::clone(&release));
        move || async move {
            entered.add_permits(1);
            let _permit = release.acquire().await;
            "finished"
        }
    };
    let router = Router::new().route("/", get(handler));
    let options = ServeOptions::default();
    let progress = TaskProgress::unwatched("API");
    let serving = serve_tcp(listener, router, options, shutdown.clone(), progress);
    let server = tokio::spawn(serving);
    let mut stream = TcpStream::connect(address).await.expect("connected");
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .expect("sent");
    let _in_handler = entered.acquire().await.expect("open");
    shutdown.cancel();
    release.add_permits(1);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    server.await.expect("no panic");
    assert!(answer.ends_with("finished"), "{answer}");
}

#[tokio::test]
async fn a_client_that_ends_its_sending_side_gets_its_answer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let shutdown = CancellationToken::new();
    let ended = Arc::new(Semaphore::new(0));
    let waits = Arc::clone(&ended);
    let slow = move || async move {
        let _permit = waits.acquire().await;
        "hello"
    };
    let router = Router::new().route("/", get(slow));
    let progress = TaskProgress::unwatched("API");
    let serving = serve_tcp(
        listener,
        router,
        ServeOptions::default(),
        shutdown.clone(),
        progress,
    );
    let server = tokio::spawn(serving);
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request).await.expect("sent");
    stream.shutdown().await.expect("open");
    // The server has seen the end of the input by then.
    tokio::time::sleep(Duration::from_millis(100)).await;
    ended.add_permits(1);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.ends_with("hello"), "{answer}");
    shutdown.cancel();
    server.await.expect("no panic");
}
