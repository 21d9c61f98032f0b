//! Measures starts of native sessions with and without containers made ahead, in alternation.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use conman_proto::{EnsureResponse, RuntimeKind, SessionState};
use http::Method;
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::json;

use crate::arguments::Starting;
use crate::daemon::Daemon;
use crate::http_client::Connection;
use crate::image;
use crate::interruption::until_interrupted;
use crate::report::{Bar, Chart, Report, Table, shown};
use crate::statistics::{Quantiles, quantiles};

const IMAGE: &str = "conman-bench:pool";

/// Time for the next container to be made ahead, before each start.
const PAUSE: Duration = Duration::from_millis(60);

/// Starts of each way before the measured ones.
const WARM_UP: usize = 3;

/// What the median of starts with a pool must keep.
const BOUND_MS: f64 = 2.0;

/// The step of a start that took a container made ahead.
const MADE_AHEAD: &str = "start.ahead";

/// One way of starting, which is the name of its template as well.
#[derive(Debug, Default, Serialize)]
struct Way {
    /// From the request to the answer that the session runs, as the client saw it.
    ms: Vec<f64>,
    phases_ms: BTreeMap<String, Vec<f64>>,
    /// Starts that took a container made ahead.
    ahead: usize,
}

/// Starts `count` sessions each way. They have limits, and no port: no program is waited for.
///
/// # Errors
/// When busybox is missing, a session does not start, or something does not end.
pub(crate) async fn start_pool(conman: &Path, options: &Starting, pool: usize) -> Result<Report> {
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let root = image::root(scratch.path())?;
    let archive = image::archive(&root)?;
    let room = 2 * (options.count + WARM_UP);
    let daemon =
        Daemon::with_templates(conman, RuntimeKind::Native, room, &templates(pool)).await?;
    let measured = until_interrupted(async {
        daemon.import(&archive, IMAGE).await?;
        measure(&daemon, options.count).await
    })
    .await;
    let stopped = daemon.stop_all().await;
    let [usual, pooled] = measured?;
    stopped?;
    report(options.count, pool, &usual, &pooled)
}

fn templates(pool: usize) -> String {
    let template = |name: &str, pool: usize| {
        format!(
            "[templates.{name}]\nimage = \"{IMAGE}\"\ncommand = [\"sleep\", \"1000000\"]\n\
             memory_bytes = 67108864\npids = 64\ncpus = 0.5\npool = {pool}\n"
        )
    };
    template("usual", 0) + &template("pooled", pool)
}

async fn measure(daemon: &Daemon, count: usize) -> Result<[Way; 2]> {
    let bar = ProgressBar::new(count as u64);
    let mut connection = Connection::open(daemon.api()).await?;
    let mut ways = [Way::default(), Way::default()];
    for number in 0..count + WARM_UP {
        for (name, way) in ["usual", "pooled"].into_iter().zip(&mut ways) {
            tokio::time::sleep(PAUSE).await;
            let one = start_one(&mut connection, name, number).await?;
            if number >= WARM_UP {
                way.add(one);
            }
        }
        bar.set_position(number as u64);
    }
    bar.finish_and_clear();
    Ok(ways)
}

async fn start_one(
    connection: &mut Connection,
    template: &str,
    number: usize,
) -> Result<(f64, BTreeMap<String, f64>)> {
    let path = format!("/v1/sessions/{template}-{number}");
    let body = json!({ "template": template });
    let begun = Instant::now();
    let answer: EnsureResponse = connection.json(Method::PUT, &path, Some(&body)).await?;
    let ms = begun.elapsed().as_secs_f64() * 1e3;
    let session = answer.session;
    ensure!(
        session.state == SessionState::Running,
        "session {} is {}: {}",
        session.id,
        session.state,
        session.reason.unwrap_or_default()
    );
    Ok((ms, session.phases_ms))
}

impl Way {
    fn add(&mut self, (ms, phases_ms): (f64, BTreeMap<String, f64>)) {
        self.ms.push(ms);
        self.ahead += usize::from(phases_ms.contains_key(MADE_AHEAD));
        for (name, ms) in phases_ms {
            self.phases_ms.entry(name).or_default().push(ms);
        }
    }
}

fn report(count: usize, pool: usize, usual: &Way, pooled: &Way) -> Result<Report> {
    let mut table = Table::new(["", "without p50", "p99", "with p50", "p99"]);
    let of = |sample: Option<&Vec<f64>>| sample.and_then(|sample| quantiles(sample));
    let mut row = |name: &str, without: Option<Quantiles>, with: Option<Quantiles>| {
        let ms = |found: Option<f64>| match found {
            Some(ms) => format!("{} ms", shown(ms)),
            None => String::new(),
        };
        table.row([
            name.to_owned(),
            ms(without.map(|q| q.p50)),
            ms(without.map(|q| q.p99)),
            ms(with.map(|q| q.p50)),
            ms(with.map(|q| q.p99)),
        ]);
    };
    let with = quantiles(&pooled.ms).context("no session was started")?;
    row("request to running", quantiles(&usual.ms), Some(with));
    let mut names: Vec<&String> = usual
        .phases_ms
        .keys()
        .chain(pooled.phases_ms.keys())
        .collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        row(
            name,
            of(usual.phases_ms.get(name)),
            of(pooled.phases_ms.get(name)),
        );
    }
    let missed = (with.p50 > BOUND_MS).then(|| {
        format!(
            "the median with a pool is {} ms, above {BOUND_MS} ms",
            shown(with.p50)
        )
    });
    Ok(Report {
        missed,
        title: format!(
            "{count} native starts each way, one at a time: without a pool and with one of {pool}"
        ),
        parts: vec![
            format!(
                "{} of {count} starts took a container made ahead",
                pooled.ahead
            )
            .into(),
            Chart::bars(
                "request to running",
                "ms",
                vec![Bar::of("without", &usual.ms), Bar::of("with", &pooled.ms)],
            )
            .into(),
            table.into(),
        ],
        json: json!({
            "benchmark": "start", "count": count, "pool": pool, "usual": usual, "pooled": pooled,
        }),
    })
}
