//! Commands in a session, without a terminal.

use std::process::Stdio;

use axum::body::Bytes;
use axum::extract::Query;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};
use conman_proto::{EXEC_PROTOCOL, ExecRequest};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use crate::calls::Calls;
use crate::support::{Daemon, Outcome, PATIENCE, command, moving, problem};

pub(crate) fn framed(channel: u8, payload: &[u8]) -> Message {
    Message::Binary(Bytes::from([&[channel], payload].concat()))
}

/// A daemon that plays `script` as the command.
pub(crate) fn playing<F>(
    calls: &Calls,
    script: impl Fn(WebSocket, ExecRequest) -> F + Clone + Send + Sync + 'static,
) -> Daemon
where
    F: Future<Output = ()> + Send + 'static,
{
    Daemon::start(route(calls, script))
}

fn route<F>(
    calls: &Calls,
    script: impl Fn(WebSocket, ExecRequest) -> F + Clone + Send + Sync + 'static,
) -> Router
where
    F: Future<Output = ()> + Send + 'static,
{
    let calls = calls.clone();
    let exec = move |Query(query): Query<Vec<(String, String)>>, upgrade: WebSocketUpgrade| {
        let [(name, request)] = &query[..] else {
            panic!("{query:?}")
        };
        assert_eq!(name, "request");
        calls.note(request);
        let request = serde_json::from_str::<ExecRequest>(request).expect("an ExecRequest");
        let upgrade = upgrade.protocols([EXEC_PROTOCOL]);
        let response: Response = upgrade.on_upgrade(move |socket| script(socket, request));
        async { response }
    };
    Router::new().route("/v1/sessions/{id}/exec", get(exec))
}

/// The next message on the channel of standard input.
pub(crate) async fn next_input(socket: &mut WebSocket) -> Option<Bytes> {
    loop {
        match socket.recv().await? {
            Ok(Message::Binary(bytes)) if bytes.first() == Some(&0) => {
                return Some(bytes.slice(1..));
            }
            Ok(_) => {}
            Err(_) => return None,
        }
    }
}

async fn send(socket: &mut WebSocket, messages: impl IntoIterator<Item = Message>) {
    for message in messages {
        socket.send(message).await.expect("sent");
    }
}

#[tokio::test]
async fn outputs_stay_apart_and_the_exit_code_is_the_commands() {
    let calls = Calls::default();
    let daemon = playing(&calls, |mut socket, _| async move {
        assert_eq!(
            next_input(&mut socket).await.as_deref(),
            Some(&b""[..]),
            "no input at once"
        );
        let messages = [
            framed(1, b"out"),
            framed(2, b"err\xff"),
            framed(3, br#"{"exit_code":7}"#),
        ];
        send(&mut socket, messages).await;
    });
    let mut command =
        daemon.command(&["exec", "-e", "A=1", "-w", "/tmp", "alice", "--", "ls", "-l"]);
    let output = command.output().await.expect("runs");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(
        (&output.stdout[..], &output.stderr[..]),
        (&b"out"[..], &b"err\xff"[..])
    );
    let asked: Value = serde_json::from_str(&calls.all()[0]).expect("JSON");
    let expected =
        json!({"command": ["ls", "-l"], "env": {"A": "1"}, "workdir": "/tmp", "tty": false});
    assert_eq!(asked, expected);
}

#[tokio::test]
async fn a_command_that_ended_with_its_container_tells_where_the_session_is() {
    for (status, code) in [
        (r#"{"exit_code":137}"#, 137),
        (r#"{"error":"the connection to the command was lost"}"#, 125),
    ] {
        let routes = route(&Calls::default(), move |mut socket, _| async move {
            send(&mut socket, [framed(3, status.as_bytes())]).await;
        });
        let daemon = Daemon::start(routes.route("/v1/sessions/{id}", moving()));
        let outcome = daemon.run(&["exec", "alice", "--", "sleep", "9"]).await;
        assert_eq!(outcome.code, code, "{outcome:?}");
        for part in [
            "generation 8 is running on node n2",
            "`conman exec alice …`",
        ] {
            assert!(outcome.stderr.contains(part), "{part}: {outcome:?}");
        }
    }
}

/// Runs `exec -i` with `input` on standard input.
async fn with_input(daemon: &Daemon, input: &[u8]) -> (Option<i32>, Vec<u8>) {
    let mut command = daemon.command(&["exec", "-i", "alice", "cat"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("runs");
    let mut stdin = child.stdin.take().expect("piped");
    let feed = async {
        // The client may end before it has read everything.
        let _ = stdin.write_all(input).await;
        drop(stdin);
    };
    let (output, ()) = tokio::time::timeout(PATIENCE, async {
        tokio::join!(child.wait_with_output(), feed)
    })
    .await
    .expect("in time");
    let output = output.expect("ended");
    (output.status.code(), output.stdout)
}

#[tokio::test]
async fn input_comes_back_whole_and_its_end_ends_the_command() {
    let daemon = playing(&Calls::default(), |mut socket, _| async move {
        while let Some(piece) = next_input(&mut socket).await {
            if piece.is_empty() {
                send(&mut socket, [framed(3, br#"{"exit_code":0}"#)]).await;
                return;
            }
            send(&mut socket, [framed(1, &piece)]).await;
        }
    });
    let input: Vec<u8> = (0..3_000_000_u32)
        .map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1])
        .collect();
    let (code, output) = with_input(&daemon, &input).await;
    assert_eq!(code, Some(0));
    assert!(
        output == input,
        "{} bytes came back of {}",
        output.len(),
        input.len()
    );
}

#[tokio::test]
async fn a_command_that_ends_before_its_input_does_not_wait_for_it() {
    let daemon = playing(&Calls::default(), |mut socket, _| async move {
        send(&mut socket, [framed(3, br#"{"exit_code":4}"#)]).await;
    });
    let mut command = daemon.command(&["exec", "-i", "alice", "true"]);
    // Held open: the client must not wait for its end.
    let mut child = command.stdin(Stdio::piped()).spawn().expect("runs");
    let _open = child.stdin.take();
    let status = tokio::time::timeout(PATIENCE, child.wait())
        .await
        .expect("in time");
    assert_eq!(status.expect("ended").code(), Some(4));
}

async fn exec(daemon: &Daemon) -> Outcome {
    daemon.run(&["exec", "alice", "prog"]).await
}

#[tokio::test]
async fn a_command_that_does_not_exist_exits_as_shells_have_it() {
    let daemon = playing(&Calls::default(), |mut socket, _| async move {
        let status = br#"{"exit_code":127,"error":"`prog` is not in the container's PATH"}"#;
        send(&mut socket, [framed(3, status)]).await;
    });
    let outcome = exec(&daemon).await;
    assert_eq!(outcome.code, 127);
    assert!(
        outcome.stderr.contains("not in the container's PATH"),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn a_connection_that_is_cut_or_closed_is_no_success_and_its_output_is_kept() {
    let cut = playing(&Calls::default(), |mut socket, _| async move {
        send(&mut socket, [framed(1, b"half")]).await;
    });
    let outcome = exec(&cut).await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (125, "half"));
    assert!(
        outcome.stderr.contains("may still be running"),
        "{outcome:?}"
    );

    let closed = playing(&Calls::default(), |mut socket, _| async move {
        let frame = CloseFrame {
            code: 1012,
            reason: "conman is restarting".into(),
        };
        send(&mut socket, [Message::Close(Some(frame))]).await;
        // The closing handshake: the client answers.
        while let Some(Ok(_)) = socket.recv().await {}
    });
    let outcome = exec(&closed).await;
    assert_eq!(outcome.code, 125);
    assert!(
        outcome.stderr.contains("conman is restarting"),
        "{outcome:?}"
    );
    assert!(outcome.stderr.contains("1012"), "{outcome:?}");
}

#[tokio::test]
async fn what_does_not_fit_the_protocol_is_refused() {
    for message in [
        Message::Text("hello".into()),
        framed(9, b"x"),
        framed(3, b"{"),
        framed(0, b"x"),
    ] {
        let daemon = playing(&Calls::default(), move |mut socket, _| {
            let message = message.clone();
            async move {
                send(&mut socket, [message]).await;
                while let Some(Ok(_)) = socket.recv().await {}
            }
        });
        let outcome = exec(&daemon).await;
        assert_eq!(outcome.code, 125);
        assert!(outcome.stderr.contains("conman.exec.v1"), "{outcome:?}");
    }
}

#[tokio::test]
async fn every_failure_of_conmans_own_exits_with_125() {
    let refuse = || async { problem(404, "no-such-session", "there is no session `alice`") };
    let daemon = Daemon::start(Router::new().route("/v1/sessions/{id}/exec", get(refuse)));
    let outcome = exec(&daemon).await;
    assert_eq!(outcome.code, 125);
    assert!(
        outcome.stderr.contains("there is no session `alice`"),
        "{outcome:?}"
    );

    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("none");
    let outcome = crate::support::outcome(command(&socket, &["exec", "alice", "prog"])).await;
    assert_eq!(outcome.code, 125);
    assert!(
        outcome.stderr.contains("conman is not running here"),
        "{outcome:?}"
    );

    let outcome =
        crate::support::outcome(command(&socket, &["exec", "-it", "alice", "prog"])).await;
    assert_eq!(outcome.code, 125);
    assert!(outcome.stderr.contains("not a terminal"), "{outcome:?}");
}

#[tokio::test]
async fn a_daemon_that_answers_no_upgrade_is_not_taken_for_one() {
    let plain = || async { "hello" };
    let daemon = Daemon::start(Router::new().route("/v1/sessions/{id}/exec", get(plain)));
    let outcome = exec(&daemon).await;
    assert_eq!(outcome.code, 125);
    assert!(outcome.stderr.contains("not conman's"), "{outcome:?}");
}

#[tokio::test]
async fn a_reader_that_goes_away_ends_the_command_as_a_broken_pipe_does() {
    let daemon = playing(&Calls::default(), |mut socket, _| async move {
        let piece = vec![b'y'; 16 * 1024];
        while socket.send(framed(1, &piece)).await.is_ok() {}
    });
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = daemon.command(&["exec", "alice", "yes"]);
    command.stdout(writer).stderr(Stdio::piped());
    let child = command.spawn().expect("runs");
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
        .await
        .expect("in time");
    let output = output.expect("ended");
    assert_eq!(
        (output.status.code(), &output.stderr[..]),
        (Some(141), &b""[..])
    );
}

#[tokio::test]
async fn exec_in_json_is_one_value_with_everything_that_was_printed() {
    let calls = Calls::default();
    let noted = calls.clone();
    let exec = move |body: Json<Value>| {
        noted.note(body.0["stdin"].to_string());
        async {
            Json(json!({ "exit_code": 3, "stdout": "out", "stderr": "err", "truncated": false }))
        }
    };
    let router = Router::new().route("/v1/sessions/{id}/exec", axum::routing::post(exec));
    let daemon = Daemon::start(router);
    let outcome = daemon.run(&["exec", "--json", "alice", "prog"]).await;
    assert_eq!((outcome.code, outcome.stderr.as_str()), (3, ""));
    assert_eq!(outcome.json()["stdout"], "out");
    let mut command = daemon.command(&["exec", "-i", "--json", "alice", "cat"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("runs");
    child
        .stdin
        .take()
        .expect("piped")
        .write_all(b"in")
        .await
        .expect("written");
    assert_eq!(child.wait().await.expect("ended").code(), Some(3));
    assert_eq!(calls.all(), ["null", "\"in\""]);
}

#[tokio::test]
async fn a_command_line_that_is_too_long_is_refused_in_one_line_without_repeating_it() {
    let calls = Calls::default();
    let daemon = playing(&calls, |_, _| async { panic!("it is not sent") });
    let long = "y".repeat(100_000);
    let outcome = daemon.run(&["exec", "alice", "sh", "-c", &long]).await;
    assert_eq!(outcome.code, 125, "{}", outcome.stderr.len());
    assert!(
        outcome.stderr.contains("too long (100"),
        "{}",
        outcome.stderr.len()
    );
    assert_eq!(outcome.stderr.lines().count(), 1);
    assert!(!outcome.stderr.contains("yyyy") && outcome.stderr.len() < 400);
    assert!(calls.all().is_empty());
}
