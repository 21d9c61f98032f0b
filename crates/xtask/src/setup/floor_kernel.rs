//! The oldest kernel that conman supports, from an older release of Debian: only its package, for
//! a machine whose other packages are of the host's release.
//!
//! The host's configuration of apt is used and not changed: lists and archives are separate.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::worker_vm::Distribution;
use crate::process::output;

/// How its release begins.
pub(super) const RELEASE: &str = "5.10.";
/// The release of Debian that has it, for virtual machines, through an empty package.
const CODENAME: &str = "bullseye";
const PACKAGE: &str = "linux-image-cloud-amd64";
/// Key for the signatures of Debian's archives.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Downloads the package to below `work`.
pub(super) fn fetch(host: &Distribution, work: &Path) -> Result<PathBuf> {
    if host.origin != "Debian" {
        bail!("{} has no such kernel", host.origin);
    }
    let apart = work.join("floor-kernel");
    for directory in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apart.join(directory)).context("making folders for apt")?;
    }
    let signed = if Path::new(KEYRING).exists() {
        format!("Signed-By: {KEYRING}\n")
    } else {
        String::new()
    };
    let sources = apart.join("floor.sources");
    let archive = &host.archive;
    let text =
        format!("Types: deb\nURIs: {archive}\nSuites: {CODENAME}\nComponents: main\n{signed}");
    fs::write(&sources, text).context("writing the source of packages")?;
    let apt = |program: &str| {
        let mut command = Command::new(program);
        command.args(["-o", "Acquire::Retries=3"]);
        for (key, value) in [
            ("Dir::Etc::sourcelist", &*sources),
            ("Dir::Etc::sourceparts", Path::new("/dev/null")),
            ("Dir::State::lists", &apart.join("lists")),
            ("Dir::Cache", &apart.join("cache")),
        ] {
            command.arg("-o").arg(format!("{key}={}", value.display()));
        }
        command.current_dir(&apart);
        command
    };
    output(apt("apt-get").args(["--quiet", "update"]))?;
    let depends = output(apt("apt-cache").args(["depends", PACKAGE]))?;
    let depends = String::from_utf8_lossy(&depends.stdout).into_owned();
    let package = depends
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
        .filter(|release| release.starts_with(RELEASE))
        .with_context(|| format!("{CODENAME} has no Linux {RELEASE} any more"))?;
    output(apt("apt-get").args(["--quiet", "download", &format!("linux-image-{package}")]))?;
    let files = fs::read_dir(&apart).context("listing what was downloaded")?;
    files
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt-get downloaded no package")
}
