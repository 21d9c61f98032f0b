//! What a program writes arrives as it is: in commands, logs and `conman run --rm`, natively and in Docker.

use std::process::{Output, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use conman_e2e::{Api, BUSYBOX, Conman, ROOT, docker_shared, eventually, eventually_some, native};
use conman_proto::{ExecResult, LogLine};
use http::StatusCode;
use serde_json::json;
use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(60);

/// Ends of output. A line that Docker is to show while its session runs needs a newline.
const WITHOUT_NEWLINE: &str = "\r\n\r";
const WITH_NEWLINE: &str = "\r\n";

/// Of what `conman run --rm` prints: fewer bytes than are kept of a log, since a fast program may have ended before
/// its output is first read.
const RUN_DOUBLINGS: u32 = 11;

/// A native session, and one of Docker's where there are both.
const RUNTIMES: [(&str, &str); 2] = [("image", ROOT), ("template", "tiny")];

/// Prints every byte, in order, 2^n times: no text. They are in the file `$f`, too.
fn every_byte(doublings: u32, end: &str) -> String {
    format!(
        "f=/tmp/a$$; i=0; \
         while [ $i -lt 256 ]; do printf \"\\\\$(printf %o $i)\"; i=$((i+1)); done >$f; \
         n={doublings}; while [ $n -gt 0 ]; do cat $f $f >$f.b; mv $f.b $f; n=$((n-1)); done; \
         printf '{}' >>$f; cat $f",
        end.escape_default()
    )
}

fn expected(doublings: u32, end: &str) -> Vec<u8> {
    let once: Vec<u8> = (0..=255).collect();
    [&once.repeat(1 << doublings)[..], end.as_bytes()].concat()
}

/// Whether these are the bytes, without printing megabytes.
#[track_caller]
fn assert_same(way: &str, found: &[u8], wanted: &[u8]) {
    let first = found.iter().zip(wanted).position(|(a, b)| a != b);
    assert!(
        found == wanted,
        "{way}: {} bytes of {}, the first that differs is {first:?}",
        found.len(),
        wanted.len()
    );
}

async fn run(mut command: Command) -> Output {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await;
    output.expect("it does not hang").expect("it runs")
}

async fn cli(conman: &Conman, arguments: &[&str]) -> Output {
    let mut command = conman.cli_command();
    command.args(arguments);
    run(command).await
}

fn decoded(text: &str, base64: Option<&String>) -> Vec<u8> {
    match base64 {
        Some(base64) => BASE64.decode(base64).expect("base64"),
        None => text.as_bytes().to_vec(),
    }
}

/// The bytes that lines of JSON carry; the last line of a streamed command is its status.
fn joined(lines: &str) -> Vec<u8> {
    let lines = lines.lines().filter(|line| line.contains("\"stream\""));
    let lines = lines.map(|line| serde_json::from_str::<LogLine>(line).expect("a line of a log"));
    let mut bytes = Vec::new();
    for line in lines {
        bytes.extend(decoded(&line.text, line.base64.as_ref()));
        bytes.extend_from_slice(line.end.as_deref().unwrap_or("\n").as_bytes());
    }
    bytes
}

/// The outputs of a log in frames: both, and what is said of lost bytes.
fn framed(mut bytes: &[u8]) -> [Vec<u8>; 3] {
    let mut outputs = [Vec::new(), Vec::new(), Vec::new()];
    while let Some((head, rest)) = bytes.split_first_chunk::<8>() {
        let [output, 0, 0, 0, length @ ..] = *head else {
            panic!("no frame: {head:?}");
        };
        let (piece, rest) = rest.split_at(u32::from_be_bytes(length) as usize);
        outputs[usize::from(output) - 1].extend_from_slice(piece);
        bytes = rest;
    }
    outputs
}

async fn log(api: &Api, format: &str) -> Vec<u8> {
    let answer = api
        .get(&format!("/v1/sessions/s/logs?format={format}"))
        .await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.body.to_vec()
}

#[tokio::test]
async fn bytes_of_commands_and_logs_arrive_unchanged_natively_and_in_docker() {
    let (Some(native), Some(docker)) = (native(), docker_shared().await) else {
        return;
    };
    let conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    let mut reference = Command::new("docker");
    reference.args([
        "run",
        "--rm",
        "--network",
        "none",
        BUSYBOX,
        "sh",
        "-c",
        &every_byte(RUN_DOUBLINGS, WITHOUT_NEWLINE),
    ]);
    let wanted = expected(RUN_DOUBLINGS, WITHOUT_NEWLINE);
    assert_same("Docker's own", &run(reference).await.stdout, &wanted);
    for runtime in RUNTIMES {
        let (kind, value) = runtime;
        let option = format!("--{kind}={value}");
        let words = [
            "run",
            "--rm",
            &option,
            "--",
            "sh",
            "-c",
            &every_byte(RUN_DOUBLINGS, WITHOUT_NEWLINE),
        ];
        let output = cli(&conman, &words).await;
        assert_eq!(output.status.code(), Some(0), "{:?}", output.stderr);
        assert_same(value, &output.stdout, &wanted);

        // Fewer than what is kept of a log of a container that is removed.
        let (script, small) = (every_byte(10, WITH_NEWLINE), expected(10, WITH_NEWLINE));
        let command = format!("{script}; cat $f >&2; exec 1>&- 2>&-; exec sleep 1000");
        let mut spec = json!({kind: value, "command": ["sh", "-c", command]});
        if runtime == RUNTIMES[0] {
            spec["log_streams"] = json!(true);
        }
        api.ensure("s", &spec).await;
        commands(&conman, &script, &small).await;
        logs(&conman, &small).await;
        api.stop("s").await;
        logs(&conman, &small).await;
        let path = "/v1/sessions/s?forget=true";
        assert!(api.delete(path).await.status.is_success());
    }
}

async fn commands(conman: &Conman, script: &str, wanted: &[u8]) {
    let api = conman.api();
    let output = cli(conman, &["exec", "s", "sh", "-c", script]).await;
    assert_same("exec", &output.stdout, wanted);
    let request = json!({"command": ["sh", "-c", script]});
    let collected: ExecResult = api
        .post("/v1/sessions/s/exec", &request)
        .await
        .expect(StatusCode::OK);
    let bytes = decoded(&collected.stdout, collected.stdout_base64.as_ref());
    assert_same("collected", &bytes, wanted);
    let streamed = api.post("/v1/sessions/s/exec?stream=true", &request).await;
    assert_same("streamed", &joined(&streamed.text()), wanted);
    let input = json!({"command": ["cat"], "stdin_base64": BASE64.encode(wanted)});
    let echoed: ExecResult = api
        .post("/v1/sessions/s/exec", &input)
        .await
        .expect(StatusCode::OK);
    let bytes = decoded(&echoed.stdout, echoed.stdout_base64.as_ref());
    assert_same("stdin_base64", &bytes, wanted);
}

async fn logs(conman: &Conman, wanted: &[u8]) {
    let api = conman.api();
    eventually("the whole log", PATIENCE, async || {
        // Docker writes each in its own time.
        let [stdout, stderr, _] = framed(&log(&api, "frames").await);
        stdout.len() >= wanted.len() && stderr.len() >= wanted.len()
    })
    .await;
    let [stdout, stderr, lost] = framed(&log(&api, "frames").await);
    assert_same("frames", &stdout, wanted);
    assert_same("frames of stderr", &stderr, wanted);
    assert_eq!(lost, b"");
    let output = cli(conman, &["logs", "s"]).await;
    assert_same("conman logs", &output.stdout, wanted);
    assert_same("conman logs", &output.stderr, wanted);
    let lines = String::from_utf8(log(&api, "json").await).expect("JSON");
    let of = |stream: &str| {
        let mark = format!("\"stream\":\"{stream}\"");
        let lines: Vec<_> = lines.lines().filter(|line| line.contains(&mark)).collect();
        joined(&lines.join("\n"))
    };
    assert_same("json", &of("stdout"), wanted);
    assert_same("json of stderr", &of("stderr"), wanted);
}

#[tokio::test]
async fn the_log_of_an_ended_session_has_its_last_line_also_of_a_terminal() {
    let (Some(native), Some(docker)) = (native(), docker_shared().await) else {
        return;
    };
    let conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    for (kind, value) in RUNTIMES {
        for (tty, wanted) in [(false, "one\ntwo"), (true, "one\r\ntwo")] {
            // It ends once its start has succeeded.
            let script = "printf 'one\\ntwo'; until [ -e /tmp/end ]; do sleep 0.05; done; exit 3";
            let spec = json!({kind: value, "tty": tty, "command": ["sh", "-c", script]});
            api.ensure("s", &spec).await;
            let end = json!({"command": ["touch", "/tmp/end"]});
            api.post("/v1/sessions/s/exec", &end).await;
            eventually("its end", PATIENCE, async || {
                api.session("s").await.state.is_ended()
            })
            .await;
            eventually("its whole log", PATIENCE, async || {
                let answer = api.get("/v1/sessions/s/logs").await;
                answer.status == StatusCode::OK && answer.text() == wanted
            })
            .await;
            api.delete("/v1/sessions/s?forget=true").await;
        }
    }
}

#[tokio::test]
async fn output_that_a_log_could_not_keep_is_not_lost_silently() {
    let Some(native) = native() else { return };
    let conman = Conman::builder()
        .set("limits", "kept_log_bytes = 65536")
        .start_native(&native)
        .await;
    let api = conman.api();
    let script = format!("{}; exec sleep 1000", every_byte(10, WITH_NEWLINE));
    let spec = json!({"image": ROOT, "command": ["sh", "-c", script]});
    api.ensure("s", &spec).await;
    let written = expected(10, WITH_NEWLINE).len();
    eventually("the whole log", PATIENCE, async || {
        framed(&log(&api, "frames").await)[0].len() == written
    })
    .await;
    api.stop("s").await;
    // The container is removed in the background.
    let [stdout, _, lost] = eventually_some("its kept log", PATIENCE, async || {
        let outputs = framed(&log(&api, "frames").await);
        (!outputs[2].is_empty()).then_some(outputs)
    })
    .await;
    let lost = String::from_utf8(lost).expect("text");
    let dropped: usize = lost
        .split(' ')
        .next()
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("a number: {lost}"));
    assert_eq!(dropped + stdout.len(), written, "{lost}");
    assert!(dropped > 0 && expected(10, WITH_NEWLINE).ends_with(&stdout));
}
