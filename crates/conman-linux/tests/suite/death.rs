//! Killing, dying, and telling one process from another.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use conman_linux::{PidFd, ProcessError, ProcessIdentity, Signal};
use conman_observer::{pid_namespace, scan};

use crate::support::{Namespace, Process, SOON};

/// An init with members that ignore every signal they can.
const STUBBORN_FAMILY: &str = "trap '' TERM INT HUP; for n in 1 2 3 4 5; do sleep 1000 & done; \
     (sleep 1000 & exec sleep 1000) & echo ready; wait";

fn members(init: i32) -> Vec<PidFd> {
    let namespace = pid_namespace(init).expect("the init lives");
    scan(|entry| entry.pid_namespace == Some(namespace))
        .iter()
        .filter_map(|entry| PidFd::open(entry.pid).ok())
        .collect()
}

#[test]
fn a_killed_process_is_dead_and_cannot_be_signalled_again() {
    let mut process = Process::idle();
    let pidfd = process.pidfd();
    assert!(!pidfd.is_dead().expect("poll"));
    assert!(!pidfd.wait_dead(Duration::from_millis(1)).expect("poll"));
    assert!(pidfd.signal(Signal::SIGCONT).expect("signal"));
    assert!(pidfd.kill().expect("signal"));
    assert!(pidfd.wait_dead(SOON).expect("poll"));
    // A zombie, and nobody's after that.
    assert!(!pidfd.kill().expect("signal"));
    process.reap();
    assert!(!pidfd.kill().expect("signal"));
    assert!(pidfd.is_dead().expect("poll"));
}

#[test]
fn a_process_that_ignores_a_signal_lives_on() {
    let process =
        Process::until_ready(Command::new("sh").args(["-c", "trap '' TERM; echo ready; exec cat"]));
    let pidfd = process.pidfd();
    assert!(pidfd.signal(Signal::SIGTERM).expect("signal"));
    assert!(!pidfd.wait_dead(Duration::from_millis(50)).expect("poll"));
}

#[test]
fn a_namespace_is_certified_dead_only_when_no_member_is_left() {
    for _ in 0..5 {
        let namespace = Namespace::with_init(STUBBORN_FAMILY);
        let members = members(namespace.init);
        assert!(members.len() >= 7, "{} members", members.len());
        let init = namespace.pidfd();
        assert!(init.kill().expect("signal"));
        assert!(init.wait_dead(SOON).expect("poll"));
        for member in &members {
            assert!(
                member.is_dead().expect("poll"),
                "{} outlived the certificate",
                member.pid()
            );
        }
    }
}

#[test]
fn a_member_that_nobody_has_reaped_withholds_the_certificate() {
    let namespace = Namespace::with_init("echo ready; exec cat");
    // Its parent lives outside the namespace and, no shell any more, does not wait for it.
    let outside = Process::until_ready(
        Command::new("nsenter")
            .args([
                "--pid",
                "--no-fork",
                "--target",
                &namespace.init.to_string(),
                "--",
            ])
            .args(["sh", "-c", "sleep 1000 >/dev/null & exec cat"]),
    );
    let init = namespace.pidfd();
    assert!(!init.is_exiting());
    assert!(init.kill().expect("signal"));
    assert!(!init.wait_dead(Duration::from_millis(200)).expect("poll"));
    let begun = Instant::now();
    while !init.is_exiting() {
        assert!(begun.elapsed() < SOON, "it does not begin to exit");
        std::thread::yield_now();
    }
    assert!(!init.is_dead().expect("poll"));
    drop(outside);
    assert!(init.wait_dead(SOON).expect("poll"));
    assert!(init.is_exiting());
}

#[test]
fn a_recorded_process_is_told_from_every_other() {
    let mut process = Process::idle();
    let identity = process.identity();
    assert_eq!(
        PidFd::open_verified(&identity).expect("the same").pid(),
        process.pid()
    );
    let (_, identified) = PidFd::open_identified(process.pid()).expect("it lives");
    assert_eq!(identified, identity);

    let later = identity.start_time_ticks + 1;
    let error = PidFd::open_verified(&ProcessIdentity {
        start_time_ticks: later,
        ..identity.clone()
    })
    .expect_err("another start");
    assert!(
        matches!(error, ProcessError::Reused { recorded, .. } if recorded == later),
        "{error}"
    );
    assert!(error.proves_death());

    let elsewhere = ProcessIdentity {
        boot_id: "another".to_owned(),
        ..identity.clone()
    };
    let error = PidFd::open_verified(&elsewhere).expect_err("another boot");
    assert!(matches!(error, ProcessError::OtherBoot { .. }), "{error}");
    assert!(error.proves_death());

    let pidfd = process.pidfd();
    pidfd.kill().expect("signal");
    assert!(pidfd.wait_dead(SOON).expect("poll"));
    // A zombie still is the recorded process, and can be told to be dead.
    let zombie = PidFd::open_verified(&identity).expect("not reaped yet");
    assert!(zombie.is_dead().expect("poll"));
    let error = PidFd::open_identified(process.pid()).expect_err("dead");
    assert!(matches!(error, ProcessError::Gone { .. }), "{error}");
    process.reap();
    // Somebody else may have the PID by now.
    let error = PidFd::open_verified(&identity).expect_err("gone");
    assert!(
        matches!(
            error,
            ProcessError::Gone { .. } | ProcessError::Reused { .. }
        ),
        "{error}"
    );
}

#[test]
fn no_process_has_a_pid_that_is_not_positive() {
    for pid in [i32::MIN, -1, 0] {
        let error = PidFd::open(pid).expect_err("no such process");
        assert!(matches!(error, ProcessError::Gone { .. }), "{pid}: {error}");
    }
}

#[tokio::test]
async fn any_number_of_tasks_on_any_runtimes_learn_of_a_death() {
    let process = Process::idle();
    let pidfd = Arc::new(process.pidfd());
    let waiters: Vec<_> = (0..5)
        .map(|_| {
            let pidfd = Arc::clone(&pidfd);
            tokio::spawn(async move { pidfd.dead().await })
        })
        .collect();
    let elsewhere = {
        let pidfd = Arc::clone(&pidfd);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.expect("a runtime").block_on(pidfd.dead())
        })
    };
    // Cancelled waits, the first one on the descriptor itself, leave nothing behind.
    for _ in 0..3 {
        let waited = tokio::time::timeout(Duration::from_millis(5), pidfd.dead()).await;
        assert!(waited.is_err(), "it lives");
    }
    pidfd.kill().expect("signal");
    for waiter in waiters {
        tokio::time::timeout(SOON, waiter)
            .await
            .expect("in time")
            .expect("no panic")
            .expect("no error");
    }
    elsewhere.join().expect("no panic").expect("no error");
    // Whoever asks after the death learns of it too.
    tokio::time::timeout(SOON, pidfd.dead())
        .await
        .expect("in time")
        .expect("no error");
}

#[test]
fn whoever_was_started_later_is_younger() {
    let mut child = std::process::Command::new("sleep")
        .arg("60")
        .spawn()
        .expect("started");
    let pid = |pid: u32| i32::try_from(pid).expect("a pid");
    let age = |pid| {
        let process = PidFd::open(pid).expect("it lives");
        process.age().expect("readable")
    };
    // The later one is read first.
    let younger = age(pid(child.id()));
    let older = age(pid(std::process::id()));
    child.kill().expect("killed");
    child.wait().expect("reaped");
    assert!(younger <= older, "{younger:?}, {older:?}");
    assert!(younger < Duration::from_secs(3_600), "{younger:?}");
}
