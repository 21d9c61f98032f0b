//! The images of the benchmarks' sessions: busybox from the distribution's package, and this program.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Where the distribution's busybox-static package installs it, depending on its age.
const BUSYBOX: [&str; 2] = ["/usr/bin/busybox", "/bin/busybox"];
const NAMES: [&str; 5] = ["sh", "httpd", "sleep", "cat", "awk"];

/// The page that the server returns.
pub(crate) const PAGE: &str = "alive\n";
pub(crate) const COMMAND: [&str; 6] = ["httpd", "-f", "-p", "8080", "-h", "/srv"];

/// Makes a root directory below `directory`.
pub(crate) fn root(directory: &Path) -> Result<PathBuf> {
    let busybox = BUSYBOX
        .iter()
        .find(|path| Path::new(path).exists())
        .context("there is no busybox; install the package busybox-static")?;
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

/// An archive with busybox and this program, and the directory that it is in.
pub(crate) fn with_this_program() -> Result<(tempfile::TempDir, PathBuf)> {
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let root = root(scratch.path())?;
    add_this_program(&root)?;
    let archive = archive(&root)?;
    Ok((scratch, archive))
}

/// Adds this program as `/bin/conman-bench`, with the libraries that it is linked to.
pub(crate) fn add_this_program(root: &Path) -> Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    add_program(root, "conman-bench", &program)
}

/// Adds a program as `/bin/NAME`, with the libraries that it is linked to.
pub(crate) fn add_program(root: &Path, name: &str, program: &Path) -> Result<()> {
    fs::copy(program, root.join("bin").join(name))
        .with_context(|| format!("copying {}", program.display()))?;
    let listed = Command::new("ldd")
        .arg(program)
        .output()
        .context("starting ldd")?;
    let listed = String::from_utf8_lossy(&listed.stdout);
    let libraries = listed
        .split_whitespace()
        .filter(|word| word.starts_with('/'));
    for library in libraries {
        let copy = root.join(library.trim_start_matches('/'));
        let folder = copy.parent().context("a library without a folder")?;
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        fs::copy(library, &copy).with_context(|| format!("copying {library}"))?;
    }
    Ok(())
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
