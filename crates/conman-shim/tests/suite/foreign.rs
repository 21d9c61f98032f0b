//! The dead-man fence over containers that others start, as Docker does.

use std::process::Command;

use conman_linux::{Cgroups, Freezer, PidFd};
use conman_shim::{CallError, ClientError, ContainerState, Request};

use crate::support::fencing::{arm, fenced, is_fenced, unfence};
use crate::support::{Client, Shim, available, hosts, lacks, next_end, subscribe, until};

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
    assert!(process.wait_dead(crate::support::SOON).expect("waited"));
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

#[test]
fn what_freezing_does_not_reach_is_refused_and_killed_by_the_fence() {
    if !available() {
        return;
    }
    let freezer = Freezer::detect().expect("detected");
    let cgroups = Cgroups::detect().expect("detected");
    let roots = ["unified/", "", "freezer/"].map(|at| format!("/sys/fs/cgroup/{at}cgroup.procs"));
    let root = roots
        .iter()
        .find(|root| std::path::Path::new(root).exists());
    let root = root.expect("mounted where it usually is");
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    // As an older runc does it, which knows nothing of the unified hierarchy beside others.
    let astray = |name: &str| {
        let session = format!("{name}.1");
        let cgroup = format!("{}/{session}", shim.cgroup);
        let docked = format!("shimtest-{}-{name}", std::process::id());
        let docked = Docked::create(&docked, &cgroup, "while :; do sleep 0.02; done")?;
        let guard = Request::Guard {
            name: session.clone(),
            cgroup: cgroup.clone(),
        };
        shim.client().ask(guard).expect("guarded");
        docked.start();
        let process = PidFd::open(docked.pid()).expect("it runs");
        // Some come and go.
        assert!(until(|| {
            let pids = cgroups.try_pids_below(&cgroup).expect("read");
            let within = pids.into_iter();
            let within = within.filter(|pid| freezer.reaches(&cgroup, *pid).expect("read"));
            let left = within.map(|pid| std::fs::write(root, pid.to_string()));
            left.count() == 0
        }));
        Some((session, docked, process))
    };
    let Some((early, _docked, told)) = astray("early") else {
        return;
    };
    let refused = client.appeared(&early, &told).expect_err("out of reach");
    assert!(matches!(
        refused,
        ClientError::Refused(CallError::Host { .. })
    ));
    assert!(
        refused.to_string().contains("cgroup namespace"),
        "{refused}"
    );
    assert!(!told.is_dead().expect("asked"));
    // Of what is nowhere else either nothing can be known before it is told of.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let untold = if mounts.contains(" - cgroup ") {
        astray("late")
    } else {
        None
    };
    client
        .ask(Request::FreezePatience { freeze_ms: 200 })
        .expect("told");
    client.ask(Request::FreezeAll).expect("ordered");
    let untold = untold.iter().map(|(_, _, process)| process);
    for process in untold.chain([&told]) {
        assert!(
            process.wait_dead(crate::support::SOON).expect("waited"),
            "it runs on"
        );
    }
    assert_eq!(next_end(&mut client).name, early);
    assert!(is_fenced(&mut client));
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

/// It was not started; what is dying of it is waited for.
fn over(client: &mut Client, name: &str) {
    let over = until(|| {
        let name = name.to_owned();
        match client.ask(Request::NotStarted { name }) {
            Ok(_) => true,
            Err(ClientError::Refused(CallError::StillAlive { .. })) => false,
            Err(error) => panic!("{error}"),
        }
    });
    assert!(over, "something of it lives on");
}

#[test]
fn a_start_is_not_over_while_anything_of_it_lives() {
    if !available() {
        return;
    }
    for (flags, _) in hosts() {
        let shim = Shim::start_with(flags);
        let cgroup = format!("{}/early.1", shim.cgroup);
        let mut client = shim.client();
        subscribe(&mut client);
        let name = || "early.1".to_owned();
        let guard = Request::Guard {
            name: name(),
            cgroup: cgroup.clone(),
        };
        client.ask(guard).expect("guarded");
        let mut it = Straggler::join(&shim, &cgroup, 0);
        let refused = client.ask(Request::NotStarted { name: name() });
        let refused = refused.expect_err("it lives");
        assert!(
            matches!(refused, ClientError::Refused(CallError::StillAlive { .. })),
            "{refused}"
        );
        // It is held as before.
        client.ask(Request::FreezeAll).expect("ordered");
        assert!(is_fenced(&mut client));
        let listed = client.list().expect("listed");
        assert!(listed[0].state.is_alive(), "{listed:?}");
        client.ask(Request::Kill { name: name() }).expect("killed");
        assert!(until(|| it.process.try_wait().expect("asked").is_some()));
        over(&mut client, &name());
        assert_eq!(next_end(&mut client).name, name());
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
        over(&mut client, &never());
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
    client.kill_all().expect("killed");
    assert!(process.wait_dead(crate::support::SOON).expect("waited"));
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
    over(&mut client, "late.1");
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
