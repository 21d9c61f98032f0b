//! The test programs that cargo builds.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process::{
    cargo, cargo_build_conman, cargo_build_workspace, cargo_test_of, output, target_dir,
};
use crate::progress::Step;
use crate::setup::Needs;

/// One test program.
#[derive(Debug, Clone)]
pub(crate) struct TestProgram {
    /// `PACKAGE/TARGET`; unit tests have `unit-` before their target.
    pub(super) name: String,
    /// The package's directory.
    pub(super) directory: PathBuf,
    pub(super) path: PathBuf,
    pub(super) is_unit: bool,
}

/// Builds the daemon and the tests of these packages, or of all.
pub(crate) fn build(packages: &[String]) -> Result<Vec<TestProgram>> {
    let step = Step::start("building conman and its tests");
    if !packages.is_empty() && Needs::of(packages).conman {
        step.run(&mut cargo_build_conman())?;
    }
    let build = || match packages.is_empty() {
        true => Ok(cargo_build_workspace()),
        false => cargo_build_tests(packages),
    };
    step.run(&mut build()?)?;
    let listed = output(build()?.args(["--quiet", "--message-format=json"]))?;
    step.done();
    let text = String::from_utf8(listed.stdout).context("reading cargo's messages")?;
    let programs: Vec<TestProgram> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter_map(|message| program(&message))
        .collect();
    write_list(&programs)?;
    Ok(programs)
}

/// The tests of these packages, and nothing that a build of all packages would build in another way.
fn cargo_build_tests(packages: &[String]) -> Result<Command> {
    let mut metadata = cargo();
    metadata.args(["metadata", "--locked", "--no-deps", "--format-version=1"]);
    let metadata: Value = serde_json::from_slice(&output(&mut metadata)?.stdout)
        .context("reading cargo's description of the workspace")?;
    let all = metadata["packages"].as_array().context("no packages")?;
    let mut command = cargo_test_of(packages);
    command.arg("--no-run");
    command.args(selections(packages, all)?.into_iter().flatten());
    Ok(command)
}

/// The arguments by which cargo builds the targets of these packages, each once: cargo does not accept a repeated
/// `--lib`.
fn selections<'a>(packages: &[String], all: &'a [Value]) -> Result<BTreeSet<Vec<&'a str>>> {
    let mut selected = BTreeSet::new();
    for name in packages {
        let package = all.iter().find(|package| package["name"] == **name);
        let package = package.with_context(|| format!("there is no package {name}"))?;
        let targets = package["targets"].as_array().into_iter().flatten();
        selected.extend(targets.map(selection));
    }
    Ok(selected)
}

/// The arguments by which cargo builds a target of a package.
fn selection(target: &Value) -> Vec<&str> {
    let name = target["name"].as_str().unwrap_or_default();
    match target["kind"][0].as_str() {
        Some("lib") => vec!["--lib"],
        Some("bin") => vec!["--bin", name],
        Some("test") => vec!["--test", name],
        _ => Vec::new(),
    }
}

/// The test program in a message of cargo.
fn program(message: &Value) -> Option<TestProgram> {
    let path = PathBuf::from(message["executable"].as_str()?);
    let kind = &message["target"]["kind"][0];
    if message["profile"]["test"] != true || kind == "bench" {
        return None;
    }
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let directory = manifest.parent()?.to_owned();
    let package = directory.file_name()?.to_str()?;
    let is_unit = kind != "test";
    let target = message["target"]["name"].as_str()?;
    let prefix = if is_unit { "unit-" } else { "" };
    Some(TestProgram {
        name: format!("{package}/{prefix}{target}"),
        directory,
        path,
        is_unit,
    })
}

/// Writes `PACKAGE/TARGET PATH` of each integration-test program to a file, for the tests that
/// copy some of them to a virtual machine.
fn write_list(programs: &[TestProgram]) -> Result<()> {
    let lines: String = programs
        .iter()
        .filter(|program| !program.is_unit)
        .map(|program| format!("{} {}\n", program.name, program.path.display()))
        .collect();
    let directory = target_dir().join("worker-vm");
    fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
    fs::write(directory.join("programs"), lines).context("writing the list of test programs")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn targets_of_one_name_in_two_packages_are_selected_once() {
        let target = |kind: &str, name: &str| json!({"kind": [kind], "name": name});
        let all = ["a", "b"].map(|name| {
            let targets = [
                target("lib", name),
                target("test", "suite"),
                target("bin", name),
            ];
            json!({"name": name, "targets": targets})
        });
        let selected = selections(&["a".to_owned(), "b".to_owned()], &all).expect("both are there");
        let selected: Vec<_> = selected.into_iter().flatten().collect();
        let expected = ["--bin", "a", "--bin", "b", "--lib", "--test", "suite"];
        assert_eq!(selected, expected);
    }
}
