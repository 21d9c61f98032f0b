//! No two containers of one session ever run, whatever befalls the fleet; and where the fence is off,
//! this test says so. `cargo xtask overlap` goes on for longer.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use conman_cluster::overlap::{DOCKERS, Drive, Scale, TEMPLATE, Tail, Violation, journal};
use conman_cluster::{Builder, Cluster, has_docker, requirements};
use conman_e2e::eventually;
use http::Method;
use serde_json::json;

const WITNESS: &str = env!("CARGO_BIN_EXE_witness");
/// Far above what it takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Another one by this variable.
const SEED: u64 = 1;
const SEED_VARIABLE: &str = "CONMAN_OVERLAP_SEED";

#[tokio::test]
async fn a_disturbed_fleet_never_runs_two_containers_of_one_session() {
    let Some(ready) = requirements() else { return };
    let dockers = if has_docker() { 2 } else { 0 };
    let builder = Cluster::builder().members(3).short();
    let builder = match dockers {
        0 => builder,
        _ => builder.docker_too(),
    };
    if !builder.is_joined() {
        let _ = writeln!(std::io::stderr(), "skipped: the nodes share no registry");
        return;
    }
    let seed = std::env::var(SEED_VARIABLE).ok();
    let drive = Drive {
        seed: seed.map_or(SEED, |text| text.parse().expect("a number")),
        sessions: 6 + dockers,
        dockers,
        handovers: 10,
        every_kind: true,
        most: Duration::from_secs(1_200),
        scale: Scale::of(builder.timing()),
    };
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    let tell = &mut |what: &str| {
        let _ = writeln!(std::io::stderr(), "{what}");
    };
    let report = drive.run(&cluster, tell).await.expect("a verdict");
    let violations: Vec<String> = report.violations.iter().map(ToString::to_string).collect();
    assert_eq!(
        violations,
        Vec::<String>::new(),
        "seed {}: {report}",
        drive.seed
    );
    assert!(
        report.handovers >= drive.handovers,
        "seed {}: {report}",
        drive.seed
    );
}

#[tokio::test]
async fn without_the_fence_two_containers_of_one_session_run_and_are_seen() {
    overlap_is_seen(unfenced(), TEMPLATE).await;
}

#[tokio::test]
#[ignore = "in acceptance: a Docker Engine of its own; the native form stays"]
async fn without_the_fence_two_of_one_session_of_dockers_run_and_are_seen() {
    if has_docker() {
        overlap_is_seen(unfenced().docker_too(), DOCKERS).await;
    }
}

fn unfenced() -> Builder {
    Cluster::builder().nodes(2).short().unfenced("n1")
}

async fn overlap_is_seen(builder: Builder, template: &str) {
    let Some(ready) = requirements() else { return };
    if !builder.is_joined() {
        let _ = writeln!(std::io::stderr(), "skipped: the nodes share no registry");
        return;
    }
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    let [unfenced, other] = cluster.nodes() else {
        panic!("two nodes");
    };
    let body = json!({"template": template});
    eventually("it runs where the fence is off", PATIENCE, async || {
        let path = "/v1/sessions/w?node_label=host%3Dn1";
        let api = unfenced.api();
        let asked = api.try_send(Method::PUT, path, Some(&body));
        let answered = tokio::time::timeout(Duration::from_secs(5), asked).await;
        matches!(answered, Ok(Ok(answer)) if answer.status.is_success())
    })
    .await;
    cluster.cut_from_etcd(0).expect("cut");
    let mut tail = Tail::open(&journal(cluster.layout())).expect("the journal");
    eventually("the overlap is seen", PATIENCE, async || {
        let asked = other.api();
        let asked = asked.try_send(Method::PUT, "/v1/sessions/w", Some(&body));
        // Refused until the takeover time is over.
        let _ = tokio::time::timeout(Duration::from_secs(5), asked).await;
        let violations = tail.catch_up().expect("readable").violations;
        let caught = |violation: &Violation| matches!(violation, Violation::Overlap { .. });
        violations.iter().any(caught)
    })
    .await;
}
