//! gVisor's `runsc`, built from its Go module: the tests need a version that distributions do not have.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{installed, output, target_dir};
use crate::progress::Step;

const MODULE: &str = "gvisor.dev/gvisor";
const VERSION: &str = "v0.0.0-20260905035102-160fafc42237";

/// Go, in PATH or where its makers' archive is unpacked.
const GO: [&str; 2] = ["go", "/usr/local/go/bin/go"];

/// Builds it, unless it is there, and returns the program. Takes some minutes and 400 MB of downloads.
pub(crate) fn make() -> Result<PathBuf> {
    let directory = target_dir().join("tools");
    let program = directory.join("runsc");
    let Some(go) = GO.into_iter().find(|go| installed(go)) else {
        bail!(
            "gVisor is built by Go, which is missing; install Go 1.26 or later, then run this again"
        );
    };
    if has_version(go, &program) {
        return Ok(program);
    }
    let step = Step::start("building gVisor");
    let mut install = Command::new(go);
    install
        .args(["install", "-ldflags=-s -w"])
        .arg(format!("{MODULE}/runsc@{VERSION}"))
        .env("CGO_ENABLED", "0")
        .env("GOBIN", &directory);
    step.run(&mut install)?;
    step.done();
    if !has_version(go, &program) {
        bail!(
            "{} is not {MODULE} {VERSION}, which was built",
            program.display()
        );
    }
    Ok(program)
}

/// Whether it was built from the version above, by what Go writes into programs. Go has compared the sources to the
/// checksum database.
fn has_version(go: &str, program: &Path) -> bool {
    let mut show = Command::new(go);
    let shown = output(show.args(["version", "-m"]).arg(program)).context("asking Go");
    shown.is_ok_and(|shown| {
        let text = String::from_utf8_lossy(&shown.stdout).into_owned();
        text.lines()
            .any(|line| line.contains(MODULE) && line.contains(VERSION))
    })
}
