//! The image of the cluster's sessions: that of the end-to-end tests, with the [witness] in it.
//!
//! [witness]: crate::overlap

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use conman_e2e::Native;

use crate::command::run;

/// Where the witness is in the image.
pub(crate) const WITNESS: &str = "/bin/witness";

/// Makes the image's archive in a directory.
pub(crate) fn archive(native: &Native, witness: &Path, directory: &Path) -> Result<PathBuf> {
    let archive = native.archive(directory);
    let extra = directory.join("extra");
    place(witness, &extra.join(WITNESS.trim_start_matches('/')))?;
    for library in libraries(witness)? {
        let inner = library.strip_prefix("/").unwrap_or(&library);
        place(&library, &extra.join(inner))?;
    }
    let mut tar = Command::new("tar");
    tar.args(["--numeric-owner", "--owner=0", "--group=0", "--append"]);
    tar.arg("--file")
        .arg(&archive)
        .arg("-C")
        .arg(&extra)
        .arg(".");
    run(&mut tar)?;
    Ok(archive)
}

fn place(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("a file lies in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// What a program is linked with, the loader included.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let listed = run(Command::new("ldd").arg(program))?;
    let paths = listed
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}
