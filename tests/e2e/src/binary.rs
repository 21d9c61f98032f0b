//! Finds the `conman` to test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The `conman` to test: the one in `CONMAN_E2E_BINARY`, or the one that cargo put beside the
/// running test, built first when it is missing.
///
/// One that is there is taken as it is: `cargo xtask test` brings it up to date, and a cargo
/// inside of every test binary would cost seconds each.
///
/// # Panics
/// When it cannot be built.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(named) = std::env::var_os("CONMAN_E2E_BINARY") {
            return named.into();
        }
        let test = std::env::current_exe().expect("the running test has a path");
        let profile = test
            .ancestors()
            .nth(2)
            .expect("a test lies in <profile>/deps");
        let binary = profile.join("conman");
        if !binary.exists() {
            build(profile);
        }
        binary
    })
}

fn build(profile: &Path) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--package", "conman"])
        .args(["--features", "dev-build"])
        .arg("--target-dir")
        .arg(profile.parent().expect("a profile lies in a target folder"));
    if profile.ends_with("release") {
        command.arg("--release");
    }
    let status = command.status().expect("cargo starts");
    assert!(status.success(), "conman cannot be built: {status}");
}

/// Copies a program that is to be run. Another process does it: while this one has a file open for writing, a child
/// that another test's thread forks has it too, and the file cannot be run (`ETXTBSY`).
///
/// # Panics
/// When it cannot be copied.
pub fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").args([from, to]).status();
    assert!(
        copied.is_ok_and(|status| status.success()),
        "cannot copy {} to {}",
        from.display(),
        to.display()
    );
}
