//! Each benchmark once, as small as it can be. The figures are not judged.

mod interruption;

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

/// A benchmark with its arguments, whose temporary files are below a directory.
fn command(arguments: &[&str], directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_conman-bench"));
    command.arg("--conman").arg(conman_e2e::binary());
    command.arg("--json").args(arguments);
    command.env("TMPDIR", directory).stdin(Stdio::null());
    command
}

/// What a benchmark finds, as JSON. It ends with an error if a figure is not within its bounds, which does not
/// matter here.
fn bench(arguments: &[&str]) -> Value {
    let directory = tempfile::tempdir().expect("a directory");
    let output = command(arguments, directory.path()).output();
    let output = output.expect("the benchmarks start");
    let found = found(&output.stdout, &output.stderr);
    let name = found["benchmark"].as_str();
    assert!(
        name.is_some_and(|name| name.starts_with(arguments[0])),
        "{found}"
    );
    found
}

fn found(output: &[u8], errors: &[u8]) -> Value {
    let text = String::from_utf8_lossy(output);
    serde_json::from_str(&text).unwrap_or_else(|error| {
        let errors = String::from_utf8_lossy(errors);
        panic!("{error}; {text}{errors}")
    })
}

#[test]
fn density_reports_the_number_that_it_reaches_on_each_network() {
    if conman_e2e::native().is_none() {
        return;
    }
    for network in ["loopback", "egress", "routed"] {
        let count = ["density", "--count", "3", "--rivals", "0"];
        let found = bench(&[&count[..], &["--network", network]].concat());
        assert_eq!(found["network"], network, "{found}");
        assert_eq!(found["reached"], 3, "{found}");
        assert_eq!(found["bound"], Value::Null, "{found}");
        assert!(found["doctor"].is_object(), "{found}");
    }
}

#[test]
fn the_storm_loses_no_client_of_conman_and_finds_no_two_containers_of_one_session() {
    if conman_e2e::native().is_none() || conman_cluster::requirements().is_none() {
        return;
    }
    if !conman_cluster::has_haproxy() {
        return conman_e2e::lacks("haproxy is missing (package haproxy)");
    }
    let fleet = "storm --ways native --nodes 2 --sessions 4 --members 1";
    let times = "--minutes 0.05 --budget 2 --every 3";
    let arguments = fleet.split(' ').chain(times.split(' '));
    let found = bench(&arguments.collect::<Vec<_>>());
    let way = &found["ways"][0];
    assert!(way["connections"].as_u64() > Some(4), "{found}");
    assert_eq!(
        (&way["never_back"], &way["two_at_once"]),
        (&0.into(), &0.into()),
        "{found}"
    );
    let machine = found["setting"]["machine"].as_str();
    assert!(
        machine.is_some_and(|machine| machine.contains("GiB")),
        "{found}"
    );
}

#[test]
fn preemptions_pauses_hops_and_links_are_measured() {
    if conman_e2e::native().is_none() {
        return;
    }
    for arguments in [
        &["preempt", "--count", "2"][..],
        &["pause", "--count", "1", "--mebibytes", "1"],
        &["hop", "--rounds", "1", "--seconds", "0.05"],
        &["net", "--preempt", "--count", "2", "--rounds", "1"],
    ] {
        bench(arguments);
    }
}

#[tokio::test]
async fn sessions_are_killed_and_started_next_to_plain_containers() {
    let Some(_docker) = conman_e2e::docker_shared().await else {
        return;
    };
    let found = bench(&["kill", "--count", "2"]);
    let ways = found["medians"].as_array().expect("three ways");
    assert_eq!(ways.len(), 3, "{found}");
    let found = bench(&["kill", "--runtime", "native", "--count", "2"]);
    assert_eq!(found["compared_with"], "Docker", "{found}");
    let one = ["--count", "1", "--rivals", "1"];
    let found = bench(&[&["start", "--runtime", "native"], &one[..]].concat());
    let of = |key: &str| found[key].as_array().map(Vec::len);
    assert_eq!(of("first_answer_ms"), Some(1), "{found}");
    assert_eq!(of("plain_first_answer_ms"), Some(1), "{found}");
}

#[tokio::test]
async fn proxies_tunnels_and_copies_are_measured() {
    let Some(_docker) = conman_e2e::docker_shared().await else {
        return;
    };
    let found = bench(&["proxy", "--rounds", "1", "--seconds", "0.05"]);
    let paths = found["medians"].as_array().expect("some paths");
    let inside = paths
        .iter()
        .find(|one| one["path"] == "conman, inside the namespace");
    assert!(
        inside.is_some_and(|inside| inside["ratio_to_direct"].as_f64() > Some(0.0)),
        "{found}"
    );
    bench(&["tunnels", "--count", "10"]);
    let small = ["--mebibytes", "1", "--files", "10", "--rounds", "1"];
    bench(&[&["files"], &small[..]].concat());
}
