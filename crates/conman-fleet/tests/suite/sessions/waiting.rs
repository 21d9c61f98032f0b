//! Requests that are held until a session is served, and those that are not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use conman_proto::SessionState;
use conman_registry::{PeerStanding, Standing};
use conman_testkit::{Fault, Operation};

use super::member::{PATIENCE, POLL_INTERVAL, id, is_served, two, web};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_held_where_it_came_while_the_session_starts_on_another_node() {
    let (_fleet, a, b) = two().await;
    let id = id("alice");
    let slow = Fault::Delay(Duration::from_millis(500));
    b.faults.next(Operation::Start, 1, slow);
    let starting = {
        let (node, id) = (Arc::clone(&b.node), id.clone());
        node.sessions()
            .ensure(&id, &web(), false)
            .await
            .expect("begun");
        id
    };
    let answer = a.fetch(&starting).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert_eq!(b.peers.as_ref().map(|peers| peers.stats().held), Some(0));
    assert_eq!(a.clients.stats().held, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_a_silent_node_until_its_sessions_may_be_claimed() {
    let (fleet, a, mut b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    // Returns when nothing listens there any more.
    let peers = b.peers.take().expect("it listens");
    peers.shutdown(Duration::ZERO).await;
    let waiting = tokio::spawn(a.fetch(&id));
    a.holds().await;
    assert!(!waiting.is_finished() && !a.node.sessions().is_live(&id));
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let answer = waiting.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.sessions().is_live(&id));
    assert_eq!(a.clients.stats().held, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_fails_if_its_node_renews_its_heartbeat_and_does_not_answer() {
    let (fleet, a, mut b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    let peers = b.peers.take().expect("it listens");
    peers.shutdown(Duration::ZERO).await;
    fleet.change("b", |b| b.heartbeat_ago_ms = 0);
    let answer = tokio::time::timeout(PATIENCE, a.fetch(&id)).await;
    let answer = answer.expect("no node will take it over");
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    for part in ["node-unreachable", "node `b`", "`listen.peers`"] {
        assert!(answer.contains(part), "{answer}");
    }
    assert_eq!(a.clients.stats().held, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_until_the_registry_says_where_its_session_is() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    fleet.cut("a");
    let waiting = tokio::spawn(a.fetch(&id));
    a.holds().await;
    assert!(!waiting.is_finished());
    fleet.heal("a");
    let answer = waiting.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert_eq!(a.clients.stats().held, 0);
}

/// A node that has just joined may have sessions to adopt before it announces its address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_a_node_that_comes_until_it_has_said_where_it_listens() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    let mut told = None;
    fleet.change("b", |b| told = b.announcement.take());
    let waiting = tokio::spawn(a.fetch(&id));
    a.holds().await;
    assert!(!waiting.is_finished());
    fleet.change("b", |b| b.announcement = told);
    let answer = waiting.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert!(b.node.sessions().is_live(&id) && !a.node.sessions().is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_listens_for_no_other_node_is_not_waited_for() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    let mut told = None;
    fleet.change("b", |b| told = b.announcement.take());
    let early = tokio::spawn(a.fetch(&id));
    a.holds().await;
    fleet.change("b", |b| {
        b.announcement = told;
        b.announcement.get_or_insert_default().peer_url = None;
    });
    let answers = [early.await.expect("no panic"), a.fetch(&id).await];
    for answer in answers {
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(answer.contains("listen.peers"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_of_a_fenced_node_is_held_there_and_elsewhere_until_it_owns_again() {
    let (_fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    b.fleet.stand(Standing::Fenced);
    let waiting = [tokio::spawn(a.fetch(&id)), tokio::spawn(b.fetch(&id))];
    a.holds().await;
    b.holds().await;
    let refused = b
        .node
        .access()
        .kept_execs(&id)
        .await
        .expect_err("it is frozen");
    assert!(refused.to_string().contains("frozen"), "{refused}");
    b.fleet.stand(Standing::Live);
    for answer in waiting {
        let answer = answer.await.expect("no panic");
        assert!(is_served(&answer, &id), "{answer}");
    }
    assert!(b.node.sessions().is_live(&id) && !a.node.sessions().is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_silent_node_has_frozen_is_served_by_its_new_owner_though_the_old_one_answers() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    let old = b.node.sessions().get(&id).expect("it runs").generation;
    b.fleet.stand(Standing::Fenced);
    fleet.change("b", |b| b.standing = PeerStanding::Silent);
    let waiting = [tokio::spawn(a.fetch(&id)), tokio::spawn(b.fetch(&id))];
    a.holds().await;
    b.holds().await;
    let [elsewhere, there] = waiting;
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let answer = elsewhere.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.sessions().is_live(&id) && !there.is_finished());
    // Back in the fleet, it may know its new ownership before it has ended the lost generation.
    fleet.change("b", |b| b.standing = PeerStanding::Live);
    b.fleet.stand(Standing::Live);
    b.node.sessions().condemn(&id, old, "it was lost");
    let answer = there.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.sessions().is_live(&id) && !b.node.sessions().is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_being_ended_here_is_served_by_whoever_owns_it_now() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    let old = b.node.sessions().get(&id).expect("it runs").generation;
    b.fleet.stand(Standing::Fenced);
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let answer = a.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    fleet.hold_releases("b", true);
    fleet.change("b", |b| b.standing = PeerStanding::Live);
    b.node.sessions().condemn(&id, old, "it was lost");
    b.fleet.stand(Standing::Live);
    let deadline = Instant::now() + PATIENCE;
    while b.node.sessions().get(&id).map(|session| session.state) != Some(SessionState::Stopping) {
        assert!(
            Instant::now() < deadline,
            "{:?}",
            b.node.sessions().get(&id)
        );
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let answer = b.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.sessions().is_live(&id));
    fleet.hold_releases("b", false);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_heard_of_late_and_says_that_it_owns_is_not_waited_for() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    b.fleet.stand(Standing::Late);
    fleet.change("b", |b| b.standing = PeerStanding::Silent);
    let answer = a.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert!(b.node.sessions().is_live(&id) && !a.node.sessions().is_live(&id));
}
