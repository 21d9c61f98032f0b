//! Watches of files in a session: what they report, their bounds, and that they lead nowhere else.

use std::time::Duration;

use conman_e2e::{Api, Conman, EventStream, docker_shared, eventually, native};
use conman_proto::ExecResult;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

/// As many as a session has.
const MAX_WATCHES: usize = 8;

fn path(directory: &str) -> String {
    format!("/v1/sessions/s/files/watch?path={directory}")
}

async fn watch(api: &Api, directory: &str) -> EventStream {
    EventStream::open(api, &path(directory), None).await
}

async fn sh(api: &Api, script: &str) -> String {
    let request = json!({"command": ["sh", "-c", script]});
    let answer = api.post("/v1/sessions/s/exec", &request).await;
    let result: ExecResult = answer.expect(StatusCode::OK);
    assert_eq!(result.exit_code, 0, "{script}: {result:?}");
    result.stdout
}

/// The next change as words, with its cookie.
async fn change(stream: &mut EventStream) -> (String, Value) {
    let change = stream.next_data().await.expect("a change");
    let words = [&change["kind"], &change["name"]];
    let words = words.map(|word| word.as_str().unwrap_or("-"));
    let slash = if change["directory"] == json!(true) {
        "/"
    } else {
        ""
    };
    (
        format!("{}{slash}", words.join(" ")),
        change["cookie"].clone(),
    )
}

async fn started() -> Option<Conman> {
    let native = native()?;
    let conman = Conman::builder().start_native(&native).await;
    conman.api().ensure("s", &json!({"template": "idle"})).await;
    Some(conman)
}

#[tokio::test]
async fn what_changes_in_a_directory_or_of_a_file_is_reported_in_order() {
    let Some(conman) = started().await else {
        return;
    };
    let api = conman.api();
    sh(&api, "mkdir -p /work/below && echo 1 >/work/file").await;
    let mut directory = watch(&api, "/work").await;
    let mut file = watch(&api, "/work/file").await;
    sh(
        &api,
        "cd /work; echo 2 >>file; touch below/unseen; mkdir sub; chmod 700 file; echo 3 >new; mv new file; \
         rm file; rmdir sub",
    )
    .await;
    let mut changes = Vec::new();
    let mut cookies = Vec::new();
    while changes.last().is_none_or(|last| last != "removed sub/") {
        let (words, cookie) = change(&mut directory).await;
        changes.push(words);
        cookies.extend(cookie.as_u64());
    }
    // The event of a replaced file has only its name.
    let expected = [
        "modified file",
        "created sub/",
        "attributes file",
        "created new",
        "modified new",
        "moved_from new",
        "moved_to file",
        "removed file",
        "removed sub/",
    ];
    assert_eq!(changes, expected);
    assert!(
        cookies.len() == 2 && cookies[0] == cookies[1],
        "{cookies:?}"
    );
    for expected in [
        "modified file",
        "attributes file",
        "moved_to file",
        "removed file",
    ] {
        assert_eq!(change(&mut file).await.0, expected);
    }

    // Nothing follows the end of the directory, or of the session.
    sh(&api, "rm -r /work").await;
    while change(&mut directory).await.0 != "gone -/" {}
    assert_eq!(directory.next_data().await, None);
    let mut root = watch(&api, "/").await;
    api.stop("s").await;
    assert_eq!(root.next_data().await, None);
}

#[tokio::test]
async fn watches_are_bounded_and_end_with_their_client() {
    let Some(conman) = started().await else {
        return;
    };
    let api = conman.api();
    let watchers = async || {
        let list: Value = api
            .get("/v1/sessions/s/processes")
            .await
            .expect(StatusCode::OK);
        list["processes"].as_array().expect("a list").len()
    };
    let before = watchers().await;
    let mut open = Vec::new();
    for _ in 0..MAX_WATCHES {
        open.push(watch(&api, "/tmp").await);
    }
    eventually("their helpers have ended", PATIENCE, async || {
        watchers().await == before + MAX_WATCHES
    })
    .await;
    let refused = api.get(&path("/tmp")).await;
    assert_eq!(refused.problem().slug(), "too-many-watches");
    drop(open);
    eventually("their processes have ended", PATIENCE, async || {
        watchers().await == before
    })
    .await;
    watch(&api, "/tmp").await;
}

#[tokio::test]
async fn a_watch_leads_nowhere_else_and_shows_a_user_only_what_it_may_read() {
    let Some(conman) = started().await else {
        return;
    };
    let api = conman.api();
    sh(
        &api,
        "mkdir -m 700 /root-only; ln -s /proc/self/cwd /tmp/link",
    )
    .await;
    for (query, slug) in [
        ("/no/such", "no-such-file"),
        ("/proc/self", "file-refused"),
        ("/tmp/link", "file-refused"),
        ("/../etc", "bad-query"),
        ("/root-only&user=1000", "file-refused"),
    ] {
        let problem = api.get(&path(query)).await.problem();
        assert_eq!(problem.slug(), slug, "{query}: {problem:?}");
    }
}

#[tokio::test]
async fn the_command_line_prints_changes_as_they_happen() {
    let Some(conman) = started().await else {
        return;
    };
    let api = conman.api();
    sh(&api, "mkdir /work").await;
    let mut command = conman.cli_command();
    command
        .args(["watch", "s:/work"])
        .stdout(std::process::Stdio::piped());
    let mut child = command.spawn().expect("started");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    // It has no output until it watches.
    let first = loop {
        sh(&api, "mkdir /work/a; rmdir /work/a").await;
        if let Ok(line) = timeout(Duration::from_millis(100), lines.next_line()).await {
            break line.expect("read");
        }
    };
    assert!(first.is_some_and(|line| line.ends_with(" a/")));
    sh(&api, "touch /work/b; rm -r /work").await;
    let mut rest = Vec::new();
    while let Some(line) = lines.next_line().await.expect("read") {
        rest.push(line);
    }
    assert!(rest.contains(&"created b".to_owned()), "{rest:?}");
    assert_eq!(rest.last().map(String::as_str), Some("gone"));
    assert!(child.wait().await.expect("ended").success());
}

#[tokio::test]
async fn docker_sessions_say_that_they_cannot() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "tiny"})).await;
    let refused = api.get(&path("/tmp")).await;
    assert_eq!(refused.problem().slug(), "not-supported");
}
