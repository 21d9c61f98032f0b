//! How long links of dead sessions stay, and how long others wait for the kernel's lock of links (rtnl)
//! meanwhile.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::json;

use super::namespaces::ip;
use super::routed::{PARALLEL_STARTS, start_conman};
use crate::daemon::Daemon;
use crate::interruption::until_interrupted;
use crate::kill::milliseconds;
use crate::observer::Observer;
use crate::report::{Bar, Chart, Report, Table, shown};

/// Bound on everything: links are deleted one by one in some 20 ms each.
const PATIENCE: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(2);
/// Pause between two requests of the bystander.
const BYSTANDER_PAUSE: Duration = Duration::from_millis(1);

/// What must hold after the death of 1,000 sessions.
const MOST_CLEANUP_MS: f64 = 1_000.0;
const LEAST_TIMES_FASTER: f64 = 20.0;
const MOST_WAIT_DEATH_MS: f64 = 300.0;
const MOST_WAIT_SWEEP_MS: f64 = 100.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// The namespaces die with their processes, and take the links along.
    Dying,
    /// Something holds the namespaces, as Docker's bind mounts do; conman sweeps the links.
    Pinned,
    /// Plain veth pairs, deleted by `ip link delete`.
    OneByOne,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Dying => "conman, namespaces die",
            Self::Pinned => "conman, namespaces are pinned",
            Self::OneByOne => "deleted one by one",
        }
    }
}

#[derive(Debug, Clone, Serialize)]
struct Measurement {
    way: Way,
    /// From the last death, from the end of the preemption if pinned, or from the command.
    gone_ms: f64,
    /// The longest wait of another program's change of a link.
    longest_wait_ms: f64,
}

/// Kills `count` routed sessions and watches their links.
///
/// # Errors
/// When conman has no routed sessions, one does not start, or links stay.
pub(super) async fn cleanup(conman: &Path, count: usize) -> Result<Report> {
    let daemon = start_conman(conman, count).await?;
    let measured = until_interrupted(async {
        Ok([
            sessions(&daemon, Way::Dying, count).await?,
            sessions(&daemon, Way::Pinned, count).await?,
            tokio::task::spawn_blocking(move || one_by_one(count))
                .await
                .context("a thread panicked")??,
        ])
    })
    .await;
    let stopped = daemon.stop_all().await;
    let measured = measured?;
    stopped?;
    report(count, &measured)
}

async fn sessions(daemon: &Daemon, way: Way, count: usize) -> Result<Measurement> {
    let prefix = format!("c{}", daemon.instance);
    let bar = ProgressBar::new(count as u64);
    let progress = |done: usize| bar.set_position(done as u64);
    let id = if way == Way::Dying { "dying" } else { "pinned" };
    let opened = daemon
        .open(id, "routed", count, PARALLEL_STARTS, progress)
        .await?;
    bar.finish_and_clear();
    let found = links(&prefix)?;
    ensure!(found == count, "{count} sessions have {found} links");
    let mut pins = Vec::new();
    if way == Way::Pinned {
        for pid in opened.iter().filter_map(|session| session.pid) {
            pins.push(File::open(format!("/proc/{pid}/ns/net")).context("pinning a namespace")?);
        }
    }
    let observer = Observer::of_cgroup(&daemon.cgroup())?;
    let bystander = Bystander::start();
    let watching = tokio::task::spawn_blocking(move || observer.wait_all_dead(PATIENCE));
    let gone = tokio::task::spawn_blocking({
        let prefix = prefix.clone();
        move || wait_gone(&prefix)
    });
    daemon.preempt().await?;
    let dead = watching.await.context("the observer panicked")??;
    // A preempted node removes nothing, because its machine stops; this one continues.
    let readmitted = Instant::now();
    daemon.readmit().await?;
    let gone = gone.await.context("a thread panicked")??;
    let longest_wait_ms = bystander.longest_wait_ms()?;
    drop(pins);
    daemon.clean().await?;
    let begun = if way == Way::Pinned { readmitted } else { dead };
    Ok(Measurement {
        way,
        gone_ms: milliseconds(gone.saturating_duration_since(begun)),
        longest_wait_ms,
    })
}

fn one_by_one(count: usize) -> Result<Measurement> {
    let prefix = format!("cb{}x", std::process::id());
    // Their other ends are in one namespace, which does not die.
    let namespace = format!("conman-bench-{}", std::process::id());
    let names = || (0..count).map(|number| format!("{prefix}{number:x}"));
    let add: String = names()
        .map(|name| format!("link add {name} type veth peer name {name} netns {namespace}\n"))
        .collect();
    let delete: String = names()
        .map(|name| format!("link delete {name}\n"))
        .collect();
    ip(&["netns", "add", &namespace], "")?;
    let deleted = ip(&["-batch", "-"], &add).and_then(|()| {
        let bystander = Bystander::start();
        let begun = Instant::now();
        ip(&["-batch", "-"], &delete)?;
        Ok((begun.elapsed(), bystander.longest_wait_ms()?))
    });
    // Links that are left disappear with it.
    ip(&["netns", "delete", &namespace], "")?;
    let (took, longest_wait_ms) = deleted?;
    Ok(Measurement {
        way: Way::OneByOne,
        gone_ms: milliseconds(took),
        longest_wait_ms,
    })
}

/// Number of this namespace's links with a prefix.
fn links(prefix: &str) -> Result<usize> {
    let listed = std::fs::read_dir("/sys/class/net").context("listing links")?;
    let names = listed.filter_map(Result::ok);
    let ours = names.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    Ok(ours.count())
}

/// The moment at which the last link with a prefix was first seen gone.
#[expect(clippy::disallowed_methods, reason = "this runs on a separate thread")]
fn wait_gone(prefix: &str) -> Result<Instant> {
    let begun = Instant::now();
    while links(prefix)? > 0 {
        ensure!(begun.elapsed() < PATIENCE, "links {prefix}… stay");
        std::thread::sleep(POLL);
    }
    Ok(Instant::now())
}

/// Another program that changes a link every millisecond: it sets `lo` up, which it is, so that only the
/// lock matters.
struct Bystander {
    ends: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<std::io::Result<Duration>>,
}

impl Bystander {
    #[expect(clippy::disallowed_methods, reason = "this runs on a separate thread")]
    fn start() -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let ends = Arc::clone(&ends);
            move || {
                let mut longest = Duration::ZERO;
                while !ends.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    conman_linux::bring_loopback_up()?;
                    longest = longest.max(begun.elapsed());
                    std::thread::sleep(BYSTANDER_PAUSE);
                }
                Ok(longest)
            }
        });
        Self { ends, thread }
    }

    fn longest_wait_ms(self) -> Result<f64> {
        self.ends.store(true, Ordering::Relaxed);
        let joined = self.thread.join().ok().context("the bystander panicked")?;
        Ok(milliseconds(joined.context("setting lo up")?))
    }
}

fn report(count: usize, measured: &[Measurement; 3]) -> Result<Report> {
    let [dying, pinned, one_by_one] = measured;
    let faster = |one: &Measurement| one_by_one.gone_ms / one.gone_ms.max(1.0);
    let mut table = Table::new([
        "links",
        "gone after",
        "faster",
        "longest wait of another program",
    ]);
    for one in measured {
        table.row([
            one.way.name().to_owned(),
            format!("{} ms", shown(one.gone_ms)),
            format!("{} ×", shown(faster(one))),
            format!("{} ms", shown(one.longest_wait_ms)),
        ]);
    }
    let bounds = [
        (dying.gone_ms > MOST_CLEANUP_MS, "cleaned up within 1 s"),
        (
            faster(dying) < LEAST_TIMES_FASTER,
            "20 times faster than one by one",
        ),
        (
            dying.longest_wait_ms > MOST_WAIT_DEATH_MS,
            "others wait 300 ms at most for a mass death",
        ),
        (
            pinned.longest_wait_ms > MOST_WAIT_SWEEP_MS,
            "others wait 100 ms at most for a sweep",
        ),
    ];
    let missed: Vec<&str> = bounds
        .into_iter()
        .filter_map(|(missed, promise)| missed.then_some(promise))
        .collect();
    let bars = measured.iter();
    let bars = bars.map(|one| Bar::one(one.way.name(), one.gone_ms.max(1.0)));
    Ok(Report {
        missed: (!missed.is_empty())
            .then(|| format!("promised, but not kept: {}", missed.join("; "))),
        title: format!("Links of {count} dead routed sessions"),
        parts: vec![
            Chart::bars("gone after", "ms", bars.collect()).into(),
            table.into(),
        ],
        json: json!({
            "benchmark": "net cleanup", "count": count, "measurements": measured,
            "times_faster": faster(dying),
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_is_too_long_is_reported_as_missed() {
        let missed = |wait_ms| {
            let of = |way, gone_ms, longest_wait_ms| Measurement {
                way,
                gone_ms,
                longest_wait_ms,
            };
            let measured = [
                of(Way::Dying, 200.0, 150.0),
                of(Way::Pinned, 300.0, wait_ms),
                of(Way::OneByOne, 17_000.0, 20.0),
            ];
            report(1_000, &measured).expect("figures").missed
        };
        assert_eq!(missed(99.0), None);
        assert!(missed(101.0).is_some_and(|why| why.contains("sweep")));
    }
}
