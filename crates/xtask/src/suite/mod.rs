//! `cargo xtask test`: everything that the tests need, then all of them.

mod programs;
mod runner;
mod standstill;

use std::num::NonZero;
use std::thread::available_parallelism;

use anyhow::{Result, bail};

use crate::setup;
use runner::Failures;

pub(crate) use programs::build;

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArguments {
    /// Only these packages.
    #[arg(long = "package", short = 'p')]
    packages: Vec<String>,
    /// Concurrent test programs; by default two more than the machine has processors.
    #[arg(long, short)]
    jobs: Option<NonZero<usize>>,
    /// Fail when more tests than this fail and pass only when they run alone.
    #[arg(long)]
    flaky_at_most: Option<usize>,
    /// Only tests whose names contain this.
    filter: Option<String>,
}

pub(crate) fn run(arguments: &TestArguments) -> Result<()> {
    let machine = setup::for_tests(&arguments.packages)?;
    let programs = programs::build(&arguments.packages)?;
    let jobs = arguments.jobs.map_or_else(default_jobs, NonZero::get);
    let Failures { failed, flaky } = runner::run(programs, jobs, arguments.filter.as_deref())?;
    drop(machine);
    if !failed.is_empty() {
        bail!(
            "tests failed in {}; run one again with `cargo xtask test NAME`",
            failed.join(", ")
        );
    }
    if let Some(most) = arguments.flaky_at_most
        && flaky > most
    {
        bail!("{flaky} tests are flaky, {most} at most may be; mend those listed above");
    }
    Ok(())
}

/// Most tests wait for something most of the time.
fn default_jobs() -> usize {
    available_parallelism().map_or(1, NonZero::get) + 2
}
