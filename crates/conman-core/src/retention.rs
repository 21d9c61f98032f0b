//! How long records of sessions stay whose node is lost; without a limit they would stay forever.
//!
//! A live node limits the number of its ended sessions' records and forgets the oldest first.

use std::time::Duration;

use conman_proto::ResolvedSpec;
use jiff::Timestamp;

use crate::restart::{End, lost_by};

/// Ended sessions can be looked up for a day, like a lost node.
const ENDED_KEPT: Duration = Duration::from_secs(24 * 3_600);
/// Sessions that start again on the next request are kept for a week, which covers holidays.
const LOST_KEPT: Duration = Duration::from_secs(7 * 24 * 3_600);

/// How long records are kept.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Records of sessions that have ended and cannot be started again from their record.
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

/// A node's age is stored once it has grown by this much: frequent writes to the registry cost more
/// than forgetting this much later.
pub const AGE_STEP: Duration = Duration::from_secs(600);

/// For how long a node has been observed to be lost since its last life: measured by monotonic
/// clocks, and never longer than the truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Age {
    /// The incarnation that is over. A node that comes back has a greater one, which invalidates
    /// earlier observations.
    pub incarnation: u64,
    pub gone_for: Duration,
}

impl Age {
    /// For a node that was not observed to be lost before.
    #[must_use]
    pub fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            gone_for: Duration::ZERO,
        }
    }

    /// The longest of the ages of this incarnation: each was observed, so none is too long.
    #[must_use]
    pub fn or_longer(self, others: impl IntoIterator<Item = Age>) -> Self {
        let same = |other: &Age| other.incarnation == self.incarnation;
        let others = others.into_iter().filter(same);
        others.fold(self, |longest, other| Self {
            gone_for: longest.gone_for.max(other.gone_for),
            ..longest
        })
    }

    /// Whether it replaces the stored age: that is of an earlier incarnation, or too short by a
    /// step.
    #[must_use]
    pub fn is_news_to(self, kept: Option<Age>) -> bool {
        let kept = match kept {
            Some(kept) if kept.incarnation > self.incarnation => return false,
            Some(kept) if kept.incarnation == self.incarnation => kept.gone_for,
            Some(_) | None => Duration::ZERO,
        };
        self.gone_for >= kept.saturating_add(AGE_STEP)
    }
}

/// What is done with a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lot {
    Stays,
    /// It is deleted.
    Forgotten,
    /// Its session is still owned by the lost node: end it first.
    Ended,
}

impl Retention {
    /// Decides on the record of a session that is not restarted automatically, and whose node has
    /// been observed to be lost for `gone_for`; `ended_at` if it was given up.
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
        // `ended_at` is by another node's clock, which may be wrong. So a record is deleted only
        // after its node was observed to be lost for as long, by a monotonic clock.
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
        for cause in [EndCause::Deleted, EndCause::Exited, EndCause::StartFailed] {
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

    const STEP: Duration = AGE_STEP;

    fn age(incarnation: u64, gone_for: Duration) -> Age {
        Age {
            incarnation,
            gone_for,
        }
    }

    #[test]
    fn an_age_is_the_longest_that_was_seen_of_the_same_life() {
        let seen = [
            age(2, 9 * DAY),
            age(3, DAY),
            age(3, SECOND),
            age(4, 8 * DAY),
        ];
        assert_eq!(Age::new(3).or_longer(seen), age(3, DAY));
        assert_eq!(age(3, 2 * DAY).or_longer(seen), age(3, 2 * DAY));
        assert_eq!(Age::new(5).or_longer(seen), age(5, Duration::ZERO));
    }

    #[test]
    fn an_age_is_kept_step_by_step_and_one_of_an_earlier_life_never() {
        assert!(!age(3, STEP - SECOND).is_news_to(None));
        assert!(age(3, STEP).is_news_to(None));
        let kept = Some(age(3, DAY));
        assert!(!age(3, DAY + STEP - SECOND).is_news_to(kept));
        assert!(age(3, DAY + STEP).is_news_to(kept));
        assert!(!age(2, 9 * DAY).is_news_to(kept));
        assert!(!age(4, STEP - SECOND).is_news_to(kept));
        assert!(age(4, STEP).is_news_to(kept));
    }
}
