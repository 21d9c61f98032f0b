//! Connections that arrive at another node while a session's own is emptied, goes or has gone: held
//! there, counted by that cause, and served.

use conman_cluster::{Cluster, overlap::monotonic_ns};
use conman_e2e::eventually;
use conman_proto::{NodeList, NodeStanding, NodeState, Session};
use http::StatusCode;
use serde_json::json;

use super::fleet::{Fleet, PATIENCE, measured};
use super::hop::open;

/// What the second node's metrics say under a name.
async fn figure(fleet: &Fleet, name: &str) -> f64 {
    let metrics = fleet.node(1).admin().get("/metrics").await.text();
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0.0, |value| value.trim().parse().expect("a number"))
}

/// How many were held at the second node for a cause, and are not any more.
async fn held(fleet: &Fleet, cause: &str) -> f64 {
    figure(
        fleet,
        &format!("conman_held_duration_seconds_count{{cause=\"{cause}\"}} "),
    )
    .await
}

/// Waits until the second node knows the first one so.
async fn known_as(fleet: &Fleet, state: NodeState, standing: NodeStanding) {
    let what = format!("n1 is known as {state:?} and {standing:?}");
    eventually(&what, PATIENCE, async || {
        let list = fleet.node(1).admin().get("/v1/nodes").await;
        let list: NodeList = list.expect(StatusCode::OK);
        let mut nodes = list.nodes.into_iter();
        nodes.any(|node| {
            let its = node.fleet.map(|fleet| fleet.standing);
            node.name == "n1" && node.state == state && its == Some(standing)
        })
    })
    .await;
}

async fn order(fleet: &Fleet, order: &str) {
    let path = format!("/v1/nodes/self/{order}");
    let answer = fleet.node(0).admin().post(&path, &json!({})).await;
    assert!(answer.status.is_success(), "{}", answer.text());
}

/// Connects through the second node to what the first one had, and is served there in the end, held
/// for each of these causes.
async fn is_held_and_served(fleet: &mut Fleet, id: &str, former: u64, causes: &[&str]) {
    let mut before = Vec::new();
    for cause in causes {
        before.push(held(fleet, cause).await);
    }
    let begun = monotonic_ns();
    let (_, line) = open(fleet, id).await.expect("served");
    measured(&format!("{id} was held"), begun, monotonic_ns());
    // By its record, in which the witness has its first node's name.
    let path = format!("/v1/sessions/{id}");
    let session: Session = fleet.node(1).api().get(&path).await.expect(StatusCode::OK);
    assert_eq!(session.node, "n2");
    assert!(line.generation > former, "{line:?}, after {former}");
    for (cause, before) in causes.iter().zip(before) {
        let after = held(fleet, cause).await;
        assert!(after > before, "{cause}: {before}, and then {after}");
        let now = figure(fleet, &format!("conman_held{{cause=\"{cause}\"}} ")).await;
        assert!(now.abs() < 0.5, "{cause}: {now} are held still");
    }
    fleet.goes_on(id, line.generation).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_arrives_elsewhere_while_a_node_drains_goes_or_has_gone_is_held_for_that_and_served() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let generation = fleet.serve_on(0, "drained").await;
    order(&fleet, "drain").await;
    known_as(&fleet, NodeState::Draining, NodeStanding::Live).await;
    is_held_and_served(&mut fleet, "drained", generation, &["draining"]).await;
    order(&fleet, "undrain").await;
    known_as(&fleet, NodeState::Live, NodeStanding::Live).await;

    let generation = fleet.serve_on(0, "preempted").await;
    fleet.preempt(0).await;
    known_as(&fleet, NodeState::Preempted, NodeStanding::Live).await;
    is_held_and_served(&mut fleet, "preempted", generation, &["preempted"]).await;
    order(&fleet, "readmit").await;
    known_as(&fleet, NodeState::Live, NodeStanding::Live).await;

    // One arrives before anybody can know what has become of the node, one after that.
    let early = fleet.serve_on(0, "early").await;
    let late = fleet.serve_on(0, "late").await;
    let begun = monotonic_ns();
    fleet.node(0).lose().expect("killed");
    // A slow machine may take as long for it as the others need to declare the node dead.
    let lost_ms = (monotonic_ns() - begun) / 1_000_000;
    let causes: &[&str] = match lost_ms < fleet.timing().takeover_ms / 2 {
        true => &["silent", "fenced"],
        false => &["fenced"],
    };
    is_held_and_served(&mut fleet, "early", early, causes).await;
    known_as(&fleet, NodeState::Live, NodeStanding::Fenced).await;
    is_held_and_served(&mut fleet, "late", late, &["fenced"]).await;
    fleet.leaves_nothing().await;
}
