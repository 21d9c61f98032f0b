//! Builds the first process of native sessions (`init/init.rs`), a program without libraries that this crate carries.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "init/init.rs";

fn main() {
    tell("cargo::rerun-if-changed=init");
    let target = variable("TARGET").into_string().expect("a name");
    let out = PathBuf::from(variable("OUT_DIR")).join("init");
    let built = Command::new(variable("RUSTC"))
        .arg(SOURCE)
        .args([
            "--edition=2024",
            "--crate-name=conman_init",
            "--crate-type=bin",
        ])
        .arg(format!("--target={target}"))
        .args(["-Cpanic=abort", "-Copt-level=s", "-Cstrip=symbols"])
        .args(["-Cforce-unwind-tables=no", "-Crelocation-model=static"])
        // The linker that comes with the compiler: the target needs no C compiler.
        .args(["-Clinker=rust-lld", "-Clinker-flavor=ld.lld"])
        .args(["-Clink-arg=-static", "-Clink-arg=--build-id=none"])
        // All of it in one page, which all sessions share.
        .args(["-Clink-arg=-znoseparate-code", "-Clink-arg=--no-rosegment"])
        .arg("-o")
        .arg(out)
        .status()
        .expect("rustc runs");
    assert!(built.success(), "cannot build {SOURCE}");
}

fn variable(name: &str) -> OsString {
    env::var_os(name).expect("cargo sets it")
}

fn tell(line: &str) {
    println!("{line}");
}
