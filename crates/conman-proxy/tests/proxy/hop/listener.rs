//! The listener for nodes: whom it has room for, and what else it answers.

use conman_peer::PeerRefusal;
use conman_proxy::ProxyOptions;

use super::nodes::{Believed, Entry, GET_ALICE, Owner};
use crate::support::{Client, TestSession, body, serve_echo_head, status, until};

/// A connection by which a node has made itself known.
async fn known(owner: &Owner) -> Client {
    let mut client = owner.connect().await;
    progress(&mut client).await;
    client
}

/// A request of a node.
async fn progress(client: &mut Client) {
    let request = "GET /peer/liveness HTTP/1.1\r\nHost: b\r\n\r\n";
    client.send(request).await;
    let head = client.read_head().await;
    assert_eq!(status(&head), "204", "{head}");
}

#[tokio::test]
async fn a_listener_for_nodes_that_is_full_says_that_it_has_taken_nothing() {
    let owner = Owner::with(ProxyOptions {
        max_connections: 1,
        ..ProxyOptions::default()
    })
    .await;
    owner.own("alice", &TestSession::new(serve_echo_head().await), true);
    let _only = known(&owner).await;
    let believed = Believed::new(owner.address);
    believed.truth.send_replace(None);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client.send(GET_ALICE).await;
    until("it is held", || entry.0.stats().held == 1).await;
    assert!(matches!(
        believed.refusal()[..],
        [PeerRefusal::Unreachable(_)]
    ));
}

#[tokio::test]
async fn who_is_no_node_leaves_room_for_a_node_at_the_same_address() {
    let owner = Owner::with(ProxyOptions {
        max_connections: 4,
        ..ProxyOptions::default()
    })
    .await;
    let nodes = [known(&owner).await, known(&owner).await];
    let mut strangers = [owner.connect().await, owner.connect().await];
    // Nothing of theirs ends for what a node needs, but the oldest.
    let third = known(&owner).await;
    assert_eq!(strangers[0].read_to_end().await, "");
    until("all others are there", || {
        owner.proxy.stats().connections == 4
    })
    .await;
    for mut node in nodes.into_iter().chain([third]) {
        progress(&mut node).await;
    }
}

#[tokio::test]
async fn who_is_no_node_leaves_the_last_place_of_all_to_a_node() {
    let owner = Owner::with(ProxyOptions {
        max_connections: 2,
        ..ProxyOptions::default()
    })
    .await;
    let _node = known(&owner).await;
    let mut idle = owner.connect().await;
    until("it is taken", || owner.proxy.stats().connections == 2).await;
    let _another = known(&owner).await;
    assert_eq!(idle.read_to_end().await, "");
}

#[tokio::test]
async fn what_a_node_asks_of_the_api_keeps_who_asks() {
    let owner = Owner::new().await;
    let mut client = owner.connect().await;
    let request = "GET /v1/sessions HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\
                   X-Conman-Caller: read alice\r\n\r\n";
    client.send(request).await;
    let answer = client.read_to_end().await;
    assert!(
        body(&answer).contains("x-conman-caller: read alice\r\n"),
        "{answer}"
    );
}
