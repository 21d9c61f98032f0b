//! Hosts that lose sight of each other.

use std::time::Duration;

use conman_cluster::overlap::monotonic_ns;
use conman_cluster::{Cluster, Cut};
use conman_e2e::eventually;
use http::Method;

use super::client::Client;
use super::fleet::{Fleet, PATIENCE, measured, within};
use super::load::Bystander;

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
    let bystander = Bystander::begin(fleet, other, &[other]).await;
    // One that stood still may have renewed for the last time long ago.
    fleet.renews(owner).await;
    let begun = monotonic_ns();
    for cut in cuts(fleet, owner) {
        fleet.cluster.cut(&cut).expect("cut");
    }
    let session = fleet.ensure_after(other, "s", old).await;
    let new = session.generation.get();
    let life = fleet.goes_on("s", new).await;
    assert_ne!(life.host, fleet.node(owner).name());
    within(
        fleet.served_again_ms(),
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
    bystander.saw_nothing().await;
    fleet.judge();

    fleet.cluster.heal().expect("healed");
    fleet.all_ready().await;
    // Its container is dead, not thawed, and the new one goes on.
    eventually("nothing of it is left", PATIENCE, async || {
        fleet.node(owner).session_processes().is_empty()
    })
    .await;
    fleet.goes_on("s", new).await;
    assert_eq!(fleet.life("s", old).expect("it wrote").last_ns, last);
    fleet.is_one(owner, "s", new).await;
    fleet.judge();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
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
    fleet.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: the simulation; the other direction stays"]
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
    fleet.leaves_nothing().await;
}

/// Its peers reach it still, and so do its clients: whoever asks in the pause waits.
#[tokio::test]
async fn row_15_clients_of_an_owner_cut_off_etcd_alone_are_held_and_served_by_the_next_one() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let old = fleet.serve_on(0, "s").await;
    let mut there = Client::connect(&fleet, 0, "s").await;
    let mut elsewhere = Client::connect(&fleet, 1, "s").await;
    fleet.all_ready().await;
    let begun = monotonic_ns();
    fleet.cluster.cut_from_etcd(0).expect("cut");
    fleet.is_fenced(0).await;
    let (held_there, held) = (there.ask(), elsewhere.ask());
    let new = elsewhere.answered(held).await;
    within(
        fleet.served_again_ms(),
        "from a cut to the answer of the next owner",
        begun,
        monotonic_ns(),
    );
    assert!(new > old, "generation {new} is not a later one than {old}");
    assert_eq!(elsewhere.comes_back().await, new);
    fleet.judge();
    // The cut one cannot know whose it is by now.
    assert!(!held_there.is_answered(), "its own is frozen");
    fleet.cluster.heal().expect("healed");
    assert_eq!(there.answered(held_there).await, new);
    assert_eq!(there.comes_back().await, new);
    fleet.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
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
    let served = fleet.serve_on(owner, "served").await;
    let mut there = Client::connect(&fleet, owner, "served").await;
    let mut elsewhere = Client::connect(&fleet, other, "served").await;
    let bystander = Bystander::begin(&fleet, other, &[other]).await;
    fleet.cut_off(owner);
    fleet.is_fenced(owner).await;
    let held = there.ask();
    let next = elsewhere.comes_back().await;
    assert!(next > served, "generation {next} after {served}");
    // Nobody asks for the other one, which its owner may therefore keep.
    let new = fleet.ensure_after(other, "taken", taken).await;
    let new = new.generation.get();
    fleet.goes_on("taken", new).await;
    let last = fleet.life("taken", taken).expect("it wrote").last_ns;
    assert!(!held.is_answered(), "its own is frozen");
    fleet.cluster.heal().expect("healed");
    // Nothing of what is no longer its own answers there.
    assert_eq!(there.answered(held).await, next);
    assert_eq!(there.comes_back().await, next);
    fleet.all_ready().await;
    bystander.saw_nothing().await;
    fleet.goes_on("kept", kept).await;
    fleet.goes_on("taken", new).await;
    assert_eq!(fleet.life("taken", taken).expect("it wrote").last_ns, last);
    assert_eq!(fleet.lives("kept").len(), 1);
    fleet.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_16_node_to_node_cut_takes_nothing_over() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let generation = placed(&mut fleet, "s").await;
    let owner = host_of(&mut fleet, "s", generation);
    let other = another(&fleet, owner);
    let served = fleet.serve_on(owner, "served").await;
    let mut client = Client::connect(&fleet, other, "served").await;
    let bystander = Bystander::begin(&fleet, other, &[other]).await;
    let cut = Cut::Between(
        fleet.node(owner).host().clone(),
        fleet.node(other).host().clone(),
    );
    fleet.cluster.cut(&cut).expect("cut");
    // The answer says within a moment that the owner cannot be reached, and so does one to a client of the
    // session, which renews its heartbeat: no other node will take it over.
    let asked = monotonic_ns();
    let answer = fleet.node(other).api().get("/v1/sessions/s").await;
    within(
        3_000,
        "from a request to its answer across a cut",
        asked,
        monotonic_ns(),
    );
    assert!(
        [502, 503].contains(&answer.status.as_u16()),
        "{}",
        answer.text()
    );
    let asked = monotonic_ns();
    let sessions = fleet.node(other).sessions();
    let answer = sessions.send(Method::GET, "/s/served/", None).await;
    within(
        5_000,
        "from a request to a session to its answer across a cut",
        asked,
        monotonic_ns(),
    );
    let slug = answer.problem().slug().to_owned();
    assert!(
        ["node-silent", "node-unreachable"].contains(&&*slug),
        "{slug}"
    );
    let held = client.ask_until_known();
    eventually("it is told why it is held", PATIENCE, async || {
        let metrics = fleet.node(other).admin().get("/metrics").await.text();
        metrics.contains("conman_held{cause=\"silent\"} 1")
    })
    .await;
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
    assert!(!held.is_answered(), "by whom, across a cut?");
    bystander.saw_nothing().await;
    fleet.cluster.heal().expect("healed");
    assert_eq!(client.answered(held).await, served);
    let again = client.ask();
    assert_eq!(client.answered(again).await, served);
    assert_eq!(fleet.lives("served").len(), 1);
    fleet.is_one(other, "s", generation).await;
    fleet.leaves_nothing().await;
}
