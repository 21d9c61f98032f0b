//! Bounds on heads, connections and descriptors.

use std::time::Duration;

use conman_proxy::ProxyOptions;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

use crate::support::{Client, Fixture, RawBackend, body, serve_echo_head, soon, status, until};

#[tokio::test]
async fn heads_beyond_the_bounds_are_refused() {
    let fixture = Fixture::with_options(ProxyOptions {
        max_head_bytes: 8 * 1024,
        max_headers: 20,
        ..ProxyOptions::default()
    });
    let alice = fixture.session("alice", serve_echo_head().await);
    let long = "x".repeat(9_000);
    let many = "X-A: b\r\n".repeat(30);
    for request in [
        format!("GET / HTTP/1.1\r\nHost: alice.localhost\r\nX-Long: {long}\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: alice.localhost\r\n{many}\r\n"),
        format!("GET / HTTP/1.1\r\nHost: alice.localhost\r\nX-{long}"),
        format!("GET /{long} HTTP/1.1\r\nHost: alice.localhost\r\n\r\n"),
    ] {
        let response = fixture.exchange(request).await;
        assert_eq!(status(&response), "431", "{response}");
    }
    assert_eq!(alice.connections(), 0);
}

#[tokio::test]
async fn a_head_that_trickles_in_is_cut() {
    let fixture = Fixture::with_options(ProxyOptions {
        head_timeout: Duration::from_secs(2),
        ..ProxyOptions::default()
    });
    let mut client = fixture.connect().await;
    let response = soon("the cut", async {
        let (mut reader, mut writer) = client.stream.split();
        let trickle = async {
            for byte in b"GET / HTTP/1.1\r\nHost: "
                .iter()
                .chain(std::iter::repeat(&b'a'))
            {
                if writer.write_u8(*byte).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let mut response = Vec::new();
        let reading = tokio::io::AsyncReadExt::read_to_end(&mut reader, &mut response);
        tokio::select! {
            // Nothing is read from either half afterwards.
            _ = reading => {}
            () = trickle => {}
        }
        String::from_utf8_lossy(&response).into_owned()
    })
    .await;
    assert_eq!(status(&response), "408", "{response}");
    until("the connection's end", || {
        fixture.proxy.stats().connections == 0
    })
    .await;
}

#[tokio::test]
async fn a_connection_on_which_nothing_comes_is_closed_without_a_word() {
    let fixture = Fixture::with_options(ProxyOptions {
        head_timeout: Duration::from_millis(100),
        ..ProxyOptions::default()
    });
    assert_eq!(fixture.exchange("").await, "");
}

#[tokio::test]
async fn a_connection_that_falls_idle_is_closed_without_a_word() {
    let fixture = Fixture::with_options(ProxyOptions {
        idle_timeout: Duration::from_millis(100),
        ..ProxyOptions::default()
    });
    fixture.session("alice", serve_echo_head().await);
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    let response = client.read_to_end().await;
    assert_eq!(response.matches("HTTP/1.1 200 ").count(), 1, "{response}");
    assert!(!response.contains("408"), "{response}");
}

#[tokio::test]
async fn waiting_for_an_answer_is_not_idleness() {
    let fixture = Fixture::with_options(ProxyOptions {
        head_timeout: Duration::from_secs(3),
        idle_timeout: Duration::from_secs(3),
        ..ProxyOptions::default()
    });
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    // With the beginning of the next request behind it, which must not age meanwhile.
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\nGET /2")
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await;
    let response = client.read_until("ok").await;
    assert_eq!(status(&response), "200", "{response}");
    client
        .send(" HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    assert!(session.read_head().await.starts_with("GET /2 "));
}

#[tokio::test]
async fn a_body_that_stops_coming_is_a_request_timeout() {
    let fixture = Fixture::with_options(ProxyOptions {
        body_stall_timeout: Duration::from_millis(100),
        ..ProxyOptions::default()
    });
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send("POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 10\r\n\r\nhalf")
        .await;
    let response = client.read_to_end().await;
    assert_eq!(status(&response), "408", "{response}");
    let mut session = backend.accept().await;
    assert!(session.read_to_end().await.ends_with("\r\n\r\nhalf"));
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut() {
    let fixture = Fixture::with_options(ProxyOptions {
        write_stall_timeout: Duration::from_millis(200),
        ..ProxyOptions::default()
    });
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session
        .send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let cut = soon("the cut", async {
        loop {
            if session.stream.write_all(chunk.as_bytes()).await.is_err() {
                return true;
            }
        }
    })
    .await;
    assert!(cut);
    until("the end of the request", || alice.activity.in_flight() == 0).await;
    until("the end of the connection", || {
        fixture.proxy.stats().connections == 0
    })
    .await;
}

#[tokio::test]
async fn where_all_callers_are_known_one_more_is_turned_away_and_room_comes_back() {
    let fixture = Fixture::with_options(ProxyOptions {
        max_connections: 2,
        ..ProxyOptions::default()
    });
    fixture.session("alice", serve_echo_head().await);
    let first = known(&fixture).await;
    let second = known(&fixture).await;
    let refused = fixture.exchange("").await;
    assert_eq!(status(&refused), "503", "{refused}");
    assert!(refused.contains("retry-after: 1\r\n"), "{refused}");
    assert!(body(&refused).contains("too-many-connections"), "{refused}");
    drop((first, second));
    until("room", || fixture.proxy.stats().connections == 0).await;
    assert_eq!(status(&fixture.get("/", "alice.localhost").await), "200");
}

/// A request to the session `alice`, on a connection that stays open.
async fn ask(client: &mut Client) {
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    let head = client.read_head().await;
    assert_eq!(status(&head), "200", "{head}");
    client.read_until("\r\n\r\n").await;
}

/// A connection with a completed request.
async fn known(fixture: &Fixture) -> Client {
    let mut client = fixture.connect().await;
    ask(&mut client).await;
    client
}

#[tokio::test]
async fn connections_without_a_request_keep_nobody_out_and_known_callers_stay() {
    let fixture = Fixture::with_options(ProxyOptions {
        max_connections: 100,
        ..ProxyOptions::default()
    });
    fixture.session("alice", serve_echo_head().await);
    let mut before = known(&fixture).await;
    let mut flood = Vec::new();
    for number in 0..1_300 {
        let mut client = fixture.connect().await;
        if number % 2 == 0 {
            client.send("GET / HTTP/1.1\r\nHost: alice.loc").await;
        }
        flood.push(client);
        if number % 100 == 0 {
            let mut during = known(&fixture).await;
            ask(&mut during).await;
        }
    }
    // The oldest had to leave, the latest did not.
    flood[0].read_to_end().await;
    let last = flood.last_mut().expect("many");
    ask(last).await;
    ask(&mut before).await;
    assert!(fixture.proxy.stats().connections <= 100);
}

#[tokio::test]
async fn who_is_turned_away_has_time_to_send_its_request_before_the_answer() {
    let fixture = Fixture::with_options(ProxyOptions {
        max_connections: 1,
        ..ProxyOptions::default()
    });
    fixture.session("alice", serve_echo_head().await);
    let _first = known(&fixture).await;
    let (mut unasked, rounds) = (0, 10);
    // A machine that stands still for long may answer one before it has sent anything.
    for _ in 0..rounds {
        let mut client = fixture.connect().await;
        let early = timeout(Duration::from_millis(100), client.stream.peek(&mut [0])).await;
        unasked += usize::from(early.is_ok());
        client
            .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
            .await;
        let refused = client.read_to_end().await;
        assert_eq!(status(&refused), "503", "{refused}");
    }
    assert!(unasked < rounds, "all were answered before they asked");
}

#[tokio::test]
async fn an_early_answer_survives_a_large_upload() {
    let fixture = Fixture::new();
    let mut client = fixture.connect().await;
    client
        .send("POST /nobody HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n")
        .await;
    // The client goes on sending, as most do, and reads only then.
    let sent = client.stream.write_all(&vec![b'x'; 400_000]).await;
    let response = client.read_to_end().await;
    assert_eq!(status(&response), "404", "{sent:?} {response}");
    assert!(body(&response).contains("unknown-address"), "{response}");
}

#[tokio::test]
async fn the_answer_of_a_session_that_refuses_an_upload_and_resets_is_not_lost() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    // Often enough that the reset finds the upload in each of its steps.
    for round in 0..20 {
        let mut client = fixture.connect().await;
        let sending = async {
            client
                .send("PUT / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 8000000\r\n\r\n")
                .await;
            let sent = client.stream.write_all(&vec![b'x'; 1_000_000]).await;
            (sent, client.read_to_end().await)
        };
        let refusing = async {
            let mut session = backend.accept().await;
            session.read_head().await;
            session
                .send("HTTP/1.1 413 Too Much\r\nConnection: close\r\nContent-Length: 3\r\n\r\nno\n")
                .await;
            // With the upload unread, this is a reset.
            drop(session);
        };
        let ((sent, response), ()) = tokio::join!(sending, refusing);
        assert_eq!(status(&response), "413", "{round}: {sent:?} {response}");
        assert_eq!(body(&response), "no\n");
    }
}

/// Set for the process in which [`a_process_with_few_descriptors`] is a proxy.
const CHILD: &str = "CONMAN_PROXY_TEST_FEW_DESCRIPTORS";

#[tokio::test]
#[ignore = "is the other process of `running_out_of_descriptors_sheds_connections_and_recovers`"]
async fn a_process_with_few_descriptors() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    std::fs::write(
        std::env::var(CHILD).expect("set"),
        fixture.address.to_string(),
    )
    .expect("a writable folder");
    // Until the parent kills this process.
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn running_out_of_descriptors_sheds_connections_and_recovers() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = folder.path().join("address");
    let binary = std::env::current_exe().expect("this test");
    let mut child = tokio::process::Command::new("sh")
        .args(["-c", "ulimit -n 64; exec \"$0\" --exact limits::a_process_with_few_descriptors --include-ignored"])
        .arg(binary)
        .env(CHILD, &told)
        .stdout(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("a process");
    let read = || {
        std::fs::read_to_string(&told)
            .ok()
            .and_then(|text| text.parse().ok())
    };
    until("the other process", || read().is_some()).await;
    let address: std::net::SocketAddr = read().expect("just seen");

    let mut open = Vec::new();
    let shed = soon("a connection that is shed", async {
        loop {
            let mut stream = tokio::net::TcpStream::connect(address)
                .await
                .expect("a backlog");
            let mut byte = [0];
            let wait = Duration::from_millis(500);
            let read = tokio::io::AsyncReadExt::read(&mut stream, &mut byte);
            if open.len() < 50 {
                open.push(stream);
            } else if let Ok(closed) = tokio::time::timeout(wait, read).await {
                break closed;
            }
        }
    })
    .await;
    assert!(matches!(shed, Ok(0) | Err(_)), "{shed:?}");
    drop(open);
    let response = soon("recovery", async {
        loop {
            let stream = tokio::net::TcpStream::connect(address)
                .await
                .expect("listening");
            let mut client = crate::support::Client { stream };
            client
                .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n")
                .await;
            let response = client.read_to_end().await;
            if !response.is_empty() && !response.starts_with('[') {
                break response;
            }
        }
    })
    .await;
    assert_eq!(status(&response), "200", "{response}");
    child.kill().await.expect("still running");
}
