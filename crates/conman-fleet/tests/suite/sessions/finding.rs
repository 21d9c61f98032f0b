//! Sessions that run somewhere, or that a node starts for a request.

use conman_proto::SessionRequest;
use conman_testkit::ModelFleet;

use super::member::{Member, id, is_served, secret, secret_of, two, web};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_any_node_reaches_the_one_session() {
    let (_fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    for node in [&a, &b, &a] {
        let answer = node.fetch(&id).await;
        assert!(is_served(&answer, &id), "{answer}");
    }
    assert!(!a.node.sessions().is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_preempted_nodes_session_is_started_by_who_is_asked_for_it() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    assert!(is_served(&a.fetch(&id).await, &id));
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    let (one, other) = (a.fetch(&id), a.fetch(&id));
    for answer in <[String; 2]>::from(tokio::join!(one, other)) {
        assert!(is_served(&answer, &id), "{answer}");
    }
    assert!(a.node.sessions().is_live(&id));
    // The draining node brings its own clients there.
    let answer = b.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_started_anew_only_where_the_labels_are_that_it_was_asked_for_with() {
    let (fleet, a, b) = two().await;
    let c = Member::join(&fleet, "c", &secret()).await;
    for name in ["b", "c"] {
        fleet.announced(name, |node| {
            node.labels.insert("pool".to_owned(), "gpu".to_owned());
        });
    }
    let ids: Vec<_> = (0..4).map(|number| id(&format!("s{number}"))).collect();
    for id in &ids {
        let web = SessionRequest {
            node_labels: Some([("pool".to_owned(), "gpu".to_owned())].into()),
            ..web()
        };
        b.node
            .sessions()
            .ensure(id, &web, true)
            .await
            .expect("it starts");
    }
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    for id in &ids {
        let answer = a.fetch(id).await;
        assert!(is_served(&answer, id), "{answer}");
        assert!(c.node.sessions().is_live(id) && !a.node.sessions().is_live(id));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_node_has_is_not_waited_for() {
    let (_fleet, a, _b) = two().await;
    let answer = a.fetch(&id("absent")).await;
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    assert_eq!(a.fleet.asked(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn that_a_session_has_ended_is_asked_of_the_registry_once() {
    let (_fleet, a, b) = two().await;
    let (elsewhere, own) = (id("alice"), id("bob"));
    b.start(&elsewhere).await;
    a.start(&own).await;
    for (node, id) in [(&b, &elsewhere), (&a, &own)] {
        node.node
            .sessions()
            .stop(id, "a test")
            .await
            .expect("stopped");
        let before = a.fleet.asked();
        let answer = a.fetch(id).await;
        assert!(answer.starts_with("HTTP/1.1 409"), "{answer}");
        assert_eq!(a.fleet.asked() - before, 1, "{id}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_of_a_node_that_refuses_this_one_is_answered_with_both_and_the_remedy() {
    let fleet = ModelFleet::new();
    let a = Member::join(&fleet, "a", &secret()).await;
    let b = Member::join(&fleet, "b", &secret_of("fedcba9876543210")).await;
    let id = id("alice");
    b.start(&id).await;
    let answer = a.fetch(&id).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    for part in ["node `a`", "node `b`", "`fleet.secret_file`"] {
        assert!(answer.contains(part), "{answer}");
    }
    // A session that is given up there is started by another usable node.
    fleet.announced("a", |a| a.draining = true);
    let c = Member::join(&fleet, "c", &secret()).await;
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    fleet.announced("b", |b| b.draining = false);
    let answer = a.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert!(c.node.sessions().is_live(&id));
}
