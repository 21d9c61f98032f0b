//! What paused sessions use, and how soon they answer again.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use conman_proto::{RuntimeKind, SessionState, StatsList};
use http::Method;
use serde::Serialize;
use serde_json::{Value, json};

use crate::arguments::Pausing;
use crate::daemon::Daemon;
use crate::http_client::Connection;
use crate::image;
use crate::interruption::until_interrupted;
use crate::kill::milliseconds;
use crate::observer::Observer;
use crate::report::{Bar, Chart, Report, shown};
use crate::statistics::{Quantiles, quantiles};

const IMAGE: &str = "conman-bench:pause";
/// Bound on the reclaim of all memory that can be reclaimed.
const RECLAIM: Duration = Duration::from_secs(60);
/// Time between two readings of the memory; two equal ones end the wait for reclaim.
const SETTLED: Duration = Duration::from_secs(2);
/// Time over which the processors are watched.
const WATCHED: Duration = Duration::from_secs(5);

const MAX_RESIDENT: f64 = 0.3;
const MAX_RESUME_MS: f64 = 50.0;

#[derive(Debug, Serialize)]
struct Measured {
    /// Resident memory of all processes of the sessions.
    running_bytes: u64,
    paused_bytes: u64,
    /// Processor time of the sessions over [`WATCHED`] while paused.
    paused_cpu_s: f64,
    swap_bytes: u64,
    /// From a request that resumes its session to the answer.
    resume_ms: Quantiles,
}

/// Pauses sessions that have filled memory, and resumes each by a request.
///
/// # Errors
/// When busybox is missing, or a session does not start, pause or answer.
pub(crate) async fn pause(conman: &Path, options: &Pausing) -> Result<Report> {
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let archive = image::archive(&image::root(scratch.path())?)?;
    let template = template(options);
    let daemon =
        Daemon::with_templates(conman, RuntimeKind::Native, options.count, &template).await?;
    let measured = until_interrupted(async {
        daemon.import(&archive, IMAGE).await?;
        measure(options, &daemon).await
    })
    .await;
    let stopped = daemon.stop_all().await;
    let measured = measured?;
    stopped?;
    Ok(report(options, &measured))
}

/// awk holds the memory, in a string that grows by a KiB.
fn template(options: &Pausing) -> String {
    let fill = format!(
        "BEGIN {{ k = sprintf(\"%1024s\", \"x\"); for (i = 0; i < {}; i++) a[i] = k i; \
         system(\": >/tmp/full; sleep 1000000\") }}",
        options.mebibytes * 1_024
    );
    let command = json!([
        "sh",
        "-c",
        format!("awk '{fill}' & exec httpd -f -p 8080 -h /tmp")
    ]);
    format!(
        "[templates.pause]\nimage = \"{IMAGE}\"\ncommand = {command}\nport = 8080\n\
         memory_bytes = {}\nready_path = \"/full\"\nresume_on_connect = true\n",
        (options.mebibytes + 64) << 22
    )
}

async fn measure(options: &Pausing, daemon: &Daemon) -> Result<Measured> {
    daemon.open("p", "pause", options.count, 2, |_| {}).await?;
    let observer = Observer::of_cgroup(&daemon.cgroup())?;
    let pids = observer.pids();
    let resident = || -> u64 {
        let sizes = pids
            .iter()
            .filter_map(|pid| conman_observer::resident_bytes(*pid).ok());
        sizes.sum()
    };
    let running_bytes = resident();
    let mut api = Connection::open(daemon.api()).await?;
    for number in 0..options.count {
        let path = format!("/v1/sessions/p-{number}/pause");
        let paused: Value = api.json(Method::POST, &path, None).await?;
        ensure!(paused["state"] == json!(SessionState::Paused), "{paused}");
    }
    let deadline = Instant::now() + RECLAIM;
    let mut paused_bytes = resident();
    loop {
        tokio::time::sleep(SETTLED).await;
        let now = resident();
        if now == paused_bytes || Instant::now() > deadline {
            break;
        }
        paused_bytes = now;
    }
    let before = cpu_s(&mut api).await?;
    tokio::time::sleep(WATCHED).await;
    let paused_cpu_s = cpu_s(&mut api).await? - before;

    let swap_bytes = pids.iter().map(|pid| swapped_bytes(*pid)).sum();
    let mut sessions = Connection::open(&daemon.sessions).await?;
    let mut times = Vec::with_capacity(options.count);
    for number in 0..options.count {
        let begun = Instant::now();
        sessions.text(&format!("/s/p-{number}/full")).await?;
        times.push(milliseconds(begun.elapsed()));
    }
    Ok(Measured {
        running_bytes,
        paused_bytes,
        paused_cpu_s,
        swap_bytes,
        resume_ms: quantiles(&times).context("no session was resumed")?,
    })
}

/// Processor time of all sessions.
async fn cpu_s(api: &mut Connection) -> Result<f64> {
    let list: StatsList = api.json(Method::GET, "/v1/nodes/self/stats", None).await?;
    let times = list.sessions.iter().map(|stats| stats.cpu_s);
    times
        .sum::<Option<f64>>()
        .context("processor time is not counted")
}

fn swapped_bytes(pid: i32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmSwap:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn report(options: &Pausing, measured: &Measured) -> Report {
    let resident = measured.paused_bytes as f64 / measured.running_bytes as f64;
    let mib = |bytes: u64| shown(bytes as f64 / 1_048_576.0 / options.count as f64);
    let found = measured.resume_ms;
    let text = format!(
        "{} MiB filled in each\nresident: {} MiB a session running, {} MiB paused \
         ({} %), {} MiB swapped\nprocessor time while paused: {} ms over {} s, all together\n\
         resume to the first answer: p50 {} ms, p99 {} ms, max {} ms\n",
        options.mebibytes,
        mib(measured.running_bytes),
        mib(measured.paused_bytes),
        shown(resident * 100.0),
        mib(measured.swap_bytes),
        shown(measured.paused_cpu_s * 1e3),
        WATCHED.as_secs(),
        shown(found.p50),
        shown(found.p99),
        shown(found.max),
    );
    let mut missed = Vec::new();
    if resident > MAX_RESIDENT {
        missed.push("resident memory of paused sessions (is there swap?)");
    }
    if measured.paused_cpu_s > 0.0 {
        missed.push("processor time of paused sessions");
    }
    if found.p99 > MAX_RESUME_MS {
        missed.push("resume, p99");
    }
    Report {
        missed: (!missed.is_empty()).then(|| missed.join(", ")),
        title: format!("{} sessions paused", options.count),
        parts: vec![
            text.into(),
            Chart::bars(
                "from a paused session's request to its answer",
                "ms",
                vec![
                    Bar::one("conman, p50", found.p50),
                    Bar::one("conman, p99", found.p99),
                ],
            )
            .into(),
        ],
        json: json!({
            "benchmark": "pause", "count": options.count, "mebibytes": options.mebibytes,
            "measured": measured,
        }),
    }
}
