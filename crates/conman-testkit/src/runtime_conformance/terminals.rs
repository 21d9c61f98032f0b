//! Checks of terminals.

use std::time::Duration;

use bytes::Bytes;
use conman_linux::Signal;
use conman_proto::{ExecId, TerminalSize};

use super::stage::{PATIENCE, Stage, command, until, within};
use conman_runtime::{
    AttachOptions, AttachedIo, AttachedOutput, ContainerKey, ContainerPlan, ExecPlan, Runtime,
    RuntimeError,
};

const SIZE: TerminalSize = TerminalSize {
    columns: 91,
    rows: 31,
};

const ANYWAY: AttachOptions = AttachOptions {
    size: None,
    after: None,
};

/// A plan for a container whose program has a terminal; `None` if the runtime refuses terminals,
/// which it must do with the right error.
async fn with_terminal(stage: &Stage, command: &[&str]) -> Option<ContainerPlan> {
    let mut plan = stage.plan("alice", command);
    plan.spec.tty = true;
    if stage.has_terminals() {
        return Some(plan);
    }
    let error = stage.runtime().create(&plan).await.expect_err("refused");
    assert!(matches!(error, RuntimeError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("native"), "{error}");
    None
}

/// Likewise for commands whose terminals are kept.
async fn keeps_commands(stage: &Stage, key: &ContainerKey) -> bool {
    if stage.keeps_commands() {
        return true;
    }
    let plan = ExecPlan {
        tty: Some(SIZE),
        ..command(&["sh"])
    };
    let error = stage.runtime().keep_exec(key, plan).await;
    let error = error.expect_err("refused");
    assert!(matches!(error, RuntimeError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("native"), "{error}");
    assert_eq!(stage.runtime().kept_execs(key).await.expect("none"), []);
    false
}

/// An attached client, and what it has seen.
struct Viewer {
    io: AttachedIo,
    seen: String,
    replays: usize,
}

impl Viewer {
    async fn attach(
        runtime: &dyn Runtime,
        key: &ContainerKey,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Self {
        let io = runtime.attach(key, exec, options).await.expect("attached");
        Self {
            io,
            seen: String::new(),
            replays: 0,
        }
    }

    async fn types(&self, text: &str) {
        let bytes = Bytes::copy_from_slice(text.as_bytes());
        self.io.input.send(bytes).await.expect("it is open");
    }

    async fn sees(&mut self, words: &str) {
        let what = format!("`{words}`");
        within(PATIENCE, &what, async {
            while !self.seen.contains(words) {
                assert!(self.look().await, "it ended with {:?}", self.seen);
            }
        })
        .await;
    }

    /// Reads the next piece; returns false at the end.
    async fn look(&mut self) -> bool {
        let bytes = match self.io.output.recv().await {
            Some(AttachedOutput::Position(_)) => return true,
            Some(AttachedOutput::Output(_, bytes)) => bytes,
            Some(AttachedOutput::Screen(bytes)) => {
                self.seen.clear();
                self.replays += 1;
                bytes
            }
            None => return false,
        };
        self.seen.push_str(&String::from_utf8_lossy(&bytes));
        true
    }

    async fn end(mut self) -> (Option<i32>, String) {
        within(PATIENCE, "the end", async {
            while self.look().await {}
            let status = self.io.status.await.expect("the end is reported");
            (status.exit_code, self.seen)
        })
        .await
    }
}

pub async fn a_program_in_a_terminal_has_its_size_its_name_and_control_over_jobs(stage: &Stage) {
    let Some(plan) = with_terminal(stage, &["sh"]).await else {
        return;
    };
    let container = stage.run(&plan).await;
    let mut viewer = Viewer::attach(stage.runtime(), &plan.key, None, ANYWAY).await;
    viewer
        .types("stty size; echo term=$TERM-$((6 * 7))\n")
        .await;
    viewer.sees("term=xterm-42").await;
    assert!(viewer.seen.contains("24 80"), "{}", viewer.seen);
    viewer.io.resize.send(SIZE).await.expect("it is open");
    let shown = match stage.resizes_terminals() {
        true => "31 91",
        false => "24 80",
    };
    let wait = format!(
        "until [ \"$(stty size)\" = '{shown}' ]; do sleep 0.05; done; echo sized-$((6 * 7))\n"
    );
    viewer.types(&wait).await;
    viewer.sees("sized-42").await;
    // Ctrl-C ends the job and not the shell; Ctrl-Z stops a job that can continue.
    viewer.types("echo begun-$((6 * 7)); sleep 1000\n").await;
    viewer.sees("begun-42").await;
    if !stage.runtime().runs_programs_itself() {
        while !stage
            .sh(&plan.key, "ps")
            .await
            .stdout
            .contains("sleep 1000")
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        viewer.types("\x03").await;
        viewer.types("echo alive-$((6 * 7)) $?\n").await;
        viewer.sees("alive-42 130").await;
        container.kill();
        return;
    }
    let sleeps = || {
        let pids = stage.pids(&plan.key);
        let name = |pid: &i32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        pids.iter()
            .any(|pid| name(pid).starts_with(b"sleep\x001000"))
    };
    until("the job", || sleeps().then_some(())).await;
    viewer.types("\x03").await;
    viewer.types("echo alive-$((6 * 7)) $?\n").await;
    viewer.sees("alive-42 130").await;
    viewer.types("sleep 1001\n").await;
    until("another job", || {
        let pids = stage.pids(&plan.key);
        let name = |pid: &i32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let found = pids
            .iter()
            .any(|pid| name(pid).starts_with(b"sleep\x001001"));
        found.then_some(())
    })
    .await;
    viewer.types("\x1a").await;
    viewer.types("jobs; echo stopped-$((6 * 7))\n").await;
    viewer.sees("stopped-42").await;
    assert!(viewer.seen.contains("Stopped"), "{}", viewer.seen);
    assert!(!viewer.seen.contains("job control turned off"));
    container.kill();
}

pub async fn all_who_are_attached_see_the_same_and_who_comes_later_too(stage: &Stage) {
    let Some(plan) = with_terminal(stage, &["sh"]).await else {
        return;
    };
    let container = stage.run(&plan).await;
    let mut first = Viewer::attach(stage.runtime(), &plan.key, None, ANYWAY).await;
    let mut second = Viewer::attach(stage.runtime(), &plan.key, None, ANYWAY).await;
    first.types("echo shared-$((6 * 7))\n").await;
    first.sees("shared-42").await;
    second.sees("shared-42").await;
    second.types("echo back-$((6 * 7))\n").await;
    first.sees("back-42").await;
    drop(first);
    drop(second);
    // As after a restart of the daemon.
    let later = stage.another_runtime();
    let mut third = Viewer::attach(&*later, &plan.key, None, ANYWAY).await;
    third.sees("back-42").await;
    assert!(third.seen.contains("shared-42"), "{}", third.seen);
    let blank = AttachOptions {
        size: Some(SIZE),
        after: Some(AttachOptions::NOW),
    };
    let mut fourth = Viewer::attach(&*later, &plan.key, None, blank).await;
    fourth.types("echo now-$((6 * 7))\n").await;
    fourth.sees("now-42").await;
    assert!(!fourth.seen.contains("shared-42"), "{}", fourth.seen);
    container.kill();
}

pub async fn the_end_of_a_program_is_told_to_who_is_attached(stage: &Stage) {
    let script = "read line; echo last-$((6 * 7)); exit 6";
    let Some(plan) = with_terminal(stage, &["sh", "-c", script]).await else {
        return;
    };
    let container = stage.run(&plan).await;
    let viewer = Viewer::attach(stage.runtime(), &plan.key, None, ANYWAY).await;
    viewer.types("go\n").await;
    let (code, seen) = viewer.end().await;
    assert_eq!(code, Some(6), "{seen}");
    assert!(seen.contains("last-42"), "{seen}");
    assert!(container.pidfd.wait_dead(PATIENCE).expect("poll works"));
    let code = stage.runtime().exit_code(&plan.key, PATIENCE).await;
    assert_eq!(code, Some(6));
    let log = stage.whole_log(&plan.key).await;
    assert!(log.contains("last-42"), "{log}");
}

pub async fn who_does_not_read_a_terminal_slows_nobody_and_catches_up(stage: &Stage) {
    let script = "read go; i=0; while [ $i -lt 40000 ]; do echo number $i of many; \
                  i=$((i+1)); done; echo done-$((6 * 7)); read line";
    let Some(plan) = with_terminal(stage, &["sh", "-c", script]).await else {
        return;
    };
    let container = stage.run(&plan).await;
    let mut slow = Viewer::attach(stage.runtime(), &plan.key, None, ANYWAY).await;
    let mut quick = Viewer::attach(stage.runtime(), &plan.key, None, ANYWAY).await;
    quick.types("go\n").await;
    quick.sees("done-42").await;
    slow.sees("done-42").await;
    assert!(slow.replays > 1, "what it missed was replayed");
    assert!(slow.seen.len() < 512 * 1024, "in bounded memory");
    container.kill();
}

pub async fn who_types_more_than_a_program_reads_waits(stage: &Stage) {
    // A terminal in line mode discards input that is too long for a line.
    let script = "stty raw -echo; echo ready-$((6 * 7)); exec sleep 1000";
    let Some(plan) = with_terminal(stage, &["sh", "-c", script]).await else {
        return;
    };
    let container = stage.run(&plan).await;
    let mut flood = Viewer::attach(stage.runtime(), &plan.key, None, ANYWAY).await;
    flood.sees("ready-42").await;
    let piece = Bytes::from(vec![b'x'; 64 * 1024]);
    let flooding = async {
        let mut sent = 0_u64;
        loop {
            let room = std::time::Duration::from_secs(1);
            match tokio::time::timeout(room, flood.io.input.send(piece.clone())).await {
                Ok(Ok(())) => sent += 1,
                Ok(Err(_)) => panic!("the terminal is closed"),
                Err(_) => return sent,
            }
            assert!(sent < 1_024, "it takes everything");
        }
    };
    let sent = within(PATIENCE, "the standstill", flooding).await;
    assert!(sent > 0);
    // Other clients are served meanwhile.
    let other = Viewer::attach(stage.runtime(), &plan.key, None, ANYWAY).await;
    drop(other);
    container.kill();
}

pub async fn a_program_without_a_terminal_has_none_to_attach_to(stage: &Stage) {
    let key = stage.plan("absent", &[]).key;
    let error = stage.runtime().attach(&key, None, ANYWAY).await;
    let error = error.expect_err("nothing is there");
    if stage.has_terminals() {
        assert!(
            matches!(error, RuntimeError::NoSuchContainer { .. }),
            "{error}"
        );
    }
    let container = stage.run_idle("alice").await;
    let error = stage.runtime().attach(&container.key, None, ANYWAY).await;
    let error = error.expect_err("it has none");
    if stage.has_terminals() {
        assert!(matches!(error, RuntimeError::NoTerminal { .. }), "{error}");
    } else {
        assert!(matches!(error, RuntimeError::Unsupported { .. }), "{error}");
    }
    container.kill();
}

pub async fn a_kept_command_outlives_who_started_it(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let key = &container.key;
    if !keeps_commands(stage, key).await {
        return;
    }
    let plan = ExecPlan {
        tty: Some(SIZE),
        env: vec![("WORD".to_owned(), "given".to_owned())],
        ..command(&["sh"])
    };
    let kept = stage.runtime().keep_exec(key, plan).await.expect("begun");
    assert!(kept.running && kept.command == ["sh"], "{kept:?}");
    let mut viewer = Viewer::attach(stage.runtime(), key, Some(kept.id), ANYWAY).await;
    viewer.types("stty size; echo $WORD-$((6 * 7))\n").await;
    viewer.sees("given-42").await;
    assert!(viewer.seen.contains("31 91"), "{}", viewer.seen);
    drop(viewer);
    let later = stage.another_runtime();
    let listed = later.kept_execs(key).await.expect("listed");
    assert_eq!((listed.len(), listed[0].id), (1, kept.id));
    assert!(
        kept.pid.is_some() && listed[0].pid == kept.pid,
        "{listed:?}"
    );
    let mut viewer = Viewer::attach(&*later, key, Some(kept.id), ANYWAY).await;
    viewer.sees("given-42").await;
    viewer.types("exit 5\n").await;
    let (code, _) = viewer.end().await;
    assert_eq!(code, Some(5));
    let (runtime, signal) = (stage.runtime(), Signal::SIGTERM.into());
    let sent = runtime.signal_exec(key, kept.id, signal).await;
    assert!(!sent.expect("answered"), "it has ended");
    let error = runtime.signal_exec(key, ExecId::new(7), signal).await;
    let error = error.expect_err("there was never one");
    assert!(matches!(error, RuntimeError::NoSuchExec { .. }), "{error}");
    // Later clients learn its end and what it showed.
    for runtime in [later, stage.another_runtime()] {
        let listed = runtime.kept_execs(key).await.expect("listed");
        assert_eq!((listed[0].running, listed[0].exit_code), (false, Some(5)));
        let viewer = Viewer::attach(&*runtime, key, Some(kept.id), ANYWAY).await;
        let (code, seen) = viewer.end().await;
        assert_eq!(code, Some(5));
        assert!(seen.contains("given-42"), "{seen}");
    }
    stage
        .runtime()
        .end_exec(key, kept.id)
        .await
        .expect("forgotten");
    let error = stage.runtime().end_exec(key, kept.id).await;
    let error = error.expect_err("it is gone");
    assert!(matches!(error, RuntimeError::NoSuchExec { .. }), "{error}");
    container.kill();
}

pub async fn a_kept_command_is_ended_with_all_that_it_has_started(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let key = &container.key;
    if !keeps_commands(stage, key).await {
        return;
    }
    let before = stage.pids(key);
    let plan = ExecPlan {
        tty: Some(SIZE),
        ..command(&["sh", "-c", "sleep 1000 & sleep 1000; true"])
    };
    let kept = stage.runtime().keep_exec(key, plan).await.expect("begun");
    let viewer = Viewer::attach(stage.runtime(), key, Some(kept.id), ANYWAY).await;
    let runs_programs_itself = stage.runtime().runs_programs_itself();
    if runs_programs_itself {
        until("its processes", || {
            (stage.pids(key).len() == before.len() + 3).then_some(())
        })
        .await;
    } else {
        while !stage
            .sh(key, "ps")
            .await
            .stdout
            .contains("sleep 1000; true")
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    stage.runtime().end_exec(key, kept.id).await.expect("ended");
    if runs_programs_itself {
        assert_eq!(stage.pids(key), before);
    } else {
        let seen = stage.sh(key, "ps").await.stdout;
        assert!(!seen.contains("sleep 1000; true"), "{seen}");
    }
    let (code, _) = viewer.end().await;
    assert_eq!(code, Some(137));
    assert_eq!(stage.runtime().kept_execs(key).await.expect("none"), []);
    container.kill();
}

pub async fn kept_commands_are_so_many_at_most_and_make_room_when_they_have_ended(stage: &Stage) {
    /// More than any runtime keeps.
    const MANY: u32 = 256;
    let mut roomy = stage.plan("alice", &["sleep", "1000"]);
    // Each command is some threads of the host where its kernel is the session's own.
    let threads = if stage.runtime().runs_programs_itself() {
        2
    } else {
        32
    };
    roomy.spec.pids = threads * MANY;
    let container = stage.run(&roomy).await;
    let key = &container.key;
    if !keeps_commands(stage, key).await {
        return;
    }
    let plan = |program: &[&str]| ExecPlan {
        tty: Some(SIZE),
        ..command(program)
    };
    let runtime = stage.runtime();
    if runtime.runs_programs_itself() {
        let missing = runtime.keep_exec(key, plan(&["nosuch-program"])).await;
        let error = missing.expect_err("there is no such program");
        assert!(
            matches!(error, RuntimeError::NoSuchCommand { exit_code: 127, .. }),
            "{error}"
        );
    }
    let first = runtime
        .keep_exec(key, plan(&["true"]))
        .await
        .expect("begun");
    within(PATIENCE, "the end of `true`", async {
        while runtime.kept_execs(key).await.expect("listed")[0].running {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let mut refused = None;
    for number in 0..MANY {
        match runtime.keep_exec(key, plan(&["sleep", "1000"])).await {
            Ok(_) => {}
            Err(error) => {
                refused = Some((number, error));
                break;
            }
        }
    }
    let (number, error) = refused.expect("there is a bound");
    assert!(matches!(error, RuntimeError::TooMany { .. }), "{error}");
    let listed = runtime.kept_execs(key).await.expect("listed");
    assert_eq!(
        listed.len(),
        number as usize,
        "the one that had ended made room"
    );
    assert!(listed.iter().all(|one| one.id != first.id && one.running));
    container.kill();
    runtime.exit_code(key, PATIENCE).await;
    let removed = runtime.remove(std::slice::from_ref(key)).await;
    assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
}
