//! The report of the overhead benchmark.

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::json;

use super::claims::verdicts;
use super::places::Place;
use super::{Measured, Measurement};
use crate::arguments::Overhead;
use crate::report::{Bar, Chart, Part, Report, Table, shown};
use crate::statistics::median;

/// A native session may reach this much less over a network.
const NETWORK_BOUND: f64 = 0.05;

/// Rounds from which on figures are judged.
const JUDGED_ROUNDS: usize = 5;

/// The ratio of a place to the plain process, paired round by round: its median, and the interval of it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Ratios {
    pub(super) place: Place,
    pub(super) metric: String,
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

pub(super) fn report(options: &Overhead, measured: &Measured) -> Result<Report> {
    let all = &measured.measurements;
    anyhow::ensure!(
        !all.is_empty(),
        "nothing was measured: {}",
        measured.reasons()
    );
    let ratios = ratios(all);
    let verdicts = verdicts(&ratios);
    let mut parts: Vec<Part> = vec![
        format!(
            "Medians of {} rounds, in which the ways take turns. A ratio is that of a way to the plain process of \
             the same round; its interval is that of the median, with 94 of 100 chances for five rounds.",
            options.rounds
        )
        .into(),
    ];
    let skipped = measured.skipped.iter();
    let skipped: Vec<String> = skipped
        .map(|one| format!("skipped: {}: {}", one.what, one.why))
        .collect();
    parts.push(skipped.join("\n").into());
    parts.push(values(all, &ratios).into());
    for metric in metrics(all) {
        let of_metric = ratios.iter().filter(|one| one.metric == metric);
        let bars: Vec<Bar> = of_metric
            .map(|one| Bar::within(one.place.name(), one.median, (one.low, one.high)))
            .collect();
        if !bars.is_empty() {
            let title = format!("{metric}: relative to a plain process");
            parts.push(Chart::bars(title, "×", bars).into());
        }
    }
    let mut study = Table::new([
        "the study says",
        "way",
        "metric",
        "ratio here",
        "this machine",
    ]);
    for one in &verdicts {
        let agrees = if one.agrees {
            "agrees"
        } else {
            "does not agree"
        };
        let ratio = format!("{:.3}", one.ratio);
        study.row([one.statement, one.place, &one.metric, &ratio, agrees]);
    }
    parts.push(
        "Felter, Ferreira, Rajamony, Rubio: An Updated Performance Comparison of Virtual Machines and Linux Containers \
         (ISPASS 2015), on other hardware:"
            .into(),
    );
    parts.push(study.into());
    // The interval of fewer rounds says nothing. An interrupted benchmark has fewer than it was to have.
    let rounds = all.iter().map(|one| one.round + 1).max().unwrap_or(0);
    let judged = ratios.iter().filter(|_| rounds >= JUDGED_ROUNDS);
    let missed: Vec<String> = judged.filter_map(missed).collect();
    Ok(Report {
        title: "What containers cost".to_owned(),
        parts,
        json: json!({
            "benchmark": "overhead", "rounds": options.rounds, "ratios": ratios, "study": verdicts,
            "measurements": all, "skipped": measured.skipped,
        }),
        missed: (!missed.is_empty()).then(|| missed.join("; ")),
    })
}

/// Whether a native session is clearly below what is promised.
fn missed(one: &Ratios) -> Option<String> {
    let is_network = one.metric.starts_with("Redis") || one.metric.starts_with("OLTP");
    let bound = if is_network { 1.0 - NETWORK_BOUND } else { 1.0 };
    let below = one.place == Place::Native && one.high < bound && !one.metric.ends_with("root");
    let (metric, high) = (&one.metric, one.high);
    below
        .then(|| format!("{metric}: a native session reaches at most {high:.3} of a plain process"))
}

fn metrics(all: &[Measurement]) -> Vec<String> {
    let mut metrics: Vec<String> = Vec::new();
    for one in all {
        if !metrics.contains(&one.metric) {
            metrics.push(one.metric.clone());
        }
    }
    metrics
}

fn places(all: &[Measurement]) -> Vec<Place> {
    let mut places: Vec<Place> = all.iter().map(|one| one.place).collect();
    places.sort_unstable();
    places.dedup();
    places
}

fn values(all: &[Measurement], ratios: &[Ratios]) -> Table {
    let mut table = Table::new(["metric", "way", "median", "ratio", "interval"]);
    for metric in metrics(all) {
        for place in places(all) {
            let sample: Vec<f64> = all
                .iter()
                .filter(|one| one.place == place && one.metric == metric)
                .map(|one| one.value)
                .collect();
            let Some(middle) = median(&sample) else {
                continue;
            };
            let found = ratios
                .iter()
                .find(|one| one.place == place && one.metric == metric);
            table.row([
                metric.clone(),
                place.name().to_owned(),
                shown(middle),
                found.map_or_else(|| "–".to_owned(), |one| format!("{:.3}", one.median)),
                found.map_or_else(
                    || "–".to_owned(),
                    |one| format!("{:.3} to {:.3}", one.low, one.high),
                ),
            ]);
        }
    }
    table
}

/// All places but the plain process, compared with it.
fn ratios(all: &[Measurement]) -> Vec<Ratios> {
    let mut ratios = Vec::new();
    for metric in metrics(all) {
        for place in places(all)
            .into_iter()
            .filter(|place| *place != Place::Plain)
        {
            let of_metric = all.iter().filter(|one| one.metric == metric);
            let plain = |round: usize| {
                let found = of_metric.clone();
                let mut found = found.filter(|one| one.place == Place::Plain && one.round == round);
                found.next().map(|one| one.value)
            };
            let paired: Vec<f64> = of_metric
                .clone()
                .filter(|one| one.place == place)
                .filter_map(|one| Some(one.value / plain(one.round)?))
                .collect();
            if let Ok((median, (low, high))) = interval(&paired) {
                ratios.push(Ratios {
                    place,
                    metric: metric.clone(),
                    median,
                    low,
                    high,
                });
            }
        }
    }
    ratios
}

/// The median, and the interval that holds the true one with a chance of 0.93 at least: between two values of the
/// sample, by the binomial distribution. Fewer than five values do not suffice: then it is all of them.
fn interval(sample: &[f64]) -> Result<(f64, (f64, f64))> {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = median(&sorted).context("no round is complete")?;
    let count = sorted.len();
    // How many values may be left out on each side.
    let (mut left_out, mut tail, mut chance) = (0, 0.0, 0.5_f64.powi(count as i32));
    while left_out < count / 2 {
        tail += chance;
        if tail > 0.035 {
            break;
        }
        chance *= (count - left_out) as f64 / (left_out + 1) as f64;
        left_out += 1;
    }
    // One more value lies outside for each counted chance.
    let outer = left_out.saturating_sub(1);
    Ok((middle, (sorted[outer], sorted[count - 1 - outer])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_of_a_median_leaves_out_what_it_may() {
        let sample = |count: i32| (1..=count).map(f64::from).collect::<Vec<_>>();
        assert_eq!(interval(&sample(5)).expect("five"), (3.0, (1.0, 5.0)));
        assert_eq!(interval(&sample(3)).expect("three"), (2.0, (1.0, 3.0)));
        // 2 × P(at most one of 9 below) = 2 × 10 / 512.
        assert_eq!(interval(&sample(9)).expect("nine"), (5.0, (2.0, 8.0)));
        assert!(interval(&[]).is_err());
    }

    #[test]
    fn ratios_are_paired_round_by_round() {
        let one = |round, place, value| Measurement {
            round,
            place,
            metric: "HPL".to_owned(),
            value,
        };
        let found = ratios(&[
            one(0, Place::Plain, 100.0),
            one(0, Place::Native, 99.0),
            one(1, Place::Plain, 50.0),
            one(1, Place::Native, 49.5),
            one(2, Place::Native, 1.0),
        ]);
        assert_eq!(found.len(), 1);
        assert!(
            (found[0].low - 0.99).abs() < 1e-9 && (found[0].high - 0.99).abs() < 1e-9,
            "{found:?}"
        );
    }
}
