//! Sessions that are restarted on another node without a request.

use std::time::Duration;

use conman_node::Node;
use conman_proto::{DrainReport, DrainRequest, DrainState, NodeLoss, OnNodeLoss, SessionId};
use conman_registry::PeerStanding;
use conman_testkit::{Fault, ModelFleet, Operation};

use super::member::{Member, PATIENCE, id, is_served, secret, two};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_preempted_node_what_is_to_be_restarted_comes_back_unasked_and_the_rest_waits() {
    let (fleet, a, b) = two().await;
    let (back, waits) = (id("back"), id("a-waits"));
    b.start_with(&back, OnNodeLoss::Restart).await;
    b.start_with(&waits, OnNodeLoss::Wait).await;
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    let session = a.runs(&back).await;
    let restarted = session.spec.restarted.expect("it says so");
    assert_eq!((restarted.from.as_str(), restarted.count), ("b", 1));
    assert_eq!(restarted.because, NodeLoss::Preempted);
    // The same scan of the records met this one first.
    assert!(!a.node.sessions().is_live(&waits));
    let answer = a.fetch(&waits).await;
    assert!(is_served(&answer, &waits), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_of_a_node_that_was_declared_dead_come_back_unasked() {
    let (fleet, a, b) = two().await;
    let back = id("back");
    b.start_with(&back, OnNodeLoss::Restart).await;
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let session = a.runs(&back).await;
    let restarted = session.spec.restarted.expect("it says so");
    assert_eq!(restarted.because, NodeLoss::Lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_failed_is_tried_again() {
    let (fleet, a, b) = two().await;
    let back = id("back");
    let fails = Fault::Refuse("there is no such thing".to_owned());
    a.faults.next(Operation::Create, 1, fails);
    loses_its_node(&fleet, &b, &back).await;
    let session = a.runs(&back).await;
    let restarted = session.spec.restarted.expect("it says so");
    assert_eq!((restarted.from.as_str(), restarted.count), ("b", 2));
    assert_eq!(restarted.because, NodeLoss::Preempted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stopped_after_its_node_had_gone_is_not_restarted() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let b = Member::join(&fleet, "b", &secret).await;
    let (back, stopped) = (id("back"), id("a-stopped"));
    for id in [&back, &stopped] {
        b.start_with(id, OnNodeLoss::Restart).await;
    }
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    let report = b
        .node
        .sessions()
        .stop(&stopped, "a test")
        .await
        .expect("stopped");
    assert!(report.state.is_ended());
    let a = Member::join(&fleet, "a", &secret).await;
    a.runs(&back).await;
    assert!(!a.node.sessions().is_live(&stopped));
    assert_eq!(
        a.node.sessions().record(&stopped).await.expect("readable"),
        None
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_deleted_after_it_had_lost_its_node_is_started_for_nobody() {
    let (fleet, a, b) = two().await;
    let (deleted, waits) = (id("deleted"), id("waits"));
    for id in [&deleted, &waits] {
        b.start_with(id, OnNodeLoss::Wait).await;
    }
    fleet.announced("b", |b| b.draining = true);
    drained(&b.node).await;
    let report = b
        .node
        .sessions()
        .stop(&deleted, "a test")
        .await
        .expect("deleted");
    assert!(report.state.is_ended());
    for node in [&a, &b] {
        let answer = node.fetch(&deleted).await;
        assert!(!is_served(&answer, &deleted), "{answer}");
        assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    let answer = a.fetch(&waits).await;
    assert!(is_served(&answer, &waits), "{answer}");
}

async fn drained(node: &Node) -> DrainReport {
    let request = DrainRequest::default();
    node.drain().begin(&request).await.expect("it begins");
    let draining = async {
        loop {
            let report = node.drain().report().expect("it drains");
            if report.state == DrainState::Drained {
                return report;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, draining)
        .await
        .expect("it ends")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_has_other_nodes_start_what_it_released_and_says_where_it_is() {
    let (fleet, a, b) = two().await;
    let (back, waits) = (id("back"), id("waits"));
    b.start_with(&back, OnNodeLoss::Restart).await;
    b.start_with(&waits, OnNodeLoss::Wait).await;
    fleet.announced("b", |b| b.draining = true);
    let report = drained(&b.node).await;
    assert_eq!(report.released, 2);
    let moved: Vec<_> = report
        .moved
        .iter()
        .map(|one| (&one.id, &*one.node))
        .collect();
    assert_eq!(moved, [(&back, "a")]);
    let restarted = a.runs(&back).await.spec.restarted.expect("it says so");
    assert_eq!(restarted.because, NodeLoss::Drained);
    assert!(!a.node.sessions().is_live(&waits));
    let answer = b.fetch(&waits).await;
    assert!(is_served(&answer, &waits), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_with_nowhere_to_go_ends_and_its_sessions_come_back_when_there_is_room() {
    let (fleet, a, b) = two().await;
    let back = id("back");
    b.start_with(&back, OnNodeLoss::Restart).await;
    for name in ["a", "b"] {
        fleet.announced(name, |node| node.draining = true);
    }
    let report = drained(&b.node).await;
    assert_eq!((report.released, report.moved.len()), (1, 0));
    fleet.announced("a", |a| a.draining = false);
    a.runs(&back).await;
}

/// Lets `b` run a session that is to come back, and lose it.
async fn loses_its_node(fleet: &ModelFleet, b: &Member, id: &SessionId) {
    b.start_with(id, OnNodeLoss::Restart).await;
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
}

/// Makes a runtime report a missing image before a start.
fn lacks_image(node: &Member) {
    let lacks = || Fault::LackImage("web:1".to_owned());
    node.faults.always(Operation::LookForImage, lacks());
    node.faults.always(Operation::Create, lacks());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_lacks_the_image_uses_up_no_restart_while_another_may_have_it() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let b = Member::join(&fleet, "b", &secret).await;
    // More than are asked if each of them fails.
    let mut without = Vec::new();
    for name in ["a", "d", "e", "f", "g"] {
        without.push(Member::join(&fleet, name, &secret).await);
    }
    without.iter().for_each(lacks_image);
    let c = Member::join(&fleet, "c", &secret).await;
    let ids = [id("alice"), id("bob"), id("carl"), id("dora")];
    for id in &ids {
        b.start_with(id, OnNodeLoss::Restart).await;
    }
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    for id in &ids {
        let session = c.runs(id).await;
        let restarted = session.spec.restarted.expect("it says so");
        assert_eq!((restarted.from.as_str(), restarted.count), ("b", 1));
    }
    for node in &without {
        assert_eq!(node.faults.calls(Operation::Create), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_every_node_lacks_the_image_of_is_counted_and_says_so() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let b = Member::join(&fleet, "b", &secret).await;
    let a = Member::join(&fleet, "a", &secret).await;
    let _without = Member::join_without_runtime(&fleet, "c", &secret).await;
    lacks_image(&a);
    let id = id("back");
    loses_its_node(&fleet, &b, &id).await;
    let tried = async {
        loop {
            match a
                .node
                .sessions()
                .get(&id)
                .filter(|session| session.state.is_ended())
            {
                Some(session) => return session,
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    let tried = tokio::time::timeout(PATIENCE, tried).await;
    let tried = tried.expect("it is tried in time");
    a.faults.clear();
    let reason = tried.reason.expect("it says why");
    assert!(reason.contains("web:1"), "{reason}");
    let restarted = tried.spec.restarted.expect("it says so");
    assert_eq!(restarted.from, "b");
    let again = a.runs(&id).await.spec.restarted.expect("it says so");
    assert!(again.count > restarted.count, "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_is_tried_however_long_the_nodes_take_to_say_that_they_lack_the_image() {
    // Together they take longer than a restart order is waited for.
    const SLOW: Duration = Duration::from_millis(1_500);
    let (fleet, secret) = (ModelFleet::new(), secret());
    let b = Member::join(&fleet, "b", &secret).await;
    let mut without = Vec::new();
    for name in ["a", "c", "d", "e", "f", "g", "h", "i"] {
        without.push(Member::join(&fleet, name, &secret).await);
    }
    for node in &without {
        let lacks = "web:1".to_owned();
        let slowly = Fault::LackImageAfter(SLOW, lacks.clone());
        node.faults.always(Operation::LookForImage, slowly);
        node.faults
            .always(Operation::Create, Fault::LackImage(lacks));
    }
    let id = id("back");
    loses_its_node(&fleet, &b, &id).await;
    let tried = async {
        loop {
            let mut nodes = without.iter();
            if nodes.any(|node| node.faults.calls(Operation::Create) > 0) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let tried = tokio::time::timeout(PATIENCE, tried).await;
    tried.expect("one of them tries");
}
