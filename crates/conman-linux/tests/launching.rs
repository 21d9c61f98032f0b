//! What launching and freezing containers stands on, on the real kernel.

#![expect(clippy::print_stderr, reason = "a skipped test says so there")]

mod support;

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use conman_linux::{
    CgroupLimits, CgroupMaker, Cgroups, Ended, Features, Freezer, MakeCgroupError, SoleThread,
};

use support::{Process, SOON};

/// A cgroup that is gone, with its processes, when the test is over.
struct Scratch {
    path: String,
    cgroups: Cgroups,
}

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            path: format!("/conman-launch-{}-{number}", std::process::id()),
            cgroups: Cgroups::detect().expect("this host has cgroups"),
        }
    }

    fn inner(&self) -> String {
        format!("{}/one.1", self.path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let left = self.cgroups.remove_tree(&self.path);
        if !std::thread::panicking() {
            assert!(left.is_empty(), "{left:?}");
        }
    }
}

/// Puts a process into a cgroup of whatever hierarchy freezes.
fn put(cgroup: &str, process: &Process) {
    let name = cgroup.trim_start_matches('/');
    let unified = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
    let found = unified
        .iter()
        .map(|mount| std::path::Path::new(mount).join(name).join("cgroup.procs"))
        .find(|file| file.exists())
        .expect("the cgroup is in the unified hierarchy");
    std::fs::write(found, process.pid().to_string()).expect("a process joins");
}

#[test]
fn a_process_with_several_threads_may_not_clone() {
    let other = std::thread::spawn(|| SoleThread::prove().is_err());
    assert!(other.join().expect("no panic"));
}

#[test]
fn a_cgroup_is_made_once_with_its_limits_and_never_taken_over() {
    let scratch = Scratch::new();
    let maker = CgroupMaker::detect().expect("detected");
    let limits = CgroupLimits {
        memory_bytes: Some(64 << 20),
        pids: Some(17),
        cpu_millis: Some(250),
    };
    let cgroup = maker.make(&scratch.inner(), &limits).expect("made");
    let again = maker
        .make(&scratch.inner(), &limits)
        .expect_err("it exists");
    assert!(matches!(again, MakeCgroupError::Exists { .. }), "{again}");
    cgroup.take_back();
    maker
        .make(&scratch.inner(), &limits)
        .expect("after it was taken back it can be made")
        .take_back();
}

#[test]
fn nothing_outside_of_conmans_own_is_made() {
    let maker = CgroupMaker::detect().expect("detected");
    for path in [
        "/",
        "",
        "/docker/a",
        "/conman-x/../y",
        "conman-x",
        "/conman-x//y",
    ] {
        let error = maker
            .make(path, &CgroupLimits::default())
            .expect_err("refused");
        assert!(
            matches!(error, MakeCgroupError::Refused { .. }),
            "{path}: {error}"
        );
    }
}

#[test]
fn a_frozen_cgroup_is_proven_frozen_and_dies_without_a_thaw() {
    let scratch = Scratch::new();
    let maker = CgroupMaker::detect().expect("detected");
    let freezer = Freezer::detect().expect("this host can freeze");
    let _cgroup = maker
        .make(&scratch.inner(), &CgroupLimits::default())
        .expect("made");
    if !freezer.dies_frozen() {
        eprintln!("skipped: this host has no unified cgroup hierarchy");
        return;
    }
    let process = Process::idle();
    put(&scratch.inner(), &process);
    let pidfd = process.pidfd();
    assert!(!freezer.is_frozen(&scratch.path).expect("readable"));
    freezer.freeze(&scratch.path).expect("frozen by its parent");
    assert!(freezer.wait_frozen(&scratch.inner(), SOON).expect("waited"));
    freezer.thaw(&scratch.path).expect("thawed");
    assert!(!freezer.is_frozen(&scratch.inner()).expect("readable"));
    freezer.freeze(&scratch.path).expect("frozen again");
    assert!(freezer.wait_frozen(&scratch.path, SOON).expect("waited"));
    freezer.kill(&scratch.path).expect("killed");
    assert!(pidfd.wait_dead(SOON).expect("waited"));
}

#[test]
fn freezing_what_does_not_exist_says_so() {
    let freezer = Freezer::detect().expect("this host can freeze");
    let error = freezer
        .freeze("/conman-nobody/x")
        .expect_err("no such cgroup");
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    let error = freezer.freeze("/conman/../x").expect_err("not plain");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn the_exit_code_of_a_reaped_process_comes_through_its_pidfd() {
    if !Features::probe().expect("probed").exit_status_by_pidfd {
        eprintln!("skipped: this kernel does not tell exit codes through a pidfd");
        return;
    }
    let mut child = Command::new("sh")
        .args(["-c", "exit 7"])
        .spawn()
        .expect("sh runs");
    let pid = i32::try_from(child.id()).expect("a pid");
    // It cannot be reaped, nor its PID be another's, before `wait`.
    let pidfd = conman_linux::PidFd::open(pid).expect("it exists, if only as a zombie");
    assert!(pidfd.wait_dead(SOON).expect("waited"));
    child.wait().expect("reaped");
    assert_eq!(pidfd.ended().expect("asked"), Some(Ended::Exited(7)));
}

#[test]
fn the_features_of_this_kernel_are_told() {
    let features = Features::probe().expect("probed");
    assert!(!features.release.is_empty());
    assert_eq!(
        features.unified_cgroups,
        Cgroups::detect().expect("detected").has_unified()
    );
}
