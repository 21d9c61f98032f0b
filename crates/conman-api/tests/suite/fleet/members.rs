//! What is asked of any node about a node.

use conman_proto::{DrainReport, NodeList, NodeStanding, PreemptPlan};
use conman_registry::PeerStanding;
use http::{Method, StatusCode};

use super::world::two;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_are_shown_with_how_they_stand_and_a_word_to_one_reaches_it() {
    let (world, a, b) = two().await;
    b.ensure("alice").await;
    world.change("b", |b| b.standing = PeerStanding::Silent);
    let nodes: NodeList = a.api.get("/v1/nodes").await.json();
    let shown: Vec<_> = nodes
        .nodes
        .iter()
        .map(|node| {
            let fleet = node.fleet.as_ref().expect("of a fleet");
            (node.name.as_str(), fleet.standing)
        })
        .collect();
    assert_eq!(
        shown,
        [("a", NodeStanding::Live), ("b", NodeStanding::Silent)]
    );
    world.change("b", |b| b.standing = PeerStanding::Live);
    let plan = |name: &'static str| {
        let uri = format!("/v1/nodes/{name}/preempt");
        let a = &a;
        async move {
            let answer = a.api.call(Method::POST, &uri, r#"{"dry_run": true}"#).await;
            answer.json::<PreemptPlan>()
        }
    };
    let here = usize::from(
        a.api
            .node
            .sessions()
            .is_live(&"alice".parse().expect("an id")),
    );
    assert_eq!(plan("a").await.sessions.len(), here);
    assert_eq!(plan("b").await.sessions.len(), 1 - here);
    let unknown = a.api.call(Method::POST, "/v1/nodes/c/preempt", "{}").await;
    assert_eq!(unknown.problem().slug(), "no-such-node");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_forgotten_once_it_is_fenced_and_owns_nothing() {
    let (world, a, b) = two().await;
    b.ensure("alice").await;
    world.start_on_b(&b, "bob").await;
    let forget = |name: &'static str| {
        let a = &a;
        async move {
            let path = format!("/v1/nodes/{name}");
            a.api.call(Method::DELETE, &path, "").await
        }
    };
    for (name, slug) in [
        ("self", "node-not-lost"),
        ("b", "node-not-lost"),
        ("c", "no-such-node"),
    ] {
        assert_eq!(forget(name).await.problem().slug(), slug, "{name}");
    }
    world.change("b", |b| b.standing = PeerStanding::Fenced);
    let kept = forget("b").await.problem();
    assert_eq!(kept.slug(), "node-owns-sessions");
    for id in ["alice", "bob"] {
        let taken = a.ensure(id).await;
        assert_eq!(taken.session.node, "a", "{id}");
    }
    assert_eq!(forget("b").await.status, StatusCode::OK);
    let left: NodeList = a.api.get("/v1/nodes").await.json();
    let names: Vec<_> = left.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["a"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_drained_and_undrained_by_way_of_another() {
    let (_world, a, b) = two().await;
    let none = a.api.get("/v1/nodes/b/drain").await;
    assert_eq!(none.problem().slug(), "not-draining");
    let plan = a
        .api
        .call(Method::POST, "/v1/nodes/b/drain", r#"{"dry_run": true}"#)
        .await;
    assert_eq!(plan.status, StatusCode::OK);
    let body = r#"{"reason": "new kernel"}"#;
    let begun = a.api.call(Method::POST, "/v1/nodes/b/drain", body).await;
    assert_eq!(begun.status, StatusCode::ACCEPTED);
    let shown: DrainReport = a.api.get("/v1/nodes/b/drain").await.json();
    assert_eq!(shown.reason, "new kernel");
    assert!(a.api.node.drain().report().is_none(), "it is not its own");
    assert!(b.api.node.drain().report().is_some());
    let back = a.api.call(Method::POST, "/v1/nodes/b/undrain", "").await;
    assert_eq!(back.status, StatusCode::OK);
    assert!(b.api.node.drain().report().is_none());
}
