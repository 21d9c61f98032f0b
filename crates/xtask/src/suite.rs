//! `cargo xtask test`: everything that the tests need, then all of them.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::cargo;
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
    step.done();
    let status = self::tests(arguments)
        .status()
        .context("starting cargo test")?;
    drop(machine);
    if !status.success() {
        bail!("tests failed ({status}); run one again with `cargo xtask test NAME`");
    }
    Ok(())
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
    command.args(&arguments.filter);
    command
}
