//! What the storm did to clients, way by way.

use serde_json::json;

use super::clients::{Seen, Timed};
use super::{PATIENCE, Way, Weathered, published};
use crate::arguments::Storming;
use crate::report::{Bar, Chart, Curve, Curves, Report, Table, shown};
use crate::statistics::quantiles;

/// Length of a point of the curves, in seconds.
const BUCKET_S: f64 = 5.0;
/// The code of a connection whose session moves.
const SERVICE_RESTART: u16 = 1012;
/// Bounds of conman's ways.
const NATIVE_P99_MS: f64 = 1_000.0;
const DOCKER_TIMES_BARE: f64 = 1.5;

pub(super) fn report(options: &Storming, ways: &[Weathered], skipped: &[String]) -> Report {
    let mut missed: Vec<String> = ways.iter().flat_map(missed_by).collect();
    missed.extend(skipped.iter().filter(|why| why.starts_with("not")).cloned());
    let lead = format!(
        "{} sessions on {} nodes behind HAProxy, a notice of {} s every {} s for {} minutes, seed {}. A client of \
         each session talks and reconnects, and opens a further connection every 3 s. A handshake has failed when \
         it is refused or not answered within {} s.",
        options.sessions,
        options.nodes,
        options.budget().as_secs_f64(),
        options.every().as_secs_f64(),
        options.minutes,
        options.seed,
        PATIENCE.as_secs(),
    );
    let mut parts = vec![lead.into(), summary(ways).into(), times(ways).into()];
    let late: String = ways.iter().filter_map(late).collect();
    parts.push(late.into());
    parts.push(skipped.join("\n").into());
    parts.push(rates(ways).into());
    parts.push(connected(ways).into());
    parts.push(reconnects(ways).into());
    parts.push(boots(ways).into());
    parts.push(published::SOURCE.into());
    parts.push(published::table().into());
    Report {
        title: "A storm of preemptions, the old way and conman's".to_owned(),
        parts,
        json: json!({
            "benchmark": "storm", "nodes": options.nodes, "sessions": options.sessions,
            "minutes": options.minutes, "budget_s": options.budget().as_secs_f64(), "every_s": options.every().as_secs_f64(),
            "seed": options.seed, "members": options.members, "ways": ways.iter().map(figures).collect::<Vec<_>>(),
            "skipped": skipped, "measurements": ways,
        }),
        missed: (!missed.is_empty()).then(|| missed.join("; ")),
    }
}

/// What of conman's promises a way does not keep; the old ways promise nothing.
fn missed_by(one: &Weathered) -> Vec<String> {
    let name = one.way.name();
    if !one.way.is_conman() {
        return Vec::new();
    }
    let mut missed = Vec::new();
    let failed = one.seen.count(false);
    if failed > 0 {
        missed.push(format!(
            "{name}: {failed} handshakes failed: {:?}",
            one.seen.failed
        ));
    }
    if one.seen.closes.keys().any(|code| *code != SERVICE_RESTART) {
        let closes = &one.seen.closes;
        let first = one.seen.broken.first().map_or("", String::as_str);
        missed.push(format!(
            "{name}: closed with {closes:?}, the first: {first}"
        ));
    }
    if !one.never_back.is_empty() {
        missed.push(format!("{name}: never came back: {:?}", one.never_back));
    }
    missed.extend(
        one.violations
            .iter()
            .map(|violation| format!("{name}: {violation}")),
    );
    let bound = match one.way {
        Way::Native => Some(NATIVE_P99_MS),
        _ => one.bare_runs_s.map(|bare| bare * 1e3 * DOCKER_TIMES_BARE),
    };
    let p99 = quantiles(&durations(&one.seen.reconnects)).map(|found| found.p99);
    if let (Some(p99), Some(bound)) = (p99, bound)
        && p99 > bound
    {
        let (p99, bound) = (shown(p99), shown(bound));
        missed.push(format!(
            "{name}: 99 of 100 reconnects take {p99} ms, not {bound} ms"
        ));
    }
    missed
}

fn late(one: &Weathered) -> Option<String> {
    let name = one.way.name();
    let bare = one.bare_runs_s.map(|bare_s| {
        format!(
            "{name}: as many plain `docker run`s as a node has sessions take {} s.\n",
            shown(bare_s)
        )
    });
    let late = (one.late > 0).then(|| {
        format!(
            "{name}: {} of {} notices came late, because the node before was not replaced yet.\n",
            one.late,
            one.notices_s.len()
        )
    });
    bare.into_iter().chain(late).reduce(|all, more| all + &more)
}

fn summary(ways: &[Weathered]) -> Table {
    let mut table = Table::new([
        "way",
        "connections",
        "failed",
        "error rate",
        "of fresh connections",
        "closed with",
        "never came back",
        "two of one at once",
        "containers",
    ]);
    for one in ways {
        let (failed, all) = (one.seen.count(false), one.seen.handshakes.len());
        let closes = one.seen.closes.iter();
        let closes: Vec<String> = closes
            .map(|(code, count)| format!("{count} × {code}"))
            .collect();
        table.row([
            one.way.name().to_owned(),
            all.to_string(),
            failed.to_string(),
            format!("{} %", shown(percent(failed, all))),
            format!("{} %", shown(fresh_percent(&one.seen))),
            closes.join(", "),
            one.never_back.len().to_string(),
            one.violations.len().to_string(),
            one.lives.to_string(),
        ]);
    }
    table
}

fn times(ways: &[Weathered]) -> Table {
    let mut table = Table::new([
        "way",
        "reconnect p50",
        "p99",
        "max",
        "boot p50",
        "p99",
        "max",
    ]);
    for one in ways {
        let mut row = vec![one.way.name().to_owned()];
        for sample in [&one.seen.reconnects, &one.seen.boots] {
            let found = quantiles(&durations(sample));
            let values = found.map(|found| [found.p50, found.p99, found.max]);
            row.extend((0..3).map(|column| match values {
                Some(values) => format!("{} ms", shown(values[column])),
                None => "–".to_owned(),
            }));
        }
        table.row(row);
    }
    table
}

fn durations(sample: &[Timed]) -> Vec<f64> {
    sample.iter().map(|one| one.ms).collect()
}

/// Failed ones among the connections that come at fixed times, whatever became of others.
fn fresh_percent(seen: &Seen) -> f64 {
    let fresh = seen.handshakes.iter().filter(|one| one.fresh);
    let failed = fresh.clone().filter(|one| !one.good).count();
    percent(failed, fresh.count())
}

fn percent(part: usize, all: usize) -> f64 {
    part as f64 * 100.0 / all.max(1) as f64
}

/// A value for each [`BUCKET_S`] of the storm.
fn curve(ways: &[Weathered], value: impl Fn(&Seen, f64, f64) -> Option<f64>) -> Vec<Curve> {
    let of_way = |one: &Weathered| {
        let buckets = (one.lasted_s / BUCKET_S) as usize;
        let points = (0..buckets).filter_map(|bucket| {
            let from = bucket as f64 * BUCKET_S;
            Some((from, value(&one.seen, from, from + BUCKET_S)?))
        });
        Curve {
            name: one.way.name().to_owned(),
            points: points.collect(),
        }
    };
    ways.iter().map(of_way).collect()
}

fn over_time(ways: &[Weathered], logarithmic: bool, curves: Vec<Curve>) -> Curves {
    // Those of the first way: the notices of all come at the same times unless they are late.
    let marks = ways.first().map(|one| one.notices_s.clone());
    Curves {
        over: "s",
        logarithmic,
        curves,
        marks: marks.unwrap_or_default(),
    }
}

fn rates(ways: &[Weathered]) -> Chart {
    let curves = curve(ways, |seen, from, to| {
        let within = seen.handshakes.iter();
        let within = within.filter(|one| one.fresh && (from..to).contains(&one.at_s));
        let (mut all, mut failed) = (0, 0);
        for one in within {
            all += 1;
            failed += usize::from(!one.good);
        }
        (all > 0).then(|| percent(failed, all))
    });
    let title = "failed ones of fresh connections; vertical lines: notices";
    Chart::curves(title, "%", over_time(ways, false, curves))
}

fn connected(ways: &[Weathered]) -> Chart {
    let curves = ways.iter().map(|one| Curve {
        name: one.way.name().to_owned(),
        points: one
            .seen
            .connected
            .iter()
            .map(|(at, count)| (*at, *count as f64))
            .collect(),
    });
    let title = "clients connected to their sessions";
    Chart::curves(title, "clients", over_time(ways, false, curves.collect()))
}

fn reconnects(ways: &[Weathered]) -> Chart {
    let curves = curve(ways, |seen, from, to| {
        let within = seen.reconnects.iter();
        let within = within.filter(|one| (from..to).contains(&one.at_s));
        within.map(|one| one.ms / 1e3).reduce(f64::max)
    });
    let title = "from a close to the next echo, the longest at a time";
    Chart::curves(title, "s", over_time(ways, true, curves))
}

fn boots(ways: &[Weathered]) -> Chart {
    let bars = ways.iter().filter_map(|one| {
        let found = quantiles(&durations(&one.seen.boots))?;
        let spread = (found.p50 / 1e3, found.max / 1e3);
        Some(Bar::within(one.way.name(), found.p99 / 1e3, spread))
    });
    let title = "from the request for a session to its first echo: 99 of 100, from the median to the longest";
    Chart::bars(title, "s", bars.collect())
}

/// The figures of a way, for programs.
fn figures(one: &Weathered) -> serde_json::Value {
    let (failed, all) = (one.seen.count(false), one.seen.handshakes.len());
    json!({
        "way": one.way, "name": one.way.name(), "connections": all, "failed": failed,
        "error_percent": percent(failed, all), "fresh_error_percent": fresh_percent(&one.seen), "failures": one.seen.failed, "closes": one.seen.closes,
        "reconnect_ms": quantiles(&durations(&one.seen.reconnects)),
        "boot_ms": quantiles(&durations(&one.seen.boots)),
        "never_back": one.never_back.len(), "two_at_once": one.violations.len(),
        "containers": one.lives, "notices": one.notices_s.len(), "late": one.late,
        "bare_runs_s": one.bare_runs_s,
    })
}

#[cfg(test)]
mod tests {
    use super::super::clients::Handshake;
    use super::*;

    fn weathered(way: Way, good: usize, bad: usize, code: u16, reconnect_ms: f64) -> Weathered {
        let ended = |good| Handshake {
            at_s: 1.0,
            good,
            fresh: !good,
        };
        let handshakes = std::iter::repeat_n(ended(true), good);
        let handshakes = handshakes.chain(std::iter::repeat_n(ended(false), bad));
        Weathered {
            way,
            lasted_s: 10.0,
            notices_s: vec![0.0],
            late: 0,
            seen: Seen {
                handshakes: handshakes.collect(),
                closes: [(code, 1)].into(),
                reconnects: vec![Timed {
                    at_s: 1.0,
                    ms: reconnect_ms,
                }],
                ..Seen::default()
            },
            never_back: Vec::new(),
            lives: 1,
            violations: Vec::new(),
            bare_runs_s: Some(2.0),
        }
    }

    #[test]
    fn a_refused_client_a_broken_connection_and_a_slow_move_are_reported_of_conman_alone() {
        let missed = |way| missed_by(&weathered(way, 99, 1, 1006, 3_500.0)).len();
        assert_eq!(
            [Way::Old, Way::OldHold, Way::Docker, Way::Native].map(missed),
            [0, 0, 3, 3]
        );
        let kept = weathered(Way::Native, 100, 0, 1012, 900.0);
        assert_eq!(missed_by(&kept), Vec::<String>::new());
        let slow_but_docker = weathered(Way::Docker, 100, 0, 1012, 2_900.0);
        assert_eq!(missed_by(&slow_but_docker), Vec::<String>::new());
    }

    #[test]
    fn the_error_rate_is_of_all_handshakes() {
        let found = figures(&weathered(Way::Old, 97, 3, 1006, 1.0));
        assert_eq!(found["error_percent"], 3.0);
        assert_eq!(found["fresh_error_percent"], 100.0);
    }
}
