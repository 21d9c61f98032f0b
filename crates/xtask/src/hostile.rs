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
    /// On sessions of another runtime: exactly those probes succeed that are known to; for Docker, `conman doctor`
    /// lists them.
    #[arg(long, value_enum)]
    pub(crate) runtime: Option<Runtime>,
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

/// What sessions are attacked instead of native ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Runtime {
    Docker,
    Gvisor,
}

pub(crate) fn run(arguments: &HostileArguments) -> Result<()> {
    setup::for_hostile()?;
    // When dropped, it stops a Docker that it has started.
    let is_docker = arguments.runtime == Some(Runtime::Docker);
    let _docker = is_docker.then(setup::for_docker).transpose()?;
    let is_gvisor = arguments.runtime == Some(Runtime::Gvisor);
    let runsc = is_gvisor.then(setup::for_gvisor).transpose()?;
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
    if let Some(runsc) = runsc {
        battery.env(setup::RUNSC, runsc);
    }
    for (wanted, flag) in [
        (arguments.list, "--list"),
        (is_docker, "--runtime=docker"),
        (is_gvisor, "--runtime=gvisor"),
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
