//! What the storm did to clients, and whether that is within what conman promises.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use super::clients::Seen;
use super::steps::Step;
use crate::overlap::Report;

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
pub struct Kind {
    pub name: &'static str,
    pub steps: usize,
    pub took_s: f64,
    pub handshakes: usize,
    pub failed: BTreeMap<String, usize>,
    pub closes: BTreeMap<u16, usize>,
    /// Closes of one client in one step, at most.
    pub most_closes: usize,
    /// Sorted.
    pub interruptions_ms: Vec<f64>,
    /// Until every client was served again, at most, after a loss.
    pub served_ms: Option<f64>,
}

/// The figures of a storm.
#[derive(Debug, Clone, Serialize)]
pub struct StormReport {
    pub sessions: usize,
    pub takeover_ms: u64,
    pub kinds: Vec<Kind>,
    pub lives: usize,
    /// What must not be, by the witnesses.
    pub violations: usize,
    pub missed: Vec<String>,
    #[serde(skip)]
    planned: Vec<&'static str>,
    #[serde(skip)]
    moves_ms: Vec<f64>,
}

impl StormReport {
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
        if step.moves() {
            self.moves_ms.extend(&seen.interruptions_ms);
        }
        let mut line = format!(
            "{step}: {:.1} s, {} handshakes, {} failed, closed {:?}, interrupted for {} at most",
            took.as_secs_f64(),
            seen.handshakes,
            seen.failed.values().sum::<usize>(),
            seen.closes,
            ms(seen.interruptions_ms.iter().copied().reduce(f64::max)),
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
        kind.handshakes += seen.handshakes;
        for (why, count) in seen.failed {
            *kind.failed.entry(why).or_default() += count;
        }
        for (code, count) in seen.closes {
            *kind.closes.entry(code).or_default() += count;
        }
        kind.most_closes = kind.most_closes.max(seen.most_closes);
        kind.interruptions_ms.extend(seen.interruptions_ms);
        kind.interruptions_ms.sort_by(f64::total_cmp);
        let served_ms = served_after.map(|after| after.as_secs_f64() * 1e3);
        kind.served_ms = kind.served_ms.into_iter().chain(served_ms).reduce(f64::max);
        line
    }

    /// Compares the figures with their bounds, and the witnesses' journal with what must not be.
    pub(super) fn judge(&mut self, witnessed: &Report) {
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
}

/// The nearest rank in a sorted sample.
pub(super) fn quantile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

fn ms(ms: Option<f64>) -> String {
    ms.map_or_else(|| "–".to_owned(), |ms| format!("{ms:.0} ms"))
}

impl fmt::Display for StormReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "{} sessions with a client each behind HAProxy, takeover time {} ms:\n\n\
             | event | times | handshakes | failed | closes | interruption p50 | p99 | max | all served after |\n\
             |---|---|---|---|---|---|---|---|---|",
            self.sessions, self.takeover_ms
        )?;
        for kind in &self.kinds {
            let closes = kind.closes.iter();
            let closes: Vec<String> = closes
                .map(|(code, count)| format!("{count} × {code}"))
                .collect();
            let closes = if closes.is_empty() {
                "–".to_owned()
            } else {
                closes.join(", ")
            };
            let [p50, p99, max] =
                [50, 99, 100].map(|percent| ms(quantile(&kind.interruptions_ms, percent)));
            writeln!(
                formatter,
                "| {} | {} | {} | {} | {closes} | {p50} | {p99} | {max} | {} |",
                kind.name,
                kind.steps,
                kind.handshakes,
                kind.failed.values().sum::<usize>(),
                ms(kind.served_ms),
            )?;
        }
        writeln!(
            formatter,
            "\np99 of a planned move: {}; {} containers ran, two of one session {}",
            ms(quantile(&self.moves_ms, 99)),
            self.lives,
            if self.violations == 0 {
                "never"
            } else {
                "see below"
            },
        )?;
        for missed in &self.missed {
            writeln!(formatter, "MISSED {missed}")?;
        }
        Ok(())
    }
}
