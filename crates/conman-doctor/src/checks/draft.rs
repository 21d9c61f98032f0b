//! A limit before and during its evaluation.

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
pub(super) fn proposal(each: f64, target: u64, used: u64) -> u64 {
    ((target as f64).mul_add(each, used as f64) * HEADROOM).ceil() as u64
}

/// A limit before its evaluation.
pub(super) struct Draft {
    name: &'static str,
    bounds: &'static str,
    value: Option<u64>,
    used: Option<u64>,
    each: f64,
    /// What sessions must leave unused.
    pub(super) reserve: u64,
    note: Option<String>,
}

impl Draft {
    pub(super) fn new(
        name: &'static str,
        bounds: &'static str,
        value: Option<u64>,
        used: Option<u64>,
        each: f64,
    ) -> Self {
        Self {
            name,
            bounds,
            value,
            used,
            each,
            reserve: 0,
            note: None,
        }
    }

    pub(super) fn note(mut self, note: &str) -> Self {
        self.note = Some(note.to_owned());
        self
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "limits beyond 2^52 bind nowhere, and are cut to what binds nowhere"
    )]
    fn binds_at(&self) -> Option<u64> {
        if self.each <= 0.0 {
            return None;
        }
        let taken = self.used.unwrap_or_default().saturating_add(self.reserve);
        let left = self.value?.saturating_sub(taken);
        Some((left as f64 / self.each) as u64)
    }

    pub(super) fn check(self) -> Check {
        Check {
            name: self.name,
            bounds: self.bounds,
            verdict: Verdict::Enough,
            value: self.value,
            used: self.used,
            per_session: self.each,
            binds_at: self.binds_at(),
            needed: None,
            remedy: None,
            note: self.note,
        }
    }

    fn judged(self, target: u64, remedy: impl FnOnce(u64) -> Remedy) -> Check {
        let needed = proposal(self.each, target, self.used.unwrap_or_default());
        let mut check = self.check();
        match (check.value, check.binds_at) {
            (None, _) if check.per_session > 0.0 => check.verdict = Verdict::Unknown,
            (_, Some(sessions)) if sessions < target => {
                check.verdict = Verdict::Binds;
                check.needed = Some(needed);
                check.remedy = Some(remedy(needed));
            }
            _ => {}
        }
        check
    }

    /// A limit that is a kernel setting, up to `highest`.
    pub(super) fn sysctl(self, target: u64, highest: u64) -> Check {
        let key = self.name;
        self.judged(target, |needed| {
            if needed > highest {
                return Remedy::Manual {
                    what: format!(
                        "spread the sessions over more machines: {key} cannot exceed {highest}"
                    ),
                };
            }
            Remedy::Sysctl { key, value: needed }
        })
    }

    /// A limit that the operator must raise.
    pub(super) fn manual(self, target: u64, what: impl FnOnce() -> String) -> Check {
        self.judged(target, |_| Remedy::Manual { what: what() })
    }
}
