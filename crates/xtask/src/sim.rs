//! `cargo xtask sim`: the search through simulated fleets, and large fleets on one etcd, from release builds.

use anyhow::{Context, Result, bail};

use crate::process::cargo;
use crate::progress::Step;

/// Arguments of `cargo xtask sim`.
#[derive(Debug, clap::Args)]
pub(crate) struct SimArguments {
    /// Number of fleets, one for each seed.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed; from 1,000,000 on, fleets have the times that nodes derive.
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Continue after a violation and count them by rule.
    #[arg(long)]
    all: bool,
    /// Machines pause, unnoticed, for longer than the takeover time allows.
    #[arg(long)]
    beyond: bool,
    /// Instead: fleets of up to ten thousand nodes through a mass preemption, and an etcd measured. Further
    /// arguments are the program's; `--scale -- --help` lists them.
    #[arg(long, conflicts_with_all = ["seeds", "start", "all", "beyond", "sabotage"])]
    scale: bool,
    #[arg(last = true, requires = "scale")]
    arguments: Vec<String>,
    /// Use a core broken by `tests/sim/sabotages/NAME.patch`.
    #[arg(long, value_name = "NAME")]
    sabotage: Option<String>,
}

pub(crate) fn run(arguments: &SimArguments) -> Result<()> {
    if arguments.scale {
        return scale(&arguments.arguments);
    }
    let build = ["--release", "--locked", "--package", "conman-sim"];
    let step = Step::start("building the simulation");
    step.run(cargo().arg("build").args(build))?;
    step.done();
    let mut search = cargo();
    search.args(["run", "--quiet"]).args(build).arg("--");
    search.args(["--seeds", &arguments.seeds.to_string()]);
    search.args(["--start", &arguments.start.to_string()]);
    search.args(arguments.all.then_some("--all"));
    search.args(arguments.beyond.then_some("--beyond"));
    if let Some(name) = &arguments.sabotage {
        search.args(["--sabotage", name]);
    }
    let status = search.status().context("starting the simulation")?;
    if !status.success() {
        bail!("the simulation found a violation, or could not run ({status})");
    }
    Ok(())
}

fn scale(arguments: &[String]) -> Result<()> {
    let build = ["--release", "--locked", "--package", "conman-scale"];
    let step = Step::start("building the simulation of large fleets");
    step.run(cargo().arg("build").args(build))?;
    step.done();
    let mut scale = cargo();
    scale.args(["run", "--quiet"]).args(build).arg("--");
    let status = scale.args(arguments).status();
    let status = status.context("starting the simulation")?;
    if !status.success() {
        bail!("the simulation of large fleets failed ({status})");
    }
    Ok(())
}
