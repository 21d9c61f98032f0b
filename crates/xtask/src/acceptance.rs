//! `cargo xtask acceptance`: the faults of a fleet, held to their figures.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::process::{cargo, output};
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
    let asked = arguments.filter.as_deref().unwrap_or_default();
    if names(asked)? == 0 {
        bail!("no fault's name contains `{asked}`; see `cargo test -p conman-cluster -- --list`");
    }
    cluster::build(true)?;
    let release = cluster::release()?;
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
    if let Some(filter) = narrower(asked, ROW_OF_THIRTY) {
        pass("thirty nodes", filter, &THIRTY, Some(&release))?;
    }
    if let Some(filter) = narrower(asked, WITH_FAILPOINTS) {
        pass("the failpoints", filter, &JUDGED, None)?;
    }
    drop(machine);
    if failed.is_empty() {
        return Ok(());
    }
    bail!("not as they should be, see above: {}", failed.join(", "));
}

/// How many rows a filter lets through.
fn names(filter: &str) -> Result<usize> {
    let mut list = cargo();
    list.args(["test", "--quiet", "--locked", "--package", "conman-cluster"]);
    list.args(["--test", "rows", filter, "--", "--list"]);
    let listed = output(&mut list)?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    Ok(text.lines().filter(|line| line.ends_with(": test")).count())
}

/// The rows that both name; `None` when there are none.
fn narrower<'a>(asked: &'a str, row: &'a str) -> Option<&'a str> {
    if row.contains(asked) {
        Some(row)
    } else {
        asked.contains(row).then_some(asked)
    }
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
