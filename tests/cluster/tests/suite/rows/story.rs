//! The events of a session whose node is cut off: those of this node, and those of the node that takes it over.

use conman_cluster::Cluster;
use conman_e2e::eventually;
use conman_proto::{EventKind, EventPage};
use http::StatusCode;

use super::fleet::{Fleet, PATIENCE};
use super::typed::{printed, refused};

/// Kinds that a node's journal has, of those that are named.
async fn kinds(fleet: &Fleet, node: usize, of: &[EventKind]) -> Vec<EventKind> {
    let mut path = "/v1/events?follow=false&local=true&limit=1000".to_owned();
    for kind in of {
        path.push_str(&format!("&kind={kind}"));
    }
    let answer = fleet.node(node).admin().get(&path).await;
    let page: EventPage = answer.expect(StatusCode::OK);
    page.events.iter().map(|event| event.kind).collect()
}

#[tokio::test]
async fn a_freeze_and_a_takeover_are_told_as_they_were() {
    use EventKind::{
        NodeFenced, NodeFrozen, NodeThawed, RegistryLost, RegistryReturned, SessionTakenOver,
    };
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let generation = fleet.ensure_on(1, "w").await.generation.get();
    fleet.goes_on("w", generation).await;

    // n2 answers for its own session without etcd.
    fleet.cut_off(1);
    eventually("its node says that it is frozen", PATIENCE, async || {
        let text = printed(&fleet, &["why", "w"], 0).await;
        let parts = ["w is frozen", " node_frozen ", "Wait"];
        parts.iter().all(|part| text.contains(part))
    })
    .await;
    let refusal = refused(&fleet, &["exec", "w", "--", "true"], 125).await;
    assert!(refusal.contains("w is frozen"), "{refusal}");
    assert!(!refusal.contains("starts it again"), "{refusal}");

    let next = fleet.ensure_after(0, "w", generation).await;
    assert_eq!(next.node, "n1");
    assert_eq!(
        kinds(&fleet, 0, &[NodeFenced, SessionTakenOver]).await,
        [NodeFenced, SessionTakenOver]
    );
    fleet.cluster.heal().expect("healed");
    fleet.all_ready().await;
    let lapse = [RegistryLost, NodeFrozen, NodeThawed, RegistryReturned];
    eventually("n2 has recorded the whole outage", PATIENCE, async || {
        let mut seen = kinds(&fleet, 1, &lapse).await;
        seen.sort_by_key(|kind| lapse.iter().position(|one| one == kind));
        // A loaded machine may have had another, shorter one.
        seen.dedup();
        seen == lapse
    })
    .await;
    let story = [
        "w is running on n1",
        "taken over from node n2, which was declared dead",
        &format!("generation {generation} on n2: started at "),
        " UTC; frozen at ",
        " UTC; taken over by n1 at ",
        " UTC; what was left of it ended at ",
    ];
    eventually("both generations are told", PATIENCE, async || {
        let text = printed(&fleet, &["why", "w"], 0).await;
        assert!(!text.contains(" UTC; ended at "), "{text}");
        story.iter().all(|part| text.contains(part))
    })
    .await;
    let frozen = printed(
        &fleet,
        &["events", "--no-follow", "--kind", "node_frozen"],
        0,
    )
    .await;
    assert!(
        frozen.lines().all(|line| line.contains("node_frozen")),
        "{frozen}"
    );
    assert!(frozen.contains("n2"), "{frozen}");
    fleet.leaves_nothing().await;
}
