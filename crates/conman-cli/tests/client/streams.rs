//! Logs and events.

use std::convert::Infallible;
use std::process::Stdio;

use axum::body::{Body, Bytes};
use axum::extract::RawQuery;
use axum::response::sse::{self, Sse};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

use crate::calls::Calls;
use crate::support::{Daemon, PATIENCE, moving, session};

const LOG: [&str; 3] = [
    r#"{"stream":"stdout","text":"one"}"#,
    r#"{"stream":"stderr","at":"2026-03-01T12:00:00Z","text":"oops"}"#,
    r#"{"stream":"stdout","text":"two"}"#,
];

/// Likewise as frames, the way a person or a pipe gets it.
const FRAMES: [&[u8]; 4] = [
    b"\x01\0\0\0\0\0\0\x05one\r\n",
    b"\x02\0\0\0\0\0\0\x05oops\n",
    b"\x03\0\0\0\0\0\0\x077 bytes",
    b"\x01\0\0\0\0\0\0\x03two",
];

/// A daemon with a log, which breaks off at its end when `broken`.
fn logging(calls: &Calls, broken: bool, state: &'static str) -> Daemon {
    let calls = calls.clone();
    let log = move |RawQuery(query): RawQuery| {
        let query = query.unwrap_or_default();
        let pieces = match query.contains("format=json") {
            true => crumbs(LOG.map(|line| format!("{line}\n")).concat().as_bytes()),
            false => crumbs(&FRAMES.concat()),
        };
        calls.note(query);
        let end = broken.then(|| Err(std::io::Error::other("the runtime went away")));
        let body = stream::iter(pieces.into_iter().map(Ok)).chain(stream::iter(end));
        async { Body::from_stream(body).into_response() }
    };
    let show = move || async move { Json(session("alice", state)) };
    Daemon::start(
        Router::new()
            .route("/v1/sessions/{id}/logs", get(log))
            .route("/v1/sessions/{id}", get(show)),
    )
}

/// A log in pieces of three bytes, so that no line and no frame arrives whole.
fn crumbs(log: &[u8]) -> Vec<Bytes> {
    log.chunks(3).map(Bytes::copy_from_slice).collect()
}

#[tokio::test]
async fn logs_keep_the_two_outputs_apart() {
    let calls = Calls::default();
    let daemon = logging(&calls, false, "running");
    let outcome = daemon.run(&["logs", "alice"]).await;
    // To the byte: an end of line that a program did not write is not added.
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "one\r\ntwo"));
    assert_eq!(outcome.stderr, "oops\nwarning: 7 bytes\n");
    let json = daemon
        .run(&["logs", "alice", "--json", "--tail", "3", "--timestamps"])
        .await;
    assert_eq!(json.stdout.lines().collect::<Vec<_>>(), LOG);
    assert_eq!(
        calls.all(),
        ["format=frames", "format=json&timestamps=true&tail=3"]
    );
}

#[tokio::test]
async fn a_log_that_breaks_off_is_no_whole_log() {
    let outcome = logging(&Calls::default(), true, "running")
        .run(&["logs", "alice"])
        .await;
    assert_eq!(outcome.code, 5, "{outcome:?}");
    // How much of what was on its way still arrives is the network's affair.
    assert!("one\r\ntwo".starts_with(&outcome.stdout), "{outcome:?}");
    assert!(outcome.stderr.contains("broke off"), "{outcome:?}");
}

#[tokio::test]
async fn a_followed_log_ends_well_only_with_its_session() {
    let calls = Calls::default();
    let ended = logging(&calls, false, "stopped")
        .run(&["logs", "-f", "alice"])
        .await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(calls.all(), ["format=frames&follow=true"]);
    let cut = logging(&calls, false, "running")
        .run(&["logs", "-f", "alice"])
        .await;
    assert_eq!((cut.code, cut.stdout.as_str()), (5, "one\r\ntwo"));
    assert!(cut.stderr.contains("still runs"), "{cut:?}");
}

#[tokio::test]
async fn a_followed_log_whose_session_moves_says_so_however_it_ends() {
    for broken in [false, true] {
        let log = move || {
            let end = broken.then(|| Err(std::io::Error::other("the node is gone")));
            let pieces = crumbs(&FRAMES.concat());
            let body = stream::iter(pieces.into_iter().map(Ok)).chain(stream::iter(end));
            async { Body::from_stream(body).into_response() }
        };
        let routes = Router::new()
            .route("/v1/sessions/{id}/logs", get(log))
            .route("/v1/sessions/{id}", moving());
        let outcome = Daemon::start(routes).run(&["logs", "-f", "alice"]).await;
        assert_eq!(outcome.code, 5, "{outcome:?}");
        for part in [
            "container on node n1 (generation 7) is gone",
            "generation 8 is running on node n2",
            "`conman logs -f alice` continues",
        ] {
            assert!(outcome.stderr.contains(part), "{part}: {outcome:?}");
        }
    }
}

fn event(seq: u64) -> Value {
    json!({
        "seq": seq, "at": "2026-03-01T12:00:00.5Z", "kind": "session_phase", "node": "n1",
        "session": "alice", "generation": 7, "phase": "create", "duration_ms": 12.0,
        "message": format!("event {seq}"),
    })
}

/// A journal of 2,500 events. A stream of it ends after two events.
fn journal(calls: &Calls) -> Daemon {
    const LAST: u64 = 2_500;
    let calls = calls.clone();
    let events = move |RawQuery(query): RawQuery| {
        let query = query.unwrap_or_default();
        calls.note(query.clone());
        let number = |name: &str| {
            let value = query.split('&').find_map(|pair| pair.strip_prefix(name));
            value.map(|value| value.parse::<u64>().expect("a number"))
        };
        let after = number("after=").unwrap_or(LAST);
        let response: Response = if query.contains("follow=false") {
            let end = LAST.min(after + number("limit=").expect("a limit"));
            let events: Vec<_> = (after + 1..=end).map(event).collect();
            let cursor = end.to_string();
            Json(json!({
                "events": events, "last_seq": LAST, "cursor": cursor, "truncated": false,
                "complete": end == LAST,
            }))
            .into_response()
        } else {
            let messages = [after + 1, after + 2].map(|seq| {
                let message = sse::Event::default()
                    .id(seq.to_string())
                    .data(event(seq).to_string());
                Ok::<_, Infallible>(message)
            });
            let comment = Ok(sse::Event::default().comment("still here"));
            let position = Ok(sse::Event::default().id(after.to_string()));
            Sse::new(stream::iter([comment, position]).chain(stream::iter(messages)))
                .into_response()
        };
        async { response }
    };
    Daemon::start(Router::new().route("/v1/events", get(events)))
}

#[tokio::test]
async fn past_events_are_read_page_by_page() {
    let calls = Calls::default();
    let outcome = journal(&calls)
        .run(&["events", "--no-follow", "--json", "--after", "10"])
        .await;
    assert_eq!(outcome.code, 0, "{:?}", outcome.stderr);
    let seqs: Vec<u64> = outcome
        .stdout
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).expect("JSON")["seq"]
                .as_u64()
                .expect("seq")
        })
        .collect();
    assert_eq!(seqs, (11..=2_500).collect::<Vec<_>>());
    assert_eq!(calls.all().len(), 3);
}

#[tokio::test]
async fn events_are_told_in_one_line_each() {
    let outcome = journal(&Calls::default())
        .run(&["events", "--no-follow", "--after", "2499"])
        .await;
    let told = "2026-03-01 12:00:00.500 UTC  n1         session_phase      alice  event 2500 [create: 12 ms]\n";
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, told));
}

/// The client's lines; it is killed when this is dropped.
struct Following {
    _child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

fn follow(daemon: &Daemon, words: &[&str]) -> Following {
    let mut child = daemon
        .command(words)
        .stdout(Stdio::piped())
        .spawn()
        .expect("runs");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    Following {
        _child: child,
        lines,
    }
}

impl Following {
    async fn seq(&mut self) -> u64 {
        let line = tokio::time::timeout(PATIENCE, self.lines.next_line())
            .await
            .expect("in time");
        let line = line.expect("readable").expect("not ended");
        serde_json::from_str::<Value>(&line).expect("JSON")["seq"]
            .as_u64()
            .expect("a seq")
    }
}

#[tokio::test]
async fn followed_events_go_on_where_they_were_when_the_stream_ends() {
    let calls = Calls::default();
    let daemon = journal(&calls);
    let mut following = follow(
        &daemon,
        &[
            "events",
            "--json",
            "--after",
            "5",
            "--session",
            "alice",
            "--kind",
            "session_phase,node_frozen",
        ],
    );
    for seq in 6..=10 {
        assert_eq!(following.seq().await, seq);
    }
    assert_eq!(
        calls.all()[..3],
        [5, 7, 9].map(|after| format!(
            "after={after}&session=alice&kind=session%5Fphase&kind=node%5Ffrozen"
        ))
    );
}

#[tokio::test]
async fn followed_events_without_a_position_begin_with_what_happens_next() {
    let daemon = journal(&Calls::default());
    assert_eq!(follow(&daemon, &["events", "--json"]).seq().await, 2_501);
}
