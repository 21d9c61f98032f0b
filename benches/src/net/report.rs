//! The report of the network benchmark.

use std::fmt::Write as _;

use anyhow::Result;
use serde::Serialize;
use serde_json::json;

use super::loads::Metric;
use super::ways::{
    BRIDGE, BRIDGE_PROXIED, DOCKER_HOST, EGRESS, FORWARDED, HAPROXY, HOST, LOOPBACK,
    LOOPBACK_INSIDE, NAT, PLAIN, ROUTED,
};
use super::{Measurement, Name, Side, Unmeasured};
use crate::arguments::Networking;
use crate::report::{Bar, Chart, Report, Table, shown};
use crate::statistics::median;

/// A cost above this is called one: the rounds differ by less.
const NOTICEABLE: f64 = 0.05;

impl Side {
    const ALL: [Self; 3] = [Self::Local, Self::Inbound, Self::Outbound];

    const fn title(self) -> &'static str {
        match self {
            Self::Local => "on this machine",
            Self::Inbound => "from another machine",
            Self::Outbound => "to another machine",
        }
    }
}

/// A promise: the figure of one way divided by that of another.
struct Promise {
    metric: Metric,
    side: Side,
    way: &'static str,
    than: &'static str,
    bound: Bound,
}

#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

const PROMISES: [Promise; 5] = [
    Promise {
        metric: Metric::Iperf3GbitPerS,
        side: Side::Outbound,
        way: ROUTED,
        than: FORWARDED,
        bound: Bound::AtLeast(0.95),
    },
    Promise {
        metric: Metric::LatencyUs,
        side: Side::Local,
        way: LOOPBACK_INSIDE,
        than: BRIDGE,
        bound: Bound::AtMost(1.0),
    },
    // The same through conman's proxy, as clients reach a session.
    Promise {
        metric: Metric::LatencyUs,
        side: Side::Local,
        way: LOOPBACK,
        than: BRIDGE_PROXIED,
        bound: Bound::AtMost(1.0),
    },
    Promise {
        metric: Metric::FetchGbitPerS,
        side: Side::Outbound,
        way: EGRESS,
        than: HAPROXY,
        bound: Bound::AtLeast(1.0),
    },
    Promise {
        metric: Metric::PushGbitPerS,
        side: Side::Outbound,
        way: EGRESS,
        than: HAPROXY,
        bound: Bound::AtLeast(1.0),
    },
];

/// Whether a promise is kept, as text.
#[derive(Debug, Serialize)]
struct Verdict {
    what: String,
    ratio: f64,
    kept: bool,
}

/// What the machine says about a statement of the study.
#[derive(Debug, Serialize)]
struct Statement {
    statement: &'static str,
    way: &'static str,
    /// Compared with a plain process, over the same cable.
    latency_ratio: f64,
    rate_ratio: f64,
    agrees: bool,
}

/// The medians of all rounds.
struct Medians<'a>(&'a [Measurement]);

impl Medians<'_> {
    fn of(&self, name: Name, metric: Metric) -> Option<f64> {
        median(&self.all(name, metric))
    }

    fn all(&self, name: Name, metric: Metric) -> Vec<f64> {
        let of_way = self.0.iter();
        let of_way = of_way.filter(|one| one.name == name && one.metric == metric);
        of_way.map(|one| one.value).collect()
    }

    fn ratio(
        &self,
        side: Side,
        metric: Metric,
        way: &'static str,
        than: &'static str,
    ) -> Option<f64> {
        let of = |way| self.of(Name { side, way }, metric);
        Some(of(way)? / of(than)?)
    }

    /// The measured ways, in the order of the first round, one side after the other.
    fn names(&self) -> Vec<Name> {
        let mut names: Vec<Name> = Vec::new();
        for one in self.0 {
            if !names.contains(&one.name) {
                names.push(one.name);
            }
        }
        names.sort_by_key(|name| Side::ALL.iter().position(|side| *side == name.side));
        names
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let verdict = |promise: &Promise| {
            let Promise {
                metric,
                side,
                way,
                than,
                bound,
            } = *promise;
            let ratio = self.ratio(side, metric, way, than)?;
            let (words, kept) = match bound {
                Bound::AtLeast(least) => (format!("at least {least:.2}"), ratio >= least),
                Bound::AtMost(most) => (format!("at most {most:.2}"), ratio <= most),
            };
            let title = metric.title();
            Some(Verdict {
                what: format!("{way} / {than}, {title}: {ratio:.2}, promised {words}"),
                ratio,
                kept,
            })
        };
        PROMISES.iter().filter_map(verdict).collect()
    }

    /// Felter, Ferreira, Rajamony and Rubio, "An Updated Performance Comparison of Virtual Machines
    /// and Linux Containers" (ISPASS 2015): Redis behind Docker's NAT, and on the host's network.
    fn statements(&self) -> Vec<Statement> {
        let costs = "NAT costs a Redis server latency and throughput";
        let free = "host networking costs it neither";
        let statement = |statement, way, costly| {
            let ratio = |metric| self.ratio(Side::Inbound, metric, way, PLAIN);
            let latency_ratio = ratio(Metric::RedisLatencyUs)?;
            let rate_ratio = ratio(Metric::RedisRequestsPerS)?;
            let slower = latency_ratio > 1.0 + NOTICEABLE;
            let fewer = rate_ratio < 1.0 - NOTICEABLE;
            Some(Statement {
                statement,
                way,
                latency_ratio,
                rate_ratio,
                agrees: if costly {
                    slower && fewer
                } else {
                    !slower && !fewer
                },
            })
        };
        [
            statement(costs, NAT, true),
            statement(free, DOCKER_HOST, false),
            statement(free, HOST, false),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

pub(super) fn report(
    options: &Networking,
    measurements: &[Measurement],
    unmeasured: &[Unmeasured],
) -> Result<Report> {
    let medians = Medians(measurements);
    let (verdicts, statements) = (medians.verdicts(), medians.statements());
    let mut text = String::new();
    for one in unmeasured {
        let (side, way) = (one.name.side.title(), one.name.way);
        // Messages of a refused configuration have several lines.
        let why: Vec<&str> = one.why.split_whitespace().collect();
        let _ = writeln!(text, "not measured: {way}, {side}: {}", why.join(" "));
    }
    for verdict in &verdicts {
        let kept = if verdict.kept { "kept" } else { "missed" };
        let _ = writeln!(text, "{}: {kept}", verdict.what);
    }
    for one in &statements {
        let agrees = if one.agrees {
            "agrees"
        } else {
            "does not agree"
        };
        let _ = writeln!(
            text,
            "study: {}. This machine {agrees}: {} takes {:.2} times as long as a plain process, \
             and serves {:.2} times as many requests",
            one.statement, one.way, one.latency_ratio, one.rate_ratio
        );
    }
    let missed: Vec<&str> = verdicts
        .iter()
        .filter(|verdict| !verdict.kept)
        .map(|verdict| verdict.what.as_str())
        .collect();
    let names = medians.names();
    let rows: Vec<_> = names.iter().map(|name| row(&medians, *name)).collect();
    let bars = names.iter().filter_map(|name| {
        let sample = medians.all(*name, Metric::LatencyUs);
        let label = format!("{}, {}", name.way, name.side.title());
        (!sample.is_empty()).then(|| Bar::of(label, &sample))
    });
    Ok(Report {
        missed: (!missed.is_empty()).then(|| missed.join("; ")),
        title: "Networks of sessions, containers and plain processes".to_owned(),
        parts: vec![
            format!(
                "Medians of {} rounds of {} s in rotation.",
                options.rounds, options.seconds
            )
            .into(),
            Chart::bars("echo of 64 B, one connection: median", "µs", bars.collect()).into(),
            table(&medians).into(),
            text.into(),
        ],
        json: json!({
            "benchmark": "net", "rounds": options.rounds, "seconds": options.seconds,
            "medians": rows, "measurements": measurements, "not_measured": unmeasured,
            "promises": verdicts, "study": statements,
        }),
    })
}

fn row(medians: &Medians<'_>, name: Name) -> serde_json::Value {
    let mut row = json!({ "side": name.side, "way": name.way });
    for metric in Metric::ALL {
        if let (Ok(serde_json::Value::String(key)), Some(value)) =
            (serde_json::to_value(metric), medians.of(name, metric))
        {
            row[key] = value.into();
        }
    }
    row
}

fn table(medians: &Medians<'_>) -> Table {
    let mut header = vec!["", "way"];
    header.extend(Metric::ALL.map(Metric::title));
    let mut table = Table::new(header);
    for name in medians.names() {
        let mut cells = vec![name.side.title().to_owned(), name.way.to_owned()];
        cells.extend(Metric::ALL.map(|metric| match medians.of(name, metric) {
            Some(value) => format!("{} {}", shown(value), metric.unit()),
            None => "–".to_owned(),
        }));
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: Networking = Networking {
        cleanup: false,
        fabric: false,
        start: false,
        preempt: false,
        count: 0,
        rounds: 1,
        seconds: 1,
    };

    fn measured(side: Side, way: &'static str, values: &[(Metric, f64)]) -> Vec<Measurement> {
        let one = |&(metric, value)| Measurement {
            name: Name { side, way },
            metric,
            value,
        };
        values.iter().map(one).collect()
    }

    fn redis(way: &'static str, latency: f64, rate: f64) -> Vec<Measurement> {
        let values = [
            (Metric::LatencyUs, latency),
            (Metric::RedisLatencyUs, latency),
            (Metric::RedisRequestsPerS, rate),
        ];
        measured(Side::Inbound, way, &values)
    }

    #[test]
    fn a_machine_agrees_with_the_study_only_where_its_figures_do() {
        let agrees = |nat: (f64, f64), host: (f64, f64)| -> Vec<bool> {
            let all = [
                redis(PLAIN, 100.0, 1_000.0),
                redis(NAT, nat.0, nat.1),
                redis(DOCKER_HOST, host.0, host.1),
            ];
            let statements = Medians(&all.concat()).statements();
            statements.iter().map(|one| one.agrees).collect()
        };
        assert_eq!(agrees((120.0, 800.0), (101.0, 990.0)), [true, true]);
        assert_eq!(agrees((120.0, 990.0), (101.0, 800.0)), [false, false]);
    }

    #[test]
    fn slower_egress_than_haproxy_is_reported_as_missed() {
        let of = |egress: f64| {
            let fetch = |way, value| {
                let values = [(Metric::LatencyUs, 50.0), (Metric::FetchGbitPerS, value)];
                measured(Side::Outbound, way, &values)
            };
            let all = [fetch(EGRESS, egress), fetch(HAPROXY, 10.0)].concat();
            report(&OPTIONS, &all, &[]).expect("figures").missed
        };
        assert_eq!(of(10.5), None);
        assert!(of(9.0).is_some_and(|why| why.contains("0.90")));
    }

    #[test]
    fn a_way_without_figures_is_listed_with_its_reason() {
        let unmeasured = Unmeasured {
            name: Name {
                side: Side::Outbound,
                way: ROUTED,
            },
            why: "no pool".to_owned(),
        };
        let all = redis(PLAIN, 100.0, 1_000.0);
        let report = report(&OPTIONS, &all, &[unmeasured]).expect("figures");
        let line = "not measured: conman, routed, to another machine: no pool";
        assert!(report.to_text().contains(line), "{}", report.to_text());
        let ratio = Medians(&all).ratio(Side::Outbound, Metric::LatencyUs, ROUTED, PLAIN);
        assert_eq!(ratio, None);
    }
}
