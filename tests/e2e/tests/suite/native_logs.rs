//! Logs of native sessions: when lines were written, and which output they are of.

use std::time::Duration;

use conman_e2e::{Api, Conman, ROOT, eventually, native};
use conman_proto::{LogLine, LogStream};
use http::StatusCode;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// How late a line may be noticed: two seconds, and what a busy machine takes. Less than the time between the lines.
const LATE_S: i64 = 7;

async fn lines(api: &Api, query: &str) -> Vec<LogLine> {
    let path = format!("/v1/sessions/s/logs?format=json&timestamps=true{query}");
    let answer = api.get(&path).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let text = answer.text();
    let parsed = text.lines().map(serde_json::from_str);
    parsed.collect::<Result<_, _>>().expect("lines of a log")
}

fn texts(lines: &[LogLine]) -> Vec<&str> {
    lines.iter().map(|line| line.text.as_str()).collect()
}

/// Each line says when it was printed.
fn assert_times(lines: &[LogLine]) {
    assert!(!lines.is_empty());
    for line in lines {
        let printed: i64 = line
            .text
            .rsplit(' ')
            .next()
            .expect("a word")
            .parse()
            .expect("a time");
        let noticed = line.at.expect("a time").as_second();
        assert!((printed..=printed + LATE_S).contains(&noticed), "{line:?}");
    }
}

#[tokio::test]
async fn a_log_tells_when_its_lines_were_written_and_begins_where_it_is_told() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let script = "echo early $(date +%s); sleep 8; echo late $(date +%s); sleep 1000";
    let spec = json!({"image": ROOT, "command": ["sh", "-c", script]});
    api.ensure("s", &spec).await;
    eventually("its second line", PATIENCE, async || {
        lines(&api, "").await.len() == 2
    })
    .await;
    let all = lines(&api, "").await;
    assert_times(&all);
    let late = all[1].at.expect("a time");
    let since = format!("&since={late}");
    // Its time is known better by and by.
    let late = lines(&api, &since).await;
    assert_times(&late);
    assert_eq!(texts(&late), texts(&all[1..]));
    assert_eq!(lines(&api, "&since=2099-01-01T00:00:00Z").await, []);
    let all_again = lines(&api, "&since=2000-01-01T00:00:00Z").await;
    assert_eq!(texts(&all_again), texts(&all));
    let wrong = api.get("/v1/sessions/s/logs?since=soon").await.problem();
    assert_eq!(wrong.errors[0].field, "since");
    let shown = conman
        .cli(&["logs", "s", "--since", "1h", "--tail", "1"])
        .await;
    assert_eq!(shown.success().trim(), all[1].text);

    // Its kept log knows as much.
    api.stop("s").await;
    assert_times(&lines(&api, "").await);
    assert_eq!(lines(&api, &since).await.len(), 1);
}

#[tokio::test]
async fn a_log_tells_outputs_apart_where_that_is_asked_for() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let script = "echo out; echo err >&2; echo again >> /dev/stdout; echo end >&2; sleep 1000";
    let command = json!(["sh", "-c", script]);
    let spec = json!({"image": ROOT, "command": command, "log_streams": true});
    api.ensure("s", &spec).await;
    eventually("its last line", PATIENCE, async || {
        lines(&api, "").await.len() == 4
    })
    .await;
    let of = |lines: &[LogLine], stream| {
        let lines = lines.iter().filter(|line| line.stream == stream);
        lines.map(|line| line.text.clone()).collect::<Vec<_>>()
    };
    let check = |all: &[LogLine]| {
        assert_eq!(of(all, LogStream::Stdout), ["out", "again"]);
        assert_eq!(of(all, LogStream::Stderr), ["err", "end"]);
    };
    check(&lines(&api, "").await);
    let shown = conman.cli(&["logs", "s"]).await;
    assert_eq!(
        (&*shown.stdout, &*shown.stderr),
        ("out\nagain\n", "err\nend\n")
    );
    api.stop("s").await;
    check(&lines(&api, "").await);

    let spec = json!({"image": ROOT, "command": command});
    api.ensure("s", &spec).await;
    eventually("its last line", PATIENCE, async || {
        lines(&api, "").await.len() == 4
    })
    .await;
    assert_eq!(
        of(&lines(&api, "").await, LogStream::Stdout),
        ["out", "err", "again", "end"]
    );
}
