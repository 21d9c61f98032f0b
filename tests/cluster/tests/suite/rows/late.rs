//! A container that Docker makes once nobody wants it any more.

use conman_cluster::overlap::{DOCKERS, monotonic_ns};
use conman_cluster::{Cluster, has_docker};
use conman_e2e::eventually;
use conman_linux::Signal;
use http::Method;
use serde_json::json;

use super::fleet::{Fleet, PATIENCE, within};
use super::load::Bystander;

/// Asks the first node once for a container of Docker's there; whether it runs.
async fn asked_for(fleet: &Fleet, id: &str) -> bool {
    let path = format!("/v1/sessions/{id}?node_label=host%3Dn1");
    let body = json!({"template": DOCKERS});
    let answer = fleet.ask(0, Method::PUT, &path, Some(&body)).await;
    answer.is_some_and(|answer| answer.status.is_success())
}

/// Whether Docker has made a container of this session, be it gone by now or not. What happens in
/// the very second is not told yet.
fn was_made(fleet: &Fleet, id: &str) -> bool {
    let words = ["events", "--since", "1", "--until", "0s"];
    let only = [
        "--filter",
        "event=create",
        "--format",
        "{{.Actor.Attributes.name}}",
    ];
    let made = fleet.cluster.ask_docker(&[&words[..], &only].concat());
    made.expect("events").contains(&format!("-{id}-"))
}

/// Whether Docker has a container of this session, running or not.
fn is_there(fleet: &Fleet, id: &str) -> bool {
    let words = ["ps", "--all", "--format", "{{.Names}}"];
    let names = fleet.cluster.ask_docker(&words).expect("containers");
    names.contains(&format!("-{id}-"))
}

/// Waits until the first node has what it had before it had a session.
async fn nothing_is_left(fleet: &Fleet) {
    eventually("nothing is left there", PATIENCE, async || {
        fleet.beyond(0, true).is_empty()
    })
    .await;
}

/// Docker stands still with the order to create; when it reads that, the session is another node's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: a Docker Engine of its own; the native form stays"]
async fn row_24_a_container_that_docker_makes_late_never_runs_beside_a_newer_one() {
    if !has_docker() {
        return;
    }
    let builder = Cluster::builder().nodes(2).short().docker_too();
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    // So that nothing but its creation is left of a start.
    eventually("Docker runs one", PATIENCE, async || {
        asked_for(&fleet, "first").await
    })
    .await;
    fleet.stop(0, "first").await;
    nothing_is_left(&fleet).await;

    let bystander = Bystander::begin(&fleet, 1, &[1]).await;
    fleet
        .cluster
        .signal_docker(Signal::SIGSTOP)
        .expect("stopped");
    assert!(!asked_for(&fleet, "late").await);
    fleet.cut_off(0);
    let new = fleet.ensure_after(1, "late", 0).await.generation.get();
    fleet.goes_on("late", new).await;
    fleet
        .cluster
        .signal_docker(Signal::SIGCONT)
        .expect("continued");
    eventually("it is made nevertheless", PATIENCE, async || {
        was_made(&fleet, "late")
    })
    .await;
    fleet.goes_on("late", new).await;
    fleet.cluster.heal().expect("healed");
    fleet.all_ready().await;
    let begun = monotonic_ns();
    eventually("it is gone", PATIENCE, async || !is_there(&fleet, "late")).await;
    within(
        10_000,
        "from a node's return until what was made late is gone",
        begun,
        monotonic_ns(),
    );
    nothing_is_left(&fleet).await;
    within(
        10_000,
        "from a node's return until nothing is left of what was made late",
        begun,
        monotonic_ns(),
    );
    fleet.goes_on("late", new).await;
    assert_eq!(fleet.lives("late").len(), 1, "what was made late has run");
    bystander.saw_nothing().await;
    fleet.leaves_nothing().await;
}
