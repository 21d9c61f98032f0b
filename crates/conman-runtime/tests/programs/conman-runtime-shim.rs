//! The shim as a separate program, for this crate's tests: `conman-runtime-shim SOCKET
//! FENCE-CGROUP ROOT…`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use conman_linux::CgroupPart;
use conman_shim::{IdPool, ShimOptions};

/// How long the fence waits for containers to freeze before it kills them.
const FREEZE_PATIENCE: Duration = Duration::from_secs(1);

#[expect(clippy::print_stderr, reason = "usage errors go to stderr")]
fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(socket), Some(cgroup)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: conman-runtime-shim SOCKET FENCE-CGROUP ROOT...");
        return ExitCode::from(2);
    };
    let socket = PathBuf::from(socket);
    let options = ShimOptions {
        state_file: socket.with_extension("state"),
        prepared_file: socket.with_extension("prepared"),
        ids_file: socket.with_extension("ids"),
        socket,
        roots: arguments.map(PathBuf::from).collect(),
        ids: IdPool::default(),
        total_cpu_millis: None,
        do_without: Vec::new(),
        cgroups: CgroupPart::All,
        prepare_for: 0,
        fence_slice: format!("{}.slice", cgroup.to_string_lossy().replacen('-', "_", 1)),
        fence_cgroup: cgroup.to_string_lossy().into_owned(),
        standby: false,
        freeze_patience: FREEZE_PATIENCE,
        frozen_max: Duration::from_mins(15),
    };
    match conman_shim::run(options) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("conman-runtime-shim: {error}");
            ExitCode::FAILURE
        }
    }
}
