//! A shim that goes on as another program.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_shim::{
    CallError, ClientError, ContainerState, FenceState, LaunchError, Reply, Request, VERSION,
};

use crate::support::{
    Client, SOON, Shim, available, boottime_ns, copy_program, next_end, subscribe, until,
    wait_dead, write_program,
};

/// The same program at another path, as an upgrade would bring it.
fn newer(shim: &Shim) -> PathBuf {
    let path = shim.path("newer");
    copy_program(Path::new(env!("CARGO_BIN_EXE_conman-shim")), &path);
    path
}

fn script(shim: &Shim, text: &str) -> PathBuf {
    let path = shim.path("candidate");
    write_program(&path, text.as_bytes());
    path
}

fn replace(client: &mut Client, program: &Path) -> Result<Reply, ClientError> {
    let program = Some(program.to_owned());
    client.ask(Request::Replace { program })
}

#[test]
fn containers_connections_and_ends_outlive_the_program() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let pid = client.shim_pid();
    let stays = client
        .launch(shim.spec("stays.1", "exec sleep 1000"))
        .expect("launched");
    let ended = client
        .launch(shim.spec("ended.1", "exit 7"))
        .expect("launched");
    wait_dead(&ended);
    assert_eq!(next_end(&mut client).name, "ended.1");
    let path = newer(&shim);
    let former = Path::new(env!("CARGO_BIN_EXE_conman-shim"));
    for program in [path.as_path(), former, path.as_path()] {
        let reply = replace(&mut client, program).expect("replaced");
        assert_eq!(reply, Reply::Done);
        let runs = fs::read_link(format!("/proc/{pid}/exe")).expect("it lives");
        assert_eq!(runs, program);
    }
    // The same connection, and a new one.
    let views = client.list().expect("listed");
    let states: Vec<_> = views.iter().map(|v| (v.name.as_str(), v.state)).collect();
    let expected = [
        ("ended.1", ContainerState::Exited { code: 7 }),
        ("stays.1", ContainerState::Running),
    ];
    assert_eq!(states, expected);
    let mut second = shim.client();
    assert_eq!(second.shim_pid(), pid);
    let next = second
        .launch(shim.spec("next.1", "exit 9"))
        .expect("launched");
    wait_dead(&next);
    // Still subscribed, and still the parent.
    let view = next_end(&mut client);
    assert_eq!(view.state, ContainerState::Exited { code: 9 });
    let process = stays.process.expect("a hold");
    process.kill().expect("killed");
    let view = next_end(&mut client);
    assert_eq!(view.name, "stays.1");
    assert_eq!(view.state, ContainerState::Signalled { signal: 9 });
}

/// How long the fence waits before it kills what is not frozen.
fn freeze_ms(client: &mut Client) -> u64 {
    match client.ask(Request::Hello { version: VERSION }) {
        Ok(Reply::Hello { freeze_ms, .. }) => freeze_ms,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_the_fence_was_told_to_wait_outlives_the_program_and_once_armed_the_shim() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    assert_eq!(freeze_ms(&mut client), 1_000);
    client
        .ask(Request::FreezePatience { freeze_ms: 700 })
        .expect("told");
    let path = newer(&shim);
    replace(&mut client, &path).expect("replaced");
    assert_eq!(freeze_ms(&mut client), 700);
    let until_boottime_ns = boottime_ns() + SOON.as_nanos() as u64;
    client
        .ask(Request::ExtendDeadline { until_boottime_ns })
        .expect("armed");
    shim.succeed();
    assert_eq!(freeze_ms(&mut shim.client()), 700);
}

#[test]
fn no_end_and_no_start_is_lost_while_the_program_changes_again_and_again() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let path = newer(&shim);
    let mut wrong = Vec::new();
    std::thread::scope(|scope| {
        let replacer = scope.spawn(|| {
            let mut client = shim.client();
            let mut done = 0;
            for _ in 0..12 {
                match replace(&mut client, &path) {
                    Ok(_) => done += 1,
                    // Starts are under way all the time.
                    Err(ClientError::Refused(CallError::NotReplaced { .. })) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
            done
        });
        let mut client = shim.client();
        let mut number = 0;
        while !replacer.is_finished() || number < 20 {
            let code = number % 100 + 1;
            let name = format!("n{number}.1");
            let spec = shim.spec(&name, &format!("exit {code}"));
            let launched = client
                .launch(spec)
                .unwrap_or_else(|error| panic!("{name}: {error:?}"));
            wait_dead(&launched);
            let mut state = None;
            until(|| {
                let views = client.list().expect("listed");
                let view = views.into_iter().find(|view| view.name == name);
                state = view.map(|view| view.state);
                state.is_none_or(|state| !state.is_alive())
            });
            if state != Some(ContainerState::Exited { code }) {
                wrong.push((name.clone(), state));
            }
            let names = vec![name];
            client
                .ask(Request::Acknowledge { names })
                .expect("acknowledged");
            number += 1;
        }
        assert!(
            replacer.join().expect("joined") > 0,
            "the trial did not work"
        );
    });
    assert_eq!(wrong, []);
    assert!(until(|| shim.sweep().is_empty()));
}

#[test]
fn a_program_that_cannot_take_over_leaves_everything_as_it_is() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let pid = client.shim_pid();
    let launched = client
        .launch(shim.spec("stays.1", "exec sleep 1000"))
        .expect("launched");
    let cut = shim.path("cut");
    let whole = fs::read(env!("CARGO_BIN_EXE_conman-shim")).expect("readable");
    fs::write(&cut, &whole[..whole.len() / 20]).expect("written");
    fs::set_permissions(&cut, fs::Permissions::from_mode(0o755)).expect("changed");
    let other_version = script(
        &shim,
        "#!/bin/bash\nset -- $CONMAN_SHIM_HANDOVER\n\
         printf '{\"Err\":\"it takes version 99\"}' >&$3\n",
    );
    let candidates = [
        (shim.path("missing"), "No such file"),
        (PathBuf::from("/bin/true"), "without an answer"),
        (cut, "without an answer"),
        (other_version, "version 99"),
        (shim.path("logs"), "not an executable file"),
        (PathBuf::from("conman-shim"), "not absolute"),
    ];
    for (program, expected) in candidates {
        let error = replace(&mut client, &program).expect_err("it cannot");
        assert!(
            matches!(error, ClientError::Refused(CallError::NotReplaced { .. })),
            "{error:?}"
        );
        assert!(error.to_string().contains(expected), "{program:?}: {error}");
    }
    let silent = script(&shim, "#!/bin/sh\nexec sleep 1000\n");
    let error = replace(&mut client, &silent).expect_err("it does not answer");
    assert!(error.to_string().contains("does not answer"), "{error}");
    let own = fs::read_link(format!("/proc/{pid}/exe")).expect("it lives");
    assert_eq!(own, Path::new(env!("CARGO_BIN_EXE_conman-shim")));
    let second = client
        .launch(shim.spec("second.1", "true"))
        .expect("launched");
    wait_dead(&second);
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

/// A deadline as the fence counts it.
fn in_whole_milliseconds(from_now: Duration) -> u64 {
    let after = u64::try_from(from_now.as_nanos()).expect("not that long");
    (crate::support::boottime_ns() + after) / 1_000_000 * 1_000_000
}

#[test]
fn a_deadline_to_come_is_the_same_after_a_replacement() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let until_boottime_ns = in_whole_milliseconds(Duration::from_hours(1));
    client
        .ask(Request::ExtendDeadline { until_boottime_ns })
        .expect("armed");
    replace(&mut client, &newer(&shim)).expect("replaced");
    assert_eq!(
        client.ask(Request::Fence).expect("asked"),
        Reply::Fence {
            state: FenceState::Armed { until_boottime_ns }
        }
    );
}

#[test]
fn the_deadline_stays_in_force_across_a_replacement() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("held.1", "exec sleep 1000"))
        .expect("launched");
    let until_boottime_ns = in_whole_milliseconds(Duration::from_millis(500));
    client
        .ask(Request::ExtendDeadline { until_boottime_ns })
        .expect("armed");
    // It may pass before, during or after this.
    let path = newer(&shim);
    replace(&mut client, &path).expect("replaced");
    let freezer = conman_linux::Freezer::detect().expect("detected");
    let cgroup = format!("{}/held.1", shim.cgroup);
    assert!(until(|| freezer.is_frozen(&cgroup).expect("asked")));
    assert!(
        crate::support::boottime_ns() >= until_boottime_ns,
        "too early"
    );
    let error = client
        .launch(shim.spec("late.1", "true"))
        .expect_err("the fence is closed");
    assert!(matches!(error, ClientError::Refused(CallError::Fenced)));
    // Closed it stays, and thaws nobody.
    replace(&mut client, &path).expect("replaced");
    assert!(freezer.is_frozen(&cgroup).expect("asked"));
    let process = launched.process.expect("a hold");
    process.kill().expect("killed");
    assert!(process.wait_dead(crate::support::SOON).expect("waited"));
}

#[test]
fn a_start_that_fails_during_a_replacement_fails_for_its_own_reason() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let path = newer(&shim);
    std::thread::scope(|scope| {
        let replacer = scope.spawn(|| replace(&mut shim.client(), &path));
        let mut client = shim.client();
        let mut number = 0;
        while !replacer.is_finished() {
            let mut spec = shim.spec(&format!("f{number}.1"), "");
            spec.program.argv = vec!["nonesuch".to_owned()];
            let error = client.launch(spec).expect_err("it does not exist");
            let ClientError::Refused(CallError::Launch { error }) = error else {
                panic!("{error:?}");
            };
            assert!(
                matches!(error, LaunchError::CommandNotFound { .. }),
                "{error:?}"
            );
            number += 1;
        }
        let _ = replacer.join().expect("joined");
    });
}

#[test]
fn a_signal_replaces_it_by_the_program_that_its_path_names_now() {
    if !available() {
        return;
    }
    // A place of its own, where the program may be exchanged.
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("conman-shim");
    copy_program(Path::new(env!("CARGO_BIN_EXE_conman-shim")), &path);
    let shim = Shim::start_as(&path);
    let client = shim.client();
    let pid = client.shim_pid();
    let second = directory.path().join("second");
    copy_program(Path::new(env!("CARGO_BIN_EXE_conman-shim")), &second);
    fs::rename(&second, &path).expect("exchanged");
    let exe = || fs::read_link(format!("/proc/{pid}/exe")).expect("it lives");
    assert_ne!(exe(), path, "the old file is gone");
    conman_linux::signal_process(pid, conman_linux::Signal::SIGHUP).expect("told");
    assert!(until(|| exe() == path));
    drop(client);
    assert_eq!(shim.client().shim_pid(), pid);
}
