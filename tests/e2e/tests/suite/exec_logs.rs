//! Commands in a session and what it prints, over HTTP and on the command line.

use std::time::Duration;

use conman_e2e::{
    Api, BUSYBOX, Conman, PYTHON, docker_shared, eventually, eventually_some, log_with,
};
use conman_proto::{ExecResult, LogLine, LogStream};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

async fn exec(api: &Api, request: Value) -> ExecResult {
    let answer = api.post("/v1/sessions/s/exec", &request).await;
    answer.expect(StatusCode::OK)
}

#[tokio::test]
async fn a_command_over_http_gives_its_exit_code_and_both_outputs() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "tiny"})).await;

    let script = "echo out; echo err >&2; exit 42";
    let result = exec(&api, json!({"command": ["sh", "-c", script]})).await;
    let told = (
        result.exit_code,
        result.stdout.as_str(),
        result.stderr.as_str(),
    );
    assert_eq!(told, (42, "out\n", "err\n"));
    assert!(!result.truncated);

    let request = json!({"command": ["sh", "-c", "cat; pwd; echo $GREETING"], "stdin": "typed\n",
        "workdir": "/tmp", "env": {"GREETING": "hello"}});
    assert_eq!(exec(&api, request).await.stdout, "typed\n/tmp\nhello\n");

    let killed = exec(&api, json!({"command": ["sh", "-c", "kill -9 $$"]})).await;
    assert_eq!(killed.exit_code, 137);

    let much = json!({"command": ["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"]});
    let much = exec(&api, much).await;
    assert!(
        much.truncated && much.stdout.len() == 1 << 20,
        "{}",
        much.stdout.len()
    );
}

#[tokio::test]
async fn a_command_that_cannot_be_run_is_told_with_its_reason() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "tiny"})).await;
    for (request, status, slug, word) in [
        (
            json!({"command": ["no-such-program"]}),
            422,
            "no-such-command",
            "no-such-program",
        ),
        (
            json!({"command": ["true"], "workdir": "/nosuch"}),
            422,
            "no-such-workdir",
            "/nosuch",
        ),
        (
            json!({"command": ["true"], "user": "nosuch"}),
            422,
            "no-such-user",
            "nosuch",
        ),
        (json!({"command": []}), 422, "bad-body", "command"),
        (
            json!({"command": ["sleep", "1000"], "timeout_ms": 200}),
            504,
            "exec-timed-out",
            "200",
        ),
    ] {
        let problem = api.post("/v1/sessions/s/exec", &request).await.problem();
        assert_eq!(
            (problem.status, problem.slug()),
            (status, slug),
            "{problem:?}"
        );
        assert!(problem.detail.contains(word), "{}", problem.detail);
    }
    api.stop("s").await;
    let ended = api
        .post("/v1/sessions/s/exec", &json!({"command": ["true"]}))
        .await;
    assert_eq!(ended.problem().slug(), "not-running");
}

#[tokio::test]
async fn a_command_is_killed_when_its_time_is_over_or_its_client_has_gone() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "tiny"})).await;
    let before = conman.processes().len();
    let only_the_program_runs = async || {
        eventually("the command is dead", PATIENCE, async || {
            conman.processes().len() == before
        })
        .await;
    };

    let script = "sleep 1000 & sleep 1000; true";
    let request = json!({"command": ["sh", "-c", script], "timeout_ms": 1000});
    let path = "/v1/sessions/s/exec";
    let problem = api.post(path, &request).await.problem();
    assert_eq!(problem.slug(), "exec-timed-out", "{problem:?}");
    assert!(problem.detail.contains("was killed"), "{problem:?}");
    // Killed when it is told so; whoever reaps them may take a moment.
    only_the_program_runs().await;

    let request = json!({"command": ["sh", "-c", script], "timeout_ms": 3_600_000});
    for path in [path, "/v1/sessions/s/exec?stream=true"] {
        let request = api.request(Method::POST, path, Some(&request));
        let asking = tokio::spawn({
            let api = api.clone();
            async move {
                let open = api.open(request).await;
                std::future::pending::<()>().await;
                drop(open);
            }
        });
        eventually("the command runs", PATIENCE, async || {
            conman.processes().len() == before + 3
        })
        .await;
        asking.abort();
        only_the_program_runs().await;
    }
    assert_eq!(exec(&api, json!({"command": ["true"]})).await.exit_code, 0);
}

#[tokio::test]
async fn conman_exec_exits_with_the_commands_code_and_passes_input_on() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("s", &json!({"template": "tiny"})).await;

    let failed = conman
        .cli(&["exec", "s", "sh", "-c", "echo out; echo err >&2; exit 42"])
        .await;
    let told = (failed.code, failed.stdout.as_str(), failed.stderr.as_str());
    assert_eq!(told, (Some(42), "out\n", "err\n"));
    let counted = conman
        .cli_with_input(&["exec", "-i", "s", "wc", "-c"], &"x".repeat(300_000))
        .await;
    assert_eq!(counted.success().trim(), "300000");
    assert_eq!(
        conman.cli(&["exec", "s", "no-such-program"]).await.code,
        Some(127)
    );
    let absent = conman.cli(&["exec", "nobody", "true"]).await;
    assert!(absent.stderr.contains("nobody"), "{absent:?}");
    assert_eq!(absent.code, Some(125), "{absent:?}");
}

/// Runs a program on a terminal of its own, waits for a word, resizes, and tells what it saw.
const ON_A_TERMINAL: &str = r#"
import fcntl, os, pty, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
def resize(rows, columns):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
seen = b""
def until(word):
    global seen
    while word not in seen:
        data = os.read(terminal, 4096)
        if not data:
            raise SystemExit("the terminal closed early: %r" % seen)
        seen += data
resize(24, 80)
os.write(terminal, b"test -t 0 && echo is-$((40+2))-tty\n")
until(b"is-42-tty")
resize(33, 99)
os.write(terminal, b"until [ \"$(stty size)\" = '33 99' ]; do sleep 0.1; done; echo size-$((50+1))\n")
until(b"size-51")
os.write(terminal, b"exit 7\n")
try:
    while os.read(terminal, 4096):
        pass
except OSError:
    pass
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;

#[tokio::test]
async fn conman_exec_with_a_terminal_is_interactive_follows_its_size_and_exits_as_the_shell() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("s", &json!({"template": "tiny"})).await;
    let mut command = tokio::process::Command::new("python3");
    command
        .args(["-c", ON_A_TERMINAL])
        .arg(conman_e2e::binary())
        .arg("--socket")
        .arg(conman.socket_path())
        .args(["exec", "-it", "s", "sh"])
        .kill_on_drop(true);
    let output = timeout(PATIENCE, command.output())
        .await
        .expect("the shell comes to its end")
        .expect("python3 can be run");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{complaint}");
}

/// Runs a program on a terminal of 33 rows and 99 columns and tells what it printed.
const ON_A_LARGE_TERMINAL: &str = r#"
import fcntl, os, pty, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    os.execvp(sys.argv[1], sys.argv[1:])
try:
    while data := os.read(terminal, 4096):
        os.write(1, data)
except OSError:
    pass
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;

#[tokio::test]
async fn a_terminal_that_is_never_resized_has_the_clients_size_from_the_beginning() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("s", &json!({"template": "tiny"})).await;
    let script = "stty size; until [ \"$(stty size)\" = '33 99' ]; do sleep 0.1; done";
    let mut command = tokio::process::Command::new("python3");
    command
        .args(["-c", ON_A_LARGE_TERMINAL])
        .arg(conman_e2e::binary())
        .arg("--socket")
        .arg(conman.socket_path())
        .args(["exec", "-it", "s", "sh", "-c", script])
        .kill_on_drop(true);
    let output = timeout(PATIENCE, command.output())
        .await
        .expect("the terminal gets its size")
        .expect("python3 can be run");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let format = "{{.Server.APIVersion}}";
    let version = docker.run(&["version", "--format", format]).await;
    let minor = version.trim().strip_prefix("1.");
    let minor: u32 = minor.and_then(|it| it.parse().ok()).expect("a version");
    // Earlier ones set it a moment after the beginning.
    if minor >= 42 {
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(printed, "33 99\r\n");
    }
}

#[tokio::test]
async fn logs_keep_the_streams_apart_and_can_be_cut_from_the_end() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    // Each line is written once Docker has written the one before, as it reads each output in its own time.
    let script = "echo one; until [ -e /tmp/one ]; do sleep 0.05; done; echo two >&2; \
                  until [ -e /tmp/two ]; do sleep 0.05; done; echo three; exec sleep 1000000";
    let request = json!({"image": BUSYBOX, "command": ["sh", "-c", script]});
    api.ensure("s", &request).await;
    for word in ["one", "two"] {
        log_with(&api, "s", word).await;
        exec(&api, json!({"command": ["touch", format!("/tmp/{word}")]})).await;
    }
    let lines = eventually_some("three lines", PATIENCE, async || {
        let path = "/v1/sessions/s/logs?format=json&timestamps=true";
        let text = api.get(path).await.text();
        (text.lines().count() == 3).then_some(text)
    })
    .await;
    let lines: Vec<LogLine> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line is JSON"))
        .collect();
    let told: Vec<_> = lines
        .iter()
        .map(|line| (line.stream, line.text.as_str()))
        .collect();
    let (out, err) = (LogStream::Stdout, LogStream::Stderr);
    assert_eq!(told, [(out, "one"), (err, "two"), (out, "three")]);
    assert!(lines.iter().all(|line| line.at.is_some()));
    assert!(lines.is_sorted_by_key(|line| line.at));
    assert_eq!(
        api.get("/v1/sessions/s/logs?tail=1").await.text(),
        "three\n"
    );

    let told = conman.cli(&["logs", "-n", "2", "s"]).await;
    assert_eq!((told.success(), told.stderr.as_str()), ("three\n", "two\n"));
}

/// Prints a line for each one that `printf` puts into its pipe, and ends with `end`.
fn echoing() -> Value {
    let script = "mkfifo /tmp/in; exec 3<>/tmp/in; while read -r line <&3; do \
                  [ \"$line\" = end ] && exit 0; echo \"$line\"; done";
    json!({"image": BUSYBOX, "command": ["sh", "-c", script]})
}

async fn say(api: &Api, word: &str) {
    let script = format!("until [ -p /tmp/in ]; do sleep 0.1; done; echo {word} > /tmp/in");
    let path = "/v1/sessions/s/exec";
    // The session may end before the command's end is told.
    let _ = api
        .post(path, &json!({"command": ["sh", "-c", script]}))
        .await;
}

#[tokio::test]
async fn a_followed_log_shows_each_line_when_it_is_printed_and_ends_with_the_session() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    api.ensure("s", &echoing()).await;
    let request = api.request(Method::GET, "/v1/sessions/s/logs?follow=true", None);
    let mut followed = api.open(request).await.expect("the daemon answers");
    let mut command = conman.cli_command();
    let mut on_terminal = command
        .args(["logs", "--follow", "s"])
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("conman starts");
    let mut printed = BufReader::new(on_terminal.stdout.take().expect("an output")).lines();

    for word in ["first", "second"] {
        say(&api, word).await;
        let mut text = String::new();
        while !text.ends_with('\n') {
            let frame = timeout(PATIENCE, followed.response.body_mut().frame())
                .await
                .expect("the line comes")
                .expect("the log goes on")
                .expect("it is whole");
            text.push_str(&String::from_utf8_lossy(&frame.into_data().expect("data")));
        }
        assert_eq!(text.trim_end(), word);
        let line = timeout(PATIENCE, printed.next_line())
            .await
            .expect("the line comes");
        assert_eq!(line.expect("it can be read").as_deref(), Some(word));
    }
    say(&api, "end").await;
    let rest = timeout(PATIENCE, followed.response.body_mut().collect())
        .await
        .expect("the log ends")
        .expect("and is whole");
    assert!(rest.to_bytes().is_empty());
    let status = timeout(PATIENCE, on_terminal.wait())
        .await
        .expect("conman logs ends");
    assert!(status.expect("it can be waited for").success());
}

#[tokio::test]
async fn the_command_line_runs_lists_inspects_and_removes_sessions() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let run = conman
        .cli(&[
            "run", "s", "--json", "--image", PYTHON, "--label", "a=b", "--", "sleep", "1000000",
        ])
        .await;
    let session: Value = serde_json::from_str(run.success()).expect("a session as JSON");
    assert_eq!(session["state"], "running");
    assert!(conman.cli(&["ps"]).await.success().contains("running"));
    assert_eq!(
        conman
            .cli(&["ps", "--quiet", "--label", "a=c"])
            .await
            .success(),
        ""
    );
    assert_eq!(
        conman
            .cli(&["ps", "--quiet", "--label", "a=b"])
            .await
            .success(),
        "s\n"
    );
    let inspected = conman.cli(&["inspect", "--json", "s"]).await;
    let inspected: Value = serde_json::from_str(inspected.success()).expect("a session as JSON");
    assert_eq!(inspected["pid"], session["pid"]);
    conman.cli(&["rm", "s"]).await.success();
    assert_eq!(conman.processes(), []);
    assert_eq!(conman.cli(&["ps", "--quiet"]).await.success(), "");
    assert_eq!(
        conman.cli(&["ps", "--quiet", "--all"]).await.success(),
        "s\n"
    );
    let absent = conman.cli(&["inspect", "nobody"]).await;
    assert_eq!(absent.code, Some(3), "{absent:?}");
    let refused = conman.cli(&["run", "t", "--template", "tinny"]).await;
    assert_eq!(refused.code, Some(4), "{refused:?}");
    assert!(refused.stderr.contains("tiny"), "{refused:?}");
}
