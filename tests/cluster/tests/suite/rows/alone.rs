//! A node that was alone, and joins a fleet.

use std::time::Duration;

use conman_cluster::Cluster;
use conman_e2e::eventually;
use http::StatusCode;

use super::fleet::{Fleet, PATIENCE};

/// How often a session ran before the node joined, so that its generations are beyond the fleet's.
const LIVES: usize = 4;
/// What a session does not write for so long has ended, or is frozen.
const QUIET: Duration = Duration::from_secs(1);

#[tokio::test]
async fn what_ran_while_a_node_was_alone_ends_when_it_joins_and_runs_anew_later() {
    let builder = Cluster::builder().nodes(2).short().alone_at_first("n1");
    let Some(mut fleet) = Fleet::start(builder).await else {
        return;
    };
    let fleets = fleet.ensure(1, "fleets").await.generation.get();
    let mut alone = 0;
    for _ in 0..LIVES {
        if alone > 0 {
            fleet.stop(0, "s").await;
        }
        alone = fleet.ensure_after(0, "s", alone).await.generation.get();
    }
    fleet.goes_on("s", alone).await;
    fleet.node(0).end_daemon().await.expect("ended");
    // Nobody has told it to end.
    fleet.goes_on("s", alone).await;

    // As long as it cannot join, others may start what ran here.
    fleet.cluster.cut_from_etcd(0).expect("cut");
    fleet.node(0).join_fleet().expect("a configuration");
    fleet.node(0).start().expect("started");
    fleet.stands_still("s", alone, QUIET).await;
    assert!(fleet.node(0).readiness().await.is_err());
    fleet.cluster.heal().expect("healed");
    fleet.all_ready().await;
    eventually("it is dead", PATIENCE, async || {
        fleet.node(0).session_processes().is_empty()
    })
    .await;
    let log = fleet.node(0).log();
    let told: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("was alone"))
        .collect();
    assert!(
        matches!(told[..], [line] if line.contains("sessions=\"s\"")),
        "{told:?}"
    );
    let known = fleet.node(1).api().get("/v1/sessions/s").await;
    assert_eq!(known.status, StatusCode::NOT_FOUND);

    // Wherever it is asked for.
    for node in [1, 0] {
        let anew = fleet.ensure_after(node, "s", alone).await.generation.get();
        fleet.goes_on("s", anew).await;
        fleet.stop(node, "s").await;
        alone = anew;
    }
    fleet.is_one(0, "fleets", fleets).await;
    // A daemon of a fleet holds more descriptors than the one that was measured.
    fleet.stop(1, "fleets").await;
    fleet.node(0).end_daemon().await.expect("ended");
    fleet.leaves_nothing().await;
}
