//! The shim as a program of its own, for tests:
//! `conman-shim SOCKET FENCE-CGROUP [--without INTERFACE]… [--cgroups v1|unified]
//! [--prepare-for COUNT] [--standby] ROOT…`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use conman_linux::{CgroupPart, Interface};
use conman_shim::ShimOptions;

/// The design's K.
const FREEZE_PATIENCE: Duration = Duration::from_secs(1);

#[expect(clippy::print_stderr, reason = "a program tells its user there")]
fn usage() -> ExitCode {
    eprintln!(
        "usage: conman-shim SOCKET FENCE-CGROUP [--without INTERFACE]... [--cgroups v1|unified] \
         [--prepare-for COUNT] [--standby] ROOT..."
    );
    ExitCode::from(2)
}

#[expect(clippy::print_stderr, reason = "a program tells its user there")]
fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(socket), Some(cgroup)) = (arguments.next(), arguments.next()) else {
        return usage();
    };
    let socket = PathBuf::from(socket);
    let mut options = ShimOptions {
        state_file: socket.with_extension("state"),
        prepared_file: socket.with_extension("prepared"),
        socket,
        roots: Vec::new(),
        do_without: Vec::new(),
        cgroups: CgroupPart::All,
        prepare_for: 0,
        fence_slice: format!("{}.slice", cgroup.to_string_lossy().replacen('-', "_", 1)),
        fence_cgroup: cgroup.to_string_lossy().into_owned(),
        standby: false,
        freeze_patience: FREEZE_PATIENCE,
    };
    while let Some(word) = arguments.next() {
        let mut value = || arguments.next()?.into_string().ok();
        match word.to_str() {
            Some("--without") => match value().and_then(|name| Interface::from_name(&name)) {
                Some(interface) => options.do_without.push(interface),
                None => return usage(),
            },
            Some("--standby") => options.standby = true,
            Some("--prepare-for") => match value().and_then(|count| count.parse().ok()) {
                Some(count) => options.prepare_for = count,
                None => return usage(),
            },
            Some("--cgroups") => match value().as_deref() {
                Some("v1") => options.cgroups = CgroupPart::V1,
                Some("unified") => options.cgroups = CgroupPart::Unified,
                _ => return usage(),
            },
            _ => options.roots.push(PathBuf::from(word)),
        }
    }
    match conman_shim::run(options) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("conman-shim: {error}");
            ExitCode::FAILURE
        }
    }
}
