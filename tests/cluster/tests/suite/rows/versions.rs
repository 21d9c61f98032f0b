//! Nodes of two versions in one fleet, each in the place of the other.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use conman_cluster::{Builder, Cluster};
use conman_e2e::{EventStream, eventually, eventually_some};
use conman_proto::{DrainReport, DrainState, EventKind};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::fleet::{Fleet, PATIENCE};

/// `CONMAN_PREVIOUS_BINARY` names the release before this one, which the second node runs; without it
/// both are this one, and what is tried is only that nothing depends on which of two nodes it is.
fn builder() -> Builder {
    let builder = Cluster::builder().nodes(2).short();
    if let Some(previous) = previous() {
        return builder.binary_on("n2", OsStr::as_ref(&previous));
    }
    builder
}

fn previous() -> Option<OsString> {
    let previous = std::env::var_os("CONMAN_PREVIOUS_BINARY");
    if previous.is_none() {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: versions that differ; CONMAN_PREVIOUS_BINARY names no earlier release"
        );
    }
    previous
}

const BOTH_WAYS: [(usize, usize); 2] = [(0, 1), (1, 0)];

#[tokio::test]
#[ignore = "in acceptance: needs an earlier conman to show more than other rows"]
async fn row_34_version_skew_works_in_both_directions() {
    let Some(mut fleet) = Fleet::shared(builder()).await else {
        return;
    };
    for (from, to) in BOTH_WAYS {
        let id = format!("from-{from}");
        let old = fleet.ensure_on(from, &id).await.generation.get();
        fleet.goes_on(&id, old).await;
        fleet.stop(from, &id).await;
        let new = fleet.ensure_after(to, &id, old).await.generation.get();
        fleet.goes_on(&id, new).await;
        fleet.node(to).lose().expect("lost");
        let next = fleet.ensure_after(from, &id, new).await.generation.get();
        fleet.goes_on(&id, next).await;
        fleet.node(to).start().expect("started");
        fleet.all_ready().await;
        fleet.judge();
    }
    fleet.leaves_nothing().await;
}

/// What nodes ask each other: a session's page, the API's answers, events.
#[tokio::test]
#[ignore = "in acceptance: needs an earlier conman to show more than other rows"]
async fn row_34_each_version_brings_what_the_other_has() {
    let Some(mut fleet) = Fleet::shared(builder()).await else {
        return;
    };
    for (asked, owner) in BOTH_WAYS {
        let mut stream = EventStream::open(&fleet.node(asked).api(), "/v1/events", None).await;
        let id = format!("on-{owner}");
        let generation = fleet.ensure_on(owner, &id).await.generation.get();
        fleet.goes_on(&id, generation).await;
        fleet.is_one(asked, &id, generation).await;
        let name = fleet.node(owner).name().to_owned();
        loop {
            let event = stream.next().await.expect("the stream goes on");
            if event.kind == EventKind::SessionReady && event.node == name {
                break;
            }
        }
        let web = format!("web-{owner}");
        let path = format!("/v1/sessions/{web}?node_label=host%3D{name}");
        eventually("the page's session runs", PATIENCE, async || {
            let body = json!({"template": "web"});
            let answer = fleet.ask(asked, Method::PUT, &path, Some(&body)).await;
            answer.is_some_and(|answer| answer.status.is_success())
        })
        .await;
        let page = fleet
            .node(asked)
            .sessions()
            .get(&format!("/s/{web}/"))
            .await;
        assert_eq!(page.text(), "hello\n");
        for path in [
            format!("/v1/sessions/{id}"),
            format!("/v1/sessions/{id}/timeline"),
            format!("/v1/sessions/{id}/logs?follow=false"),
            format!("/v1/nodes/{name}"),
        ] {
            let answer = fleet.ask(asked, Method::GET, &path, None).await;
            let answer = answer.expect("an answer");
            assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text());
        }
        let list = fleet
            .ask(asked, Method::GET, "/v1/sessions?limit=100", None)
            .await;
        let list = list.expect("an answer").text();
        assert!(list.contains(&id), "{list}");
    }
    fleet.leaves_nothing().await;
}

#[tokio::test]
#[ignore = "in acceptance: needs an earlier conman to show more than other rows"]
async fn row_34_each_version_is_drained_to_the_other() {
    let Some(mut fleet) = Fleet::shared(builder()).await else {
        return;
    };
    for (from, to) in BOTH_WAYS {
        // The other one takes none, so that it is on this one.
        order(&fleet, to, "drain").await;
        drained(&fleet, to).await;
        let id = format!("from-{from}");
        let old = fleet.ensure_restarting(from, &id).await.generation.get();
        fleet.goes_on(&id, old).await;
        order(&fleet, to, "undrain").await;
        fleet.all_ready().await;
        fleet.know_who_drains(&[to], false).await;
        order(&fleet, from, "drain").await;
        let report = drained(&fleet, from).await;
        // Its environment, by which witnesses tell their host, is of where it was made.
        let moved = report.moved.iter();
        let moved: Vec<_> = moved
            .map(|one| (one.id.as_str(), one.node.as_str()))
            .collect();
        let there = (id.as_str(), fleet.node(to).name());
        assert!(moved.contains(&there), "{report:?}");
        let life = eventually_some("it runs elsewhere, unasked", PATIENCE, async || {
            fleet.lives(&id).pop().filter(|life| life.generation > old)
        })
        .await;
        fleet.goes_on(&id, life.generation).await;
        order(&fleet, from, "undrain").await;
        fleet.all_ready().await;
        fleet.know_who_drains(&[from], false).await;
        fleet.judge();
    }
    fleet.leaves_nothing().await;
}

async fn order(fleet: &Fleet, node: usize, what: &str) {
    let admin = fleet.node(node).admin();
    let path = format!("/v1/nodes/self/{what}");
    let answer = admin.send(Method::POST, &path, Some(&json!({}))).await;
    assert!(answer.status.is_success(), "{what}: {}", answer.text());
}

async fn drained(fleet: &Fleet, node: usize) -> DrainReport {
    let path = "/v1/nodes/self/drain";
    eventually_some("it is drained", PATIENCE, async || {
        let answer = fleet.ask(node, Method::GET, path, None).await?;
        let report: DrainReport = answer.expect(StatusCode::OK);
        (report.state == DrainState::Drained).then_some(report)
    })
    .await
}

/// As one that is newer than both may write it.
#[tokio::test]
async fn row_34_a_record_with_unknown_fields_is_read_and_ends_by_either_version() {
    let Some(mut fleet) = Fleet::shared(builder()).await else {
        return;
    };
    for (node, other) in BOTH_WAYS {
        let id = format!("of-{node}");
        let old = fleet.ensure_on(node, &id).await.generation.get();
        fleet.goes_on(&id, old).await;
        fleet.stop(node, &id).await;
        let member = &fleet.cluster.members()[0];
        let key = format!("/conman/session/{id}");
        let text = member.value(&key).expect("a record");
        let mut record: Value = serde_json::from_str(&text).expect("JSON");
        record["unheard_of"] = json!({"by": ["these", 2]});
        member
            .set_value(&key, &record.to_string())
            .expect("written");
        for asked in [node, other] {
            let path = format!("/v1/sessions/{id}");
            let answer = fleet.node(asked).api().get(&path).await;
            assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        }
        let new = fleet.ensure_after(other, &id, old).await.generation.get();
        fleet.goes_on(&id, new).await;
        fleet.judge();
    }
    fleet.leaves_nothing().await;
}

/// As a package manager does it: the file is replaced beneath what runs.
fn put(binary: &Path, program: &Path) {
    let new = program.with_extension("new");
    conman_e2e::copy_program(binary, &new);
    fs::rename(&new, program).expect("renamed");
}

#[tokio::test]
async fn row_34_a_node_is_upgraded_in_place_and_its_sessions_run_on() {
    let place = tempfile::tempdir().expect("a directory");
    let program = place.path().join("conman");
    let own = conman_e2e::binary();
    put(
        &previous().map_or_else(|| own.to_owned(), PathBuf::from),
        &program,
    );
    let builder = Cluster::builder().nodes(2).short();
    let Some(mut fleet) = Fleet::shared(builder.binary_on("n2", &program)).await else {
        return;
    };
    let generation = fleet.ensure_on(1, "s").await.generation.get();
    fleet.goes_on("s", generation).await;

    put(own, &program);
    fleet.node(1).end_daemon().await.expect("ended");
    fleet.node(1).replace_shim().expect("replaced");
    fleet.node(1).start().expect("started");
    fleet.all_ready().await;
    fleet.goes_on("s", generation).await;
    fleet.is_one(0, "s", generation).await;
    let more = fleet.ensure_on(1, "more").await.generation.get();
    fleet.goes_on("more", more).await;

    // What is of the daemon before is ended and released as what is of this one.
    fleet.stop(0, "s").await;
    let next = fleet.ensure_after(0, "s", generation).await;
    fleet.goes_on("s", next.generation.get()).await;
    fleet.node(1).lose().expect("lost");
    let next = fleet.ensure_after(0, "more", more).await;
    fleet.goes_on("more", next.generation.get()).await;
    fleet.leaves_nothing().await;
}
