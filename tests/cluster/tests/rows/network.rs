//! Hosts that lose sight of each other.

use std::time::Duration;

use conman_cluster::overlap::monotonic_ns;
use conman_cluster::{Cluster, Cut};
use http::Method;

use crate::fleet::{Fleet, measured};

/// A session on the first node.
async fn placed(fleet: &mut Fleet, id: &str) -> u64 {
    let session = fleet.ensure_on(0, id).await;
    let generation = session.generation.get();
    fleet.goes_on(id, generation).await;
    generation
}

/// The host that the life of a generation is on.
fn host_of(fleet: &mut Fleet, id: &str, generation: u64) -> usize {
    let life = fleet.life(id, generation).expect("it has written");
    let hosts = fleet.cluster.layout().node_hosts();
    let found = hosts.iter().position(|host| host.name == life.host);
    found.expect("it is one of the nodes")
}

/// Any node but this one.
fn another(fleet: &Fleet, node: usize) -> usize {
    (node + 1) % fleet.cluster.nodes().len()
}

/// Cuts, waits until another node has taken the session over, heals, and sees the owner come back.
async fn taken_over_and_back(fleet: &mut Fleet, cuts: impl FnOnce(&Fleet, usize) -> Vec<Cut>) {
    let old = placed(fleet, "s").await;
    let owner = host_of(fleet, "s", old);
    let other = another(fleet, owner);
    fleet.all_ready().await;
    let begun = monotonic_ns();
    for cut in cuts(fleet, owner) {
        fleet.cluster.cut(&cut).expect("cut");
    }
    let session = fleet.ensure_after(other, "s", old).await;
    let new = session.generation.get();
    let life = fleet.goes_on("s", new).await;
    assert_ne!(life.host, fleet.node(owner).name());
    measured(
        "from a cut to the first line elsewhere",
        begun,
        life.first_ns,
    );
    // Patience is counted from the last renewal that was seen, and who still owned it when it was
    // cut off had renewed within its fence's time.
    let timing = fleet.timing();
    let patience = timing.takeover_ms - timing.fence_ms;
    let waited = life.first_ns.saturating_sub(begun) / 1_000_000;
    assert!(waited >= patience, "taken over after {waited} ms already");
    let last = fleet.life("s", old).expect("it wrote").last_ns;
    measured("from a cut to the last line there", begun, last);
    fleet.judge();

    fleet.cluster.heal().expect("healed");
    fleet.all_ready().await;
    // Its container is dead, not thawed, and the new one goes on.
    conman_e2e::eventually(
        "nothing of it is left",
        crate::fleet::PATIENCE,
        async || fleet.node(owner).session_processes().is_empty(),
    )
    .await;
    fleet.goes_on("s", new).await;
    assert_eq!(fleet.life("s", old).expect("it wrote").last_ns, last);
    fleet.is_one(owner, "s", new).await;
    fleet.judge();
}

#[tokio::test]
async fn row_15_one_way_partition_of_what_a_node_sends_has_it_taken_over() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    taken_over_and_back(&mut fleet, |fleet, owner| {
        let from = fleet.node(owner).host();
        let members = fleet.cluster.members().iter();
        members
            .map(|member| Cut::OneWay {
                from: from.clone(),
                to: member.host().clone(),
            })
            .collect()
    })
    .await;
}

#[tokio::test]
async fn row_15_one_way_partition_of_what_a_node_hears_has_it_taken_over() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    taken_over_and_back(&mut fleet, |fleet, owner| {
        let to = fleet.node(owner).host();
        let members = fleet.cluster.members().iter();
        members
            .map(|member| Cut::OneWay {
                from: member.host().clone(),
                to: to.clone(),
            })
            .collect()
    })
    .await;
}

#[tokio::test]
async fn row_22_node_back_from_the_dead_kills_what_is_no_longer_its_own_and_keeps_the_rest() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let kept = placed(&mut fleet, "kept").await;
    let taken = placed(&mut fleet, "taken").await;
    let owner = host_of(&mut fleet, "kept", kept);
    let same = host_of(&mut fleet, "taken", taken);
    assert_eq!(same, owner, "both on one node");
    let other = another(&fleet, owner);
    fleet.cut_off(owner);
    // Nobody asks for the other one, which its owner may therefore keep.
    let new = fleet.ensure_after(other, "taken", taken).await;
    let new = new.generation.get();
    fleet.goes_on("taken", new).await;
    let last = fleet.life("taken", taken).expect("it wrote").last_ns;
    fleet.cluster.heal().expect("healed");
    fleet.all_ready().await;
    fleet.goes_on("kept", kept).await;
    fleet.goes_on("taken", new).await;
    assert_eq!(fleet.life("taken", taken).expect("it wrote").last_ns, last);
    assert_eq!(fleet.lives("kept").len(), 1);
    fleet.judge();
}

#[tokio::test]
async fn row_16_node_to_node_cut_takes_nothing_over() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let generation = placed(&mut fleet, "s").await;
    let owner = host_of(&mut fleet, "s", generation);
    let other = another(&fleet, owner);
    let cut = Cut::Between(
        fleet.node(owner).host().clone(),
        fleet.node(other).host().clone(),
    );
    fleet.cluster.cut(&cut).expect("cut");
    // The answer says within a moment that the owner cannot be reached, and a client of the session
    // is held.
    let asked = monotonic_ns();
    let answer = fleet.ask(other, Method::GET, "/v1/sessions/s", None).await;
    measured(
        "from a request to its answer across a cut",
        asked,
        monotonic_ns(),
    );
    let answer = answer.expect("an answer, long before a client gives up");
    assert!(
        [502, 503].contains(&answer.status.as_u16()),
        "{}",
        answer.text()
    );
    let begun = tokio::time::Instant::now();
    let takeover = Duration::from_millis(fleet.timing().takeover_ms);
    while begun.elapsed() < takeover * 2 {
        // An answer, or a wait that the client gives up: never another container.
        if let Some(answer) = fleet.ask(other, Method::GET, "/v1/sessions/s", None).await {
            assert!(answer.status.as_u16() != 500, "{}", answer.text());
        }
        if let Some(answer) = fleet.try_ensure(other, "s").await {
            assert!(answer.status.as_u16() != 500, "{}", answer.text());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    fleet.goes_on("s", generation).await;
    assert_eq!(fleet.lives("s").len(), 1);
    fleet.cluster.heal().expect("healed");
    fleet.is_one(other, "s", generation).await;
    fleet.judge();
}
