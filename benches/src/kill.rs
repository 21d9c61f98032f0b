//! Measures how fast sessions are killed.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use conman_proto::RuntimeKind;
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::json;

use crate::arguments::Kill;
use crate::daemon::Daemon;
use crate::docker::Docker;
use crate::image;
use crate::interruption::{early_end, until_interrupted};
use crate::observer::Observer;
use crate::plain::{Network, OciContainers, Plain, remove_cgroups};
use crate::preempt::preempt_all;
use crate::report::{Bar, Chart, Report, Table, figure, shown};
use crate::statistics::median;

/// Bound on everything that Docker does with hundreds of containers.
const PATIENCE: Duration = Duration::from_secs(300);
/// Concurrent session starts while the benchmark is prepared.
const PARALLEL_STARTS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// The containers that sessions are compared with.
    Plain,
    ConmanBridge,
    ConmanLoopback,
}

impl Way {
    fn of(runtime: RuntimeKind) -> &'static [Self] {
        match runtime {
            RuntimeKind::Docker => &[Self::Plain, Self::ConmanBridge, Self::ConmanLoopback],
            RuntimeKind::Native
            | RuntimeKind::Gvisor
            | RuntimeKind::Oci(_)
            | RuntimeKind::Process => &[Self::Plain, Self::ConmanLoopback],
        }
    }

    fn name(self, runtime: RuntimeKind, plain: &Plain) -> String {
        match (self, plain) {
            (Self::Plain, Plain::Docker(None)) => "docker kill (bridge)".to_owned(),
            (Self::Plain, Plain::Docker(Some(own))) => format!("docker kill (bridge, {own})"),
            (Self::Plain, Plain::Oci(oci)) => format!("{} kill, eight at a time", oci.program()),
            (Self::ConmanBridge, _) => format!("conman ({runtime}, bridge)"),
            (Self::ConmanLoopback, _) => format!("conman ({runtime}, loopback)"),
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
    /// As conman reported it; plain containers have no such step.
    last_release_ms: Option<f64>,
    /// When Docker's API listed none of them as running any more, if they are Docker's.
    docker_noticed_ms: Option<f64>,
    /// When nothing of them was left.
    cleaned_ms: f64,
}

/// Kills `count` containers at once in each of the runtime's ways, in alternation.
///
/// # Errors
/// When the runtime or the image is missing, a session does not start, or something does not end
/// within five minutes.
pub(crate) async fn kill(conman: &Path, options: &Kill) -> Result<Report> {
    conman_linux::raise_nofile().context("raising the limit of open files")?;
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let root = image::root(scratch.path())?;
    let archive = image::archive(&root)?;
    let docker = Docker::for_runtime(options.runtime, &archive).await?;
    let plain = Plain::of(options.runtime, docker.as_ref()).await?;
    let count = options.killing.count;
    let daemon = Daemon::start(conman, options.runtime, count, &archive).await?;
    let kills = Kills {
        options,
        root: &root,
        docker: docker.as_ref(),
        plain: &plain,
        daemon: &daemon,
    };
    let mut measurements = Vec::new();
    let ended = until_interrupted(kills.measure(&mut measurements)).await;
    let stopped = daemon.stop(docker.as_ref()).await;
    // It removes what an interrupted measurement left.
    drop(docker);
    remove_cgroups(&mark());
    let early = early_end(ended, measurements.len())?;
    stopped?;
    Ok(report(options, &plain, &measurements)?.ended_early(early))
}

/// The name of everything that Docker makes for this run.
fn mark() -> String {
    format!("conman-bench-{}", std::process::id())
}

struct Kills<'a> {
    options: &'a Kill,
    /// The root directory of containers without Docker.
    root: &'a Path,
    docker: Option<&'a Docker>,
    plain: &'a Plain,
    daemon: &'a Daemon,
}

impl Kills<'_> {
    async fn measure(&self, measurements: &mut Vec<Measurement>) -> Result<()> {
        let count = self.options.killing.count;
        for round in 0..self.options.killing.rounds {
            for way in Way::of(self.options.runtime) {
                let name = way.name(self.options.runtime, self.plain);
                let bar = ProgressBar::new(count as u64);
                bar.println(format!("round {}: {name}", round + 1));
                let progress = |done: usize| bar.set_position(done as u64);
                let measured = match (way, self.plain) {
                    (Way::Plain, Plain::Docker(_)) => self.docker(progress).await,
                    (Way::Plain, Plain::Oci(_)) => self.oci(progress).await,
                    (Way::ConmanBridge, _) => self.sessions(*way, "bridge", progress).await,
                    (Way::ConmanLoopback, _) => self.sessions(*way, "loopback", progress).await,
                };
                bar.finish_and_clear();
                measurements.push(measured.with_context(|| format!("measuring {name}"))?);
            }
        }
        Ok(())
    }

    async fn docker(&self, progress: impl Fn(usize)) -> Result<Measurement> {
        let docker = self.docker.context("Docker does not run")?;
        let mark = mark();
        let label = format!("dev.conman.bench={mark}");
        let options = match self.plain {
            Plain::Docker(Some(runtime)) => ["--runtime", runtime.as_str()].to_vec(),
            _ => vec!["--init"],
        };
        let cgroup = format!("/{mark}");
        let count = self.options.killing.count;
        let ids = docker
            .run_plain(
                &label,
                (cgroup.as_str(), options.as_slice()),
                count,
                progress,
            )
            .await?;
        let observer = Observer::of_cgroup(&cgroup)?;
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
            way: Way::Plain,
            processes,
            last_dead_ms: milliseconds(dead - notice),
            last_release_ms: None,
            docker_noticed_ms: Some(milliseconds(noticed?)),
            cleaned_ms: milliseconds(cleaned),
        })
    }

    async fn oci(&self, progress: impl Fn(usize)) -> Result<Measurement> {
        let Plain::Oci(oci) = self.plain else {
            bail!("these are Docker's");
        };
        let mut containers = OciContainers::new(*oci, Network::None, self.root, "kill")?;
        for number in 0..self.options.killing.count {
            containers.run(&["sleep", "1000000"]).await?;
            progress(number + 1);
        }
        let observer = Observer::of_cgroup(&containers.cgroup())?;
        let processes = observer.count();
        let notice = Instant::now();
        let watching = tokio::task::spawn_blocking(move || observer.wait_all_dead(PATIENCE));
        containers.kill().await?;
        let dead = watching.await.context("the observer panicked")??;
        containers.remove().await;
        Ok(Measurement {
            way: Way::Plain,
            processes,
            last_dead_ms: milliseconds(dead - notice),
            last_release_ms: None,
            docker_noticed_ms: None,
            cleaned_ms: milliseconds(notice.elapsed()),
        })
    }

    async fn sessions(
        &self,
        way: Way,
        template: &str,
        progress: impl Fn(usize),
    ) -> Result<Measurement> {
        let (daemon, count) = (self.daemon, self.options.killing.count);
        let prefix = format!("kill-{template}");
        daemon
            .open(&prefix, template, count, PARALLEL_STARTS, progress)
            .await?;
        let processes = conman_observer::alive_below(&daemon.cgroup()).len();
        let docker = self
            .docker
            .filter(|_| self.options.runtime == RuntimeKind::Docker);
        let label = daemon.label();
        let notice = Instant::now();
        let noticing = async {
            let Some(docker) = docker else {
                return anyhow::Ok(None);
            };
            docker.wait_none(&label, false, PATIENCE).await?;
            Ok(Some(milliseconds(notice.elapsed())))
        };
        let (preempted, noticed) = tokio::join!(preempt_all(daemon, count), noticing);
        let (last_dead_ms, last_release_ms) = preempted?;
        if let Some(docker) = docker {
            docker.wait_none(&label, true, PATIENCE).await?;
        }
        Ok(Measurement {
            way,
            processes,
            last_dead_ms,
            last_release_ms: Some(last_release_ms),
            docker_noticed_ms: noticed?,
            cleaned_ms: milliseconds(notice.elapsed()),
        })
    }
}

fn report(options: &Kill, plain: &Plain, measurements: &[Measurement]) -> Result<Report> {
    let sample = |way: Way, value: fn(&Measurement) -> Option<f64>| -> Vec<f64> {
        let of_way = measurements.iter().filter(|one| one.way == way);
        of_way.filter_map(value).collect()
    };
    let all_dead = |way| sample(way, |one| Some(one.last_dead_ms));
    let reference = median(&all_dead(Way::Plain)).context("nothing was measured")?;
    let mut table = Table::new([
        "way",
        "last process dead",
        "sooner than the first",
        "last release",
        "dockerd noticed",
        "cleaned up",
    ]);
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for way in Way::of(options.runtime) {
        let name = way.name(options.runtime, plain);
        let Some(last_dead) = median(&all_dead(*way)) else {
            continue;
        };
        let release = sample(*way, |one| one.last_release_ms);
        let noticed = sample(*way, |one| one.docker_noticed_ms);
        let cleaned = sample(*way, |one| Some(one.cleaned_ms));
        let ratio = reference / last_dead;
        let time = |sample: &[f64]| figure(sample, "ms");
        table.row([
            name.clone(),
            time(&all_dead(*way)),
            format!("{} ×", shown(ratio)),
            time(&release),
            time(&noticed),
            time(&cleaned),
        ]);
        bars.push(Bar::of(name.clone(), &all_dead(*way)));
        rows.push(json!({
            "way": way, "name": name, "last_dead_ms": last_dead, "times_sooner": ratio,
            "last_release_ms": median(&release), "docker_noticed_ms": median(&noticed),
            "cleaned_ms": median(&cleaned),
        }));
    }
    let (count, rounds) = (options.killing.count, options.killing.rounds);
    let heading = format!(
        "{count} containers killed at once, {} runtime",
        options.runtime
    );
    let text = format!(
        "Medians of {rounds} round(s), from the command or notice. Compared with {}.",
        plain.name()
    );
    Ok(Report {
        missed: None,
        parts: vec![
            text.into(),
            Chart::bars(format!("{heading}: last process dead"), "ms", bars).into(),
            table.into(),
        ],
        title: heading,
        json: json!({
            "benchmark": "kill", "runtime": options.runtime, "compared_with": plain.name(),
            "count": count, "rounds": rounds,
            "medians": rows, "measurements": measurements,
        }),
    })
}

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}
