//! Sessions that lost their node and wait for a connection, and whose first start fails.

use conman_proto::{NodeLoss, OnNodeLoss, SessionRequest, SessionState};
use conman_testkit::{Fault, ModelFleet, Operation};

use super::member::{Member, id, is_served, secret, two, web};

/// Removes a node that has sessions.
async fn gone(fleet: &ModelFleet, b: &Member) {
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
}

fn refuse_next(node: &Member) {
    let refuse = Fault::Refuse("there is no such thing".to_owned());
    node.faults.next(Operation::Create, 1, refuse);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_comes_while_no_runtime_answers_is_served_once_one_does() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    gone(&fleet, &b).await;
    a.faults.next(Operation::Create, 2, Fault::Unavailable);
    let answer = a.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    let since = a
        .node
        .sessions()
        .get(&id)
        .and_then(|session| session.spec.restarted);
    let since = since.expect("it says why it is here");
    assert_eq!((since.from.as_str(), since.count), ("b", 0));
    assert_eq!(since.because, NodeLoss::Preempted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_connection_starts_what_the_first_one_could_not() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    gone(&fleet, &b).await;
    for _ in 0..2 {
        refuse_next(&a);
        let answer = a.fetch(&id).await;
        assert!(answer.contains("there is no such thing"), "{answer}");
    }
    // Likewise through the other node, which requests the start.
    let answer = b.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.sessions().is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_ends_by_itself_is_not_started_by_the_next_connection() {
    let (fleet, a, b) = two().await;
    let (id, folder) = (id("alice"), tempfile::tempdir().expect("a folder"));
    let met = folder.path().join("met");
    let once = format!(
        "mkdir {} || exit 3; exec busybox httpd -f -p 8080 -h /etc",
        met.display()
    );
    let request = SessionRequest {
        command: Some(["sh", "-c", &once].map(str::to_owned).to_vec()),
        on_node_loss: Some(OnNodeLoss::Wait),
        ..web()
    };
    b.node
        .sessions()
        .ensure(&id, &request, true)
        .await
        .expect("it starts");
    gone(&fleet, &b).await;
    a.fetch(&id).await;
    let failed = a.node.sessions().get(&id).expect("it was tried");
    assert_eq!(failed.state, SessionState::Failed);
    let answer = a.fetch(&id).await;
    assert!(answer.contains("PUT /v1/sessions/alice"), "{answer}");
    let now = a.node.sessions().get(&id).expect("it is shown");
    assert_eq!(now.generation, failed.generation, "it was left alone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stopped_after_its_start_had_failed_is_not_started_by_a_connection() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    gone(&fleet, &b).await;
    refuse_next(&a);
    a.fetch(&id).await;
    let report = a
        .node
        .sessions()
        .stop(&id, "a test")
        .await
        .expect("stopped");
    assert!(report.state.is_ended());
    let answer = a.fetch(&id).await;
    assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
    assert!(!a.node.sessions().is_live(&id));
}

fn lacks_image(node: &Member) {
    let lacks = Fault::LackImage("web:1".to_owned());
    node.faults.always(Operation::Create, lacks);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_node_lacks_the_image_of_is_started_by_another() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join(&fleet, "a", &secret).await;
    let b = Member::join(&fleet, "b", &secret).await;
    lacks_image(&a);
    let ids = [id("alice"), id("bob"), id("carl")];
    for id in &ids {
        b.start(id).await;
    }
    gone(&fleet, &b).await;
    let answer = a.fetch(&ids[0]).await;
    assert!(answer.starts_with("HTTP/1.1 422"), "{answer}");
    assert!(answer.contains("web:1"), "{answer}");
    let c = Member::join(&fleet, "c", &secret).await;
    // In any order.
    for id in &ids {
        let answer = a.fetch(id).await;
        assert!(is_served(&answer, id), "{answer}");
        assert!(c.node.sessions().is_live(id));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_all_that_fit_lack_the_image_of_is_started_by_one_that_may_not_be_well() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join(&fleet, "a", &secret).await;
    let b = Member::join(&fleet, "b", &secret).await;
    lacks_image(&a);
    let id = id("alice");
    b.start(&id).await;
    gone(&fleet, &b).await;
    let c = Member::join(&fleet, "c", &secret).await;
    fleet.announced("c", |told| told.load.cpu_pressure_percent = 2_000.0);
    let answer = a.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert!(c.node.sessions().is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_node_lacks_the_runtime_of_is_started_by_another() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join_without_runtime(&fleet, "a", &secret).await;
    let b = Member::join(&fleet, "b", &secret).await;
    let ids = [id("alice"), id("bob"), id("carl")];
    for id in &ids {
        b.start(id).await;
    }
    gone(&fleet, &b).await;
    // The node with the image may take sessions again.
    let answer = a.fetch(&ids[0]).await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.contains("node `b` is draining"), "{answer}");
    let tell = |name: &str| {
        let view = a.node.status().view();
        fleet.announced(name, |told| told.view = Some(view));
    };
    tell("b");
    let answer = a.fetch(&ids[0]).await;
    assert!(answer.starts_with("HTTP/1.1 422"), "{answer}");
    assert!(answer.contains("no process runtime"), "{answer}");
    let c = Member::join(&fleet, "c", &secret).await;
    // In any order, and also if it is known which node has it.
    for id in &ids {
        if *id == ids[2] {
            tell("a");
        }
        let answer = a.fetch(id).await;
        assert!(is_served(&answer, id), "{answer}");
        assert!(c.node.sessions().is_live(id));
    }
}
