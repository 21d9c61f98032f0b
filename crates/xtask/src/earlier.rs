//! Builds an earlier conman, for fleets of two versions.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::{cargo, output, root, target_dir};
use crate::progress::Step;

/// Variable that names another build instead.
const VARIABLE: &str = "CONMAN_PREVIOUS_BINARY";

/// The commit to build; each release moves it to the one before it.
const COMMIT: &str = "790a7a539303cf5eaa33fea30557ae0166c997c9";

/// The variable and the build, if there is one: a clone without history has none.
pub(crate) fn variable() -> Result<Option<(&'static str, OsString)>> {
    let named = match std::env::var_os(VARIABLE) {
        Some(named) => Some(named),
        None => build()?.map(OsString::from),
    };
    Ok(named.map(|named| (VARIABLE, named)))
}

fn build() -> Result<Option<PathBuf>> {
    let place = target_dir().join("earlier");
    let (tree, kept) = (place.join("tree"), place.join(COMMIT));
    let program = kept.join("conman");
    if program.exists() {
        return Ok(Some(program));
    }
    let mut known = Command::new("git");
    known.current_dir(root());
    known.args(["cat-file", "-e", &format!("{COMMIT}^{{commit}}")]);
    let known = known.output().context("cannot start git")?;
    if !known.status.success() {
        eprintln!(
            "skipped: nodes of an earlier version; this clone has no commit {COMMIT}: fetch the whole \
             history, or name an earlier build in {VARIABLE}"
        );
        return Ok(None);
    }
    let step = Step::start("building an earlier conman for release");
    fs::create_dir_all(&tree).with_context(|| format!("cannot make {}", tree.display()))?;
    let archive = place.join("tree.tar");
    let mut export = Command::new("git");
    export.current_dir(root());
    export.args(["archive", "--format=tar", COMMIT, "--output"]);
    output(export.arg(&archive))?;
    let mut unpack = Command::new("tar");
    unpack.arg("--extract").arg("--file").arg(&archive);
    output(unpack.arg("--directory").arg(&tree))?;
    let mut build = cargo();
    build.current_dir(&tree);
    build.args(["build", "--locked", "--release", "--package", "conman"]);
    let built = place.join("build");
    step.run(build.arg("--target-dir").arg(&built))?;
    fs::create_dir_all(&kept).with_context(|| format!("cannot make {}", kept.display()))?;
    // It gets its name only once it is whole.
    let new = kept.join("conman.new");
    let copied = fs::copy(built.join("release/conman"), &new);
    copied
        .and_then(|_| fs::rename(&new, &program))
        .with_context(|| format!("cannot make {}", program.display()))?;
    // Only the program is needed, and the rest is large.
    for rest in [&tree, &built] {
        fs::remove_dir_all(rest).with_context(|| format!("cannot remove {}", rest.display()))?;
    }
    fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))?;
    step.done();
    Ok(Some(program))
}
