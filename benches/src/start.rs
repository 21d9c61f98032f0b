//! Measures how long sessions take to start, by phase.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use conman_proto::Session;
use indicatif::ProgressBar;
use serde_json::json;

use crate::arguments::Starting;
use crate::daemon::Daemon;
use crate::docker::Docker;
use crate::interruption::until_interrupted;
use crate::report::{Bar, Chart, Report, Table, shown};
use crate::statistics::{Quantiles, quantiles};

/// Phases that are Docker's calls or the session's program; all others are conman's part.
const NOT_OURS: [&str; 3] = ["create", "start", "ready"];
/// Waiting for a place among the concurrent starts. It depends on the load, so it is listed
/// separately and belongs to no part.
const QUEUE: &str = "queue";

/// Starts sessions of a small web server through the API and adds up conman's part of each.
///
/// # Errors
/// When Docker or the image is missing or a session does not start.
pub(crate) async fn start(conman: &Path, options: &Starting) -> Result<Report> {
    let docker = Docker::new().await?;
    let daemon = Daemon::start(conman).await?;
    let bar = ProgressBar::new(options.count as u64);
    let begun = Instant::now();
    let progress = |done: usize| bar.set_position(done as u64);
    let opened = daemon.open("start", "http", options.count, options.parallel, progress);
    let opened = until_interrupted(opened).await;
    let elapsed_s = begun.elapsed().as_secs_f64();
    bar.finish_and_clear();
    let stopped = daemon.stop(&docker).await;
    let sessions = opened?;
    stopped?;
    report(options, &sessions, elapsed_s)
}

fn report(options: &Starting, sessions: &[Session], elapsed_s: f64) -> Result<Report> {
    let mut phases: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let (mut own, mut total) = (Vec::new(), Vec::new());
    for session in sessions {
        for (name, duration) in &session.phases_ms {
            phases.entry(name).or_default().push(*duration);
        }
        let sum = |counts: &dyn Fn(&str) -> bool| {
            session
                .phases_ms
                .iter()
                // Parts of phases have a dot in their names.
                .filter(|(name, _)| !name.contains('.') && counts(name))
                .map(|(_, ms)| ms)
                .sum::<f64>()
        };
        own.push(sum(&|name| name != QUEUE && !NOT_OURS.contains(&name)));
        total.push(sum(&|_| true));
    }
    let own_bar = Bar::of("conman's own part", &own);
    let own = quantiles(&own).context("no session was started")?;
    let total = quantiles(&total).context("no session was started")?;
    let mut table = Table::new(["phase", "whose", "p50", "p99", "max"]);
    let mut row = |name: &str, whose: &str, q: Quantiles| {
        let ms = |value| format!("{} ms", shown(value));
        table.row([
            name.to_owned(),
            whose.to_owned(),
            ms(q.p50),
            ms(q.p99),
            ms(q.max),
        ]);
    };
    let mut by_phase = serde_json::Map::new();
    let mut bars = Vec::new();
    for (name, sample) in &phases {
        let found = quantiles(sample).context("a phase without a value")?;
        let whose = match *name {
            QUEUE => "waiting for a place",
            "ready" => "the program's",
            name if NOT_OURS.contains(&name) => "Docker's",
            _ => "conman's",
        };
        row(name, whose, found);
        by_phase.insert((*name).to_owned(), json!({ "whose": whose, "ms": found }));
        bars.push(Bar::of(format!("{whose} {name}"), sample));
    }
    row("conman's own part", "conman's", own);
    row("whole start", "", total);
    bars.push(own_bar);
    let rate = sessions.len() as f64 / elapsed_s;
    Ok(Report {
        missed: None,
        title: format!(
            "{} starts in Docker, {} at a time",
            options.count, options.parallel
        ),
        parts: vec![
            format!("{} starts a second", shown(rate)).into(),
            Chart::bars(
                "median of each phase, from the least to the greatest",
                "ms",
                bars,
            )
            .into(),
            table.into(),
        ],
        json: json!({
            "benchmark": "start", "count": options.count, "parallel": options.parallel,
            "starts_per_s": rate, "own_ms": own, "total_ms": total, "phases": by_phase,
        }),
    })
}
