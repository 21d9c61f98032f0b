//! The init that a container's program runs below: what it reaps, forwards and reports, and that the program cannot
//! reach it.

use std::fs;
use std::path::Path;

use conman_linux::program_of_init;
use conman_shim::{ContainerState, LaunchSpec, Request};

use crate::support::{Shim, available, next_end, subscribe, until};

/// Starts processes in the background, each of which ends at once, and leaves them to its parent.
fn leaves(count: u32) -> String {
    format!("i=0; while [ $i -lt {count} ]; do (true &); i=$((i+1)); done")
}

/// Runs a program to its end.
fn end_of(shim: &Shim, spec: LaunchSpec) -> ContainerState {
    let mut client = shim.client();
    subscribe(&mut client);
    let names = vec![spec.name.clone()];
    client
        .launch(spec)
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    let ended = next_end(&mut client);
    let forget = Request::Acknowledge { names };
    client.ask(forget).expect("acknowledged");
    ended.state
}

#[test]
fn what_a_program_leaves_behind_is_reaped() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // Far more than may live at once; the init of a busy machine gets the time that it needs.
    let reaped =
        "while cat /proc/[0-9]*/stat 2>/dev/null | cut -d' ' -f3 | grep -q Z; do sleep 0.02; done";
    let script = format!(
        "n=0; while [ $n -lt 100 ]; do {}; {reaped}; n=$((n+1)); done; \
         echo $$ $PPID; cat /proc/1/comm; echo none",
        leaves(100)
    );
    let mut spec = shim.spec("reaps.1", &script);
    spec.limits.pids = Some(256);
    assert_eq!(shim.output(spec), "2 1\nconman-init\nnone\n");

    // Without the init, they stay until no process can be made.
    let script = format!("echo $$; ({}) & exec sleep 60", leaves(64));
    let mut spec = shim.spec("leaves.1", &script);
    spec.init = false;
    spec.limits.pids = Some(16);
    let mut client = shim.client();
    client.launch(spec).expect("launched");
    assert!(until(|| shim.log("leaves.1").contains("can't fork")));
    let log = shim.log("leaves.1");
    assert!(log.starts_with("1\n"), "{log}");
    client.kill_all().expect("killed");
}

#[test]
fn the_end_of_a_program_is_its_exit_code_or_its_signal() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    for (number, (script, state)) in [
        ("exit 0", ContainerState::Exited { code: 0 }),
        ("exit 137", ContainerState::Exited { code: 137 }),
        ("kill -9 $$", ContainerState::Signalled { signal: 9 }),
        ("kill -SEGV $$", ContainerState::Signalled { signal: 11 }),
        ("kill -40 $$", ContainerState::Signalled { signal: 40 }),
        // The end of another process is none of the program's.
        (
            "(kill -9 0) & wait; exit 5",
            ContainerState::Signalled { signal: 9 },
        ),
        (
            "setsid sh -c 'kill -9 $$'; exit 5",
            ContainerState::Exited { code: 5 },
        ),
        // An init cannot be killed from inside. It forwards what it gets.
        ("kill -9 1; exit 6", ContainerState::Exited { code: 6 }),
        (
            "kill -USR1 1; sleep 60",
            ContainerState::Signalled { signal: 10 },
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let spec = shim.spec(&format!("ends.{number}"), script);
        assert_eq!(end_of(&shim, spec), state, "{script}");
    }
}

#[test]
fn signals_are_forwarded_to_the_program() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let script = "trap 'echo hup' HUP; trap 'echo rt' 37; trap '' CHLD; echo ready; \
                  while :; do sleep 0.02; done";
    client
        .launch(shim.spec("told.1", script))
        .expect("launched");
    assert!(until(|| shim.log("told.1").contains("ready")));
    let mut send = |signal: i32| {
        let name = "told.1".to_owned();
        client.ask(Request::Signal { name, signal }).expect("sent");
    };
    for (signal, word) in [(1, "hup"), (37, "rt")] {
        send(signal);
        assert!(until(|| shim.log("told.1").contains(word)), "{word}");
    }
    // One that the program does not handle ends it, although it is a container's program.
    send(15);
    let ended = next_end(&mut client);
    assert_eq!(ended.state, ContainerState::Signalled { signal: 15 });
}

#[test]
fn a_program_of_another_user_gets_signals_too() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let mut spec = shim.spec("user.1", "echo ready; exec sleep 60");
    spec.program.uid = 1_000;
    client.launch(spec).expect("launched");
    assert!(until(|| shim.log("user.1").contains("ready")));
    let name = "user.1".to_owned();
    client
        .ask(Request::Signal { name, signal: 15 })
        .expect("sent");
    let ended = next_end(&mut client);
    assert_eq!(ended.state, ContainerState::Signalled { signal: 15 });
}

#[test]
fn a_container_learns_nothing_from_its_init_and_has_no_power_over_it() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script = "grep -E '^(Uid|CapPrm|CapEff|CapBnd|NoNewPrivs)' /proc/1/status; \
                  tr '\\0' ' ' </proc/1/cmdline; echo; \
                  for f in environ mem maps auxv; do \
                      { head -c 1 /proc/1/$f >/dev/null; } 2>/dev/null && echo $f; done; \
                  for f in exe root cwd ns/net fd; do ls /proc/1/$f/ 2>/dev/null && echo $f; done; \
                  { echo 1000 >/proc/1/oom_score_adj; } 2>/dev/null && echo score; \
                  cat /proc/1/oom_score_adj /proc/self/oom_score_adj";
    let mut spec = shim.spec("reach.1", script);
    // Even with these, which are the container's own.
    let capabilities = [
        "SYS_PTRACE",
        "DAC_OVERRIDE",
        "DAC_READ_SEARCH",
        "SYS_RESOURCE",
    ];
    spec.hardening.capabilities = Some(capabilities.map(str::to_owned).to_vec());
    let log = shim.output(spec);
    let expected = "Uid:\t0\t0\t0\t0\n\
                    CapPrm:\t0000000000000020\n\
                    CapEff:\t0000000000000020\n\
                    CapBnd:\t0000000000000020\n\
                    NoNewPrivs:\t1\n\
                    conman-init \n\
                    500\n500\n";
    assert_eq!(log, expected);
}

#[test]
fn an_init_has_no_descriptor_and_less_memory_than_any_program() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("small.1", "exec sleep 60"))
        .expect("launched");
    let init = launched.pid;
    // It closes its first three itself.
    assert!(until(|| {
        let fds = fs::read_dir(format!("/proc/{init}/fd")).expect("listed");
        fds.count() == 0
    }));
    let cwd = fs::read_link(format!("/proc/{init}/cwd")).expect("read");
    assert_eq!(cwd.to_str(), Some("/"));
    let program = program_of_init(init).expect("a child");
    assert_ne!(program, init);
    let resident_kb = |pid: i32| {
        let maps = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("read");
        let line = maps.lines().find_map(|line| line.strip_prefix("Rss:"));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.unwrap_or(u64::MAX)
    };
    assert!(until(|| resident_kb(init) <= 16));
    assert!(until(|| resident_kb(init) < resident_kb(program)));
    client.kill_all().expect("killed");
}

#[test]
fn a_start_without_room_for_its_program_names_the_limits() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    client
        .launch(shim.spec("first.1", "exec sleep 60"))
        .expect("launched");
    let places = ["pids", "unified", "."].map(|tree| {
        let tree = Path::new("/sys/fs/cgroup").join(tree);
        tree.join(&shim.cgroup[1..]).join("pids.max")
    });
    let limit = places.into_iter().find(|file| file.exists());
    let limit = limit.expect("the containers have a limit of processes");
    // For the first container, and the init of another one.
    fs::write(&limit, "3").expect("limited");
    let refused = client.launch(shim.spec("second.1", "exec sleep 60"));
    let error = refused.expect_err("there is no room").to_string();
    assert!(error.contains("below its init: pids.max"), "{error}");
    fs::write(&limit, "max").expect("lifted");
    let launched = client.launch(shim.spec("second.1", "exec sleep 60"));
    launched.expect("there is room");
    client.kill_all().expect("killed");
}
