//! A shim that stood still itself while its fence was due: stopped, traced, or with its machine.

use conman_linux::{Cgroups, Freezer, PidFd, Signal};
use conman_shim::{FenceState, Request};

use crate::support::fencing::{MS, arm, is_fenced, state, unfence};
use crate::support::{Client, Shim, available, boottime_ns, hosts, until, wait_dead};

/// The fence's K where a test waits for longer.
const FREEZE_MS: u64 = 3_000;

fn told_freeze_ms(client: &mut Client) {
    let freeze_ms = FREEZE_MS;
    let told = client.ask(Request::FreezePatience { freeze_ms });
    told.expect("told");
}

fn shim_process(shim: &Shim) -> PidFd {
    PidFd::open(shim.process.id().cast_signed()).expect("it lives")
}

#[test]
fn a_fence_that_comes_too_late_freezes_and_kills_nothing_that_does() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        late_on(flags, &freezer);
    }
}

fn late_on(flags: &[&str], freezer: &Freezer) {
    let shim = Shim::start_with(flags);
    let mut client = shim.client();
    let launched = client.launch(shim.spec("held.1", "exec sleep 1000"));
    let launched = launched.expect("launched");
    let deadline = told_to_fence_soon(&mut client);
    stand_still(&shim, deadline);
    assert!(is_fenced(&mut client));
    let cgroup = format!("{}/held.1", shim.cgroup);
    assert!(freezer.is_frozen(&cgroup).expect("asked"), "{flags:?}");
    let process = launched.process.as_ref().expect("a hold");
    assert!(!process.is_dead().expect("asked"), "{flags:?}: it is dead");
    client.ask(unfence(None)).expect("opened");
    assert!(!freezer.is_frozen(&cgroup).expect("asked"), "{flags:?}");
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

/// The deadline, which has not passed when this comes back.
fn told_to_fence_soon(client: &mut Client) -> u64 {
    told_freeze_ms(client);
    let deadline = arm(client, FREEZE_MS);
    assert!(matches!(state(client), FenceState::Armed { .. }));
    deadline
}

/// The shim does, until K and more is over since then.
fn stand_still(shim: &Shim, since_ns: u64) {
    let process = shim_process(shim);
    process.signal(Signal::SIGSTOP).expect("stopped");
    let until_ns = since_ns + (FREEZE_MS + 500) * MS;
    assert!(until(|| boottime_ns() > until_ns));
    process.signal(Signal::SIGCONT).expect("it goes on");
}

#[test]
fn what_has_frozen_while_the_shim_stood_still_is_not_given_up() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        frozen_meanwhile_on(flags, &freezer);
    }
}

fn frozen_meanwhile_on(flags: &[&str], freezer: &Freezer) {
    let shim = Shim::start_with(flags);
    let mut client = shim.client();
    told_freeze_ms(&mut client);
    arm(&mut client, FREEZE_MS);
    // Its cgroup is not to be had at first, so that it is not seen frozen.
    let cgroup = format!("{}/slow.1", shim.cgroup);
    let (name, place) = ("slow.1".to_owned(), cgroup.clone());
    let guard = Request::Guard {
        name,
        cgroup: place,
    };
    client.ask(guard).expect("guarded");
    let left = Cgroups::detect().expect("detected").remove_tree(&cgroup);
    assert!(left.is_empty(), "{left:?}");
    client.ask(Request::FreezeAll).expect("ordered");
    let FenceState::Freezing { since_boottime_ns } = state(&mut client) else {
        panic!("{flags:?}: it is proven");
    };
    let process = shim_process(&shim);
    process.signal(Signal::SIGSTOP).expect("stopped");
    freezer.ensure(&cgroup).expect("made");
    freezer.freeze(&cgroup).expect("frozen");
    stand_still(&shim, since_boottime_ns);
    assert!(is_fenced(&mut client));
    client.ask(unfence(None)).expect("opened");
    let is_given_up = freezer.is_frozen(&cgroup).expect("asked");
    assert!(!is_given_up, "{flags:?}: it is not thawed");
    let name = "slow.1".to_owned();
    client.ask(Request::NotStarted { name }).expect("told");
}
