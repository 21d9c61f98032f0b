//! Processes of the shim's own that die at the worst moment.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};

use conman_linux::{Cgroups, PidFd};
use conman_shim::{CallError, ClientError, LaunchError, Request};

use support::{SOON, Shim, available, spawn, until, wait_dead};

fn launcher(shim_pid: u32, cgroup: &str) -> Option<PidFd> {
    let path = format!("/proc/{shim_pid}/task/{shim_pid}/children");
    let children = std::fs::read_to_string(path).ok()?;
    let cgroups = Cgroups::detect().ok()?;
    let mut pids = children
        .split_ascii_whitespace()
        .filter_map(|pid| pid.parse().ok());
    // A container joins its cgroups a moment after its birth; the launcher is the eldest.
    let eldest = pids.find(|pid| !cgroups.contains(cgroup, *pid))?;
    let command = std::fs::read_to_string(format!("/proc/{eldest}/comm")).ok()?;
    command
        .starts_with("conman-shim")
        .then(|| PidFd::open(eldest).ok())?
}

#[test]
fn a_launcher_killed_at_any_point_of_a_start_leaves_nothing_of_it() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let stop = AtomicBool::new(false);
    let pid = shim.process.id();
    let (mut begun, mut interrupted, mut failed) = (Vec::new(), 0, None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut pause = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                if let Some(launcher) = launcher(pid, &shim.cgroup) {
                    let _ = launcher.kill();
                }
                // Every time at another point of what takes some milliseconds.
                pause = (pause + 1_300) % 17_000;
                shim.process_pause(pause);
            }
        });
        for number in 0..60 {
            let spec = shim.spec(&format!("t{number}.1"), "exec sleep 1000");
            match client.launch(spec) {
                Ok(launched) => begun.push((number, launched)),
                Err(ClientError::Refused(CallError::Launch {
                    error: LaunchError::LauncherDied,
                })) => {
                    interrupted += 1;
                }
                Err(other) => {
                    failed = Some(other);
                    break;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(failed.is_none(), "{failed:?}");
    assert!(interrupted > 0, "the trial did not work");
    // Sweeping is the next launcher's work; a start after it waits for it.
    let last = client
        .launch(shim.spec("last.1", "exec sleep 1000"))
        .expect("it works again");
    let mut expected: Vec<String> = begun
        .iter()
        .map(|(number, _)| format!("t{number}.1"))
        .collect();
    expected.push("last.1".to_owned());
    expected.sort();
    let mut left: Vec<String> = Vec::new();
    let swept = until(|| {
        left = names(&shim.path("scratch"));
        left == expected
    });
    assert!(swept, "{left:?}, not {expected:?}");
    let listed: Vec<String> = client
        .list()
        .expect("listed")
        .into_iter()
        .map(|view| view.name)
        .collect();
    assert_eq!(listed, expected);
    let freezer = conman_linux::Freezer::detect().expect("detected");
    let mut cgroups = freezer.children(&shim.cgroup).expect("listed");
    cgroups.sort();
    let wanted: Vec<String> = expected
        .iter()
        .map(|name| format!("{}/{name}", shim.cgroup))
        .collect();
    assert_eq!(cgroups, wanted);
    client.ask(Request::KillAll).expect("killed");
    wait_dead(&last);
    for (_, launched) in &begun {
        wait_dead(launched);
    }
}

fn names(directory: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("readable").flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[test]
fn a_killed_shim_takes_its_launcher_along_and_no_container() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("stays.1", "exec sleep 1000"))
        .expect("launched");
    let launcher = launcher(shim.process.id(), &shim.cgroup).expect("it lives");
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    assert!(launcher.wait_dead(SOON).expect("waited"));
    let process = launched.process.expect("a hold");
    assert!(!process.is_dead().expect("asked"));
    // Another one takes the same place.
    shim.process = spawn(shim.directory.path(), &shim.cgroup, &[]);
    let mut client = shim.client();
    let second = client
        .launch(shim.spec("second.1", "true"))
        .expect("launched");
    wait_dead(&second);
    process.kill().expect("killed");
    assert!(process.wait_dead(SOON).expect("waited"));
}

#[test]
fn a_later_shim_keeps_the_deadline_of_the_one_before() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("held.1", "exec sleep 1000"))
        .expect("launched");
    // A second from now.
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let until_boottime_ns = (now.tv_sec.cast_unsigned() + 1) * 1_000_000_000;
    client
        .ask(Request::ExtendDeadline { until_boottime_ns })
        .expect("armed");
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    shim.process = spawn(shim.directory.path(), &shim.cgroup, &[]);
    let mut client = shim.client();
    let fenced = until(|| {
        let reply = client.ask(Request::Fence).expect("asked");
        matches!(
            reply,
            conman_shim::Reply::Fence {
                state: conman_shim::FenceState::Fenced { .. }
            }
        )
    });
    assert!(fenced);
    let freezer = conman_linux::Freezer::detect().expect("detected");
    assert!(freezer.is_frozen(&shim.cgroup).expect("asked"));
    let process = launched.process.expect("a hold");
    process.kill().expect("killed");
    assert!(process.wait_dead(SOON).expect("waited"));
}
