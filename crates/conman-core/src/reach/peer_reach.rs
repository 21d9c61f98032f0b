//! Whether a node reaches one peer, by its probes: a change counts once it is steady.

use crate::ownership::BootTime;

/// How long probes must contradict what is reported before the report changes.
pub const STEADY_MS: u64 = 2_000;

/// How many probes must do so, at least: one lost packet is no cut.
const MIN_PROBES: u32 = 2;

/// One peer, as a node reports it.
///
/// ```text
/// reached ──probes failed for STEADY_MS──▶ unreached ──answered for STEADY_MS──▶ reached
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerReach {
    is_unreached: bool,
    /// The first of the latest probes that contradict the report without an exception, and how many
    /// they are.
    contrary: Option<(BootTime, u32)>,
}

impl PeerReach {
    /// Returns whether the node reports that it does not reach the peer.
    #[must_use]
    pub fn is_unreached(&self) -> bool {
        self.is_unreached
    }

    /// Handles the result of a probe that was sent at `sent` and has ended at `now`.
    pub fn probed(&mut self, sent: BootTime, now: BootTime, answered: bool) {
        if answered != self.is_unreached {
            self.contrary = None;
            return;
        }
        let (since, probes) = self.contrary.get_or_insert((sent, 0));
        *probes += 1;
        if *probes >= MIN_PROBES && now.since(*since) >= STEADY_MS {
            *self = Self {
                is_unreached: !answered,
                contrary: None,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_changes_once_probes_contradict_it_for_long_enough() {
        let mut reach = PeerReach::default();
        let mut at = |ms, answered| {
            reach.probed(BootTime(ms), BootTime(ms), answered);
            reach.is_unreached()
        };
        assert!(!at(0, true));
        assert!(!at(1_000, false), "one probe");
        assert!(!at(2_000, true), "another answer in between");
        assert!(!at(3_000, false));
        assert!(!at(4_999, false));
        assert!(at(5_000, false));
        assert!(at(6_000, true));
        assert!(at(7_000, false), "it flaps");
        assert!(at(8_000, true));
        assert!(!at(10_000, true));
    }

    #[test]
    fn one_probe_that_takes_long_is_not_enough() {
        let mut reach = PeerReach::default();
        reach.probed(BootTime(0), BootTime(3_000), false);
        assert!(!reach.is_unreached());
        reach.probed(BootTime(4_000), BootTime(6_000), false);
        assert!(reach.is_unreached());
    }
}
