//! The dead-man fence, without clock or cgroups.
//!
//! ```text
//! Unarmed ──extend──▶ Armed ──deadline──▶ Freezing ──proof──▶ Fenced
//!    ▲                 ▲ │ extend            │  ▲               │
//!    └────disarm───────┘ ┘                   │  └ patience over: │ the unfrozen are killed
//!    ▲                 ▲                     │                  │
//!    └─────────────────┴───────lift──────────┴──────────────────┘
//! ```
//! Only an order lifts it, never a later deadline alone: whoever comes back from the dead must
//! first make sure whose the containers are.

use std::time::Duration;

use crate::protocol::FenceState;

/// Pause between two looks whether everything is frozen.
const LOOK_NS: u64 = 2_000_000;

/// What the fence wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FenceStep {
    Nothing,
    /// Order the freezing of everything, then look.
    Freeze,
    /// Look whether everything is frozen.
    Look,
    /// Look, and kill what is not frozen.
    KillUnfrozen,
}

/// Times are nanoseconds on CLOCK_BOOTTIME.
#[derive(Debug)]
pub(crate) struct Fence {
    state: FenceState,
    /// The latest deadline that was ever given, also while fenced; `None` when disarmed.
    deadline: Option<u64>,
    patience_ns: u64,
}

impl Fence {
    pub(crate) fn new(patience: Duration) -> Self {
        Self {
            state: FenceState::Unarmed,
            deadline: None,
            patience_ns: u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX),
        }
    }

    pub(crate) fn state(&self) -> FenceState {
        self.state
    }

    /// The latest deadline; `None` when there is none.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    /// Whether nothing may start.
    pub(crate) fn is_closed(&self) -> bool {
        match self.state {
            FenceState::Unarmed | FenceState::Armed { .. } => false,
            FenceState::Freezing { .. } | FenceState::Fenced { .. } => true,
        }
    }

    /// A deadline; an earlier one than the present is passed over.
    pub(crate) fn extend(&mut self, until_ns: u64) {
        let until_boottime_ns = self.deadline.map_or(until_ns, |old| old.max(until_ns));
        self.deadline = Some(until_boottime_ns);
        if !self.is_closed() {
            self.state = FenceState::Armed { until_boottime_ns };
        }
    }

    /// No deadline any more.
    pub(crate) fn disarm(&mut self) {
        self.deadline = None;
        if !self.is_closed() {
            self.state = FenceState::Unarmed;
        }
    }

    /// Opens it again: `true` when everything is to be thawed. `false`, and nothing changes, with a
    /// deadline that has passed.
    pub(crate) fn lift(&mut self, now_ns: u64) -> bool {
        match self.deadline {
            Some(until) if until <= now_ns => false,
            Some(until_boottime_ns) => {
                self.state = FenceState::Armed { until_boottime_ns };
                true
            }
            None => {
                self.state = FenceState::Unarmed;
                true
            }
        }
    }

    /// What is due.
    pub(crate) fn on_time(&mut self, now_ns: u64) -> FenceStep {
        match self.state {
            FenceState::Armed { until_boottime_ns } if until_boottime_ns <= now_ns => {
                self.state = FenceState::Freezing {
                    since_boottime_ns: now_ns,
                };
                FenceStep::Freeze
            }
            FenceState::Freezing { since_boottime_ns } => {
                if now_ns.saturating_sub(since_boottime_ns) >= self.patience_ns {
                    FenceStep::KillUnfrozen
                } else {
                    FenceStep::Look
                }
            }
            FenceState::Unarmed | FenceState::Armed { .. } | FenceState::Fenced { .. } => {
                FenceStep::Nothing
            }
        }
    }

    /// Everything has been seen frozen.
    pub(crate) fn proven(&mut self) {
        if let FenceState::Freezing { since_boottime_ns } = self.state {
            self.state = FenceState::Fenced { since_boottime_ns };
        }
    }

    /// When [`Fence::on_time`] should be asked next.
    pub(crate) fn next_wake_ns(&self, now_ns: u64) -> Option<u64> {
        match self.state {
            FenceState::Armed { until_boottime_ns } => Some(until_boottime_ns),
            FenceState::Freezing { .. } => Some(now_ns.saturating_add(LOOK_NS)),
            FenceState::Unarmed | FenceState::Fenced { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fence() -> Fence {
        Fence::new(Duration::from_nanos(100))
    }

    #[test]
    fn it_freezes_at_the_deadline_looks_and_kills_what_is_not_frozen_in_time() {
        let mut fence = fence();
        assert_eq!(fence.on_time(u64::MAX), FenceStep::Nothing);
        fence.extend(1_000);
        assert_eq!(fence.on_time(999), FenceStep::Nothing);
        assert_eq!(fence.on_time(1_000), FenceStep::Freeze);
        assert!(fence.is_closed());
        assert_eq!(fence.on_time(1_099), FenceStep::Look);
        assert_eq!(fence.on_time(1_100), FenceStep::KillUnfrozen);
        fence.proven();
        assert_eq!(fence.on_time(9_000), FenceStep::Nothing);
        assert_eq!(fence.next_wake_ns(9_000), None);
    }

    #[test]
    fn a_later_deadline_alone_does_not_lift_it() {
        let mut fence = fence();
        fence.extend(1_000);
        let _ = fence.on_time(1_000);
        fence.extend(5_000);
        assert!(fence.is_closed());
        assert!(!fence.lift(5_000));
        assert!(fence.lift(4_999));
        assert_eq!(
            fence.state(),
            FenceState::Armed {
                until_boottime_ns: 5_000
            }
        );
    }

    #[test]
    fn disarming_does_not_thaw_but_lets_it_be_lifted() {
        let mut fence = fence();
        fence.extend(1_000);
        let _ = fence.on_time(1_000);
        fence.disarm();
        assert!(fence.is_closed());
        assert!(fence.lift(9_999));
        assert_eq!(fence.state(), FenceState::Unarmed);
    }

    proptest! {
        #[test]
        fn the_deadline_never_moves_back(until in proptest::collection::vec(1..1_000_u64, 1..20)) {
            let mut fence = fence();
            for one in &until {
                fence.extend(*one);
            }
            let latest = until.iter().copied().max().unwrap_or(0);
            prop_assert_eq!(fence.on_time(latest - 1), FenceStep::Nothing);
            prop_assert_eq!(fence.on_time(latest), FenceStep::Freeze);
        }
    }
}
