//! `cargo xtask acceptance`: the faults of a fleet, held to their figures.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::process::cargo;
use crate::{cluster, setup};

/// Every fault, each judged by its time as on a machine that does nothing else.
const JUDGED: [&str; 2] = ["CONMAN_CLUSTER_QUIET", "CONMAN_CLUSTER_LONG"];

/// Thirty nodes keep two processors busy by themselves: what takes long then is not judged but for the
/// row's own figure.
const THIRTY: [&str; 1] = ["CONMAN_CLUSTER_THIRTY"];
const ROW_OF_THIRTY: &str = "row_21_a_third";

/// What fails where it is told to, as builds for debugging alone do.
const WITH_FAILPOINTS: &str = "row_03";

/// Arguments of `cargo xtask acceptance`.
#[derive(Debug, clap::Args)]
pub(crate) struct AcceptanceArguments {
    /// Only faults whose names contain this.
    filter: Option<String>,
}

pub(crate) fn run(arguments: &AcceptanceArguments) -> Result<()> {
    let machine = setup::for_tests()?;
    cluster::build(true)?;
    let release = cluster::release()?;
    let asked = arguments.filter.as_deref().unwrap_or_default();
    let mut failed = Vec::new();
    let mut pass = |what, filter: &str, judged: &[&str], binary: Option<&Path>| match rows(
        filter, judged, binary,
    ) {
        Ok(true) => Ok(()),
        Ok(false) => {
            failed.push(what);
            Ok(())
        }
        Err(error) => Err(error),
    };
    pass("the faults", asked, &JUDGED, Some(&release))?;
    if ROW_OF_THIRTY.contains(asked) {
        pass("thirty nodes", ROW_OF_THIRTY, &THIRTY, Some(&release))?;
    }
    if WITH_FAILPOINTS.contains(asked) {
        pass("the failpoints", WITH_FAILPOINTS, &JUDGED, None)?;
    }
    drop(machine);
    if failed.is_empty() {
        return Ok(());
    }
    bail!("not as they should be, see above: {}", failed.join(", "));
}

/// Whether all is as it should be, with this build of conman or that for debugging.
fn rows(filter: &str, judged: &[&str], binary: Option<&Path>) -> Result<bool> {
    let mut command = cargo();
    command.args(["test", "--locked", "--package", "conman-cluster"]);
    command.args([
        "--test",
        "rows",
        "--no-fail-fast",
        filter,
        "--",
        "--nocapture",
    ]);
    for variable in judged {
        command.env(variable, "1");
    }
    if let Some(binary) = binary {
        command.env("CONMAN_E2E_BINARY", binary);
    }
    let status = command.status().context("starting cargo test")?;
    Ok(status.success())
}
