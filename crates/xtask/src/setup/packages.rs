//! Distribution packages, by name.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::installed;
use crate::progress::Step;

/// Installs those of `packages` that are missing.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    let missing: Vec<&str> = packages
        .iter()
        .copied()
        .filter(|name| !is_installed(name))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !installed("apt-get") {
        bail!(
            "this machine has no apt-get; install {} by hand, then run this again",
            missing.join(", ")
        );
    }
    let step = Step::start(format!("installing {}", missing.join(", ")));
    refresh(&step)?;
    step.run(
        apt_get()
            .args(["install", "--yes", "--no-install-recommends"])
            .args(&missing),
    )?;
    step.done();
    Ok(())
}

/// Downloads packages and all their dependencies into `directory` without installing them.
pub(crate) fn download(step: &Step, packages: &[&str], directory: &std::path::Path) -> Result<()> {
    refresh(step)?;
    let mut depends = Command::new("apt-cache");
    depends
        .args(["depends", "--recurse", "--important"])
        .args(packages);
    let listed = crate::process::output(&mut depends)?;
    let text = String::from_utf8(listed.stdout).context("reading apt-cache's answer")?;
    // Package names are at the start of a line; relations are indented, virtual ones in <>.
    let names = text
        .lines()
        .filter(|line| line.starts_with(|c: char| c.is_ascii_alphanumeric()));
    step.run(apt_get().arg("download").args(names).current_dir(directory))
}

fn refresh(step: &Step) -> Result<()> {
    step.note("refreshing the package lists");
    step.run(apt_get().arg("update"))
}

/// Whether a package is installed.
pub(crate) fn is_installed(package: &str) -> bool {
    Command::new("dpkg-query")
        .args(["--show", "--showformat=${db:Status-Status}", package])
        .output()
        .is_ok_and(|output| output.stdout == b"installed")
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-o", "DPkg::Lock::Timeout=300"]);
    command
}
