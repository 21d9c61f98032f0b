//! Requests that the node which was asked does not take, and where they go then.

use std::net::TcpListener;

use conman_peer::PeerRefusal;
use tokio::io::AsyncReadExt as _;

use super::nodes::{Believed, Entry, FOREIGN, GET_ALICE, Owner, SHUT, upload};
use crate::support::{TestSession, body, serve_echo_head, soon, status, until};

#[tokio::test]
async fn an_owner_that_is_none_answers_before_the_body_and_the_next_one_gets_it() {
    let former = Owner::new().await;
    let (owner, mut backend) = Owner::of_alice().await;
    let believed = Believed::new(former.address);
    believed.truth.send_replace(Some(owner.address));
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client.send(upload(1 << 20, "")).await;
    let sent = tokio::spawn(async move {
        client.send(vec![b'x'; 1 << 20]).await;
        client.read_to_end().await
    });
    let mut session = backend.accept().await;
    session.read_head().await;
    let mut bytes = vec![0; 1 << 20];
    soon("the body", session.stream.read_exact(&mut bytes))
        .await
        .expect("whole");
    assert!(bytes.iter().all(|byte| *byte == b'x'));
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await;
    assert_eq!(
        body(&soon("the answer", sent).await.expect("no panic")),
        "ok"
    );
    assert_eq!(believed.refusal(), [PeerRefusal::NotOwner]);
}

#[tokio::test]
async fn an_owner_of_an_older_generation_turns_a_request_away() {
    let (former, owner) = (Owner::new().await, Owner::new().await);
    let target = serve_echo_head().await;
    let old = TestSession::new(target);
    old.set_generation(6);
    former.own("alice", &old, true);
    // One that has a newer one than the entry node knows of serves it.
    let new = TestSession::new(target);
    new.set_generation(8);
    owner.own("alice", &new, true);
    let believed = Believed::new(former.address);
    believed.truth.send_replace(Some(owner.address));
    let answer = Entry::new(&believed).exchange(GET_ALICE).await;
    assert!(
        body(&answer).contains("x-conman-generation: 8\r\n"),
        "{answer}"
    );
    assert_eq!(believed.refusal(), [PeerRefusal::NotOwner]);
}

#[tokio::test]
async fn a_request_is_held_while_its_node_is_gone_and_served_by_the_next_one() {
    let gone = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let believed = Believed::new(gone.local_addr().expect("bound"));
    drop(gone);
    believed.truth.send_replace(None);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client.send(upload(4, "")).await;
    client.send("body").await;
    until("the request is held", || entry.0.stats().held == 1).await;
    assert!(matches!(
        believed.refusal()[..],
        [PeerRefusal::Unreachable(_)]
    ));

    let (owner, mut backend) = Owner::of_alice().await;
    believed.truth.send_replace(Some(owner.address));
    let mut session = backend.accept().await;
    session.read_until("body").await;
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await;
    assert_eq!(body(&client.read_to_end().await), "ok");
    assert_eq!(entry.0.stats().held, 0);
}

#[tokio::test]
async fn a_node_does_not_hold_what_another_brings_it() {
    let owner = Owner::new().await;
    let alice = TestSession::new(serve_echo_head().await);
    owner.own("alice", &alice, false);
    let believed = Believed::new(owner.address);
    believed.truth.send_replace(None);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client.send(GET_ALICE).await;
    until("the entry node holds it", || entry.0.stats().held == 1).await;
    assert_eq!(owner.proxy.stats().held, 0);
    assert_eq!(believed.refusal(), [PeerRefusal::NotReady]);
    owner.own("alice", &alice, true);
    believed.truth.send_replace(Some(owner.address));
    assert_eq!(status(&client.read_to_end().await), "200");
}

#[tokio::test]
async fn a_session_that_moves_all_the_time_is_given_up_with_its_reason() {
    let owner = Owner::new().await;
    owner.disown("alice");
    let believed = Believed::new(owner.address);
    let answer = Entry::new(&believed).exchange(GET_ALICE).await;
    assert_eq!(status(&answer), "503", "{answer}");
    assert!(
        answer.contains("session-elsewhere") && answer.contains("retry-after"),
        "{answer}"
    );
    assert!(believed.refusal().len() > 1);
}

#[tokio::test]
async fn a_node_that_this_one_does_not_accept_is_looked_after_by_the_directory() {
    let believed = Believed::new(FOREIGN);
    let answer = Entry::new(&believed).exchange(GET_ALICE).await;
    assert_eq!(status(&answer), "502", "{answer}");
    assert!(!answer.contains("x-conman"), "{answer}");
    assert_eq!(believed.refusal(), [PeerRefusal::Refused]);
}

#[tokio::test]
async fn a_connection_that_ends_because_this_node_is_unknown_there_has_taken_nothing() {
    for wish in [
        "Connection: close\r\n",
        "Connection: upgrade\r\nUpgrade: x\r\n",
    ] {
        let believed = Believed::new(SHUT);
        let entry = Entry::new(&believed);
        let mut client = entry.connect().await;
        let request = format!("GET / HTTP/1.1\r\nHost: alice.localhost\r\n{wish}\r\n");
        client.send(request).await;
        let head = client.read_head().await;
        assert_eq!(status(&head), "502", "{head}");
        assert_eq!(believed.refusal(), [PeerRefusal::Refused]);
    }
}
