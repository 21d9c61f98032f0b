//! Failures of the steps of a start, with the limit that was reached where the kernel names none.

use std::io;

use conman_shim_protocol::LaunchError;

/// The failure of a step of a start.
pub(super) fn step(name: &str) -> impl FnOnce(io::Error) -> LaunchError {
    move |error| LaunchError::step(name, &error)
}

/// Like [`step`], for namespaces: when there are too many, the kernel says only that there is no space.
pub(super) fn namespace_step(
    name: &'static str,
    limit: &'static str,
) -> impl FnOnce(io::Error) -> LaunchError {
    move |error| {
        let is_limit = error.raw_os_error() == Some(rustix::io::Errno::NOSPC.raw_os_error());
        match is_limit {
            true => step(&format!("{name}: {limit} is reached"))(error),
            false => process_step(name)(error),
        }
    }
}

/// Like [`step`], for processes: when there are too many, the kernel says only that it may be tried again.
pub(super) fn process_step(name: &'static str) -> impl FnOnce(io::Error) -> LaunchError {
    const LIMITS: &str =
        "pids.max of its cgroup or of one above, kernel.pid_max or kernel.threads-max";
    move |error| {
        let is_limit = error.raw_os_error() == Some(rustix::io::Errno::AGAIN.raw_os_error());
        match is_limit {
            true => step(&format!("{name}: {LIMITS} is reached"))(error),
            false => step(name)(error),
        }
    }
}
