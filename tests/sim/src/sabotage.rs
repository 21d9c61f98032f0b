//! Builds this simulation over copies of the real core, each with one patch applied.
//!
//! Only `conman-core`'s `ownership`, `preemption` and `reach` are copied, which need next to nothing of what the
//! rest of that crate depends on. All copies are packages of one workspace, which is built in one go.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

/// What is copied of the core.
const MODULES: [&str; 3] = ["ownership", "preemption", "reach"];

/// Their dependencies, at the versions of the workspace's lock file.
const CORE_DEPENDENCIES: &str = "serde = { version = \"*\", features = [\"derive\", \"rc\"] }\n\
    thiserror = \"*\"\n";

/// The folder of the patches.
#[must_use]
pub fn patches() -> PathBuf {
    package().join("sabotages")
}

/// The names of the patches, in order.
///
/// # Errors
/// When their folder cannot be listed.
pub fn names() -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(patches())? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "patch")
        {
            names.push(name(&path));
        }
    }
    names.sort();
    Ok(names)
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

/// Builds the simulation over one core for each patch, and returns the programs in the order of the
/// patches. `work` must be this call's alone. With optimization a build takes five times as long: for
/// searches through many seeds.
///
/// # Errors
/// When a file cannot be copied, a patch does not apply, or the result does not compile.
pub fn build(work: &Path, patches: &[PathBuf], optimized: bool) -> io::Result<Vec<PathBuf>> {
    let members = work.join("members");
    if members.exists() {
        fs::remove_dir_all(&members)?;
    }
    for patch in patches {
        sabotaged(&members, patch)?;
    }
    fs::write(work.join("Cargo.toml"), WORKSPACE)?;
    fs::copy(repository().join("Cargo.lock"), work.join("Cargo.lock"))?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let target = work.join("target");
    let mut cargo = Command::new(cargo);
    cargo
        .args(["build", "--offline", "--quiet", "--bins"])
        .args(optimized.then_some("--release"))
        .arg("--target-dir")
        .arg(&target)
        .env_remove("CARGO_BUILD_TARGET")
        .env_remove("RUSTC_BOOTSTRAP")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .current_dir(work);
    run(&mut cargo)?;
    let profile = if optimized { "release" } else { "debug" };
    let programs = patches
        .iter()
        .map(|patch| target.join(profile).join(format!("sim-{}", name(patch))));
    Ok(programs.collect())
}

/// Tests build each member once and run it for a moment.
const WORKSPACE: &str = "[workspace]\nresolver = \"3\"\nmembers = [\"members/*\"]\n\
    [profile.dev]\ndebug = false\nincremental = false\n";

/// Copies the core and the simulation, and patches the core. The packages have names of their own, and
/// their libraries those of the originals.
fn sabotaged(members: &Path, patch: &Path) -> io::Result<()> {
    let name = name(patch);
    let (core, sim) = (format!("core-{name}"), format!("sim-{name}"));
    let source = members.join(&core).join("src");
    for module in MODULES {
        let original = repository().join("crates/conman-core/src").join(module);
        copy(&original, &source.join(module))?;
    }
    fs::write(
        source.join("lib.rs"),
        MODULES
            .map(|module| format!("pub mod {module};\n"))
            .concat(),
    )?;
    manifest(members, &core, "conman_core", CORE_DEPENDENCIES)?;
    copy(&package().join("src"), &members.join(&sim).join("src"))?;
    let dependencies = format!("conman-core = {{ path = \"../{core}\", package = \"{core}\" }}\n");
    manifest(members, &sim, "conman_sim", &dependencies)?;
    apply(&source.join(module(patch)), patch, &[])
}

/// Checks that a patch applies to the core.
///
/// # Errors
/// When it does not.
pub fn applies(patch: &Path) -> io::Result<()> {
    let core = repository().join("crates/conman-core/src");
    apply(&core.join(module(patch)), patch, &["--check"])
}

/// The core's module that a patch changes, by the patch's name.
fn module(patch: &Path) -> &'static str {
    let name = name(patch);
    let is_of = |module: &&str| name.contains(&format!("-{module}-"));
    MODULES.into_iter().find(is_of).unwrap_or("ownership")
}

/// What a sabotage is called.
fn name(patch: &Path) -> String {
    let stem = patch.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

fn manifest(members: &Path, name: &str, library: &str, dependencies: &str) -> io::Result<()> {
    let text = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
         [lib]\nname = \"{library}\"\n[dependencies]\n{dependencies}"
    );
    fs::write(members.join(name).join("Cargo.toml"), text)
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

fn apply(folder: &Path, patch: &Path, options: &[&str]) -> io::Result<()> {
    let mut git = Command::new("git");
    git.arg("apply").args(options).arg(patch);
    git.current_dir(folder);
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
