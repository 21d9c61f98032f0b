//! The fence's opening, where it is cut short or the ground has gone.

use std::path::{Path, PathBuf};
use std::process::Command;

use conman_linux::Freezer;
use conman_shim::{FenceState, Request};

use crate::support::fencing::{MS, arm, is_fenced, state, unfence};
use crate::support::{Calls, Shim, available, boottime_ns, hosts, until, wait_dead, write_program};

/// K of the shim's program.
const FREEZE_MS: u64 = 1_000;

const RUNS_ON: &str = "while :; do echo ran; sleep 0.02; done";

/// A shim whose mounts are its own.
fn apart(flags: &[&str], directory: &Path) -> Shim {
    let program = directory.join("apart");
    let script = format!(
        "#!/bin/sh\nexec unshare --mount --propagation private {} \"$@\"\n",
        env!("CARGO_BIN_EXE_conman-shim")
    );
    write_program(&program, script.as_bytes());
    Shim::start_from(&program, flags)
}

/// The file of a cgroup by which it is frozen.
fn switch(flags: &[&str], cgroup: &str) -> PathBuf {
    let (kind, file) = match flags {
        [] => ("cgroup2", "cgroup.freeze"),
        _ => ("cgroup", "freezer.state"),
    };
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("readable");
    let mount = mounts.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let is_it = words[2] == kind && (flags.is_empty() || words[3].contains("freezer"));
        is_it.then(|| PathBuf::from(words[1]))
    });
    let below = Path::new(cgroup.trim_start_matches('/')).join(file);
    mount.expect("mounted").join(below)
}

#[test]
fn a_shim_that_dies_while_it_opens_its_fence_leaves_nothing_frozen_for_good_and_nothing_dead() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        cut_short_on(flags, &freezer);
    }
}

fn cut_short_on(flags: &[&str], freezer: &Freezer) {
    let directory = tempfile::tempdir().expect("a directory");
    let mut shim = apart(flags, directory.path());
    let mut client = shim.client();
    let mut launch = |name: &str| {
        let launched = client.launch(shim.spec(name, RUNS_ON));
        launched.expect("launched")
    };
    let all = [launch("a.1"), launch("b.1"), launch("c.1")];
    client.ask(Request::FreezeAll).expect("frozen");
    assert!(is_fenced(&mut client));
    let FenceState::Fenced { since_boottime_ns } = state(&mut client) else {
        panic!("it is open");
    };
    // What was frozen in time is not killed by what comes later.
    assert!(until(
        || boottime_ns() > since_boottime_ns + 2 * FREEZE_MS * MS
    ));
    // The shim gets as far as the second one.
    let cgroup = |name: &str| format!("{}/{name}", shim.cgroup);
    let fifo = directory.path().join("fifo");
    let hangs = format!(
        "mkfifo {fifo} && nsenter --mount --target {} mount --bind {fifo} {}",
        shim.process.id(),
        switch(flags, &cgroup("b.1")).display(),
        fifo = fifo.display(),
    );
    let hangs = Command::new("sh").args(["-c", &hangs]).status();
    assert!(hangs.expect("run").success(), "{flags:?}");
    let mut calls = Calls::connect(&shim);
    calls.send(unfence(None));
    let ordered = |name: &str| freezer.is_ordered(&cgroup(name)).expect("asked");
    assert!(until(|| !ordered("a.1")), "{flags:?}: it thaws nothing");
    assert!(ordered("b.1") && calls.answered().is_none(), "{flags:?}");
    shim.succeed();
    let mut client = shim.client();
    let now = state(&mut client);
    assert!(
        !matches!(now, FenceState::Armed { .. }),
        "{flags:?}: {now:?}"
    );
    assert!(is_fenced(&mut client), "{flags:?}");
    client.ask(unfence(None)).expect("opened");
    for (name, one) in ["a.1", "b.1", "c.1"].into_iter().zip(&all) {
        let length = shim.log(name).len();
        let process = one.process.as_ref().expect("a hold");
        assert!(
            until(|| shim.log(name).len() > length || process.is_dead().expect("asked")),
            "{flags:?}: {name} stays frozen"
        );
        assert!(!process.is_dead().expect("asked"), "{flags:?}: {name}");
    }
    client.kill_all().expect("killed");
    for one in &all {
        wait_dead(one);
    }
}

#[test]
fn a_fence_closes_and_opens_though_the_cgroup_above_all_was_removed() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        let shim = Shim::start_with(flags);
        let mut client = shim.client();
        let deadline = arm(&mut client, 50_000);
        // By a daemon that has ended with nothing running.
        assert_eq!(shim.sweep(), Vec::<String>::new());
        client.ask(unfence(None)).expect("opened while it is open");
        assert_eq!(shim.sweep(), Vec::<String>::new());
        client.ask(Request::FreezeAll).expect("closed");
        assert!(is_fenced(&mut client));
        // What is born in it never runs; where the frozen cannot die each is ordered by itself.
        let frozen = freezer.is_ordered(&shim.cgroup);
        assert_eq!(frozen.expect("it is there"), freezer.dies_frozen());
        assert_eq!(shim.sweep(), Vec::<String>::new());
        let until_boottime_ns = Some(deadline + 60_000 * MS);
        let order = Request::Unfence {
            until_boottime_ns,
            names: None,
        };
        client.ask(order).expect("opened");
        let now = state(&mut client);
        assert!(
            matches!(now, FenceState::Armed { .. }),
            "{flags:?}: {now:?}"
        );
        let launched = client.launch(shim.spec("next.1", RUNS_ON));
        let launched = launched.expect("launched");
        assert!(until(|| !shim.log("next.1").is_empty()), "it does not run");
        client.kill_all().expect("killed");
        wait_dead(&launched);
    }
}
