//! Checks of logs.

use futures_util::StreamExt;
use jiff::Timestamp;

use super::stage::{PATIENCE, Stage, within};
use conman_runtime::{ContainerKey, LogOptions, OutputStream, RuntimeError};

pub async fn logs_hold_both_outputs_and_their_tail(stage: &Stage) {
    let script = "for i in 1 2 3 4 5; do echo out-$i; done; echo err-1 >&2; sleep 1000";
    let container = stage.run(&stage.plan("alice", &["sh", "-c", script])).await;
    until_logged(stage, &container.key, "out-5").await;
    until_logged(stage, &container.key, "err-1").await;
    let (outs, errs) = if stage.keeps_outputs_apart() {
        ("out-1\nout-2\nout-3\nout-4\nout-5\n", "err-1\n")
    } else {
        ("out-1\nout-2\nout-3\nout-4\nout-5\nerr-1\n", "")
    };
    for dead in [false, true] {
        let (stdout, stderr) = read(stage, &container.key, LogOptions::default()).await;
        assert_eq!((stdout.as_str(), stderr.as_str()), (outs, errs));
        // The runtime decides how separate outputs are interleaved.
        let tail = LogOptions {
            tail: Some(2),
            ..LogOptions::default()
        };
        let (stdout, stderr) = read(stage, &container.key, tail).await;
        assert_eq!(
            stdout.lines().count() + stderr.lines().count(),
            2,
            "{stdout}{stderr}"
        );
        assert!(outs.ends_with(&stdout), "{stdout}");
        assert!(errs.ends_with(&stderr), "{stderr}");
        let nothing = LogOptions {
            tail: Some(0),
            ..LogOptions::default()
        };
        assert_eq!(
            read(stage, &container.key, nothing).await,
            (String::new(), String::new())
        );
        if !dead {
            container.kill();
            stage
                .runtime()
                .exit_code(&container.key, PATIENCE)
                .await
                .expect("noticed");
        }
    }
    let absent = stage.plan("absent", &[]).key;
    let error = stage
        .runtime()
        .logs(&absent, LogOptions::default())
        .await
        .err();
    assert!(
        matches!(error, Some(RuntimeError::NoSuchContainer { .. })),
        "{error:?}"
    );
}

pub async fn a_followed_log_goes_on_until_the_container_ends(stage: &Stage) {
    let script = "echo first; while [ ! -e /run/go ]; do sleep 0.02; done; echo second; sleep 1000";
    let container = stage.run(&stage.plan("alice", &["sh", "-c", script])).await;
    let options = LogOptions {
        follow: true,
        ..LogOptions::default()
    };
    let mut log = stage
        .runtime()
        .logs(&container.key, options)
        .await
        .expect("a log");
    let mut seen = String::new();
    within(PATIENCE, "both lines", async {
        while !seen.contains("second") {
            let chunk = log.next().await.expect("more output").expect("readable");
            seen.push_str(&String::from_utf8_lossy(&chunk.bytes));
            if seen == "first\n" {
                assert_eq!(
                    stage.sh(&container.key, "touch /run/go").await.exit_code,
                    Some(0)
                );
            }
        }
    })
    .await;
    container.kill();
    let rest = within(PATIENCE, "the log's end", log.count()).await;
    assert_eq!((seen.as_str(), rest), ("first\nsecond\n", 0));
}

pub async fn a_followed_log_ends_in_order_when_its_container_is_removed(stage: &Stage) {
    let container = stage
        .run(&stage.plan("alice", &["sh", "-c", "echo first; sleep 1000"]))
        .await;
    until_logged(stage, &container.key, "first").await;
    let options = LogOptions {
        follow: true,
        ..LogOptions::default()
    };
    let runtime = stage.runtime();
    let log = runtime.logs(&container.key, options).await;
    let mut log = log.expect("a log");
    // Start to follow before the program ends: an unread log may be removed with it.
    let begun = within(PATIENCE, "the first line", log.next()).await;
    let mut seen = begun.expect("a line").expect("readable").bytes.to_vec();
    // The follower reads all the time.
    let followed = tokio::spawn(log.collect::<Vec<_>>());
    container.kill();
    let removed = runtime.remove(std::slice::from_ref(&container.key)).await;
    assert!(removed.iter().all(Result::is_ok), "{removed:?}");
    let chunks = within(PATIENCE, "the log's end", followed).await;
    for chunk in chunks.expect("no panic") {
        seen.extend_from_slice(&chunk.expect("no error").bytes);
    }
    assert_eq!(String::from_utf8_lossy(&seen), "first\n");
}

pub async fn log_lines_bear_the_time_when_asked(stage: &Stage) {
    let container = stage
        .run(&stage.plan("alice", &["sh", "-c", "echo a; echo b; sleep 1000"]))
        .await;
    until_logged(stage, &container.key, "b").await;
    let options = LogOptions {
        timestamps: true,
        ..LogOptions::default()
    };
    let (stdout, _) = read(stage, &container.key, options).await;
    let lines: Vec<_> = stdout
        .lines()
        .map(|line| line.split_once(' ').expect("two"))
        .collect();
    assert_eq!(
        lines.iter().map(|(_, text)| *text).collect::<Vec<_>>(),
        ["a", "b"]
    );
    for (time, _) in lines {
        time.parse::<Timestamp>().expect("RFC 3339");
    }
}

/// Reads both outputs until the log's end.
async fn read(stage: &Stage, key: &ContainerKey, options: LogOptions) -> (String, String) {
    let mut log = stage.runtime().logs(key, options).await.expect("a log");
    let (mut stdout, mut stderr) = (String::new(), String::new());
    within(PATIENCE, "the log's end", async {
        while let Some(chunk) = log.next().await {
            let chunk = chunk.expect("readable");
            let text = String::from_utf8_lossy(&chunk.bytes);
            match chunk.stream {
                OutputStream::Stdout => stdout.push_str(&text),
                OutputStream::Stderr => stderr.push_str(&text),
            }
        }
    })
    .await;
    (stdout, stderr)
}

/// Waits until the container has printed `words`.
pub(super) async fn until_logged(stage: &Stage, key: &ContainerKey, words: &str) {
    let options = LogOptions {
        follow: true,
        ..LogOptions::default()
    };
    let mut log = stage.runtime().logs(key, options).await.expect("a log");
    let mut seen = String::new();
    within(PATIENCE, words, async {
        while !seen.contains(words) {
            let chunk = log.next().await.expect("more output").expect("readable");
            seen.push_str(&String::from_utf8_lossy(&chunk.bytes));
        }
    })
    .await;
}
