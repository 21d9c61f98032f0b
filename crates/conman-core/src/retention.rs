//! How long lost nodes, and the records of their sessions, stay; without a limit they would stay
//! forever.
//!
//! A live node limits the number of its ended sessions' records and forgets the oldest first. All
//! times here are wall clocks of several nodes: they decide how long something stays listed, and
//! never who owns a session.

use std::time::Duration;

use conman_proto::ResolvedSpec;
use jiff::Timestamp;

use crate::restart::{Ownerless, lost_by};

/// Ended sessions and lost nodes can be looked up for a day.
const ENDED_KEPT: Duration = Duration::from_hours(24);
/// Sessions that start again on the next request are kept for a week, which covers holidays.
const LOST_KEPT: Duration = Duration::from_hours(7 * 24);

/// How long records are kept.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Lost nodes that own nothing, and records of sessions that have ended and cannot be started
    /// again from their record.
    pub ended: Duration,
    /// Records of sessions that lost their node and start again on the next request.
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

/// How a record is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    Forget,
    /// Its session is still owned by the lost node: end it first.
    End,
}

impl Retention {
    /// Whether a node that was declared dead at `fenced_at`, and owns nothing, is forgotten.
    #[must_use]
    pub fn forgets_node(&self, fenced_at: Timestamp, now: Timestamp) -> bool {
        has_passed(self.ended, fenced_at, now)
    }

    /// Decides on the record of a session that is not restarted automatically, and whose node is
    /// lost: declared dead at `fenced_at`, or `None` if it is forgotten. `ended_at` if the session
    /// was given up.
    #[must_use]
    pub fn removal(
        &self,
        spec: &ResolvedSpec,
        end: Ownerless,
        ended_at: Option<Timestamp>,
        fenced_at: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<Removal> {
        let Some(ended_at) = ended_at else {
            let is_over = fenced_at.is_some_and(|at| has_passed(self.lost, at, now));
            return is_over.then_some(Removal::End);
        };
        let kept = match lost_by(spec, end) {
            Some(_) => self.lost,
            None => self.ended,
        };
        let since = fenced_at.map_or(ended_at, |at| at.max(ended_at));
        has_passed(kept, since, now).then_some(Removal::Forget)
    }
}

fn has_passed(time: Duration, since: Timestamp, now: Timestamp) -> bool {
    Duration::try_from(now.duration_since(since)).is_ok_and(|ago| ago >= time)
}

#[cfg(test)]
mod tests {
    use conman_proto::{OnNodeLoss, SessionId, SessionRequest};

    use super::*;
    use crate::{EndCause, SpecPolicy, resolve};

    const DAY: Duration = ENDED_KEPT;
    const SECOND: Duration = Duration::from_secs(1);

    fn removal(
        end: Ownerless,
        ended_ago: Option<Duration>,
        fenced_ago: Option<Duration>,
    ) -> Option<Removal> {
        let id: SessionId = "alice".parse().expect("an id");
        let request = SessionRequest {
            image: Some("a:b".to_owned()),
            on_node_loss: Some(OnNodeLoss::Wait),
            ..SessionRequest::default()
        };
        let spec = resolve(&SpecPolicy::default(), &id, &request).expect("valid");
        let now = Timestamp::from_second(100_000_000).expect("a time");
        let [ended_at, fenced_at] = [ended_ago, fenced_ago].map(|ago| ago.map(|ago| now - ago));
        Retention::default().removal(&spec, end, ended_at, fenced_at, now)
    }

    fn ended(cause: EndCause) -> Ownerless {
        Ownerless::Ended {
            cause,
            ran: true,
            exit_code: None,
        }
    }

    #[test]
    fn a_session_that_ended_on_a_lost_node_is_kept_for_a_day() {
        for cause in [EndCause::Deleted, EndCause::Exited, EndCause::StartFailed] {
            let removal =
                |ended_ago, fenced_ago| removal(ended(cause), Some(ended_ago), fenced_ago);
            assert_eq!(removal(DAY - SECOND, Some(9 * DAY)), None);
            assert_eq!(removal(9 * DAY, Some(DAY - SECOND)), None);
            assert_eq!(removal(DAY, Some(DAY)), Some(Removal::Forget));
            // A forgotten node has been lost for long, or an operator does not want it.
            assert_eq!(removal(DAY - SECOND, None), None);
            assert_eq!(removal(DAY, None), Some(Removal::Forget));
        }
    }

    #[test]
    fn a_session_that_starts_on_the_next_request_is_kept_for_a_week() {
        for cause in [EndCause::Preempted, EndCause::Drained, EndCause::NodeLost] {
            let removal =
                |ended_ago, fenced_ago| removal(ended(cause), Some(ended_ago), fenced_ago);
            assert_eq!(removal(7 * DAY - SECOND, Some(9 * DAY)), None);
            assert_eq!(removal(9 * DAY, Some(7 * DAY - SECOND)), None);
            assert_eq!(removal(7 * DAY, Some(7 * DAY)), Some(Removal::Forget));
        }
        let owned = |fenced_ago| removal(Ownerless::NodeGone, None, fenced_ago);
        assert_eq!(owned(Some(7 * DAY - SECOND)), None);
        assert_eq!(owned(Some(7 * DAY)), Some(Removal::End));
        assert_eq!(owned(None), None);
    }

    #[test]
    fn a_lost_node_is_kept_for_a_day_and_while_its_time_is_in_the_future() {
        let now = Timestamp::from_second(100_000_000).expect("a time");
        let forgets = |fenced_at| Retention::default().forgets_node(fenced_at, now);
        assert!(!forgets(now - (DAY - SECOND)));
        assert!(forgets(now - DAY));
        assert!(!forgets(now + DAY));
    }
}
