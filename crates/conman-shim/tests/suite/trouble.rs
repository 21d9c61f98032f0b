//! Processes of the shim's own that die at the worst moment.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use conman_linux::{Freezer, PidFd, Signal, signal_process};
use conman_shim::{
    CallError, ClientError, ContainerState, ExecSpec, Hardening, LaunchError, Request,
};

use crate::support::fencing::{arm, freezer, is_fenced};
use crate::support::probe::{Arg, Probe, run_probe};
use crate::support::{
    SOON, Shim, available, has_own_ids, launcher, next_end, subscribe, until, wait_dead,
};

fn is_launchers_death(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Refused(CallError::Launch {
            error: LaunchError::LauncherDied,
        })
    )
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
                Err(error) if is_launchers_death(&error) => interrupted += 1,
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
    // Sweeping is the next launcher's work; a start after it waits for it. The last kill may be noticed by a start.
    let launch = |name| match client.launch(shim.spec(name, "exec sleep 1000")) {
        Ok(launched) => Some((name, launched)),
        Err(error) => {
            assert!(is_launchers_death(&error), "it works again: {error:?}");
            None
        }
    };
    let works = ["last.1", "last.2"].into_iter().find_map(launch);
    let (name, last) = works.expect("it works again");
    let mut expected: Vec<String> = begun
        .iter()
        .map(|(number, _)| format!("t{number}.1"))
        .collect();
    expected.push(name.to_owned());
    expected.sort();
    assert_only(&shim, &expected);
    let listed: Vec<String> = client
        .list()
        .expect("listed")
        .into_iter()
        .map(|view| view.name)
        .collect();
    assert_eq!(listed, expected);
    client.kill_all().expect("killed");
    wait_dead(&last);
    for (_, launched) in &begun {
        wait_dead(launched);
    }
}

/// Directories and cgroups of these containers come to be all that there are.
fn assert_only(shim: &Shim, containers: &[String]) {
    let freezer = Freezer::detect().expect("detected");
    let cgroup = |name: &String| format!("{}/{name}", shim.cgroup);
    let wanted: Vec<String> = containers.iter().map(cgroup).collect();
    let mut found = Vec::new();
    let swept = until(|| {
        found = freezer.children(&shim.cgroup).expect("listed");
        found.sort();
        let cgroups_are = found == wanted;
        let directories = names(&shim.path("scratch"));
        let directories_are = directories == containers;
        found.extend(directories);
        cgroups_are && directories_are
    });
    assert!(swept, "{found:?}, not {containers:?}");
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
fn containers_outlive_a_killed_shim_and_a_later_one_takes_them_over() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let sleeps = "trap 'exit 42' TERM; while :; do sleep 0.05; done";
    let kept = client
        .launch(shim.spec("kept.1", sleeps))
        .expect("launched");
    let killed = client
        .launch(shim.spec("killed.1", "exec sleep 1000"))
        .expect("launched");
    let unseen = client
        .launch(shim.spec("unseen.1", "exec sleep 1000"))
        .expect("launched");
    let ended = client
        .launch(shim.spec("ended.1", "exit 3"))
        .expect("launched");
    wait_dead(&ended);
    assert!(until(|| {
        let views = client.list().expect("listed");
        views
            .iter()
            .any(|view| view.name == "ended.1" && !view.state.is_alive())
    }));
    let launcher = launcher(shim.process.id(), &shim.cgroup).expect("it lives");
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    assert!(launcher.wait_dead(SOON).expect("waited"));
    let process = kept.process.as_ref().expect("a hold");
    assert!(!process.is_dead().expect("asked"));
    // One ends while there is no shim.
    unseen
        .process
        .as_ref()
        .expect("a hold")
        .kill()
        .expect("killed");
    // Reaped, too, so that nobody knows any more.
    let proc = format!("/proc/{}", unseen.pid);
    assert!(until(|| !std::path::Path::new(&proc).exists()));
    shim.succeed();
    let mut client = shim.client();
    let views = client.list().expect("listed");
    let states: Vec<_> = views.iter().map(|v| (v.name.as_str(), v.state)).collect();
    let expected = [
        ("ended.1", ContainerState::Exited { code: 3 }),
        ("kept.1", ContainerState::Running),
        ("killed.1", ContainerState::Running),
        ("unseen.1", ContainerState::Lost),
    ];
    assert_eq!(states, expected);
    assert_eq!(views[1].pid, kept.pid);
    // Everything works for them that works for others.
    let freezer = Freezer::detect().expect("detected");
    let name = || "kept.1".to_owned();
    client
        .ask(Request::Freeze { name: name() })
        .expect("frozen");
    let cgroup = format!("{}/kept.1", shim.cgroup);
    assert!(until(|| freezer.is_frozen(&cgroup).expect("asked")));
    client.ask(Request::Thaw { name: name() }).expect("thawed");
    assert_eq!(
        client.ask(Request::Hold { name: name() }).expect("held"),
        conman_shim::Reply::Held { pid: kept.pid }
    );
    subscribe(&mut client);
    let told: Vec<_> = (0..2).map(|_| next_end(&mut client).name).collect();
    assert_eq!(told, ["ended.1", "unseen.1"]);
    let signal = Signal::SIGTERM as i32;
    client
        .ask(Request::Signal {
            name: name(),
            signal,
        })
        .expect("told");
    let view = next_end(&mut client);
    assert_eq!(view.name, "kept.1");
    assert!(
        view.state == ContainerState::Exited { code: 42 }
            || (view.state == ContainerState::Lost && !kernel_tells_ends()),
        "{view:?}"
    );
    client
        .ask(Request::Kill {
            name: "killed.1".to_owned(),
        })
        .expect("killed");
    wait_dead(&killed);
    assert_eq!(next_end(&mut client).name, "killed.1");
    let names = expected.map(|(name, _)| name.to_owned()).to_vec();
    client
        .ask(Request::Acknowledge { names })
        .expect("acknowledged");
    assert_eq!(client.list().expect("listed"), []);
    // And for ever.
    shim.succeed();
    assert_eq!(shim.client().list().expect("listed"), []);
}

/// Whether how others' children ended can be asked of the kernel.
fn kernel_tells_ends() -> bool {
    let mut child = std::process::Command::new("/bin/true")
        .spawn()
        .expect("spawned");
    let process = PidFd::open(child.id().cast_signed()).expect("held");
    child.wait().expect("reaped");
    process.ended().expect("asked").is_some()
}

#[test]
fn ids_of_containers_that_were_taken_over_are_not_given_out_again() {
    if !available() || !has_own_ids() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let mut launched = Vec::new();
    let mut bases = Vec::new();
    for round in 0..3 {
        for number in 0..3 {
            let spec = shim.spec(&format!("r{round}n{number}.1"), "exec sleep 1000");
            let one = client.launch(spec).expect("launched");
            bases.push(first_id(one.pid));
            launched.push(one);
        }
        shim.succeed();
        client = shim.client();
    }
    bases.sort_unstable();
    let before = bases.len();
    bases.dedup();
    assert_eq!(bases.len(), before, "{bases:?}");
    client.kill_all().expect("killed");
    for one in &launched {
        wait_dead(one);
    }
}

#[test]
fn ids_that_two_are_said_to_have_stay_the_first_ones() {
    if !available() || !has_own_ids() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let mut launch = |name: &str| {
        client
            .launch(shim.spec(name, "exec sleep 1000"))
            .expect("launched")
    };
    let (first, second) = (launch("a.1"), launch("b.1"));
    let ids = |id: u64| format!("\"ids\":{id},");
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    let state = std::fs::read_to_string(shim.path("shim.state")).expect("a state");
    let wrong = state.replace(&ids(first_id(second.pid)), &ids(first_id(first.pid)));
    assert_ne!(wrong, state);
    std::fs::write(shim.path("shim.state"), wrong).expect("written");
    shim.succeed();
    let mut client = shim.client();
    client
        .ask(Request::Kill {
            name: "b.1".to_owned(),
        })
        .expect("killed");
    wait_dead(&second);
    let names = vec!["b.1".to_owned()];
    assert!(until(|| client
        .ask(Request::Acknowledge {
            names: names.clone()
        })
        .is_ok()));
    let third = client
        .launch(shim.spec("c.1", "exec sleep 1000"))
        .expect("launched");
    assert_ne!(first_id(third.pid), first_id(first.pid));
    client.kill_all().expect("killed");
    wait_dead(&first);
    wait_dead(&third);
}

#[test]
fn a_shim_killed_at_any_point_of_a_start_leaves_nothing_that_nobody_knows() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut answered = Vec::new();
    let mut interrupted = 0;
    for number in 0..25_u64 {
        let mut client = shim.client();
        let name = format!("t{number}.1");
        let spec = shim.spec(&name, "exec sleep 1000");
        let pid = client.shim_pid();
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                shim.process_pause(number * 700);
                signal_process(pid, Signal::SIGKILL).expect("killed");
            });
            client.launch(spec)
        });
        match outcome {
            Ok(_) => answered.push(name),
            Err(_) => interrupted += 1,
        }
        shim.succeed();
    }
    assert!(interrupted > 0, "the trial did not work");
    let mut client = shim.client();
    let mut listed: Vec<String> = client
        .list()
        .expect("listed")
        .into_iter()
        .map(|view| view.name)
        .collect();
    // One may run whose answer was on its way.
    assert!(answered.iter().all(|name| listed.contains(name)));
    listed.sort();
    assert_only(&shim, &listed);
    client.kill_all().expect("killed");
}

/// First of a container's own ids.
fn first_id(pid: i32) -> u64 {
    let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).expect("it lives");
    let first = map.split_ascii_whitespace().nth(1).expect("a map");
    first.parse().expect("a number")
}

#[cfg(target_arch = "x86_64")]
#[test]
fn what_an_interrupted_start_left_is_removed_however_deep_and_no_start_waits_for_that() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let probe = Probe::of(libc::SYS_mkdir, &[Arg::Text("d"), Arg::Number(0o700)])
        .call(libc::SYS_chdir, &[Arg::Text("d")])
        .repeated(10_000)
        .call(
            libc::SYS_write,
            &[Arg::Number(1), Arg::Text("deep"), Arg::Number(4)],
        )
        .call(libc::SYS_pause, &[]);
    probe.write(&shim.path("store/probe/probe"), 0o755);
    shim.made_layer("probe");
    let mut spec = shim.spec("deep.1", "");
    spec.root.layers.insert(0, "probe".into());
    spec.program.argv = vec!["/probe".to_owned()];
    let deep = client.launch(spec).expect("launched");
    assert!(until(|| shim.log("deep.1") == "deep"));
    let ids = first_id(deep.pid);
    shim.process.kill().expect("killed");
    shim.process.wait().expect("reaped");
    // As if the shim had died just before it heard that the program runs.
    let state = std::fs::read_to_string(shim.path("shim.state")).expect("a state");
    let before = state.replace("\"running\"", "\"launching\"");
    assert_ne!(before, state);
    std::fs::write(shim.path("shim.state"), before).expect("written");
    shim.succeed();
    let mut client = shim.client();
    let next = client
        .launch(shim.spec("next.1", "exec sleep 1000"))
        .expect("launched");
    assert!(
        shim.path("scratch/deep.1").exists(),
        "a start waited until everything was removed"
    );
    wait_dead(&deep);
    if has_own_ids() {
        assert_ne!(first_id(next.pid), ids, "files of these ids are left");
    }
    // A busy disk may take its time for so many.
    let gone = || until(|| !shim.path("scratch/deep.1").exists());
    assert!(gone() || gone() || gone(), "it stays");
    assert_only(&shim, &["next.1".to_owned()]);
    client.kill_all().expect("killed");
    wait_dead(&next);
}

/// Programs that make the kernel tell the shim something of them while they live.
fn fakers() -> [(&'static str, Probe); 3] {
    let number = Arg::Number;
    let traced = || {
        let usr1 = libc::SIGUSR1.unsigned_abs().into();
        Probe::of(libc::SYS_ptrace, &[number(0)]).call(libc::SYS_kill, &[number(1), number(usr1)])
    };
    [
        ("traced.1", traced().call(libc::SYS_pause, &[])),
        (
            "thread.1",
            Probe::default()
                .in_second_thread()
                .call(libc::SYS_ptrace, &[number(0)])
                .call(libc::SYS_pause, &[]),
        ),
        (
            "leader.1",
            Probe::default()
                .in_second_thread()
                .call(libc::SYS_pause, &[]),
        ),
    ]
}

#[test]
fn a_containers_first_process_cannot_make_the_shim_its_tracer() {
    if !available() || !has_own_ids() {
        return;
    }
    let shim = Shim::start();
    let traced = Probe::of(libc::SYS_ptrace, &[Arg::Number(0)]);
    // With an init, only the init would be it.
    let state = run_probe(&shim, "traced.1", traced, 0o755, |spec| spec.init = false);
    assert_eq!(state, ContainerState::Exited { code: libc::EPERM });
}

#[test]
fn row_35_an_end_is_told_only_of_what_is_dead_and_what_lives_on_is_fenced() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let mut alive = Vec::new();
    for (name, probe) in fakers() {
        probe.write(&shim.path("store").join(name).join("probe"), 0o755);
        shim.made_layer(name);
        let mut spec = shim.spec(name, "");
        spec.root.layers.insert(0, name.into());
        spec.program.argv = vec!["/probe".to_owned()];
        let launched = client.launch(spec).expect("launched");
        let process = launched.process.expect("a hold");
        // It has done all that it does.
        shim.process_pause(300_000);
        let is_dead = process.is_dead().expect("asked");
        let views = client.list().expect("listed");
        let view = views.iter().find(|view| view.name == name);
        let told_alive = view.expect("known").state.is_alive();
        assert!(told_alive || is_dead, "{name} lives and is told as ended");
        if !is_dead {
            alive.push((name, process));
        }
    }
    // A zombie of a first thread is no end of the process.
    assert!(alive.iter().any(|(name, _)| *name == "leader.1"));
    for (name, _) in &alive {
        let null = File::open("/dev/null").expect("there is one");
        let spec = ExecSpec {
            with_client: false,
            files: None,
            name: format!("in.{name}"),
            container: (*name).to_owned(),
            program: shim.spec("unused", "exit 0").program,
            terminal: false,
            kept: None,
            ptys: 0,
            hardening: Hardening::default(),
        };
        let entered = client.exec(spec, [null.as_fd(); 3]);
        // The namespaces of a process are its first thread's, so none are left to enter here.
        assert!(
            entered.is_ok() || *name != "traced.1",
            "{name}: {entered:?}"
        );
    }
    arm(&mut client, 60_000);
    client.ask(Request::FreezeAll).expect("ordered");
    assert!(is_fenced(&mut client));
    for (name, process) in alive {
        let frozen = freezer().is_frozen(&format!("{}/{name}", shim.cgroup));
        assert!(
            frozen.expect("asked"),
            "{name} runs on under a closed fence"
        );
        client
            .ask(Request::Kill { name: name.into() })
            .expect("killed");
        assert!(process.wait_dead(SOON).expect("waited"), "{name}");
    }
}

#[test]
fn the_shim_may_trace_nothing_and_its_launcher_may() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    drop(shim.client());
    let may_trace = |pid: String| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("readable");
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let effective = u64::from_str_radix(effective.expect("a line").trim(), 16);
        effective.expect("a number") & (1 << 19) != 0
    };
    assert!(may_trace("self".to_owned()), "the test's own right");
    assert!(!may_trace(shim.process.id().to_string()));
    // A moment after its birth.
    assert!(until(|| {
        let launcher = launcher(shim.process.id(), &shim.cgroup);
        launcher.is_some_and(|launcher| may_trace(launcher.pid().to_string()))
    }));
}

#[test]
fn a_program_in_a_container_is_traced_by_its_parent_there() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // Its exit code is the error of the call, 0 for none.
    let layer = shim.path("store").join("traced");
    Probe::of(libc::SYS_ptrace, &[Arg::Number(0)]).write(&layer.join("probe"), 0o755);
    shim.made_layer("traced");
    let mut spec = shim.spec("debugger.1", "/probe; echo code $?");
    spec.root.layers.insert(0, "traced".into());
    assert_eq!(shim.output(spec), "code 0\n");
}
