//! Sabotages of the real core, each caught by its pinned seeds as what it is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use conman_sim::{Pauses, sabotage, simulate};
use serde::Deserialize;

const SECONDS_A_DAY: u64 = 86_400;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pinned {
    seeds: Vec<u64>,
    caught_as: Vec<String>,
}

fn pinned() -> BTreeMap<String, Pinned> {
    let file = sabotage::patches().join("seeds.toml");
    let text = std::fs::read_to_string(&file).expect("reading the pinned seeds");
    toml::from_str(&text).expect("parsing the pinned seeds")
}

/// The rule that the first violation in `seed` broke.
fn rule_broken(binary: &Path, seed: u64) -> Option<String> {
    let mut search = Command::new(binary);
    search.args(["--seeds", "1", "--start", &seed.to_string()]);
    let output = search.output().expect("running the sabotaged simulation");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        matches!(output.status.code(), Some(0 | 1)) && told.contains("1 seeds in"),
        "seed {seed} did not run: {told}"
    );
    let prefix = format!("seed {seed}: ");
    let line = told.lines().find_map(|line| line.strip_prefix(&prefix))?;
    line.split_once(':').map(|(rule, _)| rule.to_owned())
}

#[test]
fn every_sabotage_has_its_patch_and_its_seeds() {
    let names = sabotage::names().expect("listing the patches");
    let pinned = pinned();
    assert_eq!(names, pinned.keys().cloned().collect::<Vec<_>>());
    assert!(names.len() >= 12);
    // The number alone names one.
    let numbers: BTreeSet<_> = names.iter().map(|name| &name[..2]).collect();
    assert_eq!(numbers.len(), names.len());
    assert!(pinned.values().all(|pinned| !pinned.seeds.is_empty()));
}

/// The suite compiles one a day; a change of the core must not leave the others behind.
#[test]
fn every_sabotage_applies_to_the_core() {
    for name in sabotage::names().expect("listing the patches") {
        let patch = sabotage::patches().join(format!("{name}.patch"));
        sabotage::applies(&patch).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn the_untouched_core_passes_every_pinned_seed() {
    for (name, Pinned { seeds, .. }) in pinned() {
        for seed in seeds {
            let violation = simulate(seed, Pauses::Assumed).violation;
            assert!(violation.is_none(), "{name}, seed {seed}: {violation:?}");
        }
    }
}

/// Builds the core with each of these, and runs their pinned seeds.
fn are_caught(pinned: BTreeMap<String, Pinned>, work: &str) {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join(work);
    std::fs::create_dir_all(&work).expect("making a folder for the builds");
    let patches: Vec<_> = pinned
        .keys()
        .map(|name| sabotage::patches().join(format!("{name}.patch")))
        .collect();
    let binaries = sabotage::build(&work, &patches, false)
        .unwrap_or_else(|error| panic!("one does not apply or compile any more: {error}"));
    for ((name, Pinned { seeds, caught_as }), binary) in pinned.into_iter().zip(binaries) {
        for seed in seeds {
            let rule = rule_broken(&binary, seed);
            assert!(
                rule.as_ref().is_some_and(|rule| caught_as.contains(rule)),
                "{name} in seed {seed} is caught as {rule:?} instead of one of {caught_as:?}; find \
                 other seeds with `cargo xtask sim --sabotage {name} --all`"
            );
        }
    }
}

/// Another one each day.
#[test]
fn the_sabotage_of_the_day_is_caught_as_what_it_is() {
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let day = usize::try_from(since.as_secs() / SECONDS_A_DAY).expect("few days");
    let mut pinned = pinned();
    let place = day % pinned.len();
    let name = pinned.keys().nth(place).expect("one of them").clone();
    pinned.retain(|other, _| *other == name);
    are_caught(pinned, "sabotage-of-the-day");
}

#[test]
#[ignore = "compiles the core once for each: `cargo xtask acceptance sabotages`"]
fn every_sabotage_of_the_core_is_caught_as_what_it_is() {
    are_caught(pinned(), "sabotaged");
}
