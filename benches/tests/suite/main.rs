//! Each benchmark once, as small as it can be. The figures are not judged.

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;

/// What a benchmark finds, as JSON. It ends with an error if a figure is not within its bounds, which does not
/// matter here.
fn bench(arguments: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_conman-bench"));
    command.arg("--conman").arg(conman_e2e::binary());
    let output = command.arg("--json").args(arguments).output();
    let output = output.expect("the benchmarks start");
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text).unwrap_or_else(|error| {
        let errors = String::from_utf8_lossy(&output.stderr);
        panic!("{arguments:?}: {error}; {text}{errors}")
    })
}

/// The daemons of benchmarks share a range of user ids, except the storm's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this machine can hold sessions; says why not.
fn is_ready() -> bool {
    conman_e2e::native().is_some()
}

#[test]
fn density_reports_the_number_that_it_reaches_on_each_network() {
    if !is_ready() {
        return;
    }
    let _alone = alone();
    for network in ["loopback", "egress", "routed"] {
        let found = bench(&[
            "density",
            "--count",
            "3",
            "--rivals",
            "0",
            "--network",
            network,
        ]);
        assert_eq!(found["network"], network, "{found}");
        assert_eq!(found["reached"], 3, "{found}");
        assert_eq!(found["bound"], Value::Null, "{found}");
        assert!(found["doctor"].is_object(), "{found}");
    }
}

#[test]
fn the_storm_loses_no_client_of_conman_and_finds_no_two_containers_of_one_session() {
    if !is_ready() || conman_cluster::requirements().is_none() {
        return;
    }
    if !conman_cluster::has_haproxy() {
        return conman_e2e::lacks("haproxy is missing (package haproxy)");
    }
    let found = bench(&[
        "storm",
        "--ways",
        "native",
        "--nodes",
        "2",
        "--sessions",
        "4",
        "--members",
        "1",
        "--minutes",
        "0.05",
        "--budget",
        "2",
        "--every",
        "3",
    ]);
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
fn preemptions_pauses_and_hops_are_measured() {
    if !is_ready() {
        return;
    }
    let _alone = alone();
    for arguments in [
        &["preempt", "--count", "2"][..],
        &["pause", "--count", "1", "--mebibytes", "1"],
        &["hop", "--rounds", "1"],
    ] {
        let found = bench(arguments);
        assert_eq!(found["benchmark"], arguments[0], "{found}");
    }
}
