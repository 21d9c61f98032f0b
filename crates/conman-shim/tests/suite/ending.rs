//! The shim's end by SIGTERM: nothing runs on without the fence that was over it.

use std::fs;
use std::time::Duration;

use conman_linux::{Cgroups, Freezer, PidFd, Signal};
use conman_shim::{ClientError, FenceState, Request};

use crate::support::fencing::{arm, fenced, is_fenced, state, unfence};
use crate::support::{Client, Shim, available, hosts, stopped_launcher, until, wait_dead};

/// Long after the test, and before the one of [`unfence`], which is to be later.
const AFTER_MS: u64 = 50_000;

/// Bound on an end on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

const RUNS_ON: &str = "while :; do echo ran; sleep 0.02; done";

fn process(shim: &Shim) -> PidFd {
    PidFd::open(shim.process.id().cast_signed()).expect("it lives")
}

fn terminate(shim: &Shim) {
    process(shim).signal(Signal::SIGTERM).expect("told to end");
}

fn wait_ended(shim: &mut Shim) {
    let ended = shim.process.wait().expect("reaped");
    assert!(ended.success(), "{ended}");
}

#[test]
fn a_shim_that_is_told_to_end_leaves_everything_frozen_that_its_fence_was_over() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        ended_on(flags, &freezer);
    }
}

fn ended_on(flags: &[&str], freezer: &Freezer) {
    let mut shim = Shim::start_with(flags);
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("held.1", RUNS_ON))
        .expect("launched");
    arm(&mut client, AFTER_MS);
    // It has joined its cgroups once it runs.
    assert!(until(|| !shim.log("held.1").is_empty()), "it does not run");
    terminate(&shim);
    wait_ended(&mut shim);
    let cgroup = format!("{}/held.1", shim.cgroup);
    assert!(freezer.is_frozen(&cgroup).expect("asked"), "{flags:?}");
    let length = shim.log("held.1").len();
    shim.process_pause(100_000);
    assert_eq!(shim.log("held.1").len(), length, "{flags:?}: it runs");
    // Whoever succeeds it knows, and opens by an order alone.
    shim.succeed();
    let mut client = shim.client();
    assert!(is_fenced(&mut client));
    arm(&mut client, 2 * AFTER_MS);
    assert!(is_fenced(&mut client));
    assert!(freezer.is_frozen(&cgroup).expect("asked"), "{flags:?}");
    client.ask(unfence(None)).expect("opened");
    assert!(until(|| shim.log("held.1").len() > length), "it runs again");
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn a_shim_that_is_told_to_end_waits_for_what_does_not_freeze_and_opens_its_fence_no_more() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        waited_on(flags, &freezer);
    }
}

fn waited_on(flags: &[&str], freezer: &Freezer) {
    let mut shim = Shim::start_with(flags);
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("held.1", "exec sleep 1000"))
        .expect("launched");
    arm(&mut client, AFTER_MS);
    let late = unprovable(&shim, &mut client);
    for _ in 0..2 {
        terminate(&shim);
        assert!(until(|| is_closed(&mut client)), "its fence stays open");
        let refused = client.ask(unfence(None));
        assert!(fenced(refused), "{flags:?}");
        assert!(is_closed(&mut client));
        let replace = Request::Replace { program: None };
        let refused = client.ask(replace).expect_err("it ends").to_string();
        assert!(refused.contains("about to end"), "{refused}");
    }
    let cgroup = format!("{}/held.1", shim.cgroup);
    assert!(until(|| freezer.is_frozen(&cgroup).expect("asked")));
    assert!(!process(&shim).is_dead().expect("asked"), "it has ended");
    // Now nothing of it can appear.
    match client.ask(Request::NotStarted { name: late }) {
        Ok(_) | Err(ClientError::Io(_)) => {}
        Err(error) => panic!("{error:?}"),
    }
    wait_ended(&mut shim);
    shim.succeed();
    let mut client = shim.client();
    assert!(is_fenced(&mut client));
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn a_shim_that_is_told_to_end_does_not_wait_for_good_for_what_nobody_can_prove() {
    if !available() {
        return;
    }
    let mut shim = Shim::start_with(&[]);
    let mut client = shim.client();
    arm(&mut client, AFTER_MS);
    let late = unprovable(&shim, &mut client);
    terminate(&shim);
    assert!(until(|| is_closed(&mut client)), "its fence stays open");
    // Some ten seconds after it began to kill.
    let process = process(&shim);
    assert!(process.wait_dead(PATIENCE).expect("polled"), "it waits");
    wait_ended(&mut shim);
    shim.succeed();
    let mut client = shim.client();
    assert!(is_closed(&mut client), "who succeeds opens it");
    client
        .ask(Request::NotStarted { name: late })
        .expect("it is over");
}

/// The name of somebody else's start that nobody can see frozen: its cgroup is gone.
fn unprovable(shim: &Shim, client: &mut Client) -> String {
    let name = "late.1".to_owned();
    let cgroup = format!("{}/{name}", shim.cgroup);
    let guard = Request::Guard {
        name: name.clone(),
        cgroup: cgroup.clone(),
    };
    client.ask(guard).expect("guarded");
    let left = Cgroups::detect().expect("detected").remove_tree(&cgroup);
    assert!(left.is_empty(), "{left:?}");
    name
}

fn is_closed(client: &mut Client) -> bool {
    matches!(
        state(client),
        FenceState::Freezing { .. } | FenceState::Fenced { .. }
    )
}

#[test]
fn a_start_under_way_does_not_outlive_the_shim_that_is_told_to_end() {
    if !available() {
        return;
    }
    for (flags, _) in hosts() {
        let mut shim = Shim::start_with(flags);
        let mut client = shim.client();
        arm(&mut client, AFTER_MS);
        stopped_launcher(&shim);
        std::thread::scope(|scope| {
            let start = scope.spawn(|| client.launch(shim.spec("begun.1", RUNS_ON)));
            let mut other = shim.client();
            let name = || "begun.1".to_owned();
            assert!(until(|| {
                let found = other.ask(Request::Find { name: name() });
                format!("{found:?}").contains("starting: true")
            }));
            terminate(&shim);
            start.join().expect("joined").expect_err("it fails");
        });
        wait_ended(&mut shim);
        let log = fs::read_to_string(shim.path("logs").join("begun.1"));
        assert_eq!(log.unwrap_or_default(), "", "{flags:?}: it ran");
    }
}

#[test]
fn what_runs_under_no_fence_outlives_the_shim_that_is_told_to_end() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        let mut shim = Shim::start_with(flags);
        let mut client = shim.client();
        let launched = client.launch(shim.spec("free.1", RUNS_ON));
        let launched = launched.expect("launched");
        terminate(&shim);
        wait_ended(&mut shim);
        let cgroup = format!("{}/free.1", shim.cgroup);
        assert!(!freezer.is_frozen(&cgroup).expect("asked"), "{flags:?}");
        let length = shim.log("free.1").len();
        assert!(until(|| shim.log("free.1").len() > length), "it stands");
        launched.process.as_ref().map(PidFd::kill);
        wait_dead(&launched);
    }
}
