//! Measures how fast a preempted node kills and releases its sessions.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use conman_proto::RuntimeKind;
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::json;

use crate::arguments::Killing;
use crate::daemon::Daemon;
use crate::image;
use crate::interruption::{early_end, until_interrupted};
use crate::kill::milliseconds;
use crate::observer::Observer;
use crate::report::{Bar, Chart, Report, Table, figure, shown};
use crate::statistics::median;

/// Bound on the last death.
const PATIENCE: Duration = Duration::from_secs(300);
/// Concurrent session starts while a measurement is prepared.
const PARALLEL_STARTS: usize = 8;
/// The image's name in conman's store.
const IMAGE: &str = "conman-bench:preempt";
/// CPU limit of each session.
const CPUS: f64 = 0.01;
/// Bound on the last death of spinning sessions: this multiple of the idle ones', and a constant.
const MOST_TIMES: f64 = 2.0;
const MOST_MORE_MS: f64 = 200.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Load {
    Idle,
    Spinning,
}

impl Load {
    const ALL: [Self; 2] = [Self::Idle, Self::Spinning];

    const fn template(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Spinning => "spinning",
        }
    }
}

/// Times in milliseconds from the notice.
#[derive(Debug, Clone, Serialize)]
struct Measurement {
    load: Load,
    /// As the observer of `/proc` saw it.
    last_dead_ms: f64,
    last_release_ms: f64,
}

/// Preempts a node of native sessions with a limit of a hundredth of a processor, idle and
/// spinning in alternation.
///
/// # Errors
/// When busybox is missing, a session does not start, or something does not end.
pub(crate) async fn preempt(conman: &Path, options: &Killing) -> Result<Report> {
    conman_linux::raise_nofile().context("raising the limit of open files")?;
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let archive = image::archive(&image::root(scratch.path())?)?;
    let room = options.count;
    let daemon = Daemon::with_templates(conman, RuntimeKind::Native, room, &templates()).await?;
    let mut measurements = Vec::new();
    let ended = until_interrupted(async {
        daemon.import(&archive, IMAGE).await?;
        measure(options, &daemon, &mut measurements).await
    })
    .await;
    let stopped = daemon.stop_all().await;
    let early = early_end(ended, measurements.len() / Load::ALL.len())?;
    stopped?;
    Ok(report(options, &measurements)?.ended_early(early))
}

fn templates() -> String {
    let of = |load: Load, command: serde_json::Value| {
        let name = load.template();
        format!(
            "[templates.{name}]\nimage = \"{IMAGE}\"\ncommand = {command}\ncpus = {CPUS}\n\
             memory_bytes = 67108864\npids = 32\n\n"
        )
    };
    of(Load::Idle, json!(["sleep", "1000000"]))
        + &of(Load::Spinning, json!(["sh", "-c", "while :; do :; done"]))
}

async fn measure(
    options: &Killing,
    daemon: &Daemon,
    measurements: &mut Vec<Measurement>,
) -> Result<()> {
    for round in 0..options.rounds {
        for load in Load::ALL {
            let name = load.template();
            let bar = ProgressBar::new(options.count as u64);
            bar.println(format!("round {}: {name}", round + 1));
            let progress = |done: usize| bar.set_position(done as u64);
            let prefix = format!("{name}-{round}");
            daemon
                .open(&prefix, name, options.count, PARALLEL_STARTS, progress)
                .await?;
            bar.finish_and_clear();
            let (last_dead_ms, last_release_ms) = preempt_all(daemon, options.count).await?;
            measurements.push(Measurement {
                load,
                last_dead_ms,
                last_release_ms,
            });
        }
    }
    Ok(())
}

/// Preempts a node of `count` sessions: until the last death and the last release, in milliseconds
/// from the notice. Afterwards nothing of the sessions is left.
pub(crate) async fn preempt_all(daemon: &Daemon, count: usize) -> Result<(f64, f64)> {
    let observer = Observer::of_cgroup(&daemon.cgroup())?;
    let notice = Instant::now();
    let watching = tokio::task::spawn_blocking(move || observer.wait_all_dead(PATIENCE));
    let preempted = daemon.preempt().await?;
    let dead = watching.await.context("the observer panicked")??;
    ensure!(
        preempted.released == count as u64,
        "only {} of {count} sessions were released: {:?}",
        preempted.released,
        preempted.unreleased.iter().take(3).collect::<Vec<_>>()
    );
    daemon.clean().await?;
    let released = preempted.last_release_ms;
    let released = released.context("no release was reported")?;
    Ok((milliseconds(dead - notice), released))
}

fn report(options: &Killing, measurements: &[Measurement]) -> Result<Report> {
    let sample = |load: Load, value: fn(&Measurement) -> f64| -> Vec<f64> {
        let of = measurements.iter().filter(|one| one.load == load);
        of.map(value).collect()
    };
    let dead = |load| sample(load, |one: &Measurement| one.last_dead_ms);
    let median_of = |load| median(&dead(load)).context("a load was not measured");
    let mut table = Table::new(["sessions", "last process dead", "last release"]);
    let mut bars = Vec::new();
    for load in Load::ALL {
        let released = sample(load, |one| one.last_release_ms);
        table.row([
            load.template().to_owned(),
            figure(&dead(load), "ms"),
            figure(&released, "ms"),
        ]);
        bars.push(Bar::of(format!("conman, {}", load.template()), &dead(load)));
    }
    let idle = median_of(Load::Idle)?;
    let spinning = median_of(Load::Spinning)?;
    let most = idle * MOST_TIMES + MOST_MORE_MS;
    Ok(Report {
        missed: (spinning > most).then(|| {
            let (spinning, most) = (shown(spinning), shown(most));
            format!("the last spinning session died after {spinning} ms, not within {most} ms")
        }),
        title: format!("{} native sessions of {CPUS} CPU preempted", options.count),
        parts: vec![
            format!("Medians of {} round(s), from the notice.", options.rounds).into(),
            Chart::bars("last process dead", "ms", bars).into(),
            table.into(),
        ],
        json: json!({
            "benchmark": "preempt", "count": options.count, "rounds": options.rounds,
            "idle_last_dead_ms": idle, "spinning_last_dead_ms": spinning, "most_ms": most,
            "measurements": measurements,
        }),
    })
}
