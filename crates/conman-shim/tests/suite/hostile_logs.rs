//! What a container may do to its own log, and what of it the shim undoes.

use std::os::unix::fs::MetadataExt;

use conman_shim::ContainerState;

use crate::support::probe::{Arg, Probe, run_probe};
use crate::support::{Shim, available, until};

/// Bytes of the log that are kept.
const BOUND: u64 = 256 * 1_024;

const FALLOC_FL_KEEP_SIZE: u64 = 1;

#[test]
fn blocks_that_a_container_allocates_beyond_its_logs_end_are_freed() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let arguments = [1, FALLOC_FL_KEEP_SIZE, 0, 256 << 20].map(Arg::Number);
    let fallocate = Probe::of(libc::SYS_fallocate, &arguments);
    let ended = run_probe(&shim, "greedy.1", fallocate, 0o755, |spec| {
        spec.log_bytes = Some(BOUND);
    });
    assert_eq!(ended, ContainerState::Exited { code: 0 });
    let path = shim.path("logs/greedy.1");
    let allocated = || std::fs::metadata(&path).expect("it exists").blocks() * 512;
    assert!(until(|| allocated() <= BOUND), "{}", allocated());
}

#[test]
fn a_container_cannot_own_its_log_and_may_open_it_again() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // A write lease would keep every reader of the log waiting.
    let arguments = [1, 1_024, 1].map(Arg::Number);
    let lease = Probe::of(libc::SYS_fcntl, &arguments);
    let ended = run_probe(&shim, "lease.1", lease, 0o755, |_| {});
    let code = libc::EACCES;
    assert_eq!(ended, ContainerState::Exited { code });

    let arguments = [Arg::Number(1), Arg::Number(0o6777)];
    let chmod = Probe::of(libc::SYS_fchmod, &arguments);
    let ended = run_probe(&shim, "chmod.1", chmod, 0o755, |_| {});
    let code = libc::EPERM;
    assert_eq!(ended, ContainerState::Exited { code });

    let script = "echo first; echo second > /dev/stdout; echo third >> /dev/stderr";
    for user in [0, 33] {
        let name = format!("again.{user}");
        let mut spec = shim.spec(&name, script);
        (spec.program.uid, spec.program.gid) = (user, user);
        assert_eq!(shim.output(spec), "second\nthird\n");
        let data = std::fs::metadata(shim.path("logs").join(name)).expect("it exists");
        assert_eq!(
            (data.uid(), data.gid(), data.mode() & 0o7777),
            (0, 0, 0o622)
        );
    }
}
