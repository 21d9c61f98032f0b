//! A rate limiter for repeated warnings.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Maximum number of texts that are tracked separately. Beyond it, all new ones count as one.
const MAX_TRACKED: usize = 64;
/// Key of all the others; never a real text.
const OTHERS: &str = "";

/// Rate limiter for repeated warnings, which a client could otherwise cause without limit.
#[derive(Debug)]
pub struct RateLimitedLog {
    every: Duration,
    /// Texts that are distinguished at a time.
    most: usize,
    last: Mutex<BTreeMap<String, LastLogged>>,
}

#[derive(Debug, Clone, Copy)]
struct LastLogged {
    at: Duration,
    withheld: u64,
}

impl RateLimitedLog {
    /// Allows the same text once in every such time.
    #[must_use]
    pub fn new(every: Duration) -> Self {
        Self::of_few(every, MAX_TRACKED)
    }

    /// Likewise, with at most so many different texts in that time; all others count as one.
    #[must_use]
    pub fn of_few(every: Duration, most: usize) -> Self {
        Self {
            every,
            most,
            last: Mutex::default(),
        }
    }

    /// Returns `Some` if `text` may be logged now, with the number of times it was suppressed since
    /// the last time. `now` is the time since any fixed moment, of a monotonic clock.
    pub fn allow(&self, text: &str, now: Duration) -> Option<u64> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |logged: &LastLogged| now.saturating_sub(logged.at) >= self.every;
        if !last.contains_key(text) && last.len() >= self.most {
            last.retain(|_, logged| !is_over(logged));
        }
        let key = if last.contains_key(text) || last.len() < self.most {
            text
        } else {
            OTHERS
        };
        let withheld = match last.get_mut(key) {
            Some(logged) if !is_over(logged) => {
                logged.withheld += 1;
                return None;
            }
            Some(logged) => logged.withheld,
            None => 0,
        };
        let logged = LastLogged {
            at: now,
            withheld: 0,
        };
        last.insert(key.to_owned(), logged);
        Some(withheld)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_text_is_allowed_once_an_interval_with_the_number_of_suppressed_ones() {
        let warnings = RateLimitedLog::new(Duration::from_millis(1_000));
        assert_eq!(warnings.allow("a", Duration::from_millis(5)), Some(0));
        assert_eq!(warnings.allow("a", Duration::from_millis(6)), None);
        assert_eq!(warnings.allow("b", Duration::from_millis(7)), Some(0));
        assert_eq!(warnings.allow("a", Duration::from_millis(1_004)), None);
        assert_eq!(warnings.allow("a", Duration::from_millis(1_005)), Some(2));
        assert_eq!(warnings.allow("a", Duration::from_millis(2_004)), None);
    }

    #[test]
    fn of_few_texts_each_is_allowed_and_all_others_are_one() {
        let refusals = RateLimitedLog::of_few(Duration::from_millis(1_000), 2);
        let now = Duration::from_millis(1);
        let allowed = ["a", "b", "c", "d", "a"].map(|text| refusals.allow(text, now));
        assert_eq!(allowed, [Some(0), Some(0), Some(0), None, None]);
    }

    #[test]
    fn a_client_that_invents_texts_neither_fills_the_memory_nor_the_log() {
        let warnings = RateLimitedLog::new(Duration::from_millis(1_000));
        let allowed = (0..10_000).filter(|name| {
            warnings
                .allow(&name.to_string(), Duration::from_millis(0))
                .is_some()
        });
        assert_eq!(allowed.count(), MAX_TRACKED + 1);
        let tracked = warnings.last.lock().expect("not poisoned").len();
        assert!(tracked <= MAX_TRACKED + 1);
        assert_eq!(
            warnings.allow("another", Duration::from_millis(1_000)),
            Some(0)
        );
    }
}
