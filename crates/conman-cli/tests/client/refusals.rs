//! What a person is told when the daemon is not there, not conman, or does not let them in.

use axum::http::HeaderMap;
use axum::response::IntoResponse as _;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, UnixListener};

use crate::support::{Daemon, client, command, outcome, problem};

#[tokio::test]
async fn without_a_socket_the_error_says_how_to_start_conman() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("none");
    let outcome = outcome(command(&path, &["ps"])).await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (5, ""));
    let told = format!(
        "conman is not running here (no socket at {})",
        path.display()
    );
    assert!(outcome.stderr.contains(&told), "{outcome:?}");
    assert!(outcome.stderr.contains("`conman serve`"), "{outcome:?}");
    assert!(outcome.stderr.contains("--socket"), "{outcome:?}");
}

#[tokio::test]
async fn the_socket_of_a_killed_daemon_is_no_socket() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("stale");
    drop(UnixListener::bind(&path).expect("bound"));
    assert!(path.exists());
    let outcome = outcome(command(&path, &["ps", "--json"])).await;
    assert_eq!(outcome.code, 5);
    assert_eq!(outcome.problem().slug(), "daemon-unreachable");
}

#[tokio::test]
async fn a_daemon_that_hangs_up_is_told_as_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).expect("bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
                .await;
        }
    });
    let outcome = outcome(command(&path, &["nodes"])).await;
    assert_eq!(outcome.code, 5);
    assert!(outcome.stderr.contains("broke off"), "{outcome:?}");
}

#[tokio::test]
async fn a_refused_connection_names_the_address() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    drop(listener);
    let outcome = outcome(client(&["ps", "--url", &url])).await;
    assert_eq!(outcome.code, 5);
    assert!(outcome.stderr.contains(&url), "{outcome:?}");
}

#[tokio::test]
async fn a_daemon_that_is_unavailable_has_the_exit_code_of_one_that_is_not_there() {
    let refuse = || async { problem(503, "node-preempted", "the machine is going away") };
    let outcome = Daemon::start(Router::new().route("/v1/nodes", get(refuse)))
        .run(&["nodes"])
        .await;
    assert_eq!(outcome.code, 5);
    assert!(outcome.stderr.contains("`conman readmit`"), "{outcome:?}");
}

#[tokio::test]
async fn another_program_at_the_address_is_not_taken_for_conman() {
    let foreign = || async { (axum::http::StatusCode::NOT_FOUND, "<html>not found</html>") };
    let daemon = Daemon::start(Router::new().fallback(foreign));
    let outcome = daemon.run(&["ps"]).await;
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("not conman's"), "{outcome:?}");
    let other = || async { Json(json!({ "hello": "world" })) };
    let outcome = Daemon::start(Router::new().fallback(other))
        .run(&["ps"])
        .await;
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("not conman's"), "{outcome:?}");
}

/// A node that wants the token `cm_right`, over TCP.
async fn guarded() -> String {
    let list = |headers: HeaderMap| async move {
        match headers
            .get("authorization")
            .map(axum::http::HeaderValue::as_bytes)
        {
            Some(b"Bearer cm_right") => {
                assert!(
                    headers["host"]
                        .to_str()
                        .expect("text")
                        .starts_with("127.0.0.1:")
                );
                Json(json!({ "nodes": [] })).into_response()
            }
            Some(_) => problem(403, "forbidden", "the token does not allow this"),
            None => problem(401, "unauthenticated", "a token is needed"),
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        let router = Router::new().route("/v1/nodes", get(list));
        axum::serve(listener, router).await.expect("served");
    });
    url
}

#[tokio::test]
async fn a_token_from_a_file_is_sent_and_a_missing_one_is_asked_for() {
    let url = guarded().await;
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("token");
    std::fs::write(&path, "cm_right\n").expect("written");

    let without = outcome(client(&["nodes", "--url", &url])).await;
    assert_eq!(without.code, 4);
    assert!(without.stderr.contains("--token-file"), "{without:?}");

    let mut command = client(&["nodes"]);
    command
        .env("CONMAN_URL", &url)
        .env("CONMAN_TOKEN_FILE", &path);
    assert_eq!(outcome(command).await.code, 0);

    std::fs::write(&path, "cm_wrong\n").expect("written");
    let file = path.to_str().expect("UTF-8");
    let wrong = outcome(client(&["nodes", "--url", &url, "--token-file", file])).await;
    assert_eq!(wrong.code, 4);
    assert!(wrong.stderr.contains("wider scope"), "{wrong:?}");
    assert!(
        !wrong.stderr.contains("cm_wrong"),
        "a token is never printed"
    );

    std::fs::remove_file(&path).expect("removed");
    let missing = outcome(client(&["nodes", "--url", &url, "--token-file", file])).await;
    assert_eq!(missing.code, 2);
    assert!(missing.stderr.contains(file), "{missing:?}");
}

#[tokio::test]
async fn wrong_usage_exits_with_2_and_in_json_is_a_problem() {
    for words in [
        &["ps", "--no-such"][..],
        &["inspect"],
        &["run", "Not_An_Id"],
        &["run", "alice", "--memory", "lots"],
        &["nodes", "--url", "https://node"],
        &["nodes", "--url", "node:7700"],
        &["frobnicate"],
    ] {
        let plain = outcome(client(words)).await;
        assert_eq!(
            (plain.code, plain.stdout.as_str()),
            (2, ""),
            "{words:?}: {plain:?}"
        );
        assert!(plain.stderr.starts_with("error: "), "{plain:?}");
        let json = outcome(client(&[&["--json"], words].concat())).await;
        assert_eq!(
            (json.code, json.stdout.as_str()),
            (2, ""),
            "{words:?}: {json:?}"
        );
        assert_eq!(json.problem().slug(), "usage");
    }
}

#[tokio::test]
async fn help_and_version_are_no_errors_and_help_states_the_exit_codes() {
    let help = outcome(client(&["--help"])).await;
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    for text in ["Exit codes:", "CONMAN_SOCKET", "preempt", "bench"] {
        assert!(help.stdout.contains(text), "{text}: {help:?}");
    }
    let version = outcome(client(&["--version"])).await;
    assert_eq!((version.code, version.stderr.as_str()), (0, ""));
}
