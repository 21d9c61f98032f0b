//! The image: only busybox's HTTP server, from the distribution's package.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Where the distribution's busybox-static package installs it, depending on its age.
const BUSYBOX: [&str; 2] = ["/usr/bin/busybox", "/bin/busybox"];
const NAMES: [&str; 4] = ["sh", "httpd", "sleep", "cat"];

/// The page that the server returns.
pub(super) const PAGE: &str = "alive\n";
pub(super) const COMMAND: [&str; 6] = ["httpd", "-f", "-p", "8080", "-h", "/srv"];

/// Makes a root directory below `directory`.
pub(crate) fn root(directory: &Path) -> Result<PathBuf> {
    let busybox = BUSYBOX
        .iter()
        .find(|path| Path::new(path).exists())
        .context(
            "there is no busybox; install the package busybox-static (`cargo xtask setup` in \
             conman's repository does)",
        )?;
    let root = directory.join("root");
    for name in ["bin", "srv", "etc", "proc", "dev", "tmp", "sys"] {
        fs::create_dir_all(root.join(name)).with_context(|| format!("making /{name}"))?;
    }
    fs::copy(busybox, root.join("bin/busybox")).with_context(|| format!("copying {busybox}"))?;
    for name in NAMES {
        symlink("busybox", root.join("bin").join(name)).context("linking busybox")?;
    }
    fs::write(root.join("srv/index.html"), PAGE).context("writing the page")?;
    Ok(root)
}

/// Packs it as an archive.
pub(crate) fn archive(root: &Path) -> Result<PathBuf> {
    let archive = root.with_extension("tar");
    let packed = Command::new("tar")
        .args(["--create", "--numeric-owner", "--owner=0", "--group=0"])
        .arg("--file")
        .arg(&archive)
        .arg("--directory")
        .arg(root)
        .arg(".")
        .status()
        .context("starting tar")?;
    ensure!(packed.success(), "tar cannot pack {}", root.display());
    Ok(archive)
}
