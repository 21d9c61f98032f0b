//! The protocol's constants and the inequality that makes a takeover safe.
//!
//! A node's fence ends at most `B` after its last effective renewal was *sent*, on its own clock;
//! an observer waits `T` on its own since it *received* proof of that renewal. Clocks run wrong by
//! at most ρ, so the fence ends first iff `B(1+ρ) < T(1−ρ)`.

use thiserror::Error;

/// All in milliseconds, but ρ in parts per million.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// R: between two renewals.
    pub renew_ms: u64,
    /// F: from a renewal's send instant to the fence's deadline.
    pub fence_ms: u64,
    /// A new shim stands at most this long after the old one died.
    pub shim_restart_ms: u64,
    /// K: what is not verified frozen this long after the deadline is killed.
    pub freeze_ms: u64,
    /// Killing `max_sessions` unfrozen containers takes at most this long.
    pub kill_ms: u64,
    /// T: an observer's patience.
    pub takeover_ms: u64,
    /// ρ: how much a clock may run fast or slow.
    pub drift_ppm: u64,
    /// A container is killed when it was frozen this long.
    pub frozen_max_ms: u64,
    /// Between two tries of whatever did not work.
    pub retry_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            renew_ms: 1_000,
            fence_ms: 5_000,
            shim_restart_ms: 1_000,
            freeze_ms: 1_000,
            kill_ms: 2_000,
            takeover_ms: 12_000,
            drift_ppm: 10_000,
            frozen_max_ms: 900_000,
            retry_ms: 250,
        }
    }
}

/// Why these constants could let two containers of one session run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "the fence may end {missing_ms} ms after a takeover: B (fence {fence_ms} ms + shim restart + \
     freeze + kill = {bound_ms} ms) stretched by the clock drift must stay below T = \
     {takeover_ms} ms shrunk by it; raise the takeover time or lower the fence's"
)]
pub struct UnsafeTiming {
    pub missing_ms: u64,
    pub fence_ms: u64,
    pub bound_ms: u64,
    pub takeover_ms: u64,
}

impl Timing {
    /// B: from a renewal's send instant to the last moment anything of the node runs.
    #[must_use]
    pub fn bound_ms(&self) -> u64 {
        [self.shim_restart_ms, self.freeze_ms, self.kill_ms]
            .into_iter()
            .fold(self.fence_ms, u64::saturating_add)
    }

    /// How long a pause of the whole machine may be: T(1−ρ) − B(1+ρ).
    ///
    /// # Errors
    /// When nothing is left, with how much is missing.
    pub fn slack_ms(&self) -> Result<u64, UnsafeTiming> {
        const MILLION: u128 = 1_000_000;
        let drift = u128::from(self.drift_ppm);
        let bound = u128::from(self.bound_ms()).saturating_mul(MILLION + drift);
        let bound = bound.div_ceil(MILLION);
        let bound = u64::try_from(bound).unwrap_or(u64::MAX);
        let patience = u128::from(self.takeover_ms) * MILLION.saturating_sub(drift) / MILLION;
        let patience = u64::try_from(patience).unwrap_or(u64::MAX);
        if bound < patience {
            return Ok(patience - bound);
        }
        Err(UnsafeTiming {
            missing_ms: (bound - patience).saturating_add(1),
            fence_ms: self.fence_ms,
            bound_ms: self.bound_ms(),
            takeover_ms: self.takeover_ms,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_safe_and_leave_room_for_a_pause() {
        assert_eq!(Timing::default().slack_ms(), Ok(11_880 - 9_090));
    }

    #[test]
    fn raising_the_takeover_time_by_what_is_missing_makes_it_safe() {
        let mut timing = Timing {
            takeover_ms: 8_000,
            drift_ppm: 0,
            ..Timing::default()
        };
        let error = timing.slack_ms().expect_err("unsafe");
        timing.takeover_ms += error.missing_ms;
        assert_eq!(timing.slack_ms(), Ok(1));
        timing.takeover_ms -= 1;
        assert!(timing.slack_ms().is_err());
    }
}
