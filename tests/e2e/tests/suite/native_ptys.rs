//! Terminals that the programs of a native session open, with programs of the distribution.

use std::path::Path;

use conman_e2e::{Api, Conman, ROOT, lacks, native};
use conman_proto::ExecResult;
use http::StatusCode;
use serde_json::{Value, json};

/// Packages tmux, bsdutils and python3.
const PROGRAMS: [&str; 3] = ["/usr/bin/tmux", "/usr/bin/script", "/usr/bin/python3"];

/// Opens terminals until that fails, and prints their number, the name of the first and the error.
const OPEN_ALL: &str = "
import os
held = []
try:
    while True:
        held.append(os.openpty())
except OSError as error:
    print(len(held), os.ttyname(held[0][1]) if held else '', error.strerror)
";

async fn start() -> Option<Conman> {
    let native = native()?;
    if let Some(missing) = PROGRAMS.iter().find(|path| !Path::new(path).exists()) {
        lacks(&format!("{missing} is missing"));
        return None;
    }
    let builder = Conman::builder().set("binds", "allow = [\"/usr\"]");
    Some(builder.start_native(&native).await)
}

/// Starts a session that sees the host's programs.
async fn session(api: &Api, id: &str, more: Value) {
    let mut request = json!({"image": ROOT, "command": ["sleep", "1000000"],
        "env": {"LC_ALL": "C.UTF-8", "TERM": "xterm"},
        "binds": ["/usr:/usr:ro", "/usr/lib:/lib:ro", "/usr/lib64:/lib64:ro"]});
    for (key, value) in more.as_object().expect("an object") {
        request[key] = value.clone();
    }
    api.ensure(id, &request).await;
}

async fn exec(api: &Api, id: &str, command: &[&str]) -> String {
    let request = json!({"command": command, "timeout_ms": 30_000});
    let answer = api.post(&format!("/v1/sessions/{id}/exec"), &request).await;
    let result: ExecResult = answer.expect(StatusCode::OK);
    format!("{}{}", result.stdout, result.stderr)
}

#[tokio::test]
async fn programs_of_a_session_open_terminals() {
    let Some(conman) = start().await else { return };
    let api = conman.api();
    session(&api, "s", json!({"ptys": 4})).await;
    let script = [
        "script",
        "-qec",
        "tty; stty size </dev/tty >/dev/null && echo usable",
        "/dev/null",
    ];
    let output = exec(&api, "s", &script).await;
    assert!(
        output.contains("/dev/pts/0") && output.contains("usable"),
        "{output}"
    );
    let python = "import pty; pty.spawn(['sh', '-c', 'tty; test -t 0 && echo usable'])";
    let output = exec(&api, "s", &["python3", "-c", python]).await;
    assert!(
        output.contains("/dev/pts/0") && output.contains("usable"),
        "{output}"
    );
    let tmux = "tmux -f /dev/null new-session -d -x 80 -y 24 'tty; echo in tmux; sleep 1000' && \
        until tmux capture-pane -p | grep 'in tmux'; do sleep 0.1; done; tmux capture-pane -p";
    let output = exec(&api, "s", &["sh", "-c", tmux]).await;
    assert!(output.contains("/dev/pts/0"), "{output}");
    // For users other than root, too.
    let request = json!({"command": ["python3", "-c", OPEN_ALL], "user": "user"});
    let answer = api.post("/v1/sessions/s/exec", &request).await;
    let result: ExecResult = answer.expect(StatusCode::OK);
    assert!(result.stdout.starts_with("3 /dev/pts/1 "), "{result:?}");
}

#[tokio::test]
async fn terminals_are_bounded_by_each_sessions_spec() {
    let Some(conman) = start().await else { return };
    let api = conman.api();
    session(&api, "two", json!({"ptys": 2})).await;
    session(&api, "none", json!({"ptys": 0})).await;
    session(&api, "default", json!({})).await;
    let full = "2 /dev/pts/0 No space left on device\n";
    assert_eq!(exec(&api, "two", &["python3", "-c", OPEN_ALL]).await, full);
    let output = exec(&api, "none", &["python3", "-c", OPEN_ALL]).await;
    assert!(output.starts_with("0 "), "{output}");
    assert_eq!(exec(&api, "none", &["ls", "/dev/pts"]).await, "");
    // Until a command has a terminal.
    let output = exec(&api, "default", &["python3", "-c", OPEN_ALL]).await;
    assert!(output.starts_with("0 "), "{output}");
    for id in ["none", "default"] {
        let request = json!({"command": ["sleep", "1000"], "tty": true});
        let path = format!("/v1/sessions/{id}/execs");
        let kept = api.post(&path, &request).await;
        let _: Value = kept.expect(StatusCode::CREATED);
    }
    let output = exec(&api, "none", &["python3", "-c", OPEN_ALL]).await;
    assert!(output.starts_with("0 "), "{output}");
    let default = "4 /dev/pts/0 No space left on device\n";
    assert_eq!(
        exec(&api, "default", &["python3", "-c", OPEN_ALL]).await,
        default
    );
}
