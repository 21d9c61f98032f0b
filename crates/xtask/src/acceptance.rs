//! `cargo xtask acceptance`: the faults of a fleet, compared to their figures, the whole hostile
//! battery, the overlap test with the times that nodes derive, all tests on virtual machines, programs in
//! sessions, sessions with gVisor as their kernel, sessions on BTRFS, sabotages of the core, the storm behind a load balancer, and the figures of one machine; a filter selects one of them.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::cluster::OverlapArguments;
use crate::hostile::{self, HostileArguments, Runtime};
use crate::process::{cargo_test_of, cargo_test_workspace, output};
use crate::{cluster, earlier, setup, suite};

/// The module of the faults in the fleet's test program.
const ROWS: &str = "rows::";

/// The fault about two versions in one fleet.
const OF_VERSIONS: &str = "row_34";

/// Every fault, judged by the times of an otherwise idle machine.
const JUDGED: [&str; 2] = ["CONMAN_CLUSTER_QUIET", "CONMAN_CLUSTER_LONG"];

/// Thirty nodes keep two processors busy, so that only the row's own figure is judged.
const THIRTY: [&str; 1] = ["CONMAN_CLUSTER_THIRTY"];
const ROW_OF_THIRTY: &str = "row_21_a_third";

/// The fault that uses failpoints, which only debug builds have.
const WITH_FAILPOINTS: &str = "row_03";

/// The filter that selects the hostile battery.
const HOSTILE: &str = "hostile";

/// The filter that selects the overlap test, and its length.
const OVERLAP: &str = "overlap";
const HANDOVERS: usize = 30;

/// The filter that selects the storm.
const STORM: &str = "storm";

/// The filter that selects the figures of one machine.
const FIGURES: &str = "figures";

/// The filter that selects the tests on virtual machines.
const MACHINES: &str = "machines";

/// The filter that selects the tests of programs in sessions.
const PROGRAMS: &str = "programs";

/// The filter that selects the tests of sessions with a kernel of their own.
const GVISOR: &str = "gvisor";

/// The filter that selects the tests of sessions whose roots are BTRFS snapshots.
const BTRFS: &str = "btrfs";
const RUNTIME: &str = "conman-runtime";

/// The filter that selects the tests that the suite leaves out.
const LONG: &str = "long";

/// The filter that selects the sabotages of the core.
const SABOTAGES: &str = "sabotages";
const SIMULATION: &str = "conman-sim";

/// Variable for the tests on virtual machines at full length, and the packages tested there.
const LONG_MACHINES: &str = "CONMAN_VM_LONG";
const MACHINE_PACKAGES: [&str; 3] = ["conman-linux", "conman-shim", "conman-vm"];

/// Arguments of `cargo xtask acceptance`.
#[derive(Debug, clap::Args)]
pub(crate) struct AcceptanceArguments {
    /// Only faults whose names contain this; `storm`: only the storm behind HAProxy; `figures`: only the figures of one
    /// machine; `hostile`: only the
    /// attacks; `overlap`: only the overlap test; `machines`: only the tests on virtual machines; `programs`:
    /// only programs in sessions; `gvisor`: only sessions with a kernel of their own; `btrfs`: only sessions on BTRFS; `sabotages`: only sabotages of the core; `long`: only the tests that
    /// the suite leaves out and no other part runs.
    filter: Option<String>,
}

pub(crate) fn run(arguments: &AcceptanceArguments) -> Result<()> {
    match arguments.filter.as_deref() {
        Some(HOSTILE) => attacks(),
        Some(MACHINES) => machines(),
        Some(OVERLAP) => overlap(),
        Some(STORM) => cluster::storm(),
        Some(FIGURES) => cluster::figures(),
        Some(PROGRAMS) => programs(),
        Some(GVISOR) => gvisor(),
        Some(BTRFS) => btrfs(),
        Some(SABOTAGES) => sabotages(),
        Some(LONG) => long_tests(),
        Some(filter) => faults(filter),
        None => {
            // All run, so that one acceptance shows all failures.
            let outcomes = [
                faults(""),
                attacks(),
                overlap(),
                machines(),
                programs(),
                gvisor(),
                btrfs(),
                sabotages(),
                long_tests(),
                cluster::storm(),
                cluster::figures(),
            ];
            outcomes.into_iter().collect()
        }
    }
}

fn overlap() -> Result<()> {
    cluster::overlap(&OverlapArguments {
        handovers: HANDOVERS,
        seed: None,
    })
}

/// Runs the tests that the suite leaves out and no other part runs: ignored ones of all packages.
fn long_tests() -> Result<()> {
    let docker = setup::for_tests(&[])?;
    let mut command = cargo_test_workspace();
    command.args(["--no-fail-fast", "--", "--ignored", "--test-threads=1"]);
    for other in [ROWS, "programs::", "sabotage::", "gvisor::", "snapshots::"] {
        command.args(["--skip", other]);
    }
    let status = command.status().context("starting cargo test")?;
    drop(docker);
    if status.success() {
        return Ok(());
    }
    bail!("tests that the suite leaves out failed, see above")
}

/// Runs the core with each sabotage through the simulation.
fn sabotages() -> Result<()> {
    setup::for_tests(&[SIMULATION.to_owned()])?;
    let mut command = cargo_test_of(&[SIMULATION]);
    command.args(["--test", "suite", "sabotage::", "--", "--include-ignored"]);
    let status = command.status().context("starting cargo test")?;
    if status.success() {
        return Ok(());
    }
    bail!("a sabotage was not caught, see above")
}

fn machines() -> Result<()> {
    let packages = MACHINE_PACKAGES.map(str::to_owned);
    let docker = setup::for_tests(&packages)?;
    suite::build(&packages)?;
    let mut command = cargo_test_of(&["conman-vm"]);
    // One at a time: each keeps all processors busy.
    command.args(["--test", "suite", "--", "--nocapture", "--test-threads=1"]);
    command.env(LONG_MACHINES, "1");
    let status = command.status().context("starting cargo test")?;
    drop(docker);
    if status.success() {
        return Ok(());
    }
    bail!("the tests on virtual machines failed, see above")
}

/// Runs the tests of programs in sessions, those of the fast suite included, with a release build.
fn programs() -> Result<()> {
    let docker = setup::for_programs()?;
    let mut command = cargo_test_of(&["conman-e2e", "conman-cluster"]);
    command.args(["--no-fail-fast", "--test", "suite"]);
    command.args(["programs::", "--", "--include-ignored"]);
    command.env("CONMAN_E2E_BINARY", cluster::release()?);
    let status = command.status().context("starting cargo test")?;
    drop(docker);
    if status.success() {
        return Ok(());
    }
    bail!("the tests of programs in sessions failed, see above")
}

/// Runs the tests of sessions with gVisor as their kernel.
fn gvisor() -> Result<()> {
    let runsc = setup::for_gvisor()?;
    let mut command = cargo_test_of(&["conman-runtime", "conman-e2e"]);
    command.args(["--no-fail-fast", "--test", "suite"]);
    command.args(["gvisor::", "--", "--include-ignored"]);
    let status = command.env(setup::RUNSC, runsc).status();
    if !status.context("starting cargo test")?.success() {
        bail!("the tests of sessions with gVisor failed, see above");
    }
    hostile::run(&HostileArguments {
        runtime: Some(Runtime::Gvisor),
        ..HostileArguments::default()
    })
}

/// Runs the native runtime's conformance suite with roots that are BTRFS snapshots.
fn btrfs() -> Result<()> {
    setup::for_tests(&[RUNTIME.to_owned()])?;
    let mut command = cargo_test_of(&[RUNTIME]);
    command.args(["--test", BTRFS, "--", "--include-ignored"]);
    // Each has a loop device, of which some hosts have eight.
    command.arg("--test-threads=2");
    let status = command.status().context("starting cargo test")?;
    if status.success() {
        return Ok(());
    }
    bail!("the tests of sessions on BTRFS failed, see above")
}

fn faults(filter: &str) -> Result<()> {
    let asked = names(filter)?;
    if asked.is_empty() {
        bail!("no fault has such a name; see `cargo test -p conman-cluster rows:: -- --list`");
    }
    setup::for_clusters()?;
    let docker = setup::for_docker()?;
    let of_row = |row: &str| -> Vec<String> {
        let named = asked.iter().filter(|name| name.contains(row));
        named.cloned().collect()
    };
    cluster::build(true)?;
    let release = cluster::release()?;
    let earlier = match of_row(OF_VERSIONS).is_empty() {
        true => None,
        false => earlier::variable()?,
    };
    let passes = [
        ("the faults", asked.clone(), &JUDGED[..], Some(&*release)),
        (
            "thirty nodes",
            of_row(ROW_OF_THIRTY),
            &THIRTY,
            Some(&*release),
        ),
        ("the failpoints", of_row(WITH_FAILPOINTS), &JUDGED, None),
    ];
    let mut failed = Vec::new();
    for (what, names, judged, binary) in passes {
        if !names.is_empty() && !rows(&names, judged, binary, earlier.as_ref())? {
            failed.push(what);
        }
    }
    drop(docker);
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed, see above: {}", failed.join(", "));
}

/// Runs the whole hostile battery on a release build, the layers one by one, and the one on Docker's
/// sessions.
fn attacks() -> Result<()> {
    let native = HostileArguments {
        acceptance: true,
        binary: Some(cluster::release()?),
        ..HostileArguments::default()
    };
    hostile::run(&native)?;
    hostile::run(&HostileArguments {
        layers: true,
        ..HostileArguments::default()
    })?;
    hostile::run(&HostileArguments {
        runtime: Some(Runtime::Docker),
        ..native
    })
}

/// The rows that a filter selects.
fn names(filter: &str) -> Result<Vec<String>> {
    let mut list = cargo_test_of(&["conman-cluster"]);
    list.args(["--quiet", "--test", "suite", ROWS, "--", "--list"]);
    let listed = output(&mut list)?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    let names = names.filter(|name| name.starts_with(ROWS) && name.contains(filter));
    Ok(names.map(str::to_owned).collect())
}

/// Runs rows, with this build of conman or the debug build; returns whether all pass.
fn rows(
    names: &[String],
    judged: &[&str],
    binary: Option<&Path>,
    earlier: Option<&(&str, OsString)>,
) -> Result<bool> {
    let mut command = cargo_test_of(&["conman-cluster"]);
    command.args(["--test", "suite", "--", "--nocapture", "--exact"]);
    command.arg("--include-ignored").args(names);
    for variable in judged {
        command.env(variable, "1");
    }
    if let Some((variable, binary)) = earlier {
        command.env(variable, binary);
    }
    if let Some(binary) = binary {
        command.env("CONMAN_E2E_BINARY", binary);
    }
    let status = command.status().context("starting cargo test")?;
    Ok(status.success())
}
