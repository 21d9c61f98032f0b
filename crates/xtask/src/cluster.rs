//! `cargo xtask cluster`, `overlap` and `bench`: fleets on this machine, by the program of
//! `tests/cluster`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{cargo, cargo_build, cargo_build_conman, target_dir};
use crate::progress::Step;
use crate::setup;

/// Arguments of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArguments {
    /// `up`, `status`, `exec`, `kill`, `start`, `stop`, `continue`, `cut`, `heal`, `down`; each has
    /// a `--help`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

pub(crate) fn run(arguments: &ClusterArguments) -> Result<()> {
    let is_help = arguments.words.iter().any(|word| word == "--help");
    let makes = !is_help && arguments.words.first().is_some_and(|word| word == "up");
    if makes {
        setup::for_clusters()?;
    }
    // Commands that make a fleet also build the cluster's program: separately that would take a minute
    // of silence, since cargo uses other features for it than together with conman.
    if makes || !Path::new(program().get_program()).exists() {
        build(makes)?;
    }
    let status = program()
        .args(&arguments.words)
        .status()
        .context("starting the cluster's program")?;
    if !status.success() {
        // It has printed the reason; the code is that of a command on a host.
        std::process::exit(status.code().unwrap_or(1));
    }
    Ok(())
}

/// Arguments of `cargo xtask overlap`.
#[derive(Debug, clap::Args)]
pub(crate) struct OverlapArguments {
    /// Continue until sessions have changed hosts this often.
    #[arg(long, default_value_t = 300)]
    pub(crate) handovers: usize,
    /// Seed of the faults; a random one by default, which is printed.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
}

/// `cargo xtask overlap`: the long form of the overlap test.
pub(crate) fn overlap(arguments: &OverlapArguments) -> Result<()> {
    setup::for_clusters()?;
    // When dropped, it stops a Docker that it has started; only its programs are needed.
    let _docker = setup::for_docker()?;
    build(true)?;
    let mut command = program();
    command.args(["overlap", "--handovers", &arguments.handovers.to_string()]);
    if let Some(seed) = arguments.seed {
        command.args(["--seed", &seed.to_string()]);
    }
    let status = command.status().context("starting the overlap test")?;
    if !status.success() {
        bail!("the overlap test failed ({status})");
    }
    Ok(())
}

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    what: Bench,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// How soon another node serves the sessions of a node that leaves.
    Fleet(FleetArguments),
}

#[derive(Debug, clap::Args)]
struct FleetArguments {
    /// Sessions on the node that leaves.
    #[arg(long, default_value_t = 200)]
    sessions: usize,
    /// Those of them with connected clients, through other nodes.
    #[arg(long, default_value_t = 20)]
    clients: usize,
    /// Runtime of the sessions.
    #[arg(long, default_value = "native", value_parser = ["native", "docker"])]
    runtime: String,
    /// The node disappears without a notice.
    #[arg(long)]
    lost: bool,
    /// What the node that leaves does not share with the others, as on separate machines: the
    /// processors, or the kernel with its Docker Engine, which is stopped from the notice on.
    #[arg(long, value_parser = ["processors", "engine"])]
    apart: Option<String>,
    /// Use this `conman` instead of a release build of this tree.
    #[arg(long)]
    binary: Option<PathBuf>,
    #[arg(long)]
    json: bool,
}

/// `cargo xtask bench fleet`.
pub(crate) fn bench(arguments: &BenchArguments) -> Result<()> {
    let Bench::Fleet(fleet) = &arguments.what;
    setup::for_clusters()?;
    let docker = fleet.runtime == "docker";
    // When dropped, it stops a Docker that it has started.
    let _docker = docker.then(setup::for_docker).transpose()?;
    let binary = match &fleet.binary {
        Some(binary) => binary.clone(),
        None => release()?,
    };
    let mut command = Command::new(release_program()?);
    command.env("CONMAN_E2E_BINARY", binary);
    command.arg("bench");
    command.args(["--sessions", &fleet.sessions.to_string()]);
    command.args(["--clients", &fleet.clients.to_string()]);
    for (wanted, flag) in [
        (docker, "--docker"),
        (fleet.lost, "--lost"),
        (fleet.json, "--json"),
    ] {
        if wanted {
            command.arg(flag);
        }
    }
    if let Some(apart) = &fleet.apart {
        command.args(["--apart", apart]);
    }
    let status = command.status().context("starting the benchmark")?;
    if !status.success() {
        bail!("the benchmark failed, or something was not within its bounds ({status})");
    }
    Ok(())
}

/// The benchmarks that take fleets through storms, whole.
pub(crate) fn storm() -> Result<()> {
    setup::for_clusters()?;
    // When dropped, it stops a Docker that it has started; the nodes start theirs.
    let _docker = setup::for_docker()?;
    benchmarks(&[&["storm", "--every-way"], &["storm"]])
}

/// The benchmarks of one machine that repeat published measurements, whole.
pub(crate) fn figures() -> Result<()> {
    setup::for_figures()?;
    let _docker = setup::for_docker()?;
    let density = ["density", "--count", "2000", "--network"];
    let density =
        ["loopback", "egress", "routed"].map(|network| [&density[..], &[network]].concat());
    let all = density.iter().map(Vec::as_slice);
    benchmarks(&all.chain([&["overhead"][..]]).collect::<Vec<_>>())
}

/// Runs them with a release build; the reports are in the target directory. All run, so that one call shows all
/// failures.
fn benchmarks(all: &[&[&str]]) -> Result<()> {
    let conman = release()?;
    let mut failed = Vec::new();
    for arguments in all {
        let mut bench = Command::new(&conman);
        bench.arg("bench").args(*arguments);
        bench
            .arg("--report")
            .arg(target_dir().join(format!("{}.html", arguments.join("-"))));
        let status = bench.status().context("starting a benchmark")?;
        if !status.success() {
            failed.push(arguments.join(" "));
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!(
        "failed, or something was not within its bounds, see above: {}",
        failed.join(", ")
    )
}

/// A release build of conman, with the same command as for its benchmarks: alone, it would have other features
/// and be built a second time.
pub(crate) fn release() -> Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--locked", "--release"]);
    build.args(["--package", "conman", "--package", "conman-bench"]);
    let step = Step::start("building conman for release");
    step.run(&mut build)?;
    step.done();
    Ok(target_dir().join("release/conman"))
}

pub(crate) fn build(conman: bool) -> Result<()> {
    let cluster = ["--package", "conman-cluster"];
    if conman {
        let mut build = cargo_build_conman();
        build.args(cluster);
        let step = Step::start("building conman and the cluster's programs");
        step.run(&mut build)?;
        step.done();
        return Ok(());
    }
    let mut build = cargo_build();
    build.arg("--quiet").args(cluster);
    let status = build.status().context("starting cargo")?;
    if !status.success() {
        bail!("the cluster's program cannot be built ({status})");
    }
    Ok(())
}

/// A release build of the cluster's programs: clients and sessions of a benchmark share the processors with
/// what is measured. For the same reason the sessions' program is linked statically.
fn release_program() -> Result<PathBuf> {
    let step = Step::start("building the cluster's programs for release");
    for (program, flags) in [
        ("conman-cluster", &[][..]),
        ("witness", &["--", "-C", "target-feature=+crt-static"]),
    ] {
        let mut build = cargo();
        build.args(["rustc", "--locked", "--release"]);
        build.args(["--package", "conman-cluster", "--bin", program]);
        step.run(build.args(flags))?;
    }
    step.done();
    Ok(target_dir().join("release/conman-cluster"))
}

fn program() -> Command {
    let programs = target_dir().join("debug");
    let mut command = Command::new(programs.join("conman-cluster"));
    command.env("CONMAN_E2E_BINARY", programs.join("conman"));
    command
}
