use std::collections::BTreeMap;

/// Maximum number of texts that are tracked separately. Beyond it, all new ones count as one.
const MAX_KNOWN: usize = 64;
/// Key of all the others; never a real text.
const OTHERS: &str = "";

/// Rate limiter for repeated warnings, which a client could otherwise cause without limit.
#[derive(Debug, Clone)]
pub struct Sparing {
    every_ms: u64,
    known: BTreeMap<String, Said>,
}

#[derive(Debug, Clone, Copy)]
struct Said {
    at_ms: u64,
    withheld: u64,
}

impl Sparing {
    /// Allows the same text once every `every_ms`.
    #[must_use]
    pub fn new(every_ms: u64) -> Self {
        Self {
            every_ms,
            known: BTreeMap::new(),
        }
    }

    /// Returns `Some` if `what` may be logged now, with the number of times it was suppressed since
    /// the last time. `now_ms` is of a monotonic clock.
    pub fn say(&mut self, what: &str, now_ms: u64) -> Option<u64> {
        let every_ms = self.every_ms;
        let is_over = |said: &Said| now_ms.saturating_sub(said.at_ms) >= every_ms;
        if !self.known.contains_key(what) && self.known.len() >= MAX_KNOWN {
            self.known.retain(|_, said| !is_over(said));
        }
        let key = if self.known.contains_key(what) || self.known.len() < MAX_KNOWN {
            what
        } else {
            OTHERS
        };
        match self.known.get_mut(key) {
            Some(said) if !is_over(said) => {
                said.withheld += 1;
                None
            }
            Some(said) => {
                let withheld = said.withheld;
                *said = Said {
                    at_ms: now_ms,
                    withheld: 0,
                };
                Some(withheld)
            }
            None => {
                let said = Said {
                    at_ms: now_ms,
                    withheld: 0,
                };
                self.known.insert(key.to_owned(), said);
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_said_now_and_then_with_how_often_it_was_not() {
        let mut sparing = Sparing::new(1_000);
        assert_eq!(sparing.say("a", 5), Some(0));
        assert_eq!(sparing.say("a", 6), None);
        assert_eq!(sparing.say("b", 7), Some(0));
        assert_eq!(sparing.say("a", 1_004), None);
        assert_eq!(sparing.say("a", 1_005), Some(2));
        assert_eq!(sparing.say("a", 2_004), None);
    }

    #[test]
    fn whoever_invents_names_is_neither_remembered_nor_heard_without_end() {
        let mut sparing = Sparing::new(1_000);
        let said = (0..10_000).filter(|name| sparing.say(&name.to_string(), 0).is_some());
        assert_eq!(said.count(), MAX_KNOWN + 1);
        assert!(sparing.known.len() <= MAX_KNOWN + 1);
        assert_eq!(sparing.say("another", 1_000), Some(0));
    }
}
