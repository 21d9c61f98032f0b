//! How long the records of sessions stay whose node is gone, and would tell of them for ever.
//!
//! While a node is there it forgets what has ended on it by number, oldest first.

use std::time::Duration;

use conman_proto::ResolvedSpec;
use jiff::Timestamp;

use crate::restart::{End, lost_by};

/// What anybody may ask to see is kept for a day, as the node itself is.
const ENDED_KEPT: Duration = Duration::from_secs(24 * 3_600);
/// What still comes back when it is asked for, for a week: over holidays.
const LOST_KEPT: Duration = Duration::from_secs(7 * 24 * 3_600);

/// How long records are kept.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Of what has ended, and nobody can start again by that.
    pub ended: Duration,
    /// Of what lost its node, and whoever asks for it starts again by that.
    pub lost: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            ended: ENDED_KEPT,
            lost: LOST_KEPT,
        }
    }
}

/// What becomes of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lot {
    Stays,
    /// It goes.
    Forgotten,
    /// Its session is still the lost node's: it is to be ended first.
    Ended,
}

impl Retention {
    /// What becomes of the record of a session that nobody restarts by itself, and whose node has
    /// been seen to be gone `gone_for` so long; `ended_at` where it was given up.
    #[must_use]
    pub fn lot(
        &self,
        spec: &ResolvedSpec,
        end: End,
        ended_at: Option<Timestamp>,
        gone_for: Duration,
        now: Timestamp,
    ) -> Lot {
        let Some(ended_at) = ended_at else {
            // No record says when it was lost.
            return match gone_for >= self.lost {
                true => Lot::Ended,
                false => Lot::Stays,
            };
        };
        let kept = match lost_by(spec, end) {
            Some(_) => self.lost,
            None => self.ended,
        };
        // By another node's clock, which may be far off, or have been: so nothing goes before its node
        // was seen to be gone for as long, by a clock that nobody sets.
        let ago = Duration::try_from(now.duration_since(ended_at));
        match gone_for >= kept && ago.is_ok_and(|ago| ago >= kept) {
            true => Lot::Forgotten,
            false => Lot::Stays,
        }
    }
}

#[cfg(test)]
mod tests {
    use conman_proto::{OnNodeLoss, SessionId, SessionRequest};

    use super::*;
    use crate::{EndCause, SpecPolicy, resolve};

    const DAY: Duration = Duration::from_secs(24 * 3_600);
    const SECOND: Duration = Duration::from_secs(1);

    fn lot(end: End, ended_ago: Option<Duration>, gone_for: Duration) -> Lot {
        let id: SessionId = "alice".parse().expect("an id");
        let request = SessionRequest {
            image: Some("a:b".to_owned()),
            on_node_loss: Some(OnNodeLoss::Wait),
            ..SessionRequest::default()
        };
        let spec = resolve(&SpecPolicy::default(), &id, &request).expect("valid");
        let now = Timestamp::from_second(100_000_000).expect("a time");
        let ended_at = ended_ago.map(|ago| now - ago);
        Retention::default().lot(&spec, end, ended_at, gone_for, now)
    }

    fn ended(cause: EndCause) -> End {
        End::Ended {
            cause,
            ran: true,
            exit_code: None,
        }
    }

    #[test]
    fn what_has_ended_on_a_node_that_is_gone_is_kept_for_a_day() {
        for cause in [EndCause::Deleted, EndCause::Exited, EndCause::Failed] {
            let end = ended(cause);
            assert_eq!(lot(end, Some(DAY - SECOND), 9 * DAY), Lot::Stays);
            assert_eq!(lot(end, Some(9 * DAY), DAY - SECOND), Lot::Stays);
            assert_eq!(lot(end, Some(DAY), DAY), Lot::Forgotten);
        }
    }

    #[test]
    fn what_comes_back_when_it_is_asked_for_is_kept_for_a_week() {
        for cause in [EndCause::Preempted, EndCause::Drained, EndCause::NodeLost] {
            let end = ended(cause);
            assert_eq!(lot(end, Some(7 * DAY - SECOND), 9 * DAY), Lot::Stays);
            assert_eq!(lot(end, Some(9 * DAY), 7 * DAY - SECOND), Lot::Stays);
            assert_eq!(lot(end, Some(7 * DAY), 7 * DAY), Lot::Forgotten);
        }
        let gone = |gone_for| lot(End::NodeGone, None, gone_for);
        assert_eq!(gone(7 * DAY - SECOND), Lot::Stays);
        assert_eq!(gone(7 * DAY), Lot::Ended);
    }
}
