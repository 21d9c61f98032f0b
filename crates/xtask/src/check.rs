//! `cargo xtask check`: formatting, lints, documentation, dependency rules.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{DEV_BUILD, cargo, installed};
use crate::progress::{Step, shown};

const DENY_VERSION: &str = "0.20.2";

pub(crate) fn run() -> Result<()> {
    run_shown(cargo().args(["fmt", "--all", "--check"]))?;
    run_shown(
        cargo()
            .args([
                "clippy",
                "--locked",
                "--workspace",
                "--all-targets",
                "--quiet",
            ])
            .args(DEV_BUILD)
            .args(["--", "--deny", "warnings"]),
    )?;
    run_shown(
        cargo()
            .args([
                "doc",
                "--locked",
                "--workspace",
                "--no-deps",
                "--document-private-items",
                "--quiet",
            ])
            // With these, documentation uses what clippy has checked of the dependencies.
            .args(DEV_BUILD)
            .env("RUSTDOCFLAGS", "--deny warnings"),
    )?;
    dependency_rules()
}

/// Licences, bans and sources from the lock file; advisories if their database is available.
fn dependency_rules() -> Result<()> {
    if !installed("cargo-deny") {
        let step = Step::start("installing cargo-deny");
        step.run(cargo().args([
            "install",
            "--locked",
            "cargo-deny",
            "--version",
            DENY_VERSION,
        ]))?;
        step.done();
    }
    run_shown(cargo().args(["deny", "--locked", "check", "licenses", "bans", "sources"]))?;
    let database = cargo().args(["deny", "--locked", "fetch", "db"]).output();
    if database.is_ok_and(|output| output.status.success()) {
        run_shown(cargo().args(["deny", "--locked", "check", "advisories"]))
    } else {
        println!("skipped: advisories, because the advisory database cannot be reached from here");
        Ok(())
    }
}

fn run_shown(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    let status = command
        .status()
        .with_context(|| format!("starting `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", shown(command));
    }
    Ok(())
}
