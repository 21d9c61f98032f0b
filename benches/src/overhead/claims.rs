//! What the published study found, claim by claim, and what this machine finds.
//!
//! Felter, Ferreira, Rajamony and Rubio, "An Updated Performance Comparison of Virtual Machines and Linux Containers"
//! (ISPASS 2015), measured on a machine of two sockets, with Docker 1.0.

use serde::Serialize;

use super::places::Place;
use super::report::Ratios;

/// A ratio within this of 1 counts as equal unless its interval says so anyway.
const EQUAL: f64 = 0.05;

/// A statement of the study about one place.
pub(super) struct Claim {
    pub(super) statement: &'static str,
    pub(super) place: Place,
    /// How the metrics begin.
    metrics: &'static str,
    costs: bool,
}

const fn claim(statement: &'static str, place: Place, metrics: &'static str, costs: bool) -> Claim {
    Claim {
        statement,
        place,
        metrics,
        costs,
    }
}

const NAT: &str = "NAT costs throughput";
const HOST: &str = "the host's network costs nothing";

const CLAIMS: [Claim; 9] = [
    claim("memory bandwidth is equal", Place::Docker, "STREAM", false),
    claim(
        "random access is equal",
        Place::Docker,
        "RandomAccess",
        false,
    ),
    claim("Linpack is equal", Place::Docker, "HPL", false),
    claim(
        "sequential block I/O is equal",
        Place::Docker,
        "read, MiB/s, on a bind",
        false,
    ),
    claim(
        "random block I/O is equal",
        Place::Docker,
        "random reads/s, on a bind",
        false,
    ),
    claim(NAT, Place::DockerPublished, "Redis", true),
    claim(HOST, Place::DockerHost, "Redis", false),
    claim(NAT, Place::DockerPublished, "OLTP", true),
    claim(HOST, Place::DockerHost, "OLTP", false),
];

/// What this machine says about a claim.
#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    pub(super) statement: &'static str,
    pub(super) place: &'static str,
    pub(super) metric: String,
    pub(super) ratio: f64,
    pub(super) agrees: bool,
}

/// A verdict for each metric that was measured.
pub(super) fn verdicts(ratios: &[Ratios]) -> Vec<Verdict> {
    let of_claim = |claim: &'static Claim| {
        let about = ratios
            .iter()
            .filter(move |one| one.place == claim.place && one.metric.starts_with(claim.metrics));
        about.map(move |one| Verdict {
            statement: claim.statement,
            place: claim.place.name(),
            metric: one.metric.clone(),
            ratio: one.median,
            agrees: is_less(one) == claim.costs,
        })
    };
    CLAIMS.iter().flat_map(of_claim).collect()
}

/// Whether the place reaches clearly less than the plain process.
fn is_less(one: &Ratios) -> bool {
    one.median < 1.0 - EQUAL && one.high < 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratio(place: Place, metric: &str, median: f64, high: f64) -> Ratios {
        Ratios {
            place,
            metric: metric.to_owned(),
            median,
            low: median - 0.01,
            high,
        }
    }

    #[test]
    fn a_machine_agrees_only_where_its_ratios_do() {
        let found = verdicts(&[
            ratio(Place::Docker, "STREAM triad, GB/s", 0.99, 1.01),
            ratio(Place::Docker, "HPL, Gflop/s", 0.90, 0.95),
            ratio(Place::DockerPublished, "Redis GET/s", 0.80, 0.85),
            ratio(Place::DockerHost, "Redis GET/s", 0.80, 0.85),
            ratio(Place::Native, "STREAM triad, GB/s", 0.5, 0.5),
        ]);
        let agrees: Vec<bool> = found.iter().map(|one| one.agrees).collect();
        assert_eq!(agrees, [true, false, true, false]);
    }
}
