//! Programs of the system, run to their end.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// Runs a command: what it printed, or an error that holds what it complained of.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    run_with_input(command, "")
}

/// The same with a standard input.
pub(crate) fn run_with_input(command: &mut Command, input: &str) -> Result<String> {
    let shown = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {shown}; is it installed?"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // The inputs are short, so no output can block it; who does not read complains below.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child
        .wait_with_output()
        .with_context(|| format!("cannot wait for {shown}"))?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        bail!("{shown} failed ({}): {}", output.status, told.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A program in a network namespace. The process is the program itself, not a parent of it.
pub(crate) fn inside(namespace: &Path, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    let mut net = std::ffi::OsString::from("--net=");
    net.push(namespace);
    command.arg(net).arg("--").arg(program);
    command
}
