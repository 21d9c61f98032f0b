//! Starting, listing, showing and stopping sessions, against a fake daemon.

use crate::calls::Calls;
use crate::support::{Daemon, problem, problem_with, session, with};
use axum::Json;
use axum::Router;
use axum::extract::{Path, Query, RawQuery};
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use axum::routing::{delete, get, put};
use serde_json::{Value, json};

/// A daemon that ensures every session and notes what it was asked.
fn ensuring(seen: &Calls, answer: Value) -> Daemon {
    let seen = seen.clone();
    let ensure = move |Path(id): Path<String>, RawQuery(query): RawQuery, body: Json<Value>| {
        seen.note(format!("{id}?{} {}", query.unwrap_or_default(), body.0));
        async move { Json(answer) }
    };
    Daemon::start(Router::new().route("/v1/sessions/{id}", put(ensure)))
}

fn ensured() -> Value {
    with(
        session("alice", "running"),
        json!({ "created": true, "spec_matches": true }),
    )
}

#[tokio::test]
async fn run_sends_what_was_given_and_prints_the_url_alone() {
    let seen = Calls::default();
    let daemon = ensuring(&seen, ensured());
    let outcome = daemon
        .run(&[
            "run",
            "alice",
            "--template",
            "python",
            "-e",
            "A=1",
            "--",
            "x",
            "-y",
        ])
        .await;
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (0, "http://alice.localhost:7701/\n")
    );
    assert_eq!(outcome.stderr, "", "quiet when nobody watches");
    let body = json!({"template": "python", "command": ["x", "-y"], "args": [], "env": {"A": "1"}});
    assert_eq!(seen.all(), [format!("alice? {body}")]);
}

#[tokio::test]
async fn run_with_no_wait_asks_not_to_wait() {
    let seen = Calls::default();
    let answer = with(
        ensured(),
        json!({ "state": "starting", "started_at": null }),
    );
    let outcome = ensuring(&seen, answer)
        .run(&["run", "alice", "--no-wait"])
        .await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(seen.all(), ["alice?wait=false {}"]);
}

#[tokio::test]
async fn run_of_a_session_without_a_port_prints_its_name() {
    let answer = with(ensured(), json!({ "url": null, "port": null }));
    let outcome = ensuring(&Calls::default(), answer)
        .run(&["run", "alice"])
        .await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "alice\n"));
}

#[tokio::test]
async fn run_in_json_is_the_daemons_answer_with_fields_that_this_version_does_not_know() {
    let outcome = ensuring(&Calls::default(), ensured())
        .run(&["--json", "run", "alice"])
        .await;
    assert_eq!(outcome.code, 0);
    assert_eq!(outcome.json(), ensured());
}

#[tokio::test]
async fn run_of_a_session_with_another_spec_warns_that_nothing_was_changed() {
    let answer = with(
        ensured(),
        json!({ "created": false, "spec_matches": false }),
    );
    let outcome = ensuring(&Calls::default(), answer)
        .run(&["run", "alice"])
        .await;
    assert_eq!(outcome.code, 0);
    assert!(outcome.stderr.contains("another spec"), "{outcome:?}");
}

#[tokio::test]
async fn run_of_a_session_that_ended_at_once_fails_and_says_where_to_look() {
    let answer = with(
        ensured(),
        json!({ "state": "failed", "reason": "exit code 3" }),
    );
    let outcome = ensuring(&Calls::default(), answer)
        .run(&["run", "alice"])
        .await;
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("exit code 3"), "{outcome:?}");
    assert!(outcome.stderr.contains("conman why alice"), "{outcome:?}");
}

#[tokio::test]
async fn every_mistake_in_a_spec_is_told_on_a_line_of_its_own() {
    let refuse = || async {
        problem_with(
            422,
            "bad-spec",
            "port: must be 1 to 65535; template: unknown",
            json!([
                {"field": "memory_bytes", "message": "must be at least 6291456"},
                {"field": "template", "message": "is unknown; did you mean `python`?"},
            ]),
        )
    };
    let daemon = Daemon::start(Router::new().route("/v1/sessions/{id}", put(refuse)));
    let outcome = daemon.run(&["run", "alice", "--template", "pyhton"]).await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (4, ""));
    assert_eq!(
        outcome.stderr,
        "error: It was refused\n  memory_bytes: must be at least 6291456\n  \
         template: is unknown; did you mean `python`?\n"
    );
}

#[tokio::test]
async fn a_start_that_failed_is_a_failure_with_the_sessions_name_in_the_advice() {
    let refuse = || async { problem(502, "start-failed", "nothing answered on port 8080") };
    let daemon = Daemon::start(Router::new().route("/v1/sessions/{id}", put(refuse)));
    let outcome = daemon.run(&["run", "alice"]).await;
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.stderr.contains("nothing answered on port 8080"),
        "{outcome:?}"
    );
    assert!(outcome.stderr.contains("`conman why alice`"), "{outcome:?}");
}

#[tokio::test]
async fn an_image_that_is_missing_is_told_with_one_remedy() {
    let detail = "image `python` is not on this node; import it with `conman image import`";
    let refuse = move || async move { problem(422, "no-such-image", detail) };
    let daemon = Daemon::start(Router::new().route("/v1/sessions/{id}", put(refuse)));
    let outcome = daemon.run(&["run", "alice"]).await;
    assert!(outcome.stderr.contains(detail), "{outcome:?}");
    assert!(!outcome.stderr.contains("load"), "{outcome:?}");
}

/// A daemon with three pages of sessions that notes the queries.
fn paging(seen: &Calls) -> Daemon {
    let seen = seen.clone();
    let list = move |RawQuery(query): RawQuery| {
        let query = query.unwrap_or_default();
        seen.note(query.clone());
        let (name, next) = match query.split("cursor=").nth(1) {
            None => ("alice", json!("a/b c")),
            Some("a%2Fb%20c") => ("bob", json!("last")),
            Some("last") => ("carol", Value::Null),
            Some(other) => panic!("cursor {other}"),
        };
        async move { Json(json!({ "sessions": [session(name, "running")], "next": next })) }
    };
    Daemon::start(Router::new().route("/v1/sessions", get(list)))
}

#[tokio::test]
async fn ps_follows_the_pages_and_hides_ended_sessions_unless_asked() {
    let seen = Calls::default();
    let daemon = paging(&seen);
    let outcome = daemon.run(&["ps", "--label", "team=a b"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let lines: Vec<_> = outcome.stdout.lines().collect();
    assert_eq!(lines.len(), 4, "{outcome:?}");
    assert!(
        lines[0].starts_with("NAME") && lines[0].ends_with("URL"),
        "{lines:?}"
    );
    for (line, name) in lines[1..].iter().zip(["alice", "bob", "carol"]) {
        assert!(line.starts_with(name), "{line}");
        assert!(
            line.contains("running") && line.contains(" n1 ") && line.contains("python"),
            "{line}"
        );
        assert!(line.contains(" ago") && line.contains("4711"), "{line}");
    }
    assert!(
        !outcome.stdout.contains('\u{1b}'),
        "no colours without a terminal"
    );
    let queries = seen.all();
    assert!(
        queries[0].contains("state=running") && !queries[0].contains("stopped"),
        "{queries:?}"
    );
    assert!(
        queries
            .iter()
            .all(|query| query.contains("label=team%3Da%20b")),
        "{queries:?}"
    );
}

#[tokio::test]
async fn ps_all_and_state_choose_what_is_asked_for() {
    let seen = Calls::default();
    let daemon = paging(&seen);
    assert_eq!(daemon.run(&["ps", "-a"]).await.code, 0);
    assert!(!seen.all()[0].contains("state="));
    assert_eq!(
        daemon
            .run(&["ps", "--state", "stuck", "--state", "failed"])
            .await
            .code,
        0
    );
    assert!(
        seen.all()[3].contains("state=stuck&state=failed"),
        "{:?}",
        seen.all()
    );
}

#[tokio::test]
async fn ps_in_json_is_one_value_with_the_sessions_of_all_pages() {
    let outcome = paging(&Calls::default()).run(&["ps", "--json"]).await;
    let value = outcome.json();
    let names: Vec<_> = value["sessions"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| &it["id"])
        .collect();
    assert_eq!(names, ["alice", "bob", "carol"]);
    assert_eq!(value["next"], Value::Null);
    assert_eq!(value["sessions"][0]["field_of_a_newer_daemon"], true);
}

#[tokio::test]
async fn ps_quiet_prints_names_for_scripts() {
    let outcome = paging(&Calls::default()).run(&["ps", "-q"]).await;
    assert_eq!(outcome.stdout, "alice\nbob\ncarol\n");
}

#[tokio::test]
async fn a_list_whose_pages_never_end_is_given_up() {
    let list = || async { Json(json!({ "sessions": [], "next": "again" })) };
    let outcome = Daemon::start(Router::new().route("/v1/sessions", get(list)))
        .run(&["ps"])
        .await;
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("does not end"), "{outcome:?}");
}

#[tokio::test]
async fn what_a_session_says_cannot_drive_the_terminal() {
    let list = || async {
        let hostile = with(
            session("alice", "failed"),
            json!({ "reason": "\u{1b}[2J\r\nfake" }),
        );
        Json(json!({ "sessions": [hostile], "next": null }))
    };
    let outcome = Daemon::start(Router::new().route("/v1/sessions", get(list)))
        .run(&["ps", "-a"])
        .await;
    assert!(
        outcome.stdout.contains("\\u{1b}[2J\\r\\nfake"),
        "{outcome:?}"
    );
    assert!(!outcome.stdout.contains('\u{1b}'), "{outcome:?}");
}

#[tokio::test]
async fn a_reader_that_goes_away_is_no_error() {
    let list = || async {
        let sessions: Vec<_> = (0..900)
            .map(|n| session(&format!("s{n}"), "running"))
            .collect();
        Json(json!({ "sessions": sessions, "next": null }))
    };
    let daemon = Daemon::start(Router::new().route("/v1/sessions", get(list)));
    for words in [&["ps"][..], &["ps", "--json"], &["ps", "-q"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = daemon.command(words);
        command.stdout(writer).stderr(std::process::Stdio::piped());
        let output = command
            .spawn()
            .expect("runs")
            .wait_with_output()
            .await
            .expect("ends");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            (output.status.code(), stderr.as_str()),
            (Some(0), ""),
            "{words:?}"
        );
    }
}

/// A daemon that knows `alice` only.
fn showing() -> Daemon {
    let show = |Path(id): Path<String>| async move {
        match id.as_str() {
            "alice" => Json(session("alice", "running")).into_response(),
            _ => problem(404, "no-such-session", "there is no session `bob`"),
        }
    };
    Daemon::start(Router::new().route("/v1/sessions/{id}", get(show)))
}

#[tokio::test]
async fn inspect_prints_all_that_the_daemon_says() {
    let daemon = showing();
    let outcome = daemon.run(&["inspect", "alice"]).await;
    assert_eq!(outcome.code, 0);
    assert_eq!(outcome.json(), session("alice", "running"));
}

#[tokio::test]
async fn a_session_that_does_not_exist_has_its_exit_code_and_in_json_its_problem() {
    let daemon = showing();
    let outcome = daemon.run(&["inspect", "bob"]).await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (3, ""));
    assert_eq!(
        outcome.stderr,
        "error: It was refused: there is no session `bob`\nnext: `conman run ID --template TEMPLATE` starts it, `conman ps --all` lists the sessions\n"
    );
    let outcome = daemon.run(&["inspect", "bob", "--json"]).await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (3, ""));
    assert_eq!(outcome.problem().slug(), "no-such-session");
}

/// A daemon that stops what it is told to, in every way that exists.
fn stopping(seen: &Calls) -> Daemon {
    let seen = seen.clone();
    let stop = move |Path(id): Path<String>| {
        seen.note(id.clone());
        async move {
            match id.as_str() {
                "gone" => problem(404, "no-such-session", "there is no session `gone`"),
                "held" => (
                    StatusCode::ACCEPTED,
                    Json(json!({
                        "id": id, "generation": 7, "state": "stuck",
                        "reason": "process 9 is in uninterruptible sleep",
                        "dead_ms": null, "released_ms": null,
                    })),
                )
                    .into_response(),
                "broken" => Json(json!({
                    "id": id, "generation": 7, "state": "failed", "reason": "exited with 3",
                    "dead_ms": 0.0, "released_ms": 0.0,
                }))
                .into_response(),
                _ => Json(json!({
                    "id": id, "generation": 7, "state": "stopped",
                    "dead_ms": 8.0, "released_ms": 9.5,
                }))
                .into_response(),
            }
        }
    };
    let list = |Query(query): Query<Vec<(String, String)>>| async move {
        assert!(
            query.iter().all(|(_, value)| value != "stopped"),
            "ended ones are not stopped"
        );
        assert!(
            query.contains(&("node".to_owned(), "self".to_owned())),
            "those of other nodes are not stopped"
        );
        let sessions = [session("alice", "running"), session("bob", "starting")];
        Json(json!({ "sessions": sessions, "next": null }))
    };
    Daemon::start(
        Router::new()
            .route("/v1/sessions/{id}", delete(stop))
            .route("/v1/sessions", get(list)),
    )
}

#[tokio::test]
async fn rm_stops_several_once_each_and_tells_how_long_it_took() {
    let seen = Calls::default();
    let outcome = stopping(&seen).run(&["rm", "alice", "bob", "alice"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(
        outcome.stdout,
        "alice is stopped, after 9.5 ms\nbob is stopped, after 9.5 ms\n"
    );
    let mut stopped = seen.all();
    stopped.sort();
    assert_eq!(stopped, ["alice", "bob"]);
}

#[tokio::test]
async fn rm_says_what_it_did_to_a_session_that_had_failed() {
    let daemon = stopping(&Calls::default());
    for (words, told) in [
        (
            &["rm", "broken"][..],
            "broken had failed before (exited with 3); `conman rm --forget broken` takes it off the lists\n",
        ),
        (
            &["rm", "broken", "--forget"],
            "broken had failed before (exited with 3); it is forgotten\n",
        ),
        (
            &["rm", "alice", "--forget"],
            "alice is stopped, after 9.5 ms; it is forgotten\n",
        ),
    ] {
        let outcome = daemon.run(words).await;
        assert_eq!((outcome.code, &*outcome.stdout), (0, told), "{words:?}");
    }
}

#[tokio::test]
async fn rm_goes_on_after_a_failure_and_a_stuck_session_decides_the_exit_code() {
    let daemon = stopping(&Calls::default());
    let outcome = daemon.run(&["rm", "held", "gone", "alice"]).await;
    assert_eq!(outcome.code, 6);
    assert_eq!(outcome.stdout, "alice is stopped, after 9.5 ms\n");
    assert!(
        outcome
            .stderr
            .contains("held: process 9 is in uninterruptible"),
        "{outcome:?}"
    );
    assert!(
        outcome.stderr.contains("there is no session `gone`"),
        "{outcome:?}"
    );
    assert_eq!(daemon.run(&["rm", "gone", "alice"]).await.code, 3);
}

#[tokio::test]
async fn rm_in_json_is_one_value_and_each_failure_a_problem() {
    let outcome = stopping(&Calls::default())
        .run(&["rm", "--json", "held", "gone", "alice"])
        .await;
    assert_eq!(outcome.code, 6);
    let reports = &outcome.json()["reports"];
    assert_eq!(
        (&reports[0]["id"], &reports[1]["id"]),
        (&json!("held"), &json!("alice"))
    );
    let slugs: Vec<_> = outcome
        .stderr
        .lines()
        .map(|line| serde_json::from_str::<conman_proto::Problem>(line).expect("a problem"))
        .map(|problem| problem.slug().to_owned())
        .collect();
    assert_eq!(slugs, ["session-stuck", "no-such-session"]);
}

#[tokio::test]
async fn rm_all_needs_a_yes_that_nobody_is_there_to_give() {
    let seen = Calls::default();
    let daemon = stopping(&seen);
    let outcome = daemon.run(&["rm", "--all"]).await;
    assert_eq!(outcome.code, 2);
    assert!(outcome.stderr.contains("Stop 2 sessions?"), "{outcome:?}");
    assert!(outcome.stderr.contains("--yes"), "{outcome:?}");
    assert!(seen.all().is_empty());
    assert_eq!(daemon.run(&["rm", "--all", "--yes"]).await.code, 0);
    assert_eq!(seen.all().len(), 2);
}
