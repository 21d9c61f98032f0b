//! `cargo xtask hostile`: attacks from inside sessions.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::process::{cargo_build_conman, target_dir};
use crate::progress::Step;
use crate::setup;

/// Arguments of `cargo xtask hostile`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct HostileArguments {
    /// Only probes whose names contain one of these.
    pub(crate) filter: Vec<String>,
    /// Only list the probes.
    #[arg(long)]
    pub(crate) list: bool,
    /// On Docker's sessions: exactly those probes succeed that `conman doctor` lists.
    #[arg(long)]
    pub(crate) docker: bool,
    /// Try each layer of protection with the others off, for the probes that need nothing but a session.
    #[arg(long)]
    pub(crate) layers: bool,
    /// Include the long probes, judge the bystander's times as on a quiet machine, and read the host's
    /// counters after each probe.
    #[arg(long)]
    pub(crate) acceptance: bool,
    /// Use this `conman` instead of a debug build of this tree.
    #[arg(long)]
    pub(crate) binary: Option<PathBuf>,
}

pub(crate) fn run(arguments: &HostileArguments) -> Result<()> {
    setup::for_hostile()?;
    // When dropped, it stops a Docker that it has started.
    let _docker = arguments.docker.then(setup::for_docker).transpose()?;
    let mut build = cargo_build_conman();
    build.args(["--package", "conman-hostile", "--package", "conman-shim"]);
    let step = Step::start("building conman and the attacks");
    step.run(&mut build)?;
    step.done();
    let programs = target_dir().join("debug");
    let mut battery = std::process::Command::new(programs.join("conman-hostile"));
    let binary = arguments.binary.clone();
    battery.env(
        "CONMAN_E2E_BINARY",
        binary.unwrap_or_else(|| programs.join("conman")),
    );
    battery.args(&arguments.filter);
    for (wanted, flag) in [
        (arguments.list, "--list"),
        (arguments.docker, "--docker"),
        (arguments.layers, "--layers"),
        (arguments.acceptance, "--acceptance"),
    ] {
        battery.args(wanted.then_some(flag));
    }
    let status = battery.status().context("starting the battery")?;
    if !status.success() {
        bail!("the hostile battery failed, see above ({status})");
    }
    Ok(())
}
