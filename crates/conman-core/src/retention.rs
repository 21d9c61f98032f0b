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

/// A node's age is kept once it has grown by so much: a registry that is written to all the time costs
/// more than to forget so much later.
pub const AGE_STEP: Duration = Duration::from_secs(600);

/// For how long a node has been gone since its last life, as far as somebody saw it: by clocks that
/// nobody sets, and never longer than it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Age {
    /// Of the life that is over. Whoever comes back has a greater one, so that what was seen before
    /// says nothing any more.
    pub incarnation: u64,
    pub gone_for: Duration,
}

impl Age {
    /// Of a node that nobody has seen to be gone before.
    #[must_use]
    pub fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            gone_for: Duration::ZERO,
        }
    }

    /// The longest of those that are of this life: each was seen, so none is too long.
    #[must_use]
    pub fn or_longer(self, others: impl IntoIterator<Item = Age>) -> Self {
        let same = |other: &Age| other.incarnation == self.incarnation;
        let others = others.into_iter().filter(same);
        others.fold(self, |longest, other| Self {
            gone_for: longest.gone_for.max(other.gone_for),
            ..longest
        })
    }

    /// Whether it is to be kept in place of what is: of an earlier life, or too short by a step.
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
