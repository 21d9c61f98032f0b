//! Builds this simulation over a copy of the real core with one patch applied.
//!
//! Only `conman-core`'s `ownership` is copied, which needs next to nothing of what the rest of that
//! crate depends on; so each patched build takes seconds. All share one build folder.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

/// The dependencies of `ownership`, at the versions of the workspace's lock file.
const CORE_DEPENDENCIES: &[&str] = &["thiserror"];

/// The folder of the patches.
#[must_use]
pub fn patches() -> PathBuf {
    package().join("sabotages")
}

fn package() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn repository() -> PathBuf {
    let package = package();
    package
        .ancestors()
        .nth(2)
        .map_or(package.clone(), Path::to_path_buf)
}

/// The patched simulation's binary, built below `work`, which must be this call's alone;
/// without a patch, the same build of the core as it is.
///
/// # Errors
/// When a file cannot be copied, the patch does not apply, or the result does not compile.
pub fn build(work: &Path, patch: Option<&Path>) -> io::Result<PathBuf> {
    let core = work.join("core");
    let ownership = core.join("src/ownership");
    for sources in [core.join("src"), work.join("sim/src")] {
        if sources.exists() {
            fs::remove_dir_all(sources)?;
        }
    }
    let crates = repository().join("crates");
    copy(&crates.join("conman-core/src/ownership"), &ownership)?;
    copy(&package().join("src"), &work.join("sim/src"))?;
    fs::write(core.join("src/lib.rs"), "pub mod ownership;\n")?;
    let dependencies = CORE_DEPENDENCIES.iter().fold(String::new(), |mut all, of| {
        let _ = writeln!(all, "{of} = \"*\"");
        all
    });
    manifest(&core, "conman-core", &dependencies)?;
    manifest(
        &work.join("sim"),
        "conman-sim",
        "conman-core.path = \"../core\"\n",
    )?;
    fs::write(
        work.join("Cargo.toml"),
        "[workspace]\nresolver = \"3\"\nmembers = [\"core\", \"sim\"]\n\
         [profile.dev]\ndebug = false\nopt-level = 1\n",
    )?;
    fs::copy(repository().join("Cargo.lock"), work.join("Cargo.lock"))?;
    if let Some(patch) = patch {
        apply(&ownership, patch)?;
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let target = work.join("target");
    let build = ["build", "--offline", "--quiet", "--package", "conman-sim"];
    let mut cargo = Command::new(cargo);
    cargo
        .args(build)
        .arg("--target-dir")
        .arg(&target)
        .env_remove("CARGO_BUILD_TARGET")
        .current_dir(work);
    run(&mut cargo)?;
    Ok(target.join("debug/conman-sim"))
}

fn manifest(folder: &Path, name: &str, dependencies: &str) -> io::Result<()> {
    let text = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
         [dependencies]\n{dependencies}"
    );
    fs::write(folder.join("Cargo.toml"), text)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::write(target, fs::read(entry.path())?)?;
        }
    }
    Ok(())
}

fn apply(folder: &Path, patch: &Path) -> io::Result<()> {
    let mut git = Command::new("git");
    git.arg("apply").arg(patch).current_dir(folder);
    // Outside any repository: inside one, git passes over files that it does not know.
    git.env(
        "GIT_CEILING_DIRECTORIES",
        folder.ancestors().nth(1).unwrap_or(folder),
    );
    git.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE");
    run(&mut git)
}

fn run(command: &mut Command) -> io::Result<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{command:?}: {told}")))
}
