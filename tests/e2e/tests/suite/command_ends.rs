//! When commands in sessions end, native and Docker's, with Docker Engine as reference.

use std::process::Stdio;
use std::time::Duration;

use conman_e2e::{Api, Conman, docker_shared, eventually, native};
use conman_proto::ExecResult;
use http::StatusCode;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

/// The native session, and Docker's.
const SESSIONS: [(&str, &str); 2] = [("native", "idle"), ("docker", "tiny")];

async fn exec(api: &Api, id: &str, request: Value) -> ExecResult {
    let path = format!("/v1/sessions/{id}/exec");
    let answer = timeout(PATIENCE, api.post(&path, &request)).await;
    answer.expect("it ends").expect(StatusCode::OK)
}

#[tokio::test]
async fn a_command_ends_without_what_it_left_behind_as_in_docker_engine() {
    let Some(native) = native() else { return };
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    for (id, template) in SESSIONS {
        api.ensure(id, &json!({"template": template})).await;
    }
    // Holds the outputs open for as long as the test runs.
    let script = "sleep 100000 & echo started; echo trouble >&2; exit 4";
    let containers = docker.containers_of(&conman.instance()).await;
    let reference = format!(
        "docker exec {} sh -c '{script}'; [ $? = 4 ] && echo code 4",
        containers[0]
    );
    let reference = tokio::process::Command::new("sh")
        .args(["-c", &reference])
        .output();
    let reference = timeout(PATIENCE, reference).await.expect("Docker's ends");
    let reference = reference.expect("docker runs");
    assert_eq!(reference.stdout, b"started\ncode 4\n", "{reference:?}");
    assert_eq!(reference.stderr, b"trouble\n", "{reference:?}");

    for (id, _) in SESSIONS {
        let request = json!({"command": ["sh", "-c", script], "timeout_ms": 60_000});
        let result = exec(&api, id, request).await;
        assert_eq!(
            (
                result.exit_code,
                result.stdout.as_str(),
                result.stderr.as_str()
            ),
            (4, "started\n", "trouble\n"),
            "{id}"
        );
        let streamed = conman.cli(&["exec", id, "sh", "-c", script]).await;
        assert_eq!(
            (
                streamed.code,
                streamed.stdout.as_str(),
                streamed.stderr.as_str()
            ),
            (Some(4), "started\n", "trouble\n"),
            "{id}"
        );
        let count = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 100000' | wc -l";
        let left = exec(&api, id, json!({"command": ["sh", "-c", count]})).await;
        let left: usize = left.stdout.trim().parse().expect("a number");
        assert!(left >= 2, "{id}: {left}");
    }
}

#[tokio::test]
async fn what_a_native_command_leaves_behind_may_write_after_its_end() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "idle"})).await;
    let before = conman.processes().len();
    // More than a pipe holds; `yes` fails without a reader.
    let script = "seq 20000; (until [ -e /tmp/go ]; do sleep 0.05; done; \
        yes | head -c 1000000 && touch /tmp/written) & exit 3";
    let result = exec(&api, "s", json!({"command": ["sh", "-c", script]})).await;
    let lines: Vec<_> = result.stdout.lines().collect();
    assert_eq!(
        (result.exit_code, lines.len(), lines.last()),
        (3, 20_000, Some(&"20000")),
        "what it wrote itself is whole"
    );
    let script = "touch /tmp/go; until [ -e /tmp/written ]; do sleep 0.05; done";
    let request = json!({"command": ["sh", "-c", script], "timeout_ms": 60_000});
    assert_eq!(exec(&api, "s", request).await.exit_code, 0);
    eventually("its relay has ended, too", PATIENCE, async || {
        conman.processes().len() == before
    })
    .await;
}

#[tokio::test]
async fn a_command_line_that_is_interrupted_takes_its_command_along() {
    let Some(native) = native() else { return };
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    for (id, template) in SESSIONS {
        api.ensure(id, &json!({"template": template})).await;
        let before = conman.processes().len();
        let mut command = conman.cli_command();
        let script = "echo begun; sleep 1000; true";
        command
            .args(["exec", id, "sh", "-c", script])
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().expect("conman starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.expect("begun");
        assert_eq!(line.expect("read").as_deref(), Some("begun"));
        assert!(conman.processes().len() > before, "{id}");
        let pid = Pid::from_raw(child.id().expect("it runs").cast_signed());
        // Not SIGINT: tests that were started in the background ignore it, and programs inherit that.
        kill_process(pid.expect("not zero"), Signal::TERM).expect("signalled");
        eventually("the command is dead", PATIENCE, async || {
            conman.processes().len() == before
        })
        .await;
        let ended = timeout(PATIENCE, child.wait()).await.expect("it ends");
        ended.expect("waited for");
    }
    // A kept one needs no client.
    let kept = conman.cli(&["exec", "--detach", "native", "sleep", "1000"]);
    let kept = kept.await.success().trim().to_owned();
    let path = format!("/v1/sessions/native/execs/{kept}");
    let shown: Value = api.get(&path).await.expect(StatusCode::OK);
    assert_eq!(shown["running"], true, "{shown}");
}
