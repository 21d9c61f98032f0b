//! The secret by which nodes know each other, and whose connect tokens they take, replaced while they
//! run.

use std::fs;
use std::time::Duration;

use conman_cluster::Cluster;
use conman_e2e::eventually;
use conman_linux::Signal;
use conman_proto::ConnectToken;
use http::header::SET_COOKIE;
use http::{Method, StatusCode};
use serde_json::json;
use tokio::time::sleep;

use super::fleet::{Fleet, PATIENCE};

const KEPT: &str = "cannot reload the fleet's secret; keeping the former content";
const OVER: &str = "the fleet's secret can be read again";
/// In which a daemon looks at the file again, and once more.
const LOOKS: Duration = Duration::from_secs(12);

/// A connect token of a node's.
async fn token(fleet: &Fleet, node: usize) -> String {
    let admin = fleet.node(node).admin();
    // It outlives the test.
    let body = json!({"ttl_s": 86_400});
    let made = admin.post("/v1/sessions/w/token", &body).await;
    made.expect::<ConnectToken>(StatusCode::OK).token
}

/// Whether a node exchanges it for a cookie, as it does what is good.
async fn takes(fleet: &Fleet, node: usize, token: &str) -> bool {
    let path = format!("/s/w/?conman_token={token}");
    let sessions = fleet.node(node).sessions();
    let answer = sessions.send(Method::GET, &path, None).await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.text());
    let cookie = answer.headers[SET_COOKIE].to_str().expect("text");
    !cookie.contains("Max-Age=0;")
}

/// What a node knows the others by from now on: one line each.
fn write(fleet: &Fleet, node: usize, lines: &[&str]) {
    let path = fleet.cluster.layout().secret(fleet.node(node).name());
    // Renamed into place: nobody reads half of it.
    let partial = path.with_extension("new");
    fs::copy(&path, &partial).expect("made, as private as the former one");
    fs::write(&partial, lines.join("\n")).expect("written");
    fs::rename(&partial, &path).expect("renamed");
}

async fn has_read_it_again(fleet: &Fleet, node: usize) {
    eventually("it has read the secret again", PATIENCE, async || {
        let log = fleet.node(node).log();
        log.contains("reloaded the fleet's secret")
    })
    .await;
}

#[tokio::test]
async fn secret_of_the_fleet_is_replaced_while_nodes_run_and_tokens_of_each_are_good_at_all() {
    let builder = Cluster::builder().nodes(2).members(1).short();
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    let former = fleet.cluster.layout().secret("n1");
    let former = fs::read_to_string(former).expect("readable");
    let later = "later".repeat(10);
    let session = fleet.ensure_on(1, "w").await;
    let generation = session.generation.get();
    fleet.goes_on("w", generation).await;
    let by_former = token(&fleet, 0).await;
    assert!(takes(&fleet, 1, &by_former).await);

    // One is told, the other finds it by itself.
    for node in [0, 1] {
        write(&fleet, node, &[&former, &later]);
    }
    fleet.node(0).signal_daemon(Signal::SIGHUP).expect("told");
    for node in [0, 1] {
        has_read_it_again(&fleet, node).await;
    }

    // The first one uses the later one now, which the other only accepts so far.
    write(&fleet, 0, &[&later, &former]);
    fleet.node(0).kill_daemon().expect("killed");
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    let by_later = token(&fleet, 0).await;
    for node in [0, 1] {
        for token in [&by_former, &by_later] {
            assert!(takes(&fleet, node, token).await, "n{}", node + 1);
        }
    }
    // They know each other: it runs on the second one.
    let found = fleet.ensure(0, "w").await;
    assert_eq!(
        (found.node.as_str(), found.generation.get()),
        ("n2", generation)
    );

    for node in [0, 1] {
        write(&fleet, node, &[&later]);
        fleet
            .node(node)
            .signal_daemon(Signal::SIGHUP)
            .expect("told");
    }
    for node in [0, 1] {
        eventually("the former one is worth nothing", PATIENCE, async || {
            !takes(&fleet, node, &by_former).await
        })
        .await;
        assert!(takes(&fleet, node, &by_later).await, "n{}", node + 1);
    }
    let found = fleet.ensure(0, "w").await;
    assert_eq!(found.generation.get(), generation);
    fleet.goes_on("w", generation).await;
    assert_eq!(fleet.lives("w").len(), 1, "it was restarted");
    fleet.leaves_nothing().await;
}

#[tokio::test]
async fn secret_of_another_fleet_is_refused_at_the_join_with_the_reason_on_both_sides() {
    let builder = Cluster::builder().nodes(2).members(1).short();
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    let generation = fleet.ensure_on(0, "w").await.generation.get();
    let secret = fleet.cluster.layout().secret("n2");
    let secret = fs::read_to_string(secret).expect("readable");
    fleet.node(1).kill_daemon().expect("killed");
    write(&fleet, 1, &[&"another".repeat(10)]);
    fleet.node(1).start().expect("started");
    let refused = fleet.node(1).wait_ready().await;
    let refused = refused.expect_err("it stays out").to_string();
    for part in ["do not accept each other", "`fleet.secret_file`"] {
        assert!(refused.contains(part), "{refused}");
    }
    let log = fleet.node(0).log();
    for part in [
        "refused a connection to the listener for nodes",
        "`fleet.secret_file`",
    ] {
        assert!(log.contains(part), "{log}");
    }
    fleet.node(1).kill_daemon().expect("it has ended");
    write(&fleet, 1, &[&secret]);
    fleet.node(1).start().expect("started");
    fleet.all_ready().await;
    fleet.goes_on("w", generation).await;
    fleet.leaves_nothing().await;
}

/// How often a node has told this so far.
fn told(fleet: &Fleet, words: &str) -> usize {
    fleet.node(0).log().matches(words).count()
}

#[tokio::test]
#[ignore = "in acceptance: the replacement of a secret stays"]
async fn secret_that_cannot_be_used_is_told_once_and_that_it_is_over() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(1).members(1)).await else {
        return;
    };
    let good = fleet.cluster.layout().secret("n1");
    let good = fs::read_to_string(good).expect("readable");
    let generation = fleet.ensure(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    write(&fleet, 0, &["short"]);
    eventually("it is told", PATIENCE, async || told(&fleet, KEPT) > 0).await;
    sleep(LOOKS).await;
    assert_eq!(told(&fleet, KEPT), 1, "{}", fleet.node(0).log());
    // Something else is wrong with it.
    write(&fleet, 0, &[good.as_str(); 5]);
    eventually("it is told", PATIENCE, async || told(&fleet, KEPT) > 1).await;
    // Somebody asks.
    fleet.node(0).signal_daemon(Signal::SIGHUP).expect("told");
    eventually("it is told", PATIENCE, async || told(&fleet, KEPT) > 2).await;
    sleep(LOOKS).await;
    assert_eq!(told(&fleet, KEPT), 3, "{}", fleet.node(0).log());
    assert_eq!(told(&fleet, OVER), 0);
    write(&fleet, 0, &[&good]);
    eventually("it is told", PATIENCE, async || told(&fleet, OVER) > 0).await;
    sleep(LOOKS).await;
    assert_eq!((told(&fleet, OVER), told(&fleet, KEPT)), (1, 3));
    fleet.leaves_nothing().await;
}
