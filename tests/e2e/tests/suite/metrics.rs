//! What a scraper reads.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, Stdio};

use conman_e2e::native;
use serde_json::json;

use super::native_sessions::start;

#[tokio::test]
async fn every_metric_is_in_the_operators_table_and_has_a_text() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let template = json!({"template": "web"});
    conman.api().ensure("web", &template).await;
    conman.sessions().get("/s/web/").await;
    let metrics = conman.api().get("/metrics").await.text();
    let table = include_str!("../../../../deploy/metrics.md");
    let texts = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# HELP "));
    let described: BTreeSet<&str> = texts.filter_map(|text| text.split(' ').next()).collect();
    let mut kinds = 0;
    for line in metrics.lines() {
        let Some(kind) = line.strip_prefix("# TYPE ") else {
            continue;
        };
        let (name, kind) = kind.split_once(' ').expect("a name and a type");
        let row = format!("| `{name}` | {kind} |");
        assert!(table.contains(&row), "the table has no row {row}");
        assert!(described.contains(name), "{name} has no text");
        kinds += 1;
    }
    assert!(kinds > 10, "{metrics}");
    if let Some(complaints) = promtool(&metrics) {
        assert_eq!(complaints, "", "promtool check metrics");
    }
}

/// What `promtool check metrics` says; `None` where it is not installed.
fn promtool(metrics: &str) -> Option<String> {
    let mut checking = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    let mut input = checking.stdin.take().expect("a pipe");
    input.write_all(metrics.as_bytes()).expect("read");
    drop(input);
    let checked = checking.wait_with_output().expect("it ends");
    Some(String::from_utf8_lossy(&checked.stderr).into_owned())
}
