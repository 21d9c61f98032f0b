//! What is wrong from the beginning ends in a message that says what to do, never in two containers.

use std::fs;
use std::sync::Arc;

use conman_cluster::{Authority, Cluster};
use conman_e2e::{eventually, eventually_some};
use serde_json::json;

use super::fleet::{Fleet, PATIENCE};

/// Waits until a node says why it is not ready, in these words.
async fn says(fleet: &Fleet, node: usize, words: &[&str]) {
    let what = format!("n{} says {words:?}", node + 1);
    eventually_some(&what, PATIENCE, async || {
        let why = fleet.node(node).readiness().await.err()?;
        words.iter().all(|word| why.contains(word)).then_some(())
    })
    .await;
}

/// It serves nothing that it cannot own.
async fn starts_nothing(fleet: &Fleet, node: usize) {
    let answer = fleet.try_ensure(node, "w").await;
    assert!(answer.is_none_or(|answer| !answer.status.is_success()));
    assert_eq!(fleet.node(node).session_processes(), []);
}

#[tokio::test]
async fn an_etcd_that_is_not_there_at_the_start_is_waited_for() {
    let builder = Cluster::builder().nodes(1).members(1).short();
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    // It reports by which numbers takeovers are safe; a slow machine has multiples of them.
    let log = fleet.node(0).log();
    let sums = |line: &str| line.contains(" (1 + 0.01) = ") && line.contains(" (1 - 0.01) = ");
    assert!(log.lines().any(sums), "{log}");
    fleet.node(0).kill_daemon().expect("killed");
    fleet.cluster.members()[0].kill().expect("killed");
    fleet.node(0).start().expect("started");
    let endpoint = &fleet.cluster.layout().endpoints()[0];
    says(&fleet, 0, &["cannot be connected to", endpoint]).await;
    starts_nothing(&fleet, 0).await;
    fleet.cluster.members()[0].start().expect("started");
    fleet.all_ready().await;
    let generation = fleet.ensure(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    fleet.judge();
}

#[tokio::test]
async fn two_nodes_with_one_name_are_told_apart_and_only_the_first_is_served() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let generation = fleet.ensure_on(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    fleet.node(1).kill_daemon().expect("killed");
    let config = fleet
        .cluster
        .layout()
        .host_directory("n2")
        .join("conman.toml");
    let text = fs::read_to_string(&config).expect("readable");
    let text = text.replace("name = \"n2\"", "name = \"n1\"");
    fs::write(&config, text).expect("written");
    // What has a name keeps it, since all that it runs is recorded so.
    fleet.node(1).start().expect("started");
    eventually("it serves as before", PATIENCE, async || {
        fleet.node(1).readiness().await.is_ok()
    })
    .await;
    let log = fleet.node(1).log();
    assert!(log.contains("the node stays `n2`"), "{log}");
    fleet.node(1).kill_daemon().expect("killed");
    // Now as if it had none yet.
    let known = fleet
        .cluster
        .layout()
        .state_dir("n2")
        .join("node-name.json");
    fs::remove_file(known).expect("removed");
    fleet.node(1).start().expect("started");
    says(&fleet, 1, &["`n1`", "node.name"]).await;
    starts_nothing(&fleet, 1).await;
    eventually("the first one serves", PATIENCE, async || {
        fleet.node(0).readiness().await.is_ok()
    })
    .await;
    fleet.goes_on("w", generation).await;
    assert_eq!(fleet.lives("w").len(), 1);
    // What it was not let join by it has not kept: another one is given as it says.
    fleet.node(1).kill_daemon().expect("killed");
    let text = fs::read_to_string(&config).expect("readable");
    let text = text.replace("name = \"n1\"", "name = \"n2\"");
    fs::write(&config, text).expect("written");
    fleet.node(1).start().expect("started");
    fleet.all_ready().await;
    let log = fleet.node(1).log();
    let stays = log.lines().filter(|line| line.contains("the node stays"));
    assert_eq!(stays.count(), 1, "{log}");
    fleet.judge();
}

#[tokio::test]
async fn a_newer_registry_is_refused_with_its_format() {
    let builder = Cluster::builder().nodes(1).members(1).short();
    let Some(fleet) = Fleet::shared(builder).await else {
        return;
    };
    fleet.node(0).kill_daemon().expect("killed");
    // "/conman/schema" and {"format":999}, in base64.
    let newer = json!({"key": "L2Nvbm1hbi9zY2hlbWE=", "value": "eyJmb3JtYXQiOjk5OX0="});
    let member = &fleet.cluster.members()[0];
    member.post("/v3/kv/put", &newer).await.expect("written");
    fleet.node(0).start().expect("started");
    let words = [
        "has format 999",
        "uses format 2",
        "run the newer conman that wrote it",
    ];
    says(&fleet, 0, &words).await;
    starts_nothing(&fleet, 0).await;
}

#[tokio::test]
async fn a_record_that_cannot_be_read_ends_its_own_session_and_no_other() {
    let builder = Cluster::builder().nodes(2).members(1).short();
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    let generation = fleet.ensure_on(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    let other = fleet.ensure_on(0, "v").await.generation.get();
    fleet.goes_on("v", other).await;
    fleet.node(0).kill_daemon().expect("killed");
    let member = &fleet.cluster.members()[0];
    member.set_value("/conman/session/w", "{").expect("written");
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    fleet.goes_on("v", other).await;
    let log = fleet.node(0).log();
    for word in [
        "etcdctl get /conman/session/w",
        "etcdctl del /conman/session/w",
    ] {
        assert!(log.contains(word), "{log}");
    }
    // What ran of it is proven dead before anybody may have it again.
    let next = fleet.ensure_after(1, "w", generation).await;
    fleet.goes_on("w", next.generation.get()).await;
    fleet.goes_on("v", other).await;
    assert_eq!(fleet.lives("v").len(), 1);
    fleet.judge();
}

#[tokio::test]
async fn a_node_that_fails_at_each_start_stays_away_and_another_serves_its_sessions() {
    // Without a secret of the nodes' own, connect tokens are made by a key in etcd.
    let ours = Arc::new(Authority::new("ours").expect("an authority"));
    let builder = Cluster::builder().nodes(2).members(1).short();
    let Some(mut fleet) = Fleet::shared(builder.certified(&ours)).await else {
        return;
    };
    let generation = fleet.ensure_on(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    fleet.node(0).kill_daemon().expect("killed");
    // What it finds out once it has joined.
    let (member, key) = (&fleet.cluster.members()[0], "/conman/shared-key");
    let good = member.value(key).expect("read");
    member.set_value(key, "{").expect("written");
    // As if that had been so before.
    let count = fleet.cluster.layout().state_dir("n1").join("failed-starts");
    fs::write(&count, "2").expect("written");
    fleet.node(0).start().expect("started");
    eventually("n1 fails", PATIENCE, async || {
        let ended = fleet.node(0).ended().expect("looked");
        ended.is_some_and(|status| !status.success())
    })
    .await;
    // As a service manager does.
    fleet.node(0).kill_daemon().expect("it has ended");
    fleet.node(0).start().expect("started");
    eventually("n1 stays away", PATIENCE, async || {
        fleet
            .node(0)
            .log()
            .contains("it waits so that other nodes can take over its sessions")
    })
    .await;
    let next = fleet.ensure_after(1, "w", generation).await;
    let next = next.generation.get();
    fleet.goes_on("w", next).await;
    assert_eq!(fleet.node(0).ended().expect("looked"), None, "it waits");
    let member = &fleet.cluster.members()[0];
    member.set_value(key, good.trim()).expect("written");
    fs::remove_file(&count).expect("it has counted");
    fleet.all_ready().await;
    fleet.goes_on("w", next).await;
    fleet.judge();
}
