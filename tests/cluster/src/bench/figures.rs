//! What was measured, and whether it is within what conman promises.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use conman_core::ownership::Timing;
use conman_proto::PreemptReport;
use serde::Serialize;
use tokio::time::Instant;

use super::client::Served;
use super::{Apart, Options};
use crate::overlap::Report;

/// Bounds on the end of all of a node's sessions after a notice.
const NATIVE_RELEASED_MS: f64 = 500.0;
const DOCKER_RELEASED_MS: f64 = 1_000.0;
/// Bound on a client's way to the new container after a notice, and after the takeover time.
const SERVED_MS: f64 = 2_000.0;

/// Times in milliseconds, from the notice or from the loss of the node.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    pub runtime: &'static str,
    pub way: &'static str,
    /// What the node that goes did not share with the others.
    pub apart: Option<Apart>,
    pub sessions: usize,
    pub clients: usize,
    pub takeover_ms: u64,
    /// The rest of these are of a notice only.
    pub processes: usize,
    pub killed: u64,
    pub certified: u64,
    pub released: u64,
    /// As `/proc` told.
    pub last_process_dead_ms: Option<f64>,
    pub last_kill_ms: Option<f64>,
    pub last_certificate_ms: Option<f64>,
    pub last_release_ms: Option<f64>,
    /// When clients' connections were closed, of those who waited for that.
    pub closed_ms: Option<Quantiles>,
    /// When the new containers greeted: those who waited until their connections were closed, and
    /// those who connected anew at once.
    pub served_ms: Option<Quantiles>,
    pub served_who_reloaded_ms: Option<Quantiles>,
    /// Answers that clients did not want, with their numbers.
    pub refusals: BTreeMap<String, usize>,
    /// Medians of the phases of the new containers' starts.
    pub phases_ms: BTreeMap<String, f64>,
    /// Of the sessions with clients: containers that ran, and what must not be.
    pub lives: usize,
    pub violations: Vec<String>,
    pub bounds: Bounds,
    pub met: bool,
}

/// What is promised.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Bounds {
    pub released_ms: Option<f64>,
    pub served_ms: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quantiles {
    pub count: usize,
    pub p50: f64,
    pub max: f64,
}

impl Figures {
    pub(super) fn of(options: &Options, timing: &Timing) -> Self {
        let released_ms = match (options.lost, options.docker) {
            (true, _) => None,
            (false, true) => Some(DOCKER_RELEASED_MS),
            (false, false) => Some(NATIVE_RELEASED_MS),
        };
        #[expect(clippy::cast_precision_loss, reason = "an hour is short")]
        let takeover = if options.lost {
            timing.takeover_ms as f64
        } else {
            0.0
        };
        Self {
            runtime: if options.docker { "docker" } else { "native" },
            way: if options.lost { "lost" } else { "notice" },
            apart: options.apart,
            sessions: options.sessions,
            clients: options.clients,
            takeover_ms: timing.takeover_ms,
            processes: 0,
            killed: 0,
            certified: 0,
            released: 0,
            last_process_dead_ms: None,
            last_kill_ms: None,
            last_certificate_ms: None,
            last_release_ms: None,
            closed_ms: None,
            served_ms: None,
            served_who_reloaded_ms: None,
            refusals: BTreeMap::new(),
            phases_ms: BTreeMap::new(),
            lives: 0,
            violations: Vec::new(),
            bounds: Bounds {
                released_ms,
                served_ms: takeover + SERVED_MS,
            },
            met: false,
        }
    }

    pub(super) fn preempted(&mut self, dead: Duration, report: &PreemptReport) {
        self.last_process_dead_ms = Some(ms(dead));
        self.killed = report.killed;
        self.certified = report.certified;
        self.released = report.released;
        self.last_kill_ms = report.last_kill_ms;
        self.last_certificate_ms = report.last_certificate_ms;
        self.last_release_ms = report.last_release_ms;
    }

    pub(super) fn served_since(&mut self, went: Instant, served: &[Served]) {
        let since = |at: Instant| ms(at.duration_since(went));
        let closed = served.iter().filter_map(|one| one.closed);
        self.closed_ms = quantiles(closed.map(since));
        let again = |reloaded: bool| {
            let some = served.iter();
            let some = some.filter(|one| one.closed.is_none() == reloaded);
            quantiles(some.map(|one| since(one.again)))
        };
        self.served_ms = again(false);
        self.served_who_reloaded_ms = again(true);
        for refusal in served.iter().flat_map(|one| &one.refusals) {
            *self.refusals.entry(refusal.clone()).or_default() += 1;
        }
    }

    pub(super) fn starts(&mut self, phases: BTreeMap<String, Vec<f64>>) {
        let median = |(phase, sample): (String, Vec<f64>)| {
            quantiles(sample.into_iter()).map(|found| (phase, found.p50))
        };
        self.phases_ms = phases.into_iter().filter_map(median).collect();
    }

    pub(super) fn judged(&mut self, report: &Report) {
        self.lives = report.lives;
        self.violations = report.violations.iter().map(ToString::to_string).collect();
        let within = |figure: Option<f64>, bound: Option<f64>| match (figure, bound) {
            (Some(figure), Some(bound)) => figure <= bound,
            (None, Some(_)) => false,
            (_, None) => true,
        };
        let Bounds {
            released_ms,
            served_ms,
        } = self.bounds;
        let slowest = [self.served_ms, self.served_who_reloaded_ms];
        let slowest = slowest.into_iter().flatten();
        let served: usize = slowest.clone().map(|one| one.count).sum();
        self.met = self.violations.is_empty()
            && (released_ms.is_none() || self.released == self.sessions as u64)
            && within(self.last_process_dead_ms, released_ms)
            && within(self.last_certificate_ms, released_ms)
            && within(self.last_release_ms, released_ms)
            && served == self.clients
            && self.refusals.is_empty()
            && slowest.map(|one| one.max).all(|max| max <= served_ms);
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "{} {} sessions on a node that goes ({}), {} clients through two others{}; takeover \
             time {} ms",
            self.sessions,
            self.runtime,
            self.way,
            self.clients,
            match self.apart {
                Some(Apart::Processors) => ", processors apart",
                Some(Apart::Engine) => ", its Docker Engine stopped",
                None => "",
            },
            self.takeover_ms
        )?;
        let mut row = |what: &str, value: String| writeln!(formatter, "  {what:42} {value}");
        let bound = self.bounds.released_ms;
        let bounded = |figure: Option<f64>| match (figure, bound) {
            (Some(figure), Some(bound)) => Some(format!("{figure:8.0} ms   (≤ {bound:.0})")),
            _ => None,
        };
        for (what, figure) in [
            ("last process dead", self.last_process_dead_ms),
            ("last certificate", self.last_certificate_ms),
            ("last release", self.last_release_ms),
        ] {
            if let Some(text) = bounded(figure) {
                row(what, text)?;
            }
        }
        if bound.is_some() {
            row("released", format!("{:8}", self.released))?;
        }
        let most = self.bounds.served_ms;
        for (what, sample, bound) in [
            ("old connections closed", self.closed_ms, String::new()),
            (
                "served again, after that",
                self.served_ms,
                format!("   (≤ {most:.0})"),
            ),
            (
                "served again, connecting anew at once",
                self.served_who_reloaded_ms,
                format!("   (≤ {most:.0})"),
            ),
        ] {
            if let Some(Quantiles { count, p50, max }) = sample {
                row(
                    what,
                    format!("{p50:8.0} ms p50, {max:.0} ms max of {count}{bound}"),
                )?;
            }
        }
        // Parts of phases are in the JSON.
        let whole = self
            .phases_ms
            .iter()
            .filter(|(name, _)| !name.contains('.'));
        let whole: Vec<String> = whole.map(|(name, ms)| format!("{name} {ms:.0}")).collect();
        row("phases of the new starts, p50 in ms", whole.join(", "))?;
        for (refusal, times) in &self.refusals {
            row("a client was told", format!("{times:8} × {refusal}"))?;
        }
        row(
            "containers of those sessions",
            format!("{:8}, {} violations", self.lives, self.violations.len()),
        )?;
        for violation in &self.violations {
            row("violation", violation.clone())?;
        }
        row(
            "within the bounds",
            if self.met { "yes" } else { "no" }.to_owned(),
        )
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}

/// By nearest rank: each is a value that was measured.
fn quantiles(sample: impl Iterator<Item = f64>) -> Option<Quantiles> {
    let mut sorted: Vec<f64> = sample.collect();
    sorted.sort_by(f64::total_cmp);
    Some(Quantiles {
        count: sorted.len(),
        p50: *sorted.get(sorted.len().saturating_sub(1) / 2)?,
        max: *sorted.last()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_sample() {
        let found = quantiles([4.0, 1.0, 3.0, 2.0].into_iter()).expect("not empty");
        assert_eq!((found.count, found.p50, found.max), (4, 2.0, 4.0));
        assert_eq!(quantiles([].into_iter()), None);
    }

    #[test]
    fn figures_beyond_a_bound_or_with_a_violation_are_not_met() {
        let options = Options {
            sessions: 2,
            clients: 1,
            docker: false,
            lost: false,
            apart: None,
        };
        let good = Report {
            lines: 1,
            sessions: 1,
            lives: 2,
            handovers: 1,
            violations: Vec::new(),
        };
        let judged = |release: f64, served: Option<f64>, released: u64, refused: bool| {
            let mut figures = Figures::of(&options, &Timing::default());
            if refused {
                figures.refusals.insert("HTTP error: 503".to_owned(), 1);
            }
            figures.last_process_dead_ms = Some(10.0);
            figures.last_certificate_ms = Some(20.0);
            figures.last_release_ms = Some(release);
            figures.released = released;
            figures.served_ms = quantiles(served.into_iter());
            figures.judged(&good);
            figures.met
        };
        let judge = |release, served, released| judged(release, Some(served), released, false);
        assert!(judge(499.0, 1_999.0, 2));
        assert!(!judge(501.0, 1_999.0, 2));
        assert!(!judge(499.0, 2_001.0, 2));
        assert!(!judge(499.0, 1_999.0, 1));
        assert!(!judged(499.0, None, 2, false), "nobody was served");
        assert!(
            !judged(499.0, Some(1_999.0), 2, true),
            "somebody was refused"
        );
    }
}
