//! Requests that wait for their session.

use std::time::Duration;

use conman_proxy::ProxyOptions;

use crate::support::{Fixture, body, serve_echo_head, status, until};

#[tokio::test]
async fn a_request_is_held_until_its_session_is_ready_and_then_served() {
    let fixture = Fixture::new();
    fixture.session("slow", serve_echo_head().await);
    let mut client = fixture.connect().await;
    client
        .send("GET /x HTTP/1.1\r\nHost: slow.localhost\r\n\r\n")
        .await;
    until("the hold", || fixture.proxy.stats().held == 1).await;
    fixture.directory.gate.send_replace(true);
    assert_eq!(status(&client.read_head().await), "200");
    assert_eq!(fixture.proxy.stats().held, 0);
}

#[tokio::test]
async fn more_than_the_bound_are_not_held() {
    let fixture = Fixture::with_options(ProxyOptions {
        max_held: 2,
        ..ProxyOptions::default()
    });
    let address = serve_echo_head().await;
    fixture.session("slow", address);
    fixture.session("alice", address);
    let mut held = Vec::new();
    for number in 1..=2 {
        let mut client = fixture.connect().await;
        client
            .send("GET / HTTP/1.1\r\nHost: slow.localhost\r\n\r\n")
            .await;
        until("the hold", || fixture.proxy.stats().held == number).await;
        held.push(client);
    }
    let refused = fixture.get("/", "slow.localhost").await;
    assert_eq!(status(&refused), "503", "{refused}");
    assert!(refused.contains("\r\nretry-after: 1\r\n"), "{refused}");
    assert!(body(&refused).contains("too-many-held"), "{refused}");
    // Sessions that run are not affected.
    assert_eq!(status(&fixture.get("/", "alice.localhost").await), "200");
    fixture.directory.gate.send_replace(true);
    for client in &mut held {
        assert_eq!(status(&client.read_head().await), "200");
    }
}

#[tokio::test]
async fn a_client_that_goes_away_while_held_frees_its_place() {
    let fixture = Fixture::new();
    fixture.session("slow", serve_echo_head().await);
    let mut client = fixture.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: slow.localhost\r\n\r\n")
        .await;
    until("the hold", || fixture.proxy.stats().held == 1).await;
    drop(client);
    until("the place", || fixture.proxy.stats().held == 0).await;
    until("the connection", || fixture.proxy.stats().connections == 0).await;
}

#[tokio::test]
async fn a_hold_ends_when_its_time_is_over() {
    let fixture = Fixture::with_options(ProxyOptions {
        hold_timeout: Duration::from_millis(100),
        ..ProxyOptions::default()
    });
    let response = fixture.get("/", "never.localhost").await;
    assert_eq!(status(&response), "503", "{response}");
    assert!(body(&response).contains("session-not-ready"), "{response}");
}
