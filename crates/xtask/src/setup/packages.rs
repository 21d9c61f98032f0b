//! Distribution packages, by name.

use std::fs::{self, File};
use std::io::Write as _;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{installed, target_dir};
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
    note(&missing)
}

/// Lists what the set-up has installed, a package a line.
const NOTE: &str = "installed-packages";

fn note(packages: &[&str]) -> Result<()> {
    let path = target_dir().join(NOTE);
    let note = File::options().create(true).append(true).open(&path);
    note.and_then(|mut note| writeln!(note, "{}", packages.join("\n")))
        .with_context(|| format!("writing {}", path.display()))
}

/// Packages that the set-up has installed and that are there, without their dependencies.
pub(crate) fn installed_packages() -> Vec<String> {
    let text = fs::read_to_string(target_dir().join(NOTE)).unwrap_or_default();
    let names = text.lines().filter(|name| is_installed(name));
    names.map(str::to_owned).collect()
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
