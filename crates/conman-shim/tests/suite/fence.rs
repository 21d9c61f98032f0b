//! The dead-man fence over containers of the shim's own.

use std::fs;

use conman_linux::Freezer;
use conman_shim::{CallError, ClientError, FenceState, Request, VERSION};

use crate::support::fencing::{MS, arm, fenced, freezer, is_fenced, state, unfence};
use crate::support::{
    Client, Shim, available, boottime_ns, has_own_ids, hosts, next_end, subscribe, until, wait_dead,
};

#[test]
fn unarmed_it_lets_everything_run_and_armed_only_until_the_deadline() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        armed_on(flags, &freezer);
    }
}

fn armed_on(flags: &[&str], freezer: &Freezer) {
    // A start that takes longer than the deadline is refused; the next one has more time.
    let armed = [1_000, 10_000, 60_000]
        .into_iter()
        .any(|after_ms| armed_for(flags, freezer, after_ms));
    assert!(armed, "no container starts in a minute");
}

/// Whether the machine was quick enough for so early a deadline.
fn armed_for(flags: &[&str], freezer: &Freezer, after_ms: u64) -> bool {
    let shim = Shim::start_with(flags);
    let mut client = shim.client();
    assert_eq!(state(&mut client), FenceState::Unarmed);
    let before = client
        .launch(shim.spec("before.1", "exec sleep 1000"))
        .expect("launched");
    let first = arm(&mut client, after_ms / 2);
    let second = arm(&mut client, after_ms);
    assert!(first < second);
    let after = match client.launch(shim.spec("after.1", "exec sleep 1000")) {
        Ok(after) => after,
        Err(error) => {
            assert!(boottime_ns() >= first, "{error:?}");
            client.kill_all().expect("killed");
            wait_dead(&before);
            return false;
        }
    };
    assert!(is_fenced(&mut client));
    assert!(boottime_ns() >= second - MS, "too early");
    for name in ["before.1", "after.1"] {
        let cgroup = format!("{}/{name}", shim.cgroup);
        assert!(freezer.is_frozen(&cgroup).expect("asked"), "{name}");
    }
    // A later deadline alone changes nothing.
    arm(&mut client, 60_000);
    assert!(matches!(state(&mut client), FenceState::Fenced { .. }));
    assert!(fenced(client.launch(shim.spec("late.1", "true"))));
    client.ask(unfence(None)).expect("opened");
    assert!(matches!(state(&mut client), FenceState::Armed { .. }));
    for name in ["before.1", "after.1"] {
        let cgroup = format!("{}/{name}", shim.cgroup);
        assert!(!freezer.is_frozen(&cgroup).expect("asked"), "{name}");
    }
    client.kill_all().expect("killed");
    wait_dead(&before);
    wait_dead(&after);
    true
}

#[test]
fn what_stays_frozen_for_too_long_is_killed_and_never_runs_again() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        let flags = [flags, &["--frozen-max-ms", "1500"]].concat();
        let shim = Shim::start_with(&flags);
        let mut client = shim.client();
        subscribe(&mut client);
        let launched = client
            .launch(shim.spec("a.1", "while :; do echo ran; sleep 0.02; done"))
            .expect("launched");
        arm(&mut client, 60_000);
        client.ask(Request::FreezeAll).expect("frozen");
        assert!(is_fenced(&mut client));
        let frozen = freezer.is_frozen(&format!("{}/a.1", shim.cgroup));
        assert!(frozen.expect("asked"));
        let before = shim.log("a.1");
        wait_dead(&launched);
        assert_eq!(shim.log("a.1"), before, "it ran on its way out");
        let end = next_end(&mut client);
        assert_eq!((&*end.name, end.fenced), ("a.1", true), "{end:?}");
    }
}

#[test]
fn only_those_that_are_named_are_thawed_and_the_lost_are_killed_while_they_are_frozen() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        named_on(flags, &freezer);
    }
}

fn named_on(flags: &[&str], freezer: &Freezer) {
    let shim = Shim::start_with(flags);
    let mut client = shim.client();
    let mut launch = |name: &str| {
        client
            .launch(shim.spec(name, "echo begun; while :; do echo ran; sleep 0.02; done"))
            .expect("launched")
    };
    let (mine, other, lost) = (launch("mine.1"), launch("other.1"), launch("lost.1"));
    client.ask(Request::FreezeAll).expect("frozen");
    assert!(is_fenced(&mut client));
    let before = shim.log("lost.1");
    client
        .ask(Request::Kill {
            name: "lost.1".to_owned(),
        })
        .expect("killed");
    wait_dead(&lost);
    assert_eq!(shim.log("lost.1"), before, "it ran on its way out");
    client.ask(unfence(Some(&["mine.1"]))).expect("opened");
    let frozen = |name: &str| {
        let cgroup = format!("{}/{name}", shim.cgroup);
        freezer.is_frozen(&cgroup).expect("asked")
    };
    assert!(!frozen("mine.1"));
    assert!(frozen("other.1"));
    let length = shim.log("mine.1").len();
    assert!(until(|| shim.log("mine.1").len() > length), "it runs again");
    client.kill_all().expect("killed");
    wait_dead(&mine);
    wait_dead(&other);
}

#[test]
fn a_fence_stays_as_it_is_over_the_death_of_the_shim() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("held.1", "exec sleep 1000"))
        .expect("launched");
    let deadline = arm(&mut client, 1_000);
    // Of which the next shim knows.
    shim.succeed();
    let mut client = shim.client();
    assert!(is_fenced(&mut client));
    assert!(boottime_ns() >= deadline - MS, "too early");
    assert!(freezer().is_frozen(&shim.cgroup).expect("asked"));
    // And the one after it, that it has fired.
    shim.succeed();
    let mut client = shim.client();
    assert!(is_fenced(&mut client));
    let cgroup = format!("{}/held.1", shim.cgroup);
    assert!(freezer().is_frozen(&cgroup).expect("asked"));
    assert!(fenced(client.launch(shim.spec("late.1", "true"))));
    // The deadline alone, given to the dead one, does not open it either.
    arm(&mut client, 60_000);
    assert!(is_fenced(&mut client));
    client.ask(unfence(None)).expect("opened");
    assert!(!freezer().is_frozen(&cgroup).expect("asked"));
    let process = launched.process.as_ref().expect("a hold");
    assert!(!process.is_dead().expect("asked"));
    process.kill().expect("killed");
    wait_dead(&launched);
}

/// What becomes of the state that a dead shim left.
type Damage = fn(&std::path::Path);

#[test]
fn a_shim_that_lost_its_state_begins_closed_if_anything_lives() {
    if !available() {
        return;
    }
    let damages: [(&str, Damage); 5] = [
        ("missing", |path| {
            std::fs::remove_file(path).expect("removed");
        }),
        ("empty", |path| std::fs::write(path, "").expect("written")),
        ("beginning", |path| {
            let state = std::fs::read(path).expect("read");
            std::fs::write(path, &state[1..]).expect("written");
        }),
        ("middle", |path| {
            let state = std::fs::read_to_string(path).expect("read");
            let damaged = state.replacen("fence", "fenze", 1);
            assert_ne!(damaged, state);
            std::fs::write(path, damaged).expect("written");
        }),
        ("of a later form", |path| {
            let state = std::fs::read_to_string(path).expect("read");
            let version = format!("\"version\":{VERSION},");
            let later = state.replacen(&version, "\"version\":99,", 1);
            assert_ne!(later, state);
            std::fs::write(path, later).expect("written");
        }),
    ];
    for (flags, freezer) in hosts() {
        for (name, damage) in damages {
            lost_on(flags, &freezer, name, damage);
        }
    }
}

fn lost_on(flags: &[&str], freezer: &Freezer, how: &str, damage: Damage) {
    let mut shim = Shim::start_with(flags);
    let mut client = shim.client();
    let spec = shim.spec("held.1", "while :; do echo ran; sleep 0.02; done");
    let launched = client.launch(spec).expect("launched");
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    damage(&shim.path("shim.state"));
    shim.succeed();
    let mut client = shim.client();
    assert!(is_fenced(&mut client), "{how}");
    let cgroup = format!("{}/held.1", shim.cgroup);
    assert!(freezer.is_frozen(&cgroup).expect("asked"), "{how}");
    assert!(fenced(client.launch(shim.spec("late.1", "true"))));
    // It is found again as what it is, and its ids are nobody else's.
    let found = client.list().expect("listed");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].pid, found[0].foreign), (launched.pid, false));
    let length = shim.log("held.1").len();
    shim.process_pause(100_000);
    assert_eq!(shim.log("held.1").len(), length, "{how}: it runs");
    client
        .ask(Request::Unfence {
            until_boottime_ns: None,
            names: None,
        })
        .expect("opened");
    assert_eq!(state(&mut client), FenceState::Unarmed);
    assert!(until(|| shim.log("held.1").len() > length), "it runs again");
    let next = client
        .launch(shim.spec("next.1", "exec sleep 1000"))
        .expect("launched");
    if has_own_ids() {
        let ids = |pid| std::fs::read_to_string(format!("/proc/{pid}/uid_map")).expect("it lives");
        assert_ne!(ids(next.pid), ids(launched.pid));
    }
    client.kill_all().expect("killed");
    wait_dead(&launched);
    wait_dead(&next);
    // Nothing lives: nothing to be afraid of.
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    damage(&shim.path("shim.state"));
    shim.succeed();
    assert_eq!(state(&mut shim.client()), FenceState::Unarmed, "{how}");
}

#[test]
fn whoever_is_not_named_does_not_run_when_the_cgroup_above_all_is_thawed() {
    if !available() {
        return;
    }
    let freezer = freezer();
    let mut shim = Shim::start();
    let mut client = shim.client();
    let mut launch = |name: &str| {
        client
            .launch(shim.spec(name, "while :; do echo ran; sleep 0.02; done"))
            .expect("launched")
    };
    let all = [launch("mine.1"), launch("other.1")];
    client.ask(Request::FreezeAll).expect("frozen");
    assert!(is_fenced(&mut client));
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    // Frozen only by what is above it, as if the shim had died before it came to this one.
    let cgroup = format!("{}/other.1", shim.cgroup);
    freezer.thaw(&cgroup).expect("thawed");
    if !freezer.dies_frozen() {
        freezer.freeze(&shim.cgroup).expect("frozen");
    }
    assert!(freezer.is_frozen(&cgroup).expect("asked"));
    shim.succeed();
    let mut client = shim.client();
    assert!(is_fenced(&mut client));
    let length = shim.log("other.1").len();
    client.ask(unfence(Some(&["mine.1"]))).expect("opened");
    let before = shim.log("mine.1").len();
    assert!(until(|| shim.log("mine.1").len() > before), "it runs again");
    assert_eq!(shim.log("other.1").len(), length, "it ran");
    client.kill_all().expect("killed");
    for one in &all {
        wait_dead(one);
    }
}

#[test]
fn what_a_client_froze_is_not_thawed_by_the_fence() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("own.1", "exec sleep 1000"))
        .expect("launched");
    let name = "own.1".to_owned();
    client
        .ask(Request::Freeze { name: name.clone() })
        .expect("frozen");
    arm(&mut client, 50);
    assert!(is_fenced(&mut client));
    client.ask(unfence(None)).expect("opened");
    let cgroup = format!("{}/own.1", shim.cgroup);
    assert!(freezer().is_frozen(&cgroup).expect("asked"));
    client.ask(Request::Thaw { name }).expect("thawed");
    assert!(!freezer().is_frozen(&cgroup).expect("asked"));
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn a_start_under_way_when_the_fence_closes_fails_or_is_frozen() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        closing_on(flags, &freezer);
    }
}

fn closing_on(flags: &[&str], freezer: &Freezer) {
    let shim = Shim::start_with(flags);
    let mut client = shim.client();
    arm(&mut client, 60_000);
    for round in 0..6_u64 {
        let begun = std::thread::scope(|scope| {
            let closer = scope.spawn(|| {
                let mut client = shim.client();
                shim.process_pause(9_000 + round * 1_700);
                client.ask(Request::FreezeAll).expect("frozen");
            });
            let mut begun = Vec::new();
            for number in 0.. {
                let name = format!("r{round}n{number}.1");
                match client.launch(shim.spec(&name, "exec sleep 1000")) {
                    Ok(launched) => begun.push((name, launched)),
                    Err(ClientError::Refused(CallError::Fenced | CallError::Launch { .. })) => {
                        break;
                    }
                    Err(error) => panic!("{error:?}"),
                }
            }
            closer.join().expect("joined");
            begun
        });
        assert!(is_fenced(&mut client));
        let mut listed: Vec<String> = client
            .list()
            .expect("listed")
            .into_iter()
            .map(|view| view.name)
            .collect();
        listed.sort();
        let mut expected: Vec<String> = begun.iter().map(|(name, _)| name.clone()).collect();
        expected.sort();
        assert_eq!(listed, expected);
        for (name, _) in &begun {
            let cgroup = format!("{}/{name}", shim.cgroup);
            assert!(freezer.is_frozen(&cgroup).expect("asked"), "{name}");
        }
        client.kill_all().expect("killed");
        for (_, launched) in &begun {
            wait_dead(launched);
        }
        assert!(until(|| {
            let views = client.list().expect("listed");
            views.iter().all(|view| !view.state.is_alive())
        }));
        client
            .ask(Request::Acknowledge { names: listed })
            .expect("acknowledged");
        client.ask(unfence(None)).expect("opened");
    }
    let last = client.launch(shim.spec("last.1", "true"));
    wait_dead(&last.expect("launched"));
}

#[test]
fn a_start_that_is_killed_while_it_is_under_way_does_not_stay() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let mut killer = shim.client();
    subscribe(&mut killer);
    for number in 0..10 {
        let name = format!("k{number}.1");
        std::thread::scope(|scope| {
            let launch = scope.spawn(|| client.launch(shim.spec(&name, "exec sleep 1000")));
            assert!(until(|| {
                let name = name.clone();
                killer.ask(Request::Kill { name }).is_ok()
            }));
            if let Ok(launched) = launch.join().expect("joined") {
                wait_dead(&launched);
            }
        });
        // Whether it ever began or not.
        assert_eq!(next_end(&mut killer).name, name);
    }
    assert!(until(|| {
        let views = client.list().expect("listed");
        views.iter().all(|view| !view.state.is_alive())
    }));
}

#[test]
fn what_was_condemned_before_its_start_was_ordered_never_begins() {
    if !available() {
        return;
    }
    let shim = Shim::start_with(&[]);
    let mut client = shim.client();
    arm(&mut client, 600_000);
    condemn_early(&mut client, "lost.1");
    never_begins(&shim, &mut client, "lost.1");
    let next = client.launch(shim.spec("lost.2", "exec sleep 1000"));
    let next = next.expect("another generation may");
    client.kill_all().expect("killed");
    wait_dead(&next);
}

/// Kills one of which nothing was ordered yet, with an armed fence.
fn condemn_early(client: &mut Client, name: &str) {
    let name = name.to_owned();
    let early = client.ask(Request::Kill { name });
    assert!(
        matches!(
            early,
            Err(ClientError::Refused(CallError::NoSuchContainer { .. }))
        ),
        "{early:?}"
    );
}

fn never_begins(shim: &Shim, client: &mut Client, name: &str) {
    let outcome = client.launch(shim.spec(name, "exec sleep 1000"));
    assert!(fenced(outcome), "{name}");
}

#[test]
fn what_was_condemned_early_does_not_begin_by_a_later_shim_either() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    arm(&mut client, 600_000);
    condemn_early(&mut client, "lost.1");
    // By the line that was added, then by the state as the next shim has written it anew.
    for _ in 0..2 {
        shim.succeed();
        client = shim.client();
        assert!(matches!(state(&mut client), FenceState::Armed { .. }));
        never_begins(&shim, &mut client, "lost.1");
    }
    let replace = Request::Replace { program: None };
    client.ask(replace).expect("replaced");
    never_begins(&shim, &mut client, "lost.1");
    // Armed anew, it knows it as well.
    let disarm = Request::Unfence {
        until_boottime_ns: None,
        names: None,
    };
    client.ask(disarm).expect("disarmed");
    assert_eq!(state(&mut client), FenceState::Unarmed);
    arm(&mut client, 600_000);
    never_begins(&shim, &mut client, "lost.1");
}

#[test]
fn what_was_condemned_early_does_not_begin_by_the_program_that_replaces_the_shims() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    arm(&mut client, 600_000);
    for name in ["lost.1", "lost.2"] {
        condemn_early(&mut client, name);
    }
    let replace = Request::Replace { program: None };
    client.ask(replace).expect("replaced");
    for name in ["lost.1", "lost.2"] {
        never_begins(&shim, &mut client, name);
    }
    let next = client.launch(shim.spec("lost.3", "exec sleep 1000"));
    let next = next.expect("another generation may");
    client.kill_all().expect("killed");
    wait_dead(&next);
}

/// None has the time to freeze.
fn fence_kills(client: &mut Client) {
    let freeze_ms = 0;
    let told = client.ask(Request::FreezePatience { freeze_ms });
    told.expect("told");
    client.ask(Request::FreezeAll).expect("ordered");
}

#[test]
fn what_the_fence_kills_by_itself_is_told_as_such_by_later_shims_as_well() {
    if !available() {
        return;
    }
    for (flags, _) in hosts() {
        let mut shim = Shim::start_with(flags);
        let mut client = shim.client();
        let mut launch = |name: &str, script: &str| {
            let launched = client.launch(shim.spec(name, script));
            launched.expect("launched")
        };
        let idle = "exec sleep 1000";
        let (late, ordered) = (launch("late.1", idle), launch("ordered.1", idle));
        let ended = launch("ended.1", "exit 3");
        wait_dead(&ended);
        arm(&mut client, 600_000);
        client
            .ask(Request::Kill {
                name: "ordered.1".to_owned(),
            })
            .expect("killed");
        wait_dead(&ordered);
        fence_kills(&mut client);
        wait_dead(&late);
        let told = |client: &mut Client| {
            let mut ends = client.list().expect("listed");
            ends.sort_by(|one, other| one.name.cmp(&other.name));
            let ends = ends.into_iter();
            ends.map(|end| (end.name, end.fenced)).collect::<Vec<_>>()
        };
        let expected = [("ended.1", false), ("late.1", true), ("ordered.1", false)];
        let expected = expected.map(|(name, fenced)| (name.to_owned(), fenced));
        assert_eq!(told(&mut client), expected);
        let replace = Request::Replace { program: None };
        client.ask(replace).expect("replaced");
        assert_eq!(told(&mut client), expected);
        shim.process.kill().expect("killed");
        shim.process.wait().expect("reaped");
        // The launcher of a shim that was replaced has the lock as well, until it sees its shim's end.
        let lock = fs::File::open(shim.path("shim.lock")).expect("a lock");
        assert!(until(|| lock.try_lock().is_ok()), "the lock is taken still");
        drop(lock);
        shim.succeed();
        assert_eq!(told(&mut shim.client()), expected);
    }
}

#[test]
fn what_was_to_be_killed_while_it_lived_is_killed_by_a_later_shim() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let mut launch = |name: &str| {
        let launched = client.launch(shim.spec(name, "exec sleep 1000"));
        launched.expect("launched")
    };
    let (dead, lives) = (launch("dead.1"), launch("lives.1"));
    arm(&mut client, 600_000);
    let name = "dead.1".to_owned();
    client.ask(Request::Kill { name }).expect("killed");
    wait_dead(&dead);
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    let path = shim.path("shim.state");
    let state = std::fs::read_to_string(&path).expect("a state");
    let of = |name: &str, doomed: bool| {
        let (name, doomed) = (
            format!("\"name\":\"{name}\""),
            format!("\"doomed\":{doomed}"),
        );
        move |line: &&str| line.contains(&name) && line.contains(&doomed)
    };
    assert!(
        state.lines().any(|line| of("dead.1", true)(&line)),
        "{state}"
    );
    // As if an order to kill the other one had not come into effect.
    let line = state.lines().rfind(of("lives.1", false));
    let line = line.expect("its line");
    let doomed = line.replace("\"doomed\":false", "\"doomed\":true");
    std::fs::write(&path, format!("{state}{doomed}\n")).expect("written");
    shim.succeed();
    wait_dead(&lives);
}
