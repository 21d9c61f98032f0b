//! `cargo xtask test`: everything that the tests need, then all of them.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process::{cargo, output, target_dir};
use crate::{progress::Step, setup};

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArguments {
    /// Only these packages.
    #[arg(long = "package", short = 'p')]
    packages: Vec<String>,
    /// Only tests whose names contain this.
    filter: Option<String>,
}

pub(crate) fn run(arguments: &TestArguments) -> Result<()> {
    let machine = setup::for_tests()?;
    let step = Step::start("building conman and its tests");
    step.run(cargo().args(["build", "--locked", "--package", "conman"]))?;
    let mut tests = tests(arguments);
    step.run(tests.arg("--no-run"))?;
    list_programs(arguments)?;
    step.done();
    let status = self::tests(arguments)
        .args(&arguments.filter)
        .status()
        .context("starting cargo test")?;
    drop(machine);
    if !status.success() {
        bail!("tests failed ({status}); run one again with `cargo xtask test NAME`");
    }
    Ok(())
}

/// Writes down which programs the tests are, for those that take them to other machines.
fn list_programs(arguments: &TestArguments) -> Result<()> {
    let mut tests = tests(arguments);
    let built = output(tests.args(["--no-run", "--quiet", "--message-format=json"]))?;
    let text = String::from_utf8(built.stdout).context("reading cargo's answer")?;
    let programs: Vec<String> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter_map(|message| program(&message))
        .collect();
    let directory = target_dir().join("worker-vm");
    fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
    fs::write(directory.join("programs"), programs.concat()).context("writing the tests' programs")
}

/// `PACKAGE/TARGET PATH` of a test program.
fn program(message: &Value) -> Option<String> {
    let path = message["executable"].as_str()?;
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let package = manifest.parent()?.file_name()?.to_str()?;
    let target = message["target"]["name"].as_str()?;
    let is_test = message["target"]["kind"][0] == "test";
    is_test.then(|| format!("{package}/{target} {path}\n"))
}

fn tests(arguments: &TestArguments) -> Command {
    let mut command = cargo();
    command.args(["test", "--locked", "--no-fail-fast"]);
    if arguments.packages.is_empty() {
        command.arg("--workspace");
    }
    for package in &arguments.packages {
        command.args(["--package", package]);
    }
    command
}
