//! Measures how fast sessions of Docker are killed.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::json;

use crate::arguments::Killing;
use crate::daemon::Daemon;
use crate::docker::Docker;
use crate::interruption::until_interrupted;
use crate::observer::Observer;
use crate::report::{Bar, Chart, Report, Table, figure, shown};
use crate::statistics::median;

/// Bound on everything that Docker does with hundreds of containers.
const PATIENCE: Duration = Duration::from_secs(300);
/// Concurrent session starts while the benchmark is prepared.
const PARALLEL_STARTS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    DockerKill,
    ConmanBridge,
    ConmanLoopback,
}

impl Way {
    const ALL: [Self; 3] = [Self::DockerKill, Self::ConmanBridge, Self::ConmanLoopback];

    const fn name(self) -> &'static str {
        match self {
            Self::DockerKill => "docker kill (bridge)",
            Self::ConmanBridge => "conman (Docker, bridge)",
            Self::ConmanLoopback => "conman (Docker, loopback)",
        }
    }
}

/// One measurement; times in milliseconds from the notice or command.
#[derive(Debug, Clone, Serialize)]
struct Measurement {
    way: Way,
    /// Processes of the containers before the kill.
    processes: usize,
    /// As the observer of `/proc` saw it.
    last_dead_ms: f64,
    /// As conman reported it; Docker has no such step.
    last_release_ms: Option<f64>,
    /// When Docker's API listed none of them as running any more.
    docker_noticed_ms: f64,
    /// When Docker's API listed none of them at all.
    cleaned_ms: f64,
}

/// Kills `count` containers at once in each of three variants, in alternation.
///
/// # Errors
/// When Docker or the image is missing, a session does not start, or something does not end
/// within five minutes.
pub(crate) async fn kill(conman: &Path, options: &Killing) -> Result<Report> {
    let docker = Docker::new().await?;
    let daemon = Daemon::start(conman).await?;
    let measured = until_interrupted(measure(options, &docker, &daemon)).await;
    let swept = match measured {
        Ok(_) => Ok(()),
        Err(_) => sweep_plain(&docker).await,
    };
    let stopped = daemon.stop(&docker).await;
    let measurements = measured?;
    swept.and(stopped)?;
    report(options, &measurements)
}

async fn measure(options: &Killing, docker: &Docker, daemon: &Daemon) -> Result<Vec<Measurement>> {
    let mut measurements = Vec::new();
    for round in 0..options.rounds {
        for way in Way::ALL {
            let bar = ProgressBar::new(options.count as u64);
            bar.println(format!("round {}: {}", round + 1, way.name()));
            let progress = |done: usize| bar.set_position(done as u64);
            let measurement = match way {
                Way::DockerKill => plain(docker, options.count, progress).await,
                Way::ConmanBridge => {
                    sessions(docker, daemon, way, "bridge", options.count, progress).await
                }
                Way::ConmanLoopback => {
                    sessions(docker, daemon, way, "loopback", options.count, progress).await
                }
            };
            bar.finish_and_clear();
            measurements.push(measurement.with_context(|| format!("measuring {}", way.name()))?);
        }
    }
    Ok(measurements)
}

/// The name of everything that Docker makes for this run.
fn mark() -> String {
    format!("conman-bench-{}", std::process::id())
}

/// The label of the plain containers.
fn plain_label() -> String {
    format!("dev.conman.bench={}", mark())
}

/// Removes the plain containers that an interrupted measurement left.
async fn sweep_plain(docker: &Docker) -> Result<()> {
    let label = plain_label();
    let ids = docker.ids(&label).await?;
    if !ids.is_empty() {
        docker.remove(&ids).await.with_context(|| {
            format!("removing what is left; `docker rm -f $(docker ps -aq -f label={label})` does")
        })?;
    }
    remove_cgroups(&mark());
    Ok(())
}

async fn plain(docker: &Docker, count: usize, progress: impl Fn(usize)) -> Result<Measurement> {
    let (mark, label) = (mark(), plain_label());
    let ids = docker
        .run_plain(&label, &format!("/{mark}"), count, progress)
        .await?;
    let observer = Observer::of_cgroup(&format!("/{mark}"))?;
    let processes = observer.count();
    let notice = Instant::now();
    let watching = tokio::task::spawn_blocking(move || observer.wait_all_dead(PATIENCE));
    let noticing = async {
        docker.wait_none(&label, false, PATIENCE).await?;
        anyhow::Ok(notice.elapsed())
    };
    let (killed, noticed) = tokio::join!(docker.kill(&ids), noticing);
    killed?;
    let dead = watching.await.context("the observer panicked")??;
    docker.remove(&ids).await?;
    let cleaned = notice.elapsed();
    remove_cgroups(&mark);
    Ok(Measurement {
        way: Way::DockerKill,
        processes,
        last_dead_ms: milliseconds(dead - notice),
        last_release_ms: None,
        docker_noticed_ms: milliseconds(noticed?),
        cleaned_ms: milliseconds(cleaned),
    })
}

async fn sessions(
    docker: &Docker,
    daemon: &Daemon,
    way: Way,
    template: &str,
    count: usize,
    progress: impl Fn(usize),
) -> Result<Measurement> {
    daemon
        .open(
            &format!("kill-{template}"),
            template,
            count,
            PARALLEL_STARTS,
            progress,
        )
        .await?;
    let label = daemon.label();
    let observer = Observer::of_cgroup(&daemon.cgroup())?;
    let processes = observer.count();
    let notice = Instant::now();
    let watching = tokio::task::spawn_blocking(move || observer.wait_all_dead(PATIENCE));
    let noticing = async {
        docker.wait_none(&label, false, PATIENCE).await?;
        anyhow::Ok(notice.elapsed())
    };
    let (report, noticed) = tokio::join!(daemon.preempt(), noticing);
    let report = report?;
    let dead = watching.await.context("the observer panicked")??;
    if report.released != count as u64 {
        bail!(
            "only {} of {count} sessions were released: {:?}",
            report.released,
            report.unreleased
        );
    }
    // A preempted node removes nothing, because its machine stops; this one continues.
    daemon.readmit().await?;
    docker.wait_none(&label, true, PATIENCE).await?;
    let cleaned = notice.elapsed();
    Ok(Measurement {
        way,
        processes,
        last_dead_ms: milliseconds(dead - notice),
        last_release_ms: report.last_release_ms,
        docker_noticed_ms: milliseconds(noticed?),
        cleaned_ms: milliseconds(cleaned),
    })
}

/// Docker does not remove the cgroup that it was told to use; ours is empty at this point.
fn remove_cgroups(mark: &str) {
    if let Ok(cgroups) = conman_linux::Cgroups::detect() {
        // At worst an empty folder in a pseudo file system stays, which is no failure.
        let _ = cgroups.remove_tree(&format!("/{mark}"));
    }
}

fn report(options: &Killing, measurements: &[Measurement]) -> Result<Report> {
    let sample = |way: Way, value: fn(&Measurement) -> Option<f64>| -> Vec<f64> {
        let of_way = measurements.iter().filter(|one| one.way == way);
        of_way.filter_map(value).collect()
    };
    let all_dead = |way| sample(way, |one| Some(one.last_dead_ms));
    let dead = |way| median(&all_dead(way));
    let reference = dead(Way::DockerKill).context("docker kill was not measured")?;
    let mut table = Table::new([
        "way",
        "last process dead",
        "sooner than docker kill",
        "last release",
        "dockerd noticed",
        "cleaned up",
    ]);
    let mut rows = Vec::new();
    for way in Way::ALL {
        let last_dead = dead(way).context("a way was not measured")?;
        let release = sample(way, |one| one.last_release_ms);
        let noticed = sample(way, |one| Some(one.docker_noticed_ms));
        let cleaned = sample(way, |one| Some(one.cleaned_ms));
        let ratio = reference / last_dead;
        let time = |sample: &[f64]| figure(sample, "ms");
        table.row([
            way.name().to_owned(),
            time(&all_dead(way)),
            format!("{} ×", shown(ratio)),
            time(&release),
            time(&noticed),
            time(&cleaned),
        ]);
        rows.push(json!({
            "way": way, "name": way.name(), "last_dead_ms": last_dead, "times_sooner": ratio,
            "last_release_ms": median(&release), "docker_noticed_ms": median(&noticed),
            "cleaned_ms": median(&cleaned),
        }));
    }
    let bars = Way::ALL
        .into_iter()
        .map(|way| Bar::of(way.name(), &all_dead(way)))
        .collect();
    let heading = format!("{} containers killed at once", options.count);
    Ok(Report {
        missed: None,
        parts: vec![
            format!(
                "Medians of {} round(s), from the command or notice.",
                options.rounds
            )
            .into(),
            Chart::bars(format!("{heading}: last process dead"), "ms", bars).into(),
            table.into(),
        ],
        title: heading,
        json: json!({
            "benchmark": "kill", "count": options.count, "rounds": options.rounds,
            "medians": rows, "measurements": measurements,
        }),
    })
}

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}
