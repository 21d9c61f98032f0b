//! The dead-man fence over containers of the shim's own and of others.

mod support;

use std::process::Command;

use conman_linux::{Cgroups, Freezer, PidFd};
use conman_shim::{CallError, Client, ClientError, ContainerState, FenceState, Reply, Request};

use support::{
    Shim, available, boottime_ns, has_own_ids, hosts, lacks, next_end, subscribe, until, wait_dead,
};

const MS: u64 = 1_000_000;

fn freezer() -> Freezer {
    Freezer::detect().expect("detected")
}

fn state(client: &mut Client) -> FenceState {
    match client.ask(Request::Fence).expect("asked") {
        Reply::Fence { state } => state,
        other => panic!("{other:?}"),
    }
}

fn is_fenced(client: &mut Client) -> bool {
    until(|| matches!(state(client), FenceState::Fenced { .. }))
}

fn fenced<T: std::fmt::Debug>(outcome: Result<T, ClientError>) -> bool {
    let error = outcome.expect_err("it is closed");
    matches!(error, ClientError::Refused(CallError::Fenced))
}

fn arm(client: &mut Client, after_ms: u64) -> u64 {
    let until_boottime_ns = boottime_ns() + after_ms * MS;
    client
        .ask(Request::ExtendDeadline { until_boottime_ns })
        .expect("armed");
    until_boottime_ns
}

fn unfence(names: Option<&[&str]>) -> Request {
    Request::Unfence {
        until_boottime_ns: Some(boottime_ns() + 60_000 * MS),
        names: names.map(|names| names.iter().map(|name| (*name).to_owned()).collect()),
    }
}

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
            client.ask(Request::KillAll).expect("killed");
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
    client.ask(Request::KillAll).expect("killed");
    wait_dead(&before);
    wait_dead(&after);
    true
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
    client.ask(Request::KillAll).expect("killed");
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
    let damages: [(&str, Damage); 4] = [
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
    client.ask(Request::KillAll).expect("killed");
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
    client.ask(Request::KillAll).expect("killed");
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
    client.ask(Request::KillAll).expect("killed");
    wait_dead(&launched);
}

const IMAGE: &str = "conman-test:busybox";

/// A container of Docker's, removed at the end.
struct Docked {
    name: String,
    cgroup: String,
}

impl Docked {
    /// `None` where there is no Docker.
    fn create(name: &str, cgroup: &str, script: &str) -> Option<Self> {
        let known = docker(&["image", "inspect", IMAGE]);
        if known.is_none() {
            lacks(&format!("Docker or its image {IMAGE} is missing"));
            return None;
        }
        let arguments = [
            "create",
            "--name",
            name,
            "--network",
            "none",
            "--cgroup-parent",
            cgroup,
            IMAGE,
            "sh",
            "-c",
            script,
        ];
        docker(&arguments).map(|_| Self {
            name: name.to_owned(),
            cgroup: cgroup.to_owned(),
        })
    }

    fn start(&self) {
        docker(&["start", &self.name]).expect("started");
    }

    fn pid(&self) -> i32 {
        let text = docker(&["inspect", "-f", "{{.State.Pid}}", &self.name]).expect("inspected");
        text.trim().parse().expect("a number")
    }

    fn log(&self) -> usize {
        docker(&["logs", &self.name]).expect("a log").len()
    }
}

impl Drop for Docked {
    /// Docker waits for what is frozen, and would for ever: so that dies first.
    fn drop(&mut self) {
        for (_, freezer) in hosts() {
            let _ = freezer.kill(&self.cgroup);
            let above = self.cgroup.rsplit_once('/').map_or("", |(above, _)| above);
            let _ = freezer.thaw(above);
        }
        let _ = docker(&["rm", "-f", &self.name]);
    }
}

/// Bounded, since Docker waits for what is frozen.
fn docker(arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("timeout");
    let output = command.args(["20", "docker"]).args(arguments).output();
    let output = output.ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    output.status.success().then_some(text)
}

#[test]
fn containers_of_dockers_freeze_thaw_and_die_by_the_fence() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        docked_on(flags, &freezer);
    }
}

fn docked_on(flags: &[&str], freezer: &Freezer) {
    let shim = Shim::start_with(flags);
    let cgroup = format!("{}/docked.1", shim.cgroup);
    let name = format!("shimtest-{}-docked", std::process::id());
    let script = "while :; do echo ran; sleep 0.02; done";
    let Some(docked) = Docked::create(&name, &cgroup, script) else {
        return;
    };
    let mut client = shim.client();
    subscribe(&mut client);
    let guard = Request::Guard {
        name: "docked.1".to_owned(),
        cgroup: cgroup.clone(),
    };
    client.ask(guard.clone()).expect("guarded");
    let twice = client.ask(guard).expect_err("twice");
    assert!(matches!(
        twice,
        ClientError::Refused(CallError::Exists { .. })
    ));
    arm(&mut client, 60_000);
    docked.start();
    let process = PidFd::open(docked.pid()).expect("it runs");
    client
        .appeared("docked.1", &process)
        .expect("taken under the fence");
    client.ask(Request::FreezeAll).expect("frozen");
    assert!(is_fenced(&mut client));
    let before = docked.log();
    assert!(freezer.is_frozen(&cgroup).expect("asked"));
    client.ask(unfence(None)).expect("opened");
    assert!(until(|| docked.log() > before), "it runs again");
    client.ask(Request::FreezeAll).expect("frozen");
    assert!(is_fenced(&mut client));
    client
        .ask(Request::Kill {
            name: "docked.1".to_owned(),
        })
        .expect("killed");
    assert!(process.wait_dead(support::SOON).expect("waited"));
    let view = next_end(&mut client);
    assert_eq!((view.name.as_str(), view.foreign), ("docked.1", true));
    assert!(
        matches!(
            view.state,
            ContainerState::Signalled { signal: 9 } | ContainerState::Lost
        ),
        "{view:?}"
    );
    let names = vec![view.name];
    client
        .ask(Request::Acknowledge { names })
        .expect("acknowledged");
    assert_eq!(client.list().expect("listed"), []);
}

/// A process that says whether it ran after it had joined a cgroup.
struct Straggler {
    process: std::process::Child,
    said: std::path::PathBuf,
}

impl Straggler {
    fn join(shim: &Shim, cgroup: &str, number: u32) -> Self {
        let said = shim.path(&format!("straggler-{number}"));
        let mut process = Command::new("sh")
            .args(["-c", "read line; echo ran > \"$0\"; exec sleep 1000"])
            .arg(&said)
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("spawned");
        let pid = process.id().to_string();
        for root in ["", "/unified", "/freezer"] {
            let directory = format!("/sys/fs/cgroup{root}{cgroup}");
            if std::path::Path::new(&directory).exists() {
                std::fs::write(format!("{directory}/cgroup.procs"), &pid).expect("joined");
            }
        }
        let input = process.stdin.as_mut().expect("a pipe");
        // It may be dead already.
        let _ = std::io::Write::write_all(input, b"go\n");
        Self { process, said }
    }

    fn dies_without_having_run(&mut self) {
        let ended = until(|| self.process.try_wait().expect("asked").is_some());
        if !ended {
            self.process.kill().expect("killed");
        }
        assert!(ended, "it goes on");
        assert!(!self.said.exists(), "it ran");
    }
}

#[test]
fn whatever_appears_of_a_start_that_was_killed_dies_until_the_start_is_over() {
    if !available() {
        return;
    }
    for (flags, _) in hosts() {
        let mut shim = Shim::start_with(flags);
        let cgroup = format!("{}/late.1", shim.cgroup);
        let mut client = shim.client();
        subscribe(&mut client);
        let name = || "late.1".to_owned();
        let guard = Request::Guard {
            name: name(),
            cgroup: cgroup.clone(),
        };
        client.ask(guard).expect("guarded");
        client.ask(Request::Kill { name: name() }).expect("killed");
        for number in 0..3 {
            Straggler::join(&shim, &cgroup, number).dies_without_having_run();
        }
        // The next shim goes on with it.
        shim.succeed();
        client = shim.client();
        subscribe(&mut client);
        Straggler::join(&shim, &cgroup, 3).dies_without_having_run();
        let mut last = Straggler::join(&shim, &cgroup, 4);
        let process = PidFd::open(last.process.id().cast_signed()).expect("held");
        client.appeared("late.1", &process).expect("taken");
        last.dies_without_having_run();
        let end = next_end(&mut client);
        assert_eq!(end.name, "late.1");
        let names = vec![name()];
        client
            .ask(Request::Acknowledge { names })
            .expect("forgotten");
        // One that is over is nobody's any more.
        let guard = Request::Guard {
            name: "never.1".to_owned(),
            cgroup: format!("{}/never.1", shim.cgroup),
        };
        client.ask(guard).expect("guarded");
        let never = || "never.1".to_owned();
        client.ask(Request::Kill { name: never() }).expect("killed");
        client
            .ask(Request::NotStarted { name: never() })
            .expect("over");
        assert_eq!(next_end(&mut client).name, "never.1");
    }
}

#[test]
fn what_docker_has_in_slices_of_systemds_is_found_again_by_a_shim_that_lost_its_state() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        sliced_on(flags, &freezer);
    }
}

fn sliced_on(flags: &[&str], freezer: &Freezer) {
    let mut shim = Shim::start_with(flags);
    let above = shim.cgroup.replacen('-', "_", 1);
    let slice = format!("{above}.slice");
    let cgroup = format!("{slice}{above}-a_docked_1.slice");
    let name = format!("shimtest-{}-sliced", std::process::id());
    let script = "while :; do echo ran; sleep 0.02; done";
    let Some(docked) = Docked::create(&name, &cgroup, script) else {
        return;
    };
    let mut client = shim.client();
    let guard = Request::Guard {
        name: "a-docked.1".to_owned(),
        cgroup: cgroup.clone(),
    };
    client.ask(guard).expect("guarded");
    docked.start();
    let process = PidFd::open(docked.pid()).expect("it runs");
    client.appeared("a-docked.1", &process).expect("taken");
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    std::fs::remove_file(shim.path("shim.state")).expect("removed");
    shim.succeed();
    let mut client = shim.client();
    assert!(is_fenced(&mut client));
    assert!(freezer.is_frozen(&cgroup).expect("asked"));
    let found = client.list().expect("listed");
    let found: Vec<_> = found
        .iter()
        .map(|one| (one.name.as_str(), one.pid, one.foreign))
        .collect();
    assert_eq!(found, [("a-docked.1", process.pid(), true)]);
    let before = docked.log();
    client.ask(unfence(None)).expect("opened");
    assert!(until(|| docked.log() > before), "it runs again");
    client.ask(Request::KillAll).expect("killed");
    assert!(process.wait_dead(support::SOON).expect("waited"));
    drop(docked);
    let cgroups = Cgroups::detect().expect("detected");
    assert!(until(|| cgroups.remove_tree(&slice).is_empty()));
}

#[test]
fn a_start_of_dockers_that_comes_after_the_deadline_never_runs() {
    if !available() {
        return;
    }
    for (flags, freezer) in hosts() {
        late_on(flags, &freezer);
    }
}

fn late_on(flags: &[&str], freezer: &Freezer) {
    let shim = Shim::start_with(flags);
    let cgroup = format!("{}/late.1", shim.cgroup);
    let name = format!("shimtest-{}-late", std::process::id());
    let Some(docked) = Docked::create(&name, &cgroup, "echo ran; exec sleep 1000") else {
        return;
    };
    let mut client = shim.client();
    client
        .ask(Request::Guard {
            name: "late.1".to_owned(),
            cgroup: cgroup.clone(),
        })
        .expect("guarded");
    arm(&mut client, 1);
    assert!(until(|| freezer.is_frozen(&cgroup).expect("asked")));
    // Docker does not know, and starts it all the same.
    let (begun, started) = std::thread::scope(|scope| {
        let start = scope.spawn(|| docker(&["start", &docked.name]));
        let cgroups = Cgroups::detect().expect("detected");
        let begun = until(|| !cgroups.pids_below(&cgroup).is_empty());
        // Docker answers nothing about it before that start is over.
        client
            .ask(Request::Kill {
                name: "late.1".to_owned(),
            })
            .expect("killed");
        (begun, start.join().expect("joined"))
    });
    assert!(begun, "Docker never started it");
    assert_eq!(started, None, "Docker could start it");
    assert_eq!(docked.log(), 0, "it ran");
    client
        .ask(Request::NotStarted {
            name: "late.1".to_owned(),
        })
        .expect("over");
    assert!(fenced(client.ask(Request::Guard {
        name: "later.1".to_owned(),
        cgroup: format!("{}/later.1", shim.cgroup),
    })));
}

#[test]
fn a_cgroup_that_is_not_ours_is_not_guarded() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    for cgroup in [
        "/",
        "/system.slice",
        "/conman",
        "conman/x",
        "/conman/../x",
        "/conmanx/",
    ] {
        let outcome = client.ask(Request::Guard {
            name: "x.1".to_owned(),
            cgroup: cgroup.to_owned(),
        });
        assert!(outcome.is_err(), "{cgroup}");
    }
    assert_eq!(client.list().expect("listed"), []);
    let process = PidFd::open(std::process::id().cast_signed()).expect("held");
    let outcome = client.appeared("x.1", &process);
    assert!(outcome.is_err());
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
        client.ask(Request::KillAll).expect("killed");
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
    client.ask(Request::KillAll).expect("killed");
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
    client.ask(Request::Disarm).expect("disarmed");
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
    client.ask(Request::KillAll).expect("killed");
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
