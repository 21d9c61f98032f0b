//! What each kind of step did to clients, and whether that is within what conman promises.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_cluster::overlap;
use serde::Serialize;

use super::steps::Step;
use crate::report::{Bar, Chart, Report, Table};
use crate::storm::clients::Seen;

/// Bound on an interruption by a planned move, for 99 of 100.
const MOVED_MS: f64 = 1_000.0;
/// Bound on the time until everybody is served after a loss, beyond the takeover time.
const SERVED_MS: f64 = 2_000.0;
/// Connections without a Close frame that the line of a planned step names.
const SHOWN_BROKEN: usize = 5;
/// The code of a connection whose session moves or whose node leaves.
const SERVICE_RESTART: u16 = 1012;

/// All steps of one kind.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Kind {
    name: &'static str,
    steps: usize,
    took_s: f64,
    handshakes: usize,
    failed: BTreeMap<String, usize>,
    closes: BTreeMap<u16, usize>,
    /// Closes of one client in one step, at most.
    most_closes: usize,
    /// Sorted.
    interruptions_ms: Vec<f64>,
    /// Until every client was served again, at most, after a loss.
    served_ms: Option<f64>,
}

/// The figures of all steps.
#[derive(Debug, Clone, Serialize)]
pub(super) struct EveryWay {
    sessions: usize,
    takeover_ms: u64,
    kinds: Vec<Kind>,
    lives: usize,
    /// What must not be, by the witnesses.
    violations: usize,
    missed: Vec<String>,
    #[serde(skip)]
    planned: Vec<&'static str>,
    #[serde(skip)]
    moves_ms: Vec<f64>,
}

impl EveryWay {
    pub(super) fn new(sessions: usize, takeover_ms: u64) -> Self {
        Self {
            sessions,
            takeover_ms,
            kinds: Vec::new(),
            lives: 0,
            violations: 0,
            missed: Vec::new(),
            planned: Vec::new(),
            moves_ms: Vec::new(),
        }
    }

    /// Adds what was seen in a step, and returns it as a line.
    pub(super) fn add(
        &mut self,
        step: Step,
        took: Duration,
        served_after: Option<Duration>,
        seen: Seen,
    ) -> String {
        if self
            .kinds
            .last()
            .is_none_or(|last| last.name != step.kind())
        {
            self.kinds.push(Kind {
                name: step.kind(),
                ..Kind::default()
            });
        }
        if step.is_planned() && self.planned.last() != Some(&step.kind()) {
            self.planned.push(step.kind());
        }
        let mut interruptions: Vec<f64> = seen.reconnects.iter().map(|one| one.ms).collect();
        interruptions.sort_by(f64::total_cmp);
        if step.moves() {
            self.moves_ms.extend(&interruptions);
        }
        let mut line = format!(
            "{step}: {:.1} s, {} handshakes, {} failed, closed {:?}, interrupted for {} at most",
            took.as_secs_f64(),
            seen.count(true),
            seen.count(false),
            seen.closes,
            ms(interruptions.last().copied()),
        );
        for (why, count) in &seen.failed {
            let _ = write!(line, "\n    {count} failed: {why}");
        }
        let broken = seen.broken.iter().filter(|_| step.is_planned());
        for broken in broken.take(SHOWN_BROKEN) {
            let _ = write!(line, "\n    without a Close frame: {broken}");
        }
        let Some(kind) = self.kinds.last_mut() else {
            return line;
        };
        kind.steps += 1;
        kind.took_s += took.as_secs_f64();
        kind.handshakes += seen.count(true);
        for (why, count) in seen.failed {
            *kind.failed.entry(why).or_default() += count;
        }
        for (code, count) in seen.closes {
            *kind.closes.entry(code).or_default() += count;
        }
        kind.most_closes = kind.most_closes.max(seen.most_closes);
        kind.interruptions_ms.extend(interruptions);
        kind.interruptions_ms.sort_by(f64::total_cmp);
        let served_ms = served_after.map(|after| after.as_secs_f64() * 1e3);
        kind.served_ms = kind.served_ms.into_iter().chain(served_ms).reduce(f64::max);
        line
    }

    /// Compares the figures with their bounds, and the witnesses' journal with what must not be.
    pub(super) fn judge(&mut self, witnessed: &overlap::Report) {
        self.lives = witnessed.lives;
        self.violations = witnessed.violations.len();
        let mut missed: Vec<String> = Vec::new();
        missed.extend(witnessed.violations.iter().map(ToString::to_string));
        for kind in self
            .kinds
            .iter()
            .filter(|kind| self.planned.contains(&kind.name))
        {
            if !kind.failed.is_empty() {
                missed.push(format!(
                    "{}: handshakes failed: {:?}",
                    kind.name, kind.failed
                ));
            }
            if kind.closes.keys().any(|code| *code != SERVICE_RESTART) {
                missed.push(format!("{}: closed with {:?}", kind.name, kind.closes));
            }
        }
        let restart = Step::Restart(0).kind();
        let restarts = self.kinds.iter().filter(|kind| kind.name == restart);
        for kind in restarts.filter(|kind| kind.most_closes > 1) {
            let most = kind.most_closes;
            missed.push(format!("{restart}: cut a client {most} times"));
        }
        self.moves_ms.sort_by(f64::total_cmp);
        if quantile(&self.moves_ms, 99).is_none_or(|p99| p99 > MOVED_MS) {
            missed.push(format!(
                "p99 of a planned move: {}",
                ms(quantile(&self.moves_ms, 99))
            ));
        }
        #[expect(clippy::cast_precision_loss, reason = "an hour is short")]
        let bound_ms = self.takeover_ms as f64 + SERVED_MS;
        let slowest = self.kinds.iter().filter_map(|kind| kind.served_ms);
        let slowest = slowest.reduce(f64::max);
        if slowest.is_none_or(|slowest| slowest > bound_ms) {
            missed.push(format!(
                "served after a loss: {}, not {bound_ms} ms",
                ms(slowest)
            ));
        }
        self.missed = missed;
    }

    pub(super) fn finish(self) -> Result<Report> {
        let mut table = Table::new([
            "event",
            "times",
            "handshakes",
            "failed",
            "closes",
            "interruption p50",
            "p99",
            "max",
            "all served after",
        ]);
        let mut bars = Vec::new();
        for kind in &self.kinds {
            let closes = kind.closes.iter();
            let closes: Vec<String> = closes
                .map(|(code, count)| format!("{count} × {code}"))
                .collect();
            let quantiles = [50, 99, 100].map(|percent| quantile(&kind.interruptions_ms, percent));
            let mut row = vec![
                kind.name.to_owned(),
                kind.steps.to_string(),
                kind.handshakes.to_string(),
                kind.failed.values().sum::<usize>().to_string(),
                if closes.is_empty() {
                    "–".to_owned()
                } else {
                    closes.join(", ")
                },
            ];
            row.extend(quantiles.map(ms));
            row.push(ms(kind.served_ms));
            table.row(row);
            if let [Some(p50), Some(p99), Some(max)] = quantiles {
                bars.push(Bar::within(
                    format!("conman, {}", kind.name),
                    p99,
                    (p50, max),
                ));
            }
        }
        let witnessed = format!(
            "99 of 100 planned moves within {}; {} containers ran, two of one session {}.",
            ms(quantile(&self.moves_ms, 99)),
            self.lives,
            if self.violations == 0 {
                "never"
            } else {
                "see above"
            },
        );
        let lead = format!(
            "{} sessions with a client each behind HAProxy, takeover time {} ms.",
            self.sessions, self.takeover_ms
        );
        let title = "interruption of a client: 99 of 100, from the median to the longest";
        let mut json = serde_json::to_value(&self).context("figures are plain")?;
        json["benchmark"] = "storm-every-way".into();
        Ok(Report {
            title: "Every way in which a node leaves or is lost".to_owned(),
            parts: vec![
                lead.into(),
                Chart::bars(title, "ms", bars).into(),
                table.into(),
                witnessed.into(),
            ],
            json,
            missed: (!self.missed.is_empty()).then(|| self.missed.join("; ")),
        })
    }
}

/// The nearest rank in a sorted sample.
fn quantile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

fn ms(ms: Option<f64>) -> String {
    ms.map_or_else(|| "–".to_owned(), |ms| format!("{ms:.0} ms"))
}
