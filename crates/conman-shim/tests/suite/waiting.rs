//! Starts that wait in the shim until the launcher takes them.

use std::fs;
use std::process::Command;
use std::time::Duration;

use conman_linux::Signal;
use conman_shim::{CallError, FenceState, LaunchError, LaunchSpec, Reply, Request};

use crate::support::{
    Calls, Shim, available, boottime_ns, hosts, stopped_launcher, until, write_program,
};

/// Starts that are ordered at once.
const MANY: usize = 96;

/// Of an order's bytes, so that most do not fit into the launcher's socket, the one in the middle least of
/// all.
const PADDING_BYTES: usize = 16_384;

fn launch(spec: LaunchSpec) -> Request {
    Request::Launch(Box::new(spec))
}

/// Why a start failed.
fn failure(reply: Reply) -> LaunchError {
    match reply {
        Reply::Failed {
            error: CallError::Launch { error },
        } => error,
        other => panic!("{other:?}"),
    }
}

/// An armed fence's deadline.
fn arm(calls: &mut Calls, after: Duration) -> u64 {
    let after_ns = u64::try_from(after.as_nanos()).expect("not that long");
    let until_boottime_ns = boottime_ns() + after_ns;
    let armed = calls.send(Request::ExtendDeadline { until_boottime_ns });
    assert!(matches!(calls.next(), (id, Reply::Fence { .. }) if id == armed));
    until_boottime_ns
}

#[test]
fn one_of_many_that_wait_is_killed_before_its_turn_and_never_runs() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut calls = Calls::connect(&shim);
    arm(&mut calls, Duration::from_hours(1));
    let launcher = stopped_launcher(&shim);
    let name = |number: usize| format!("w{number}.1");
    let starts: Vec<u64> = (0..MANY)
        .map(|number| {
            let mut spec = shim.spec(&name(number), "echo ran");
            let padding = ("PADDING".to_owned(), "x".repeat(PADDING_BYTES));
            spec.program.env.push(padding);
            calls.send(launch(spec))
        })
        .collect();
    let middle = MANY / 2;
    let kill = calls.send(Request::Kill { name: name(middle) });
    // At once: nobody else knows of it.
    for _ in 0..2 {
        match calls.next() {
            (id, Reply::Done) => assert_eq!(id, kill),
            (id, reply) => {
                assert_eq!(id, starts[middle], "{reply:?}");
                let error = failure(reply).to_string();
                assert!(error.contains("killed"), "{error}");
            }
        }
    }
    launcher.signal(Signal::SIGCONT).expect("it goes on");
    for _ in 1..MANY {
        let (id, reply) = calls.next();
        assert!(matches!(reply, Reply::Launched { .. }), "{id}: {reply:?}");
    }
    let mut client = shim.client();
    let mut listed = Vec::new();
    assert!(until(|| {
        listed = client.list().expect("listed");
        listed.iter().all(|view| !view.state.is_alive())
    }));
    assert!(listed.iter().all(|view| view.name != name(middle)));
    assert_eq!(listed.len(), MANY - 1);
    for number in 0..MANY {
        let ran = shim.path("logs").join(name(number)).exists();
        assert_eq!(ran, number != middle, "{number}");
    }
}

#[test]
fn a_start_that_is_handed_over_while_the_fence_closes_never_runs() {
    if !available() {
        return;
    }
    for (flags, _) in hosts() {
        // A machine that is too slow gives the replacement up.
        let tried = (0..10).any(|_| handed_over_on(flags));
        assert!(tried, "no start was handed over");
    }
}

/// Whether the start was handed over at all.
fn handed_over_on(flags: &[&str]) -> bool {
    let shim = Shim::start_with(flags);
    let mut calls = Calls::connect(&shim);
    let mut others = Calls::connect(&shim);
    let mut replacer = Calls::connect(&shim);
    let launcher = stopped_launcher(&shim);
    let under_way = calls.send(launch(shim.spec("first.1", "exec sleep 1000")));
    // The program that takes over does so only once the deadline has passed.
    let (said, taken, go) = (shim.path("said"), shim.path("taken"), shim.path("go"));
    let made = Command::new("mkfifo").arg(&go).status().expect("run");
    assert!(made.success());
    let script = format!(
        "#!/bin/sh\ncase \"$CONMAN_SHIM_HANDOVER\" in\n\
         check*) echo $$ > {}; ;;\n\
         take*) : > {}; read line < {}; ;;\nesac\nexec {} \"$@\"\n",
        said.display(),
        taken.display(),
        go.display(),
        env!("CARGO_BIN_EXE_conman-shim"),
    );
    let program = shim.path("slow");
    write_program(&program, script.as_bytes());
    let program = Some(program);
    let replaced = replacer.send(Request::Replace { program });
    // Once it has said that it can, starts wait in the shim.
    assert!(until(|| {
        let pid = fs::read_to_string(&said).unwrap_or_default();
        let proc = format!("/proc/{}", pid.trim());
        !pid.trim().is_empty() && !fs::exists(proc).expect("asked")
    }));
    for _ in 0..2 {
        let asked = others.send(Request::Fence);
        assert_eq!(others.next().0, asked);
    }
    let waits = calls.send(launch(shim.spec("second.1", "echo ran; exec sleep 1000")));
    let deadline = arm(&mut others, Duration::from_secs(4));
    launcher.signal(Signal::SIGCONT).expect("it goes on");
    let first = calls.next();
    let begun = matches!(first, (id, Reply::Launched { .. }) if id == under_way);
    let mut refused = None;
    assert!(until(|| {
        refused = replacer.answered();
        refused.is_some() || taken.exists()
    }));
    if refused.is_some() {
        assert!(matches!(refused, Some((id, Reply::Failed { .. })) if id == replaced));
    }
    let handed_over = begun && refused.is_none() && calls.answered().is_none();
    if refused.is_none() {
        assert!(until(|| boottime_ns() > deadline));
        fs::write(&go, "\n").expect("told to go on");
        assert!(matches!(replacer.next(), (id, Reply::Done) if id == replaced));
    }
    if handed_over {
        let (id, reply) = calls.next();
        assert_eq!(id, waits);
        // By no launcher's word, which would have begun it.
        assert_eq!(failure(reply), LaunchError::LauncherDied);
        let log = fs::read_to_string(shim.path("logs").join("second.1"));
        assert_eq!(log.unwrap_or_default(), "", "it ran");
    }
    let mut client = shim.client();
    assert!(until(|| {
        let state = client.ask(Request::Fence).expect("asked");
        let Reply::Fence { state } = state else {
            panic!("{state:?}");
        };
        matches!(state, FenceState::Fenced { .. })
    }));
    client.kill_all().expect("killed");
    handed_over
}
