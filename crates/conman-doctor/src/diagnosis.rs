//! The result of all checks of a host.

use serde::Serialize;

/// What a host lacks for a number of sessions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// Sessions that the host is to hold.
    pub target: u64,
    pub runtime: String,
    /// Sessions that it holds without changes, as far as every limit is known.
    pub holds: Option<u64>,
    /// The limit that binds first, by name.
    pub first_limit: Option<&'static str>,
    pub checks: Vec<Check>,
}

impl Diagnosis {
    /// Whether no known limit binds below the target.
    pub fn is_fit(&self) -> bool {
        self.checks
            .iter()
            .all(|check| check.verdict != Verdict::Binds)
    }
}

/// One limit of the host.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// The limit's own name where it has one, for example `kernel.pid_max`.
    pub name: &'static str,
    /// What it bounds, for people.
    pub bounds: &'static str,
    pub verdict: Verdict,
    /// Its value; absent if it could not be read, or is not a number.
    pub value: Option<u64>,
    /// The part that is in use.
    pub used: Option<u64>,
    /// What one session takes of it.
    pub per_session: f64,
    /// Sessions at which it binds; absent when it never does or is unknown.
    pub binds_at: Option<u64>,
    /// What its value must be for the target.
    pub needed: Option<u64>,
    /// What to do, if anything.
    pub remedy: Option<Remedy>,
    /// Additional information.
    pub note: Option<String>,
}

impl Check {
    /// A check of which only this is known.
    pub(crate) fn of(name: &'static str, bounds: &'static str, value: Option<u64>) -> Self {
        Self {
            name,
            bounds,
            verdict: Verdict::Enough,
            value,
            used: None,
            per_session: 0.0,
            binds_at: None,
            needed: None,
            remedy: None,
            note: None,
        }
    }
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Enough,
    /// It binds below the target.
    Binds,
    /// It does not bind, but something should be done.
    Advice,
    /// It could not be read.
    Unknown,
}

/// What to do about a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Remedy {
    /// A kernel setting that `--fix` raises, or disables with a 0.
    Sysctl { key: &'static str, value: u64 },
    /// A change that only the operator can make.
    Manual { what: String },
}
