//! The shim as a separate program, for tests:
//! `conman-shim SOCKET FENCE-CGROUP [--without INTERFACE]… [--cgroups v1|unified]
//! [--prepare-for COUNT] [--total-cpu-millis COUNT] [--frozen-max-ms MS] [--standby] ROOT…`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use conman_linux::{CgroupPart, Interface};
use conman_shim::{IdPool, ShimOptions};

/// The design's K.
const FREEZE_PATIENCE: Duration = Duration::from_secs(1);
/// Used unless a test gives less.
const FROZEN_MAX: Duration = Duration::from_mins(15);

#[expect(clippy::print_stderr, reason = "a program tells its user there")]
fn usage() -> ExitCode {
    eprintln!(
        "usage: conman-shim SOCKET FENCE-CGROUP [--without INTERFACE]... [--cgroups v1|unified] \
         [--prepare-for COUNT] [--total-cpu-millis COUNT] [--frozen-max-ms MS] [--standby] ROOT..."
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
        ids_file: socket.with_extension("ids"),
        socket,
        roots: Vec::new(),
        ids: IdPool::default(),
        total_cpu_millis: None,
        do_without: Vec::new(),
        cgroups: CgroupPart::All,
        prepare_for: 0,
        fence_slice: format!("{}.slice", cgroup.to_string_lossy().replacen('-', "_", 1)),
        fence_cgroup: cgroup.to_string_lossy().into_owned(),
        standby: false,
        freeze_patience: FREEZE_PATIENCE,
        frozen_max: FROZEN_MAX,
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
            Some("--frozen-max-ms") => match value().and_then(|ms| ms.parse().ok()) {
                Some(ms) => options.frozen_max = Duration::from_millis(ms),
                None => return usage(),
            },
            Some("--total-cpu-millis") => match value().and_then(|millis| millis.parse().ok()) {
                Some(millis) => options.total_cpu_millis = Some(millis),
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
