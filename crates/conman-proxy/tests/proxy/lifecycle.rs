//! Shutdown, and faults of single connections.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use conman_core::Departure;
use conman_proxy::{ProxyOptions, Verdict};
use conman_watchdog::Watchdog;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::support::{Fixture, RawBackend, serve_echo_head, soon, status, until};

#[tokio::test]
async fn a_shutdown_lets_requests_in_flight_end_and_takes_no_more() {
    // One worker: once it has closed the idle connection, the shutdown is known to it.
    let fixture = Fixture::with_options(ProxyOptions {
        workers: 1,
        ..ProxyOptions::default()
    });
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut idle = fixture.connect().await;
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    let Fixture { proxy, address, .. } = fixture;
    let ended = tokio::spawn(proxy.shutdown(Duration::from_secs(60)));
    assert_eq!(idle.read_to_end().await, "", "idle connections are closed");
    soon("the listener's end", async {
        while TcpStream::connect(address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await;
    let response = client.read_to_end().await;
    assert!(
        response.contains("connection: close") && response.ends_with("ok"),
        "{response}"
    );
    soon("the shutdown", ended).await.expect("no panic");
}

#[tokio::test]
async fn what_outlives_the_patience_of_a_shutdown_is_cut() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
        .await;
    let mut session = backend.accept().await;
    session.read_head().await;
    soon(
        "the shutdown",
        fixture.proxy.shutdown(Duration::from_millis(50)),
    )
    .await;
    assert_eq!(client.read_to_end().await, "");
    assert_eq!(session.read_to_end().await, "");
}

#[tokio::test]
async fn a_node_that_leaves_asks_clients_to_connect_again_before_it_closes_idle_connections() {
    const PROBE: &str = "GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    let fixture = Fixture::new();
    let (departs, departure) = watch::channel(Departure::Staying);
    fixture.proxy.follow(departure);
    let (mut used, mut idle) = (fixture.connect().await, fixture.connect().await);
    for client in [&mut used, &mut idle] {
        client.send(PROBE).await;
        let response = client.read_until("ready\n").await;
        assert!(!response.contains("connection: close"), "{response}");
    }
    departs.send_replace(Departure::Announced);
    soon("the listener leaves", async {
        loop {
            let mut client = fixture.connect().await;
            client.send(PROBE).await;
            let response = client.read_until("ready\n").await;
            if response.contains("connection: close") {
                break;
            }
        }
    })
    .await;
    used.send(PROBE).await;
    let response = used.read_to_end().await;
    assert!(response.contains("connection: close"), "{response}");
    // Still open, until the node closes what is left.
    until("the others' end", || fixture.proxy.stats().connections == 1).await;
    departs.send_replace(Departure::Closing);
    assert_eq!(idle.read_to_end().await, "");
    let mut late = fixture.connect().await;
    late.send(PROBE).await;
    assert_eq!(status(&late.read_to_end().await), "200", "it is served");
    departs.send_replace(Departure::Staying);
    soon("the listener stays", async {
        loop {
            let mut client = fixture.connect().await;
            client.send(PROBE).await;
            let response = client.read_until("ready\n").await;
            if !response.contains("connection: close") {
                break;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn dropping_the_proxy_closes_everything() {
    let fixture = Fixture::new();
    let mut client = fixture.connect().await;
    until("the connection", || fixture.proxy.stats().connections == 1).await;
    drop(fixture.proxy);
    assert_eq!(client.read_to_end().await, "");
}

#[tokio::test]
async fn a_panic_on_one_connection_leaves_the_others_alone() {
    let fixture = Fixture::new();
    fixture.session("alice", serve_echo_head().await);
    let mut neighbours = Vec::new();
    for _ in 0..4 {
        neighbours.push(fixture.connect().await);
    }
    until("the connections", || fixture.proxy.stats().connections == 4).await;
    for _ in 0..4 {
        let response = fixture.get("/", "panics.localhost").await;
        assert!(!response.contains("200"), "{response}");
    }
    for client in &mut neighbours {
        client
            .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n")
            .await;
        assert_eq!(status(&client.read_head().await), "200");
    }
    drop(neighbours);
    until("the end of all", || fixture.proxy.stats().connections == 0).await;
}

#[tokio::test]
async fn a_worker_whose_thread_is_blocked_stands_still_until_it_goes_on() {
    let watchdog = Watchdog::default();
    let options = ProxyOptions {
        watchdog: watchdog.clone(),
        ..ProxyOptions::default()
    };
    let (release, released) = mpsc::sync_channel::<()>(1);
    let released = Mutex::new(released);
    let fixture = Fixture::with_gate(options, move |_, id, _| {
        if id.as_str() == "stuck" {
            // Until nobody can send any more.
            let _ = released.lock().expect("no panic while held").recv();
        }
        Verdict::Admit { may_start: false }
    });
    let still = || -> Vec<&'static str> {
        let still = watchdog.still().into_iter();
        still.map(|still| still.name).collect()
    };
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: stuck.localhost\r\nConnection: close\r\n\r\n")
        .await;
    // The other worker and the acceptor go on all the while.
    until("one worker's standstill", || still() == ["sessions proxy"]).await;
    drop(release);
    assert_eq!(status(&client.read_to_end().await), "404");
    until("that all go on", || still().is_empty()).await;
}

#[tokio::test]
async fn a_client_that_ends_its_sending_side_gets_its_answer() {
    for request in [
        "GET / HTTP/1.1\r\nHost: alice.localhost\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: alice.localhost\r\nContent-Length: 5\r\n\r\nhello",
    ] {
        let fixture = Fixture::new();
        let mut backend = RawBackend::new().await;
        fixture.session("alice", backend.address);
        let mut client = fixture.connect().await;
        client.send(request).await;
        client.stream.shutdown().await.expect("open");
        let mut session = backend.accept().await;
        session.read_head().await;
        // The proxy has seen the end of the client's input already.
        tokio::time::sleep(Duration::from_millis(100)).await;
        session
            .send("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nanswer")
            .await;
        let answer = client.read_to_end().await;
        assert!(answer.ends_with("\r\n\r\nanswer"), "{request}: {answer}");
    }
}
