//! Time-outs of fleets that tests can wait for.

use std::fmt::Write as _;
use std::time::Duration;

use conman_core::ownership::Timing;

use crate::overlap::Scale;

/// Half the defaults: takeovers come soon, and a loaded machine may still stand still for more than a
/// second before the protocol's assumptions end.
pub(crate) const SHORT: Timing = Timing {
    renew_ms: 400,
    fence_ms: 2_000,
    shim_restart_ms: 1_000,
    freeze_ms: 500,
    kill_ms: 1_000,
    takeover_ms: 6_000,
    drift_ppm: 10_000,
    frozen_max_ms: 900_000,
    retry_ms: 250,
};

/// [`SHORT`], and on a machine that is many times as slow as usual twice that: it may stand still for longer.
pub(crate) fn short() -> Timing {
    scaled(u64::from((conman_e2e::slowness() / 4).clamp(1, MOST)))
}

/// More would make the suite wait for takeovers longer than it computes.
const MOST: u32 = 2;

/// A fence that stays open while etcd elects a leader, on a loaded machine, too.
pub(crate) fn patient() -> Timing {
    let patient = Timing {
        fence_ms: 20_000,
        ..Timing::default()
    };
    patient.derive_takeover(0)
}

fn scaled(times: u64) -> Timing {
    Timing {
        renew_ms: SHORT.renew_ms * times,
        fence_ms: SHORT.fence_ms * times,
        shim_restart_ms: SHORT.shim_restart_ms * times,
        freeze_ms: SHORT.freeze_ms * times,
        kill_ms: SHORT.kill_ms * times,
        takeover_ms: SHORT.takeover_ms * times,
        ..SHORT
    }
}

/// As the configuration has them.
pub(crate) fn lines(timing: &Timing) -> String {
    let fields = [
        ("renew_ms", timing.renew_ms),
        ("fence_ms", timing.fence_ms),
        ("shim_restart_ms", timing.shim_restart_ms),
        ("freeze_ms", timing.freeze_ms),
        ("kill_ms", timing.kill_ms),
        ("takeover_ms", timing.takeover_ms),
        ("drift_ppm", timing.drift_ppm),
    ];
    let mut text = String::new();
    for (field, value) in fields {
        let _ = writeln!(text, "{field} = {value}");
    }
    text
}

impl Scale {
    /// That of a fleet with these time-outs.
    #[must_use]
    pub fn of(timing: &Timing) -> Self {
        Self {
            takeover: Duration::from_millis(timing.takeover_ms),
            slack: Duration::from_millis(timing.slack_ms().unwrap_or(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_time_outs_are_safe_and_bear_a_machine_that_stands_still_for_a_second() {
        for times in 1..=u64::from(MOST) {
            let slack = scaled(times).slack_ms();
            assert!(slack.is_ok_and(|slack| slack > 1_000 * times), "{times}");
        }
    }
}
