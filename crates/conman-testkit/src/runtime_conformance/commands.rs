//! Checks of commands in containers.

use std::time::Duration;

use bytes::Bytes;
use conman_linux::PidFd;
use conman_proto::TerminalSize;

use super::stage::{PATIENCE, Stage, command, pid_namespace, until, within};
use conman_runtime::{ExecIo, ExecPlan, OutputStream, RuntimeError};

pub async fn commands_have_their_outputs_apart_and_their_exit_code(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let outcome = stage
        .sh(&container.key, "echo out; echo err >&2; exit 3")
        .await;
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str()),
        ("out\n", "err\n")
    );
    assert_eq!((outcome.exit_code, outcome.error), (Some(3), None));
    let killed = stage.sh(&container.key, "kill -9 $$").await;
    assert_eq!(killed.exit_code, Some(137));
    let silent = stage.exec(&container.key, command(&["true"])).await;
    assert_eq!((silent.stdout.as_str(), silent.exit_code), ("", Some(0)));
}

pub async fn commands_read_their_standard_input_to_its_end(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let plan = ExecPlan {
        stdin: true,
        ..command(&["wc", "-c"])
    };
    let long = "x".repeat(300_000);
    let outcome = stage
        .exec_with_input(&container.key, plan, &[&long, "yz"])
        .await;
    assert_eq!(outcome.stdout.trim(), "300002");
    let without = stage.exec(&container.key, command(&["wc", "-c"])).await;
    assert_eq!(
        without.stdout.trim(),
        "0",
        "without input there is nothing to wait for"
    );
}

pub async fn commands_run_where_and_with_what_was_asked(stage: &Stage) {
    let mut plan = stage.plan("alice", &["sleep", "1000"]);
    plan.spec.env = [("OUTER", "o"), ("BOTH", "o")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    let container = stage.run(&plan).await;
    let outcome = stage
        .exec(
            &container.key,
            ExecPlan {
                env: vec![("BOTH".to_owned(), "i with spaces".to_owned())],
                workdir: Some("/etc".to_owned()),
                user: Some("65534:65534".to_owned()),
                ..command(&["sh", "-c", "echo $OUTER; echo \"$BOTH\"; pwd; id -u; id -g"])
            },
        )
        .await;
    assert_eq!(
        outcome.stdout, "o\ni with spaces\n/etc\n65534\n65534\n",
        "{}",
        outcome.stderr
    );
}

pub async fn a_command_of_another_user_opens_its_streams_anew(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let script = "echo out >/proc/self/fd/1; echo err >/proc/self/fd/2; cat /proc/self/fd/0";
    let plan = ExecPlan {
        stdin: true,
        user: Some("65534:65534".to_owned()),
        ..command(&["sh", "-c", script])
    };
    let outcome = stage.exec_with_input(&container.key, plan, &["in\n"]).await;
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str()),
        ("out\nin\n", "err\n")
    );
    container.kill();
}

pub async fn commands_have_a_terminal_of_the_size_that_was_asked(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let size = TerminalSize {
        columns: 91,
        rows: 31,
    };
    let plan = ExecPlan {
        tty: Some(size),
        stdin: true,
        ..command(&["sh"])
    };
    let mut io = stage
        .runtime()
        .exec(&container.key, plan)
        .await
        .expect("run");
    let mut seen = String::new();
    let input =
        "until [ \"$(stty size)\" = '31 91' ]; do sleep 0.05; done; echo sized-$((6 * 7))\n";
    io.stdin
        .send(Bytes::from_static(input.as_bytes()))
        .await
        .expect("it reads");
    read_until(&mut io, &mut seen, "sized-42").await;
    io.resize
        .send(TerminalSize {
            columns: 117,
            rows: 43,
        })
        .await
        .expect("the resize is accepted");
    let shown = match stage.resizes_terminals() {
        true => "43 117",
        false => "31 91",
    };
    let input = format!(
        "until [ \"$(stty size)\" = '{shown}' ]; do sleep 0.05; done; tty; exit $((2 + 3))\n"
    );
    io.stdin.send(Bytes::from(input)).await.expect("it reads");
    let status = within(PATIENCE, "the shell's end", async {
        while let Some((stream, bytes)) = io.output.recv().await {
            assert_eq!(stream, OutputStream::Stdout, "a terminal has one output");
            seen.push_str(&String::from_utf8_lossy(&bytes));
        }
        io.status.await.expect("the end is reported")
    })
    .await;
    assert_eq!(status.exit_code, Some(5), "{seen}");
}

pub async fn commands_are_slowed_by_a_reader_that_does_not_read(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let script = "i=0; while [ $i -lt 200 ]; do head -c 65536 /dev/zero | tr '\\0' x; echo; \
        i=$((i + 1)); echo $i >/run/progress; done";
    let plan = command(&["sh", "-c", script]);
    let mut io = stage
        .runtime()
        .exec(&container.key, plan)
        .await
        .expect("run");
    let progress = || stage.sh(&container.key, "cat /run/progress 2>/dev/null || echo 0");
    // The count stops once every buffer on the way is full.
    let mut before = String::new();
    let stuck_at = within(PATIENCE, "the standstill", async {
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(300)).await;
            let now = progress().await.stdout.trim().to_owned();
            // Empty while the file is being rewritten.
            if now == before && !matches!(now.as_str(), "" | "0") {
                return now;
            }
            before = now;
        }
    })
    .await;
    let stuck_at: u64 = stuck_at.parse().expect("a number");
    assert!(
        stuck_at < 200,
        "the command wrote all 13 MB although there was no reader"
    );
    let mut total = 0;
    let status = within(PATIENCE, "the command's end", async {
        while let Some((_, bytes)) = io.output.recv().await {
            assert!(bytes.len() <= 64 * 1024, "pieces are bounded");
            total += bytes.len();
        }
        io.status.await.expect("the end is reported")
    })
    .await;
    assert_eq!(
        (total, status.exit_code),
        (200 * 65_537, Some(0)),
        "nothing is lost"
    );
}

pub async fn a_command_that_does_not_exist_says_so(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    for (program, expected) in [("nosuch-program", 127), ("/no/such", 127), ("/etc", 126)] {
        if !stage.runtime().runs_programs_itself() && expected == 126 {
            continue;
        }
        for tty in [
            None,
            Some(TerminalSize {
                columns: 80,
                rows: 24,
            }),
        ] {
            let plan = ExecPlan {
                tty,
                ..command(&[program])
            };
            let outcome = stage.exec(&container.key, plan).await;
            assert_eq!(
                outcome.exit_code,
                Some(expected),
                "{program}: {:?}",
                outcome.error
            );
            let error = outcome.error.expect("an explanation");
            if !stage.runtime().runs_programs_itself() {
                // Only its kernel knows why, and prints it.
                continue;
            }
            assert!(error.contains(program), "{error}");
            assert_eq!(
                outcome.stdout, "",
                "the explanation is not output of the command"
            );
        }
    }
}

pub async fn a_command_that_closes_its_terminal_goes_on_to_its_own_end(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let plan = ExecPlan {
        tty: Some(TerminalSize {
            columns: 80,
            rows: 24,
        }),
        ..command(&["sh", "-c", "exec <&- >&- 2>&-; sleep 0.3; exit 7"])
    };
    let outcome = stage.exec(&container.key, plan).await;
    assert_eq!(outcome.exit_code, Some(7), "{:?}", outcome.error);
}

pub async fn a_command_dies_with_its_container(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let plan = command(&["sh", "-c", "echo begun; sleep 1000"]);
    let mut io = stage
        .runtime()
        .exec(&container.key, plan)
        .await
        .expect("run");
    let mut seen = String::new();
    read_until(&mut io, &mut seen, "begun").await;
    let namespace = pid_namespace(container.pid).expect("it lives");
    let inside = || stage.pids_in(&namespace, &container.key);
    assert!(inside().len() > 1, "the command is in the namespace");
    // This waits for the command as well: it is a process of the namespace.
    container.kill();
    assert_eq!(inside(), Vec::<i32>::new());
    until("the end of the command's relay", || {
        stage.pids(&container.key).is_empty().then_some(())
    })
    .await;
    let status = within(PATIENCE, "the command's end", async {
        while io.output.recv().await.is_some() {}
        io.status.await.expect("the end is reported")
    })
    .await;
    assert!(matches!(status.exit_code, Some(137) | None), "{status:?}");
}

pub async fn a_command_is_killed_with_all_that_it_has_started(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let namespace = pid_namespace(container.pid).expect("it lives");
    let before = stage.pids(&container.key);
    let script = "sleep 1000 & echo begun; sleep 1000; true";
    let size = TerminalSize {
        columns: 80,
        rows: 24,
    };
    for tty in [None, Some(size)] {
        let plan = ExecPlan {
            tty,
            ..command(&["sh", "-c", script])
        };
        let mut io = stage
            .runtime()
            .exec(&container.key, plan)
            .await
            .expect("run");
        read_until(&mut io, &mut String::new(), "begun").await;
        within(PATIENCE, "the kill", io.kill.kill())
            .await
            .expect("it is killed");
        if !stage.runtime().runs_programs_itself() {
            let seen = stage.sh(&container.key, "ps").await.stdout;
            assert!(!seen.contains("sleep 1000; true"), "{seen}");
        }
        let mut left = stage.pids_in(&namespace, &container.key);
        left.retain(|pid| {
            PidFd::open(*pid).is_ok_and(|process| !process.is_dead().unwrap_or(true))
        });
        if stage.runtime().runs_programs_itself() {
            assert_eq!(left, before);
        }
        let status = within(PATIENCE, "the command's end", async {
            while io.output.recv().await.is_some() {}
            io.status.await.expect("the end is reported")
        })
        .await;
        assert_eq!(status.exit_code, Some(137), "{status:?}");
    }

    let mut io = stage
        .runtime()
        .exec(&container.key, command(&["true"]))
        .await
        .expect("run");
    within(PATIENCE, "the command's end", async {
        while io.output.recv().await.is_some() {}
        io.status.await.expect("the end is reported")
    })
    .await;
    io.kill.kill().await.expect("it has ended already");
}

pub async fn a_command_ends_with_its_first_process_and_leaves_the_others(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let script = "(until [ -e /run/go ]; do sleep 0.05; done; touch /run/alive; sleep 1000) & \
        echo started; exit 4";
    let outcome = within(
        PATIENCE,
        "the command's end",
        stage.sh(&container.key, script),
    )
    .await;
    assert_eq!(
        (outcome.stdout.as_str(), outcome.exit_code, outcome.error),
        ("started\n", Some(4), None)
    );
    let script = "touch /run/go; until [ -e /run/alive ]; do sleep 0.05; done";
    let alive = within(PATIENCE, "the child", stage.sh(&container.key, script)).await;
    assert_eq!(alive.exit_code, Some(0));
    container.kill();
}

pub async fn a_command_ends_with_its_reader(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let before = stage.pids(&container.key);
    // One of these may end meanwhile, such as the launcher's.
    let has_only = |before: &[i32]| {
        let pids = stage.pids(&container.key);
        pids.iter().all(|pid| before.contains(pid))
    };
    let size = TerminalSize {
        columns: 80,
        rows: 24,
    };
    for tty in [None, Some(size)] {
        let plan = ExecPlan {
            tty,
            ..command(&["sh", "-c", "echo begun; sleep 1000; true"])
        };
        let mut io = stage
            .runtime()
            .exec(&container.key, plan)
            .await
            .expect("run");
        read_until(&mut io, &mut String::new(), "begun").await;
        if !stage.runtime().runs_programs_itself() {
            drop(io);
            while stage
                .sh(&container.key, "ps")
                .await
                .stdout
                .contains("sleep 1000; true")
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            continue;
        }
        assert!(!has_only(&before));
        drop(io);
        until("the command's end", || has_only(&before).then_some(())).await;
    }
    container.kill();
}

pub async fn a_command_needs_a_running_container(stage: &Stage) {
    let key = stage.plan("absent", &[]).key;
    let error = stage
        .runtime()
        .exec(&key, command(&["true"]))
        .await
        .expect_err("nowhere to run");
    assert!(
        matches!(error, RuntimeError::NoSuchContainer { .. }),
        "{error}"
    );
    let container = stage.run_idle("alice").await;
    container.kill();
    stage
        .runtime()
        .exit_code(&container.key, PATIENCE)
        .await
        .expect("its end is noticed");
    let result = stage
        .runtime()
        .exec(&container.key, command(&["true"]))
        .await;
    let error = result.expect_err("it is dead");
    assert!(matches!(error, RuntimeError::Refused { .. }), "{error}");
}

async fn read_until(io: &mut ExecIo, seen: &mut String, words: &str) {
    within(PATIENCE, words, async {
        while !seen.contains(words) {
            let (_, bytes) = io.output.recv().await.expect("more output");
            seen.push_str(&String::from_utf8_lossy(&bytes));
        }
    })
    .await;
}
