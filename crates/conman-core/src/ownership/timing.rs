//! The protocol's constants and the inequality that makes a takeover safe.
//!
//! A node's fence ends at most `B` after its last effective renewal was *sent*, on its clock; an
//! observer waits `T` on its clock since it *received* proof of that renewal. Clocks are wrong by
//! at most ρ, so the fence ends first iff `B(1+ρ) < T(1−ρ)`. B is the node's and T the observer's.
//! Where their settings differ, as while a fleet's settings are changed, a node publishes the T for
//! which its settings were verified, and its observers wait for that if it is longer.

use thiserror::Error;

/// The unit of ρ.
const MILLION: u128 = 1_000_000;

/// Killing a container that does not freeze is estimated at half a millisecond; `conman bench kill`
/// measures a machine's time.
pub const KILLS_PER_MS: u64 = 2;

/// Time for killing, at least: a kill that fails is repeated.
const MIN_KILL_MS: u64 = 1_000;

/// A derived takeover time bears a pause of the machine this long, at least.
const MIN_SLACK_MS: u64 = 1_300;

/// A derived takeover time bears this multiple of the host's longest recorded stall.
const STALL_FACTOR: u64 = 2;

/// A longer stall counts as one of this length: no takeover time bears a machine that was suspended.
const MAX_STALL_MS: u64 = 5_000;

/// F bears this many round trips of the store.
const ROUND_TRIPS: u64 = 3;

/// An F that is proposed is a multiple of this.
const FENCE_STEP_MS: u64 = 100;

/// In milliseconds, except ρ in parts per million.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// R: interval between two renewals.
    pub renew_ms: u64,
    /// F: from a renewal's send instant to the fence's deadline.
    pub fence_ms: u64,
    /// A new shim is ready at most this long after the old one died.
    pub shim_restart_ms: u64,
    /// K: a slot that is not verified frozen this long after the deadline is killed.
    pub freeze_ms: u64,
    /// Killing `max_sessions` unfrozen containers takes at most this long.
    pub kill_ms: u64,
    /// T: an observer's waiting time.
    pub takeover_ms: u64,
    /// ρ: how much a clock may run fast or slow.
    pub drift_ppm: u64,
    /// A container that was frozen for this long is killed.
    pub frozen_max_ms: u64,
    /// Interval between attempts.
    pub retry_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            renew_ms: 1_000,
            fence_ms: 5_000,
            shim_restart_ms: 1_000,
            freeze_ms: 1_000,
            kill_ms: MIN_KILL_MS,
            takeover_ms: 9_475,
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
    /// How long killing this many containers may take.
    #[must_use]
    pub fn kill_ms(sessions: u64) -> u64 {
        sessions.div_ceil(KILLS_PER_MS).max(MIN_KILL_MS)
    }

    /// The same with the shortest T that is safe on a host that has stood still for
    /// `longest_stall_ms`.
    #[must_use]
    pub fn derive_takeover(self, longest_stall_ms: u64) -> Self {
        let stall_ms = longest_stall_ms.min(MAX_STALL_MS);
        let slack_ms = MIN_SLACK_MS.max(stall_ms * STALL_FACTOR);
        let takeover_ms = self.own_clock_ms(self.stretched_ms().saturating_add(slack_ms));
        Self {
            takeover_ms,
            ..self
        }
    }

    /// The longest round trip of the store with which no renewal comes too late, even if one is lost.
    #[must_use]
    pub fn borne_round_trip_ms(&self) -> u64 {
        self.fence_ms / ROUND_TRIPS
    }

    /// The same with the shortest F and T for a store whose round trip takes `round_trip_ms`.
    #[must_use]
    pub fn fitting(self, round_trip_ms: u64) -> Self {
        let needed_ms = round_trip_ms.saturating_mul(ROUND_TRIPS);
        let fence_ms = needed_ms.next_multiple_of(FENCE_STEP_MS);
        let longer = Self { fence_ms, ..self };
        longer.derive_takeover(0)
    }

    /// The same for a node on which this many containers live already, perhaps more than it is
    /// configured for: both the time for killing and T grow.
    #[must_use]
    pub fn for_sessions(self, sessions: u64) -> Self {
        let needed = Self {
            kill_ms: self.kill_ms.max(sessions.div_ceil(KILLS_PER_MS)),
            ..self
        };
        let growth_ms = needed.stretched_ms() - self.stretched_ms();
        Self {
            takeover_ms: self
                .takeover_ms
                .saturating_add(self.own_clock_ms(growth_ms)),
            ..needed
        }
    }

    /// B: from a renewal's send instant to the last moment at which anything of the node runs.
    #[must_use]
    pub fn bound_ms(&self) -> u64 {
        [self.shim_restart_ms, self.freeze_ms, self.kill_ms]
            .into_iter()
            .fold(self.fence_ms, u64::saturating_add)
    }

    /// B(1+ρ): the same in true time, at most.
    #[must_use]
    pub fn stretched_ms(&self) -> u64 {
        let rate = MILLION + u128::from(self.drift_ppm);
        let bound = u128::from(self.bound_ms()).saturating_mul(rate);
        u64::try_from(bound.div_ceil(MILLION)).unwrap_or(u64::MAX)
    }

    /// How many containers can be killed in time, at [`KILLS_PER_MS`].
    #[must_use]
    pub fn killed_in_time(&self) -> u64 {
        self.kill_ms.saturating_mul(KILLS_PER_MS)
    }

    /// T(1−ρ), in true time: how long the silence of a node with these settings has lasted at least
    /// before the node may be declared dead. The node publishes it.
    #[must_use]
    pub fn silence_ms(&self) -> u64 {
        let rate = MILLION.saturating_sub(u128::from(self.drift_ppm));
        let silence = u128::from(self.takeover_ms) * rate / MILLION;
        u64::try_from(silence).unwrap_or(u64::MAX)
    }

    /// How long to observe a node that publishes how long its silence has to last.
    #[must_use]
    pub fn patience_ms(&self, silence_ms: Option<u64>) -> u64 {
        self.takeover_ms
            .max(self.own_clock_ms(silence_ms.unwrap_or(0)))
    }

    /// After how much time of an own clock that runs fast `true_ms` have passed for certain.
    fn own_clock_ms(&self, true_ms: u64) -> u64 {
        let rate = MILLION.saturating_sub(u128::from(self.drift_ppm)).max(1);
        let own_ms = (u128::from(true_ms) * MILLION).div_ceil(rate);
        u64::try_from(own_ms).unwrap_or(u64::MAX)
    }

    /// How long the whole machine may pause: T(1−ρ) − B(1+ρ).
    ///
    /// # Errors
    /// When nothing is left, with how much is missing.
    pub fn slack_ms(&self) -> Result<u64, UnsafeTiming> {
        let (bound, patience) = (self.stretched_ms(), self.silence_ms());
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
    fn the_defaults_are_the_shortest_safe_times_of_a_host_that_never_stood_still() {
        let timing = Timing::default();
        assert_eq!(timing, timing.derive_takeover(0));
        assert!(timing.takeover_ms <= 9_500, "{timing:?}");
        assert_eq!(timing.kill_ms, Timing::kill_ms(1_000));
        assert_eq!(timing.slack_ms(), Ok(MIN_SLACK_MS));
    }

    #[test]
    fn derived_times_bear_twice_the_longest_stall_except_a_suspended_machine() {
        let derived = |stall_ms| Timing::default().derive_takeover(stall_ms);
        assert_eq!(derived(650), derived(0));
        assert_eq!(derived(1_000).slack_ms(), Ok(2_000));
        assert_eq!(derived(u64::MAX), derived(MAX_STALL_MS));
        let many = Timing {
            kill_ms: Timing::kill_ms(10_001),
            ..Timing::default()
        };
        assert_eq!(many.kill_ms, 5_001);
        assert!(many.slack_ms().is_err(), "for 2,000 sessions at most");
        assert!(many.derive_takeover(0).slack_ms().is_ok());
    }

    #[test]
    fn times_that_fit_a_slow_store_bear_its_round_trip_and_are_safe() {
        let timing = Timing::default();
        assert_eq!(timing.borne_round_trip_ms(), 1_666);
        let fitting = timing.fitting(2_101);
        assert_eq!(fitting.fence_ms, 6_400);
        assert!(fitting.borne_round_trip_ms() >= 2_101);
        assert!(fitting.slack_ms().is_ok() && fitting.takeover_ms > timing.takeover_ms);
    }

    #[test]
    fn a_node_of_longer_times_is_waited_for_by_one_of_shorter_ones() {
        let (short, long) = (
            Timing::default(),
            Timing {
                fence_ms: 20_000,
                takeover_ms: 30_000,
                ..Timing::default()
            },
        );
        let (short_said, long_said) = (Some(short.silence_ms()), Some(long.silence_ms()));
        assert_eq!(short.patience_ms(None), short.takeover_ms);
        assert_eq!(short.patience_ms(short_said), short.takeover_ms);
        assert_eq!(short.patience_ms(long_said), 30_000);
        assert_eq!(long.patience_ms(short_said), 30_000);
        let wrong = Timing {
            drift_ppm: 100_000,
            ..short
        };
        let patience = wrong.patience_ms(long_said);
        assert_eq!(patience, 33_000, "a clock that may run faster waits longer");
        assert_eq!(short.patience_ms(Some(u64::MAX)), u64::MAX);
    }

    #[test]
    fn more_containers_than_configured_lengthen_the_takeover_time_as_much_as_their_killing() {
        let timing = Timing::default();
        assert_eq!(timing.for_sessions(2_000), timing);
        let more = timing.for_sessions(8_000);
        assert_eq!(more.kill_ms, 4_000);
        let slack = |timing: Timing| timing.slack_ms().expect("it is safe");
        assert!(slack(more) >= slack(timing), "{more:?}");
    }

    #[test]
    fn raising_the_takeover_time_by_what_is_missing_makes_it_safe() {
        let mut timing = Timing {
            takeover_ms: 6_000,
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
