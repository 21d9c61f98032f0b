//! Which node has a session, by what the nodes themselves tell of their room.

use conman_cluster::Cluster;
use conman_cluster::overlap::TEMPLATE;
use conman_e2e::{Answer, eventually, eventually_some};
use conman_proto::EnsureResponse;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::fleet::{Fleet, PATIENCE};

/// More than any machine has.
const A_PEBIBYTE: u64 = 1 << 50;

/// What a node says once to somebody who wants a session.
async fn answer(fleet: &Fleet, node: usize, path: &str, body: &Value) -> Answer {
    eventually_some("it answers", PATIENCE, async || {
        fleet.ask(node, Method::PUT, path, Some(body)).await
    })
    .await
}

/// Waits until a node refuses it because no node takes it: why each does not.
async fn reasons(fleet: &Fleet, node: usize, path: &str, body: &Value) -> String {
    let mut told = None;
    eventually("no node takes it", PATIENCE, async || {
        let answer = answer(fleet, node, path, body).await;
        assert_eq!(
            answer.status,
            StatusCode::SERVICE_UNAVAILABLE,
            "{}",
            answer.text()
        );
        let problem = answer.problem();
        let is_that = problem.slug() == "no-node";
        told = is_that.then_some(problem.detail);
        is_that
    })
    .await;
    told.expect("it was told")
}

#[tokio::test]
async fn a_session_asked_for_at_a_node_that_is_full_starts_on_another_until_there_is_room() {
    let builder = Cluster::builder().nodes(2);
    let builder = builder.set_on("n1", "limits", "max_sessions = 1");
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    let first = fleet.ensure_on(0, "first").await.generation.get();
    fleet.goes_on("first", first).await;

    let body = json!({"template": TEMPLATE});
    for id in ["second", "third"] {
        let session = eventually_some("it runs", PATIENCE, async || {
            let told = answer(&fleet, 0, &format!("/v1/sessions/{id}"), &body).await;
            if !told.status.is_success() {
                // The machine may have stood still for a while, which is another matter.
                assert_ne!(told.problem().slug(), "node-full", "{}", told.text());
                return None;
            }
            Some(told.expect::<EnsureResponse>(told.status).session)
        })
        .await;
        assert_eq!(session.node, "n2", "{id}");
        fleet.goes_on(id, session.generation.get()).await;
    }
    // By its label it can be had nowhere else.
    let own = "/v1/sessions/own?node_label=host%3Dn1";
    for asked in [0, 1] {
        let reasons = reasons(&fleet, asked, own, &body).await;
        for part in [
            "node `n1` has its 1 sessions (limits.max_sessions)",
            "node `n2` has `host = n2`, not `n1`",
        ] {
            assert!(reasons.contains(part), "{part}: {reasons}");
        }
    }
    fleet.goes_on("first", first).await;

    fleet.stop(1, "first").await;
    let own = fleet.ensure_on(0, "own").await.generation.get();
    fleet.goes_on("own", own).await;
    fleet.leaves_nothing().await;
}

#[tokio::test]
async fn a_session_that_wants_more_memory_than_any_node_has_is_refused_with_what_each_has() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2)).await else {
        return;
    };
    let body = json!({"template": TEMPLATE, "memory_bytes": A_PEBIBYTE});
    for asked in [0, 1] {
        let reasons = reasons(&fleet, asked, "/v1/sessions/large", &body).await;
        for node in ["n1", "n2"] {
            let said = format!("node `{node}` has only ");
            let of_it = reasons.split(&said).nth(1).unwrap_or_default();
            let (mib, rest) = of_it.split_once(' ').unwrap_or_default();
            assert!(mib.parse::<u64>().is_ok_and(|mib| mib > 0), "{reasons}");
            assert!(rest.starts_with("MiB of memory left"), "{reasons}");
        }
    }
    // What they do have is had.
    let small = fleet.ensure(0, "large").await.generation.get();
    fleet.goes_on("large", small).await;
    fleet.leaves_nothing().await;
}
