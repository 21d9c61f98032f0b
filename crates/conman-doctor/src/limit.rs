//! A limit, and what it means for a number of sessions.

use crate::diagnosis::{Check, Remedy, Verdict};

/// Factor for proposed values: a quarter is left for other programs on the host.
const HEADROOM: f64 = 1.25;

/// What a limit must be for `target` sessions, including the headroom.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "limits are far below 2^52, and a proposal need not be exact"
)]
pub(crate) fn proposal(each: f64, target: u64, used: u64) -> u64 {
    ((target as f64).mul_add(each, used as f64) * HEADROOM).ceil() as u64
}

/// A limit of which sessions take a part.
pub(crate) struct Limit {
    check: Check,
    /// What one session takes; 0 if the limit does not concern it.
    pub(crate) each: f64,
    raise: Raise,
}

/// How a limit is raised.
pub(crate) enum Raise {
    /// By the kernel setting of its name.
    Sysctl { highest: u64 },
    /// By the operator.
    Manual(String),
}

impl Limit {
    pub(crate) fn new(
        name: &'static str,
        bounds: &'static str,
        value: Option<u64>,
        used: Option<u64>,
        each: f64,
        raise: Raise,
    ) -> Self {
        let check = Check {
            used,
            per_session: each,
            ..Check::of(name, bounds, value)
        };
        Self { check, each, raise }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "limits beyond 2^52 bind nowhere, and are cut to what binds nowhere"
    )]
    pub(crate) fn judge(self, target: u64) -> Check {
        let Self { check, each, raise } = self;
        let used = check.used.unwrap_or_default();
        let Some(value) = check.value else {
            return Check {
                verdict: Verdict::Unknown,
                ..check
            };
        };
        let binds_at = (value.saturating_sub(used) as f64 / each) as u64;
        let binds = binds_at < target;
        let needed = proposal(each, target, used);
        let key = check.name;
        let remedy = match raise {
            Raise::Sysctl { highest } if needed <= highest => Remedy::Sysctl { key, value: needed },
            Raise::Sysctl { highest } => Remedy::Manual {
                what: format!(
                    "spread the sessions over more machines: {key} cannot exceed {highest}"
                ),
            },
            Raise::Manual(what) => Remedy::Manual { what },
        };
        Check {
            verdict: if binds {
                Verdict::Binds
            } else {
                Verdict::Enough
            },
            binds_at: Some(binds_at),
            needed: binds.then_some(needed),
            remedy: binds.then_some(remedy),
            ..check
        }
    }
}
