//! The test programs that cargo builds.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process::{cargo_build, cargo_build_conman, cargo_build_workspace, output, target_dir};
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
    step.run(&mut cargo_build_tests(packages))?;
    let listed = output(cargo_build_tests(packages).args(["--quiet", "--message-format=json"]))?;
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

/// Of all packages, in one build with the daemon, so that nothing is built twice or waits for it.
fn cargo_build_tests(packages: &[String]) -> std::process::Command {
    if packages.is_empty() {
        return cargo_build_workspace();
    }
    let mut command = cargo_build();
    command.arg("--tests");
    for package in packages {
        command.args(["--package", package]);
    }
    command
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
