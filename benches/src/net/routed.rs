//! What a link adds to a start and to a preemption: routed sessions next to loopback ones.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use conman_proto::RuntimeKind;
use indicatif::ProgressBar;
use serde_json::json;

use crate::arguments::Networking;
use crate::daemon::Daemon;
use crate::image;
use crate::interruption::{early_end, until_interrupted};
use crate::kill::milliseconds;
use crate::preempt::preempt_all;
use crate::report::{Bar, Chart, Report, Table, figure, shown};
use crate::statistics::median;

/// The compared templates: the second one is the first one with a link.
const TEMPLATES: [&str; 2] = ["loopback", "routed"];
/// Starts of each template in a round.
const STARTS: usize = 50;
/// A routed start may take this much longer, and with many sessions alive twice that.
const MOST_MORE_MS: f64 = 2.0;
const MANY: usize = 5_000;
/// The last release of routed sessions may come at this multiple of the loopback ones' time.
const MOST_TIMES: f64 = 1.2;
/// Concurrent starts while a measurement is prepared.
pub(super) const PARALLEL_STARTS: usize = 8;
/// The image's name in conman's store.
const IMAGE: &str = "conman-bench:routed";

/// Starts a conman with room for that many sleeping sessions, loopback and routed.
pub(super) async fn start_conman(conman: &Path, room: usize) -> Result<Daemon> {
    conman_linux::raise_nofile().context("raising the limit of open files")?;
    let scratch = tempfile::tempdir().context("making a temporary folder")?;
    let archive = image::archive(&image::root(scratch.path())?)?;
    let templates = TEMPLATES.map(|network| {
        format!(
            "[templates.{network}]\nimage = \"{IMAGE}\"\ncommand = [\"sleep\", \"1000000\"]\n\
             network = \"{network}\"\n"
        )
    });
    let settings = format!("[net]\npool = [\"198.19.0.0/16\"]\n{}", templates.concat());
    let daemon = Daemon::with_templates(conman, RuntimeKind::Native, room, &settings).await?;
    match daemon.import(&archive, IMAGE).await {
        Ok(()) => Ok(daemon),
        Err(error) => {
            daemon.stop_all().await?;
            Err(error)
        }
    }
}

/// Compares starts or preemptions of both templates.
///
/// # Errors
/// When conman has no routed sessions, a session does not start, or something does not end.
pub(super) async fn compare(conman: &Path, options: &Networking) -> Result<Report> {
    let room = options.count + 2 * STARTS * options.rounds;
    let daemon = start_conman(conman, room).await?;
    let mut times = Times::default();
    let ended = until_interrupted(async {
        match options.start {
            true => starts(options, &daemon, &mut times).await,
            false => preemptions(options, &daemon, &mut times).await,
        }
    })
    .await;
    let stopped = daemon.stop_all().await;
    let early = early_end(ended, times[1].len())?;
    stopped?;
    Ok(report(options, &times)?.ended_early(early))
}

/// Times of the loopback sessions and of the routed ones, in milliseconds.
type Times = [Vec<f64>; 2];

/// Starts both in alternation, one at a time, next to `count` routed sessions.
async fn starts(options: &Networking, daemon: &Daemon, times: &mut Times) -> Result<()> {
    let bar = ProgressBar::new(options.count as u64);
    let progress = |done: usize| bar.set_position(done as u64);
    daemon
        .open(
            "alive",
            TEMPLATES[1],
            options.count,
            PARALLEL_STARTS,
            progress,
        )
        .await?;
    bar.finish_and_clear();
    for number in 0..STARTS * options.rounds {
        for (template, times) in TEMPLATES.iter().zip(&mut *times) {
            let begun = Instant::now();
            daemon
                .open_one(format!("{template}-{number}"), template)
                .await?;
            times.push(milliseconds(begun.elapsed()));
        }
    }
    Ok(())
}

/// Preempts `count` sessions of each in alternation; times of the last release.
async fn preemptions(options: &Networking, daemon: &Daemon, times: &mut Times) -> Result<()> {
    for round in 0..options.rounds {
        for (template, times) in TEMPLATES.iter().zip(&mut *times) {
            let bar = ProgressBar::new(options.count as u64);
            let progress = |done: usize| bar.set_position(done as u64);
            let prefix = format!("{template}-{round}");
            daemon
                .open(&prefix, template, options.count, PARALLEL_STARTS, progress)
                .await?;
            bar.finish_and_clear();
            times.push(preempt_all(daemon, options.count).await?.1);
        }
    }
    Ok(())
}

fn report(options: &Networking, times: &Times) -> Result<Report> {
    let medians = [median(&times[0]), median(&times[1])];
    let [Some(loopback), Some(routed)] = medians else {
        anyhow::bail!("nothing was measured");
    };
    let count = options.count;
    let (title, most, bound) = if options.start {
        let more = MOST_MORE_MS * if count >= MANY { 2.0 } else { 1.0 };
        let title = format!("start next to {count} routed sessions");
        (title, loopback + more, format!("{} ms more", shown(more)))
    } else {
        let title = format!("{count} sessions preempted: last release");
        (title, loopback * MOST_TIMES, format!("{MOST_TIMES} times"))
    };
    let mut table = Table::new(["sessions", "p50"]);
    let mut bars = Vec::new();
    for (template, times) in TEMPLATES.iter().zip(times) {
        table.row([(*template).to_owned(), figure(times, "ms")]);
        bars.push(Bar::of(format!("conman, {template}"), times));
    }
    Ok(Report {
        missed: (routed > most).then(|| {
            let (routed, loopback) = (shown(routed), shown(loopback));
            format!(
                "{title}: routed {routed} ms, loopback {loopback} ms; promised: {bound} at most"
            )
        }),
        parts: vec![
            format!("Medians of {} round(s).", options.rounds).into(),
            Chart::bars("median", "ms", bars).into(),
            table.into(),
        ],
        title,
        json: json!({
            "benchmark": if options.start { "net start" } else { "net preempt" },
            "count": count, "rounds": options.rounds,
            "loopback_ms": loopback, "routed_ms": routed, "most_ms": most,
            "loopback": times[0], "routed": times[1],
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_routed_start_may_cost_two_milliseconds_and_four_next_to_many() {
        let missed = |count, routed| {
            let options = Networking {
                cleanup: false,
                fabric: false,
                start: true,
                preempt: false,
                count,
                rounds: 1,
                seconds: 1,
            };
            let times = [vec![10.0], vec![routed]];
            report(&options, &times).expect("figures").missed
        };
        assert_eq!(missed(200, 11.9), None);
        assert!(missed(200, 12.1).is_some_and(|why| why.contains("12.1 ms")));
        assert_eq!(missed(5_000, 13.9), None);
        assert!(missed(5_000, 14.1).is_some());
    }
}
