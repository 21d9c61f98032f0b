//! How many sessions one machine holds, and the cost of one more at that number.

mod conditions;
mod footprint;
mod report;
mod template;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use conman_proto::{EnsureResponse, RuntimeKind, SessionState, SessionStats, StatsList};
use futures_util::future::try_join_all;
use http::Method;
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::json;

use crate::arguments::{Density, DensityStore};
use crate::daemon::Daemon;
use crate::docker::Docker;
use crate::http_client::Connection;
use crate::image;
use crate::interruption::{is_interrupted, until_interrupted};
use crate::kill::milliseconds;
use crate::observer::Observer;
use crate::plain::{self, Network as OciNetwork, Oci, OciContainers};
use crate::report::Report;
use conditions::Conditions;
use footprint::{Footprint, MachineMemory, Own};
use template::template;

/// Sessions whose page is requested at the end.
const ASKED: usize = 500;
/// Connections for these requests.
const ASKING: usize = 8;
/// Looks at the statistics of all sessions, and the time without looks that they are compared with.
const LOOKS: u32 = 5;
const QUIET: std::time::Duration = std::time::Duration::from_secs(10);
/// With fewer sessions there is nothing to measure in these times, which are then as short as this.
const FEW: usize = 100;
const SHORT: std::time::Duration = std::time::Duration::from_millis(100);
/// The daemon rests if it used less than this processor time for so long: it pauses for five seconds or more between
/// two measurements of all sessions' files.
const REST: std::time::Duration = std::time::Duration::from_secs(2);
const MOST_AT_REST_S: f64 = 0.05;
const REST_PATIENCE: std::time::Duration = std::time::Duration::from_secs(120);
/// Bound on the death of everything.
const DEATH_PATIENCE: std::time::Duration = std::time::Duration::from_secs(120);

/// One start, as its client saw it.
#[derive(Debug, Clone, Serialize)]
struct Start {
    /// Sessions requested before it.
    alive: usize,
    ms: f64,
    phases_ms: BTreeMap<String, f64>,
}

/// Sequential starts of one kind next to the same sessions.
#[derive(Debug, Clone, Serialize)]
struct Rival {
    name: &'static str,
    /// `Err` is the reason why there are none.
    times_ms: std::result::Result<Vec<f64>, String>,
}

#[derive(Debug, Serialize)]
struct Measured {
    /// What `conman doctor` says before the first start.
    doctor: Doctor,
    conditions: Conditions,
    starts: Vec<Start>,
    /// Why there are no more, as conman says it.
    bound: Option<String>,
    elapsed_s: f64,
    rivals_at: usize,
    rivals: Vec<Rival>,
    footprint: Footprint,
    looks: Looks,
    daemon: Own,
    shim: Option<Own>,
    answering: usize,
    asked: usize,
    processes: usize,
    last_dead_ms: f64,
    last_release_ms: f64,
}

/// The limits of the host, as `conman doctor` names them.
#[derive(Debug, Clone, Serialize)]
struct Doctor {
    /// Sessions that the host holds; `None`: as many as wanted.
    holds: Option<u64>,
    first_limit: Option<String>,
}

/// Processor time of daemon and shim, in seconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Looks {
    /// For one look at the statistics of all sessions.
    one_s: f64,
    /// Without looks, over a second.
    quiet_s: f64,
}

/// Starts that many sessions of a small web server through the API, with limits and everything
/// else that is on by default, requests the page of some, and preempts the node.
///
/// # Errors
/// When the runtime or busybox is missing, a session does not start, or something does not end.
pub(crate) async fn density(conman: &Path, options: &Density) -> Result<Report> {
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let root = image::root(scratch.path())?;
    let archive = image::archive(&root)?;
    // Its image is there until the end of this function.
    let docker = match (options.runtime, options.rivals) {
        (RuntimeKind::Docker, _) | (_, 1..) => Docker::with_image(&archive).await,
        (_, 0) => Err(anyhow!("no containers are compared")),
    };
    let docker = docker.map_err(|error| format!("{error:#}"));
    if let (RuntimeKind::Docker, Err(why)) = (options.runtime, &docker) {
        bail!("{why}");
    }
    let measured = with_daemon(conman, options, &archive, &docker, &root).await?;
    let beside = match options.store {
        DensityStore::Overlay => None,
        // The snapshots come first: a host never has fewer superblocks at once than it had.
        DensityStore::Btrfs if is_interrupted() => None,
        DensityStore::Btrfs => {
            let options = Density {
                store: DensityStore::Overlay,
                rivals: 0,
                ..options.clone()
            };
            Some(with_daemon(conman, &options, &archive, &docker, &root).await?)
        }
    };
    report::report(options, &measured, beside.as_ref())
}

/// Measures in a daemon for this.
async fn with_daemon(
    conman: &Path,
    options: &Density,
    archive: &Path,
    docker: &std::result::Result<Docker, String>,
    root: &Path,
) -> Result<Measured> {
    // Exactly as many as needed: the kernel is prepared for no more.
    let room = options.count + options.rivals;
    let conditions = Conditions::now(room)?;
    let daemon = Daemon::with_templates(conman, options.runtime, room, &template(options)).await?;
    let measured = async {
        if options.runtime != RuntimeKind::Docker {
            daemon.import(archive, IMAGE).await?;
        }
        measure(options, conditions, &daemon, docker, root).await
    };
    let measured = measured.await;
    let stopped = daemon.stop_all().await;
    let measured = measured?;
    stopped?;
    Ok(measured)
}

/// The image's name in conman's store.
const IMAGE: &str = "conman-bench:http";

async fn measure(
    options: &Density,
    conditions: Conditions,
    daemon: &Daemon,
    docker: &std::result::Result<Docker, String>,
    root: &Path,
) -> Result<Measured> {
    conman_linux::raise_nofile().context("raising the limit of open files")?;
    let doctor = doctor(options, daemon).await?;
    let before = MachineMemory::now()?;
    let rivals_at = options.rivals_at.min(options.count);
    let bar = ProgressBar::new(options.count as u64);
    let (mut starts, mut elapsed_s) = (Vec::with_capacity(options.count), 0.0);
    let (mut rivals, mut bound) = (Vec::new(), None);
    for (from, to) in [(0, rivals_at), (rivals_at, options.count)] {
        let begun = Instant::now();
        let (started, refused) = open(options, daemon, from, to, &bar).await?;
        starts.extend(started);
        elapsed_s += begun.elapsed().as_secs_f64();
        bound = refused;
        if bound.is_some() {
            break;
        }
        if from == 0 && options.rivals > 0 {
            bar.println(format!("the rivals, next to {rivals_at} sessions"));
            let compared = measure_rivals(options, daemon, docker, root);
            match until_interrupted(compared).await {
                Ok(measured) => rivals = measured,
                Err(why) => {
                    bound = Some(format!("{why:#}"));
                    break;
                }
            }
        }
    }
    bar.finish_and_clear();
    let reached = starts.len();
    ensure!(
        reached > 0,
        "no session starts: {}",
        bound.unwrap_or_default()
    );
    let after = MachineMemory::now()?;
    let conditions = conditions.with_sessions()?;
    let observer = Observer::of_cgroup(&daemon.cgroup())?;
    let pids = observer.pids();
    let footprint = Footprint::between(before, after, reached, footprint::program_bytes(&pids)?);
    let own = Own::of(daemon.pid()?)?;
    let shim = daemon.shim_pid().map(Own::of).transpose()?;
    let looks = look(reached, daemon).await?;
    let asked = ASKED.min(reached);
    let answering = ask(&starts, daemon, asked).await?;
    let processes = observer.count();
    let notice = Instant::now();
    let watching = tokio::task::spawn_blocking(move || observer.wait_all_dead(DEATH_PATIENCE));
    let preempted = daemon.preempt().await?;
    let dead = watching.await.context("the observer panicked")??;
    ensure!(
        preempted.released >= reached as u64,
        "only {} of {reached} sessions were released: {:?}",
        preempted.released,
        preempted.unreleased.iter().take(3).collect::<Vec<_>>()
    );
    Ok(Measured {
        doctor,
        conditions,
        starts,
        bound,
        elapsed_s,
        rivals_at,
        rivals,
        footprint,
        looks,
        daemon: own,
        shim,
        answering,
        asked,
        processes,
        last_dead_ms: milliseconds(dead - notice),
        last_release_ms: preempted
            .last_release_ms
            .context("no release was reported")?,
    })
}

async fn doctor(options: &Density, daemon: &Daemon) -> Result<Doctor> {
    let found = daemon.doctor(options.count).await?;
    let found = &found["diagnosis"];
    Ok(Doctor {
        holds: found["holds"].as_u64(),
        first_limit: found["first_limit"].as_str().map(str::to_owned),
    })
}

/// A time for that many sessions.
fn time(count: usize, usual: std::time::Duration) -> std::time::Duration {
    if count < FEW { SHORT } else { usual }
}

/// Waits for a pause of what the daemon does on its own: it measures the sessions' files.
async fn rest(count: usize, used: impl Fn() -> Result<f64>) -> Result<()> {
    let begun = Instant::now();
    loop {
        let before = used()?;
        tokio::time::sleep(time(count, REST)).await;
        if used()? - before < MOST_AT_REST_S {
            return Ok(());
        }
        ensure!(begun.elapsed() < REST_PATIENCE, "the daemon does not rest");
    }
}

/// Measures looks at all statistics, and as long without them.
async fn look(count: usize, daemon: &Daemon) -> Result<Looks> {
    let pids = [Some(daemon.pid()?), daemon.shim_pid()];
    let used = || -> Result<f64> {
        let times = pids.iter().flatten().map(|pid| footprint::cpu_s(*pid));
        times.sum()
    };
    rest(count, &used).await?;
    let mut connection = Connection::open(daemon.api()).await?;
    let before = used()?;
    for _ in 0..LOOKS {
        let path = "/v1/nodes/self/stats";
        let list: StatsList = connection.json(Method::GET, path, None).await?;
        let counted = |stats: &SessionStats| stats.cpu_s.is_some() && stats.memory_bytes.is_some();
        ensure!(
            list.sessions.iter().filter(|stats| counted(stats)).count() >= count,
            "not all sessions have statistics"
        );
    }
    let looked = used()?;
    let quiet = time(count, QUIET);
    tokio::time::sleep(quiet).await;
    Ok(Looks {
        one_s: (looked - before) / f64::from(LOOKS),
        quiet_s: (used()? - looked) / quiet.as_secs_f64(),
    })
}

fn session_id(number: usize) -> String {
    format!("d-{number}")
}

/// Starts sessions on one connection for each concurrent start, until one is refused or Ctrl-C: returns why then.
/// What was reached is measured like a smaller number.
async fn open(
    options: &Density,
    daemon: &Daemon,
    from: usize,
    to: usize,
    bar: &ProgressBar,
) -> Result<(Vec<Start>, Option<String>)> {
    let (next, refused) = (AtomicUsize::new(from), Mutex::new(None));
    let refuse = |why: Error| {
        next.store(to, Ordering::Relaxed);
        let mut refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.get_or_insert_with(|| format!("{why:#}"));
    };
    let connections = (0..options.parallel).map(|_| async {
        let mut connection = Connection::open(daemon.api()).await?;
        let mut starts = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= to {
                return anyhow::Ok(starts);
            }
            let id = session_id(number);
            let started = match is_interrupted() {
                true => Err(anyhow!("interrupted")),
                false => start(&mut connection, number, &id).await,
            };
            match started {
                Ok(start) => starts.push(start),
                Err(why) => refuse(why),
            }
            bar.inc(1);
        }
    });
    let mut starts: Vec<Start> = try_join_all(connections).await?.concat();
    starts.sort_by_key(|start| start.alive);
    Ok((
        starts,
        refused.into_inner().unwrap_or_else(PoisonError::into_inner),
    ))
}

async fn start(connection: &mut Connection, alive: usize, id: &str) -> Result<Start> {
    let body = json!({ "template": "http" });
    let path = format!("/v1/sessions/{id}");
    let begun = Instant::now();
    let answer: EnsureResponse = connection.json(Method::PUT, &path, Some(&body)).await?;
    let ms = milliseconds(begun.elapsed());
    let session = answer.session;
    ensure!(
        session.state == SessionState::Running,
        "session {id} is {}: {}",
        session.state,
        session.reason.unwrap_or_default()
    );
    Ok(Start {
        alive,
        ms,
        phases_ms: session.phases_ms,
    })
}

/// One after the other, including conman's own starts.
async fn measure_rivals(
    options: &Density,
    daemon: &Daemon,
    docker: &std::result::Result<Docker, String>,
    root: &Path,
) -> Result<Vec<Rival>> {
    let own = async {
        let mut connection = Connection::open(daemon.api()).await?;
        let mut times = Vec::with_capacity(options.rivals);
        for number in 0..options.rivals {
            let id = format!("r-{number}");
            times.push(start(&mut connection, number, &id).await?.ms);
        }
        for number in 0..options.rivals {
            let path = format!("/v1/sessions/r-{number}");
            connection
                .json::<serde_json::Value>(Method::DELETE, &path, None)
                .await?;
        }
        anyhow::Ok(times)
    };
    let in_docker = async {
        let docker = docker.as_ref().map_err(|why| anyhow!("{why}"))?;
        docker_runs(docker, options.rivals).await
    };
    let said = |times: Result<Vec<f64>>| times.map_err(|error| format!("{error:#}"));
    let (bare, oci) = match options.runtime {
        RuntimeKind::Gvisor => ("runsc run", Oci::Runsc),
        RuntimeKind::Native | RuntimeKind::Oci(_) | RuntimeKind::Docker | RuntimeKind::Process => {
            ("crun run", Oci::Crun)
        }
    };
    Ok(vec![
        Rival {
            name: "conman, through its API",
            times_ms: said(own.await),
        },
        Rival {
            name: bare,
            times_ms: said(oci_runs(oci, root, options.rivals).await),
        },
        Rival {
            name: "docker run",
            times_ms: said(in_docker.await),
        },
    ])
}

/// Starts containers with `crun run` or `runsc run`, one after the other; milliseconds each.
async fn oci_runs(oci: Oci, root: &Path, count: usize) -> Result<Vec<f64>> {
    let mut containers = OciContainers::new(oci, OciNetwork::None, root, "density")?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begun = Instant::now();
        containers.run(&image::COMMAND).await?;
        times.push(milliseconds(begun.elapsed()));
    }
    containers.remove().await;
    Ok(times)
}

/// Starts containers with `docker run`, one after the other; milliseconds each.
async fn docker_runs(docker: &Docker, count: usize) -> Result<Vec<f64>> {
    let label = format!("dev.conman.bench=density-{}", std::process::id());
    let (memory, cpus) = (plain::MEMORY_BYTES.to_string(), plain::CPUS.to_string());
    let pids = plain::PIDS.to_string();
    let limits = ["--memory", &memory, "--cpus", &cpus, "--pids-limit", &pids];
    let (mut times, mut ids) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for _ in 0..count {
        let begun = Instant::now();
        ids.push(docker.run(&label, &limits, &image::COMMAND).await?);
        times.push(milliseconds(begun.elapsed()));
    }
    docker.remove(&ids).await?;
    Ok(times)
}

/// Requests the page of some sessions, spread over all in a shuffled order; returns how many
/// answered.
async fn ask(starts: &[Start], daemon: &Daemon, asked: usize) -> Result<usize> {
    let mut numbers: Vec<usize> = starts.iter().map(|start| start.alive).collect();
    shuffle(&mut numbers, u64::from(std::process::id()));
    numbers.truncate(asked);
    let (next, answering) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let connections = (0..ASKING).map(|_| async {
        let mut connection = Connection::open(&daemon.sessions).await?;
        while let Some(number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
            let path = format!("/s/{}/", session_id(*number));
            let page = connection.text(&path).await?;
            answering.fetch_add(usize::from(page == image::PAGE), Ordering::Relaxed);
        }
        anyhow::Ok(())
    });
    try_join_all(connections).await?;
    Ok(answering.into_inner())
}

/// Fisher–Yates with the numbers of SplitMix64: the sample of sessions is arbitrary but
/// reproducible.
fn shuffle(numbers: &mut [usize], mut state: u64) {
    for end in (1..numbers.len()).rev() {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        let at = mixed % (end as u64 + 1);
        numbers.swap(end, usize::try_from(at).unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_keeps_every_number() {
        let mut numbers: Vec<usize> = (0..100).collect();
        shuffle(&mut numbers, 7);
        assert_ne!(numbers, (0..100).collect::<Vec<_>>());
        numbers.sort_unstable();
        assert_eq!(numbers, (0..100).collect::<Vec<_>>());
    }
}
