//! The witnesses and their checker on a real node.

use std::path::Path;
use std::time::Duration;

use conman_cluster::overlap::{TEMPLATE, Tail, Violation, journal};
use conman_cluster::{Cluster, requirements};
use conman_e2e::eventually;
use serde_json::json;

const WITNESS: &str = env!("CARGO_BIN_EXE_witness");
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn witnesses_tell_of_every_life_with_its_generation_and_host() {
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(1).members(0).apart();
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    let api = cluster.nodes()[0].api();
    let mut tail = Tail::open(&journal(cluster.layout())).expect("the journal");
    let mut generations = Vec::new();
    for life in 1..=2 {
        let session = api
            .ensure("w", &json!({"template": TEMPLATE}))
            .await
            .session;
        generations.push(session.generation.get());
        eventually("it has written", PATIENCE, async || {
            let report = tail.catch_up().expect("readable");
            report.lives == life && tail.checker().lives("w")[life - 1].lines > 2
        })
        .await;
        api.stop("w").await;
    }
    let report = tail.catch_up().expect("readable");
    assert_eq!(report.violations, []);
    let lives = tail.checker().lives("w");
    let told: Vec<u64> = lives.iter().map(|life| life.generation).collect();
    assert_eq!(told, generations);
    assert!(lives.iter().all(|life| life.host == "n1"), "{lives:?}");
}

/// Nodes that know nothing of each other are a fleet without any protection.
#[tokio::test]
async fn two_nodes_that_both_run_a_session_are_caught() {
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(2).members(0);
    let cluster = Cluster::start(&builder.apart(), &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    for node in cluster.nodes() {
        node.api().ensure("w", &json!({"template": TEMPLATE})).await;
    }
    let mut tail = Tail::open(&journal(cluster.layout())).expect("the journal");
    eventually("the overlap is seen", PATIENCE, async || {
        let violations = tail.catch_up().expect("readable").violations;
        let caught = |violation: &Violation| matches!(violation, Violation::Overlap { .. });
        violations.iter().any(caught)
    })
    .await;
}
