//! How often etcd is asked where a session is.

use conman_cluster::Cluster;
use conman_e2e::{eventually, eventually_some};
use http::{Method, StatusCode};
use serde_json::json;

use super::fleet::{Fleet, PATIENCE};

/// A node that is slow to answer for a moment is looked up once more: the least of these counts.
const SESSIONS: [&str; 4] = ["a", "b", "c", "d"];
const ASKED: &str = "conman_fleet_lookups_total{from=\"etcd\"} ";

/// How often the second node has asked etcd so far.
async fn asked(fleet: &Fleet) -> u64 {
    let metrics = fleet.node(1).admin().get("/metrics").await.text();
    let line = metrics.lines().find_map(|line| line.strip_prefix(ASKED));
    line.map_or(0, |count| count.parse().expect("a number"))
}

/// How often it asks until it serves a page of the session.
async fn asked_until_served(fleet: &Fleet, id: &str) -> u64 {
    let before = asked(fleet).await;
    let path = format!("/s/{id}/");
    let api = fleet.node(1).sessions();
    eventually("it is served", PATIENCE, async || {
        let answer = api.try_send(Method::GET, &path, None).await;
        answer.is_ok_and(|answer| answer.status == StatusCode::OK)
    })
    .await;
    asked(fleet).await - before
}

/// The least that any of the sessions takes.
async fn least(fleet: &Fleet) -> u64 {
    let mut least = u64::MAX;
    for id in SESSIONS {
        least = least.min(asked_until_served(fleet, id).await);
    }
    least
}

/// Has each run on a node, which is the one that is asked for it.
async fn run_on(fleet: &Fleet, node: usize) {
    let host = fleet.node(node).name();
    let body = json!({"template": "web"});
    for id in SESSIONS {
        let path = format!("/v1/sessions/{id}?node_label=host%3D{host}");
        eventually_some("it runs", PATIENCE, async || {
            let answer = fleet.ask(node, Method::PUT, &path, Some(&body)).await?;
            answer.status.is_success().then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_session_of_another_node_is_looked_up_once_and_again_when_it_has_moved() {
    let Some(fleet) = Fleet::shared(Cluster::builder().nodes(3)).await else {
        return;
    };
    run_on(&fleet, 0).await;
    assert_eq!(least(&fleet).await, 1, "when nothing is known");
    assert_eq!(least(&fleet).await, 0, "when it is known");
    for id in SESSIONS {
        fleet.stop(0, id).await;
    }
    run_on(&fleet, 2).await;
    assert_eq!(least(&fleet).await, 1, "when what is known is out of date");
    assert_eq!(least(&fleet).await, 0, "when it is known again");
}
