//! Measures how long sessions take to start, by phase.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use conman_proto::Session;
use indicatif::ProgressBar;
use serde_json::json;

use crate::arguments::Starting;
use crate::daemon::Daemon;
use crate::docker::Docker;
use crate::http_client::Connection;
use crate::image;
use crate::interruption::{early_end, until_interrupted};
use crate::kill::milliseconds;
use crate::plain::{self, Plain};
use crate::report::{Bar, Chart, Part, Report, Table, shown};
use crate::statistics::{Quantiles, quantiles};

/// Phases that are the runtime's calls or the session's program; all others are conman's part.
const NOT_OURS: [&str; 3] = ["create", "start", "ready"];
/// Waiting for a place among the concurrent starts. It depends on the load, so it is listed
/// separately and belongs to no part.
const QUEUE: &str = "queue";

#[derive(Debug, Default)]
struct Measured {
    sessions: Vec<Session>,
    elapsed_s: f64,
    /// From the request to the first answer, one after the other, in milliseconds: of sessions, and of plain containers.
    own_ms: Vec<f64>,
    plain_ms: Vec<f64>,
}

/// Starts sessions of a small web server through the API and adds up conman's part of each. Then starts sessions and
/// plain containers, one after the other, and waits for the first page of each.
///
/// # Errors
/// When the runtime or the image is missing or a session does not start.
pub(crate) async fn start(conman: &Path, options: &Starting) -> Result<Report> {
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let root = image::root(scratch.path())?;
    let archive = image::archive(&root)?;
    let docker = Docker::for_runtime(options.runtime, &archive).await?;
    let plain = Plain::of(options.runtime, docker.as_ref()).await;
    let room = options.count + 1;
    let daemon = Daemon::start(conman, options.runtime, room, &archive).await?;
    let mut measured = Measured::default();
    let ended = until_interrupted(async {
        many(options, &daemon, &mut measured).await?;
        if let (Ok(plain), 1..) = (&plain, options.rivals) {
            let containers = (plain, docker.as_ref(), &*root);
            one_by_one(options.rivals, &daemon, containers, &mut measured).await?;
        }
        anyhow::Ok(())
    })
    .await;
    let stopped = daemon.stop(docker.as_ref()).await;
    let early = early_end(ended, measured.sessions.len())?;
    stopped?;
    Ok(report(options, plain, &measured)?.ended_early(early))
}

async fn many(options: &Starting, daemon: &Daemon, measured: &mut Measured) -> Result<()> {
    let bar = ProgressBar::new(options.count as u64);
    let begun = Instant::now();
    let progress = |done: usize| bar.set_position(done as u64);
    let opened = daemon.open("start", "http", options.count, options.parallel, progress);
    measured.sessions = opened.await?;
    measured.elapsed_s = begun.elapsed().as_secs_f64();
    bar.finish_and_clear();
    Ok(())
}

/// In turns, so that both meet the same machine.
async fn one_by_one(
    count: usize,
    daemon: &Daemon,
    (plain, docker, root): (&Plain, Option<&Docker>, &Path),
    measured: &mut Measured,
) -> Result<()> {
    for number in 0..count {
        let id = format!("one-{number}");
        let begun = Instant::now();
        daemon.open_one(id.clone(), "http").await?;
        let mut connection = Connection::open(&daemon.sessions).await?;
        let page = connection.text(&format!("/s/{id}/")).await?;
        ensure!(page == image::PAGE, "session {id} answers {page:?}");
        measured.own_ms.push(milliseconds(begun.elapsed()));
        daemon.delete(&id.parse()?).await?;
        measured
            .plain_ms
            .extend(plain::starts(plain, docker, root, 1).await?);
    }
    Ok(())
}

/// The time to the first answer, next to that of plain containers.
fn first_answers(plain: Result<Plain>, measured: &Measured) -> Vec<Part> {
    let plain = match plain {
        Ok(plain) => plain.name(),
        Err(why) => return vec![format!("skipped: plain containers: {why:#}").into()],
    };
    let (Some(own), Some(other)) = (quantiles(&measured.own_ms), quantiles(&measured.plain_ms))
    else {
        return Vec::new();
    };
    let mut table = Table::new([
        "from the request to the first answer",
        "p50",
        "p99",
        "ratio",
    ]);
    for (name, found) in [("a session", own), (&*plain, other)] {
        table.row([
            name.to_owned(),
            format!("{} ms", shown(found.p50)),
            format!("{} ms", shown(found.p99)),
            format!("{:.2} ×", found.p50 / other.p50),
        ]);
    }
    let title = "from the request to the first answer, one at a time";
    let bars = vec![
        Bar::of("conman", &measured.own_ms),
        Bar::of(plain, &measured.plain_ms),
    ];
    vec![Chart::bars(title, "ms", bars).into(), table.into()]
}

fn report(options: &Starting, plain: Result<Plain>, measured: &Measured) -> Result<Report> {
    let sessions = &measured.sessions;
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
            name if NOT_OURS.contains(&name) => "the runtime's",
            _ => "conman's",
        };
        row(name, whose, found);
        by_phase.insert((*name).to_owned(), json!({ "whose": whose, "ms": found }));
        bars.push(Bar::of(format!("{whose} {name}"), sample));
    }
    row("conman's own part", "conman's", own);
    row("whole start", "", total);
    bars.push(own_bar);
    let rate = sessions.len() as f64 / measured.elapsed_s;
    let mut parts: Vec<Part> = vec![
        format!("{} starts a second", shown(rate)).into(),
        Chart::bars(
            "median of each phase, from the least to the greatest",
            "ms",
            bars,
        )
        .into(),
        table.into(),
    ];
    let compared = plain.as_ref().ok().map(Plain::name);
    parts.extend(first_answers(plain, measured));
    Ok(Report {
        missed: None,
        title: format!(
            "{} starts, {} runtime, {} at a time",
            options.count, options.runtime, options.parallel
        ),
        parts,
        json: json!({
            "benchmark": "start", "runtime": options.runtime, "count": options.count,
            "parallel": options.parallel, "starts_per_s": rate, "own_ms": own, "total_ms": total,
            "phases": by_phase, "compared_with": compared,
            "first_answer_ms": measured.own_ms, "plain_first_answer_ms": measured.plain_ms,
        }),
    })
}
