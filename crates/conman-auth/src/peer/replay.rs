//! The nonces of known connections.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Maximum number of nonces: connections that other nodes open within twice the clock tolerance. 80
/// bytes each.
const MAX_NONCES: usize = 1 << 17;

/// Identifies one connection of a peer.
pub(super) type Nonce = [u8; 16];

/// Nonces that have not expired.
#[derive(Debug, Default)]
pub(super) struct Nonces {
    known: HashSet<Nonce>,
    /// Number of known nonces by sender.
    senders: HashMap<Arc<str>, usize>,
    /// Roughly ordered by expiry: requests that arrive late are added late.
    queue: VecDeque<Noted>,
}

#[derive(Debug)]
struct Noted {
    until_ms: u64,
    nonce: Nonce,
    sender: Arc<str>,
}

/// Why a nonce is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NonceRefused {
    Known,
    /// Too many connections in total, or too many of this sender to leave room for others.
    Full,
}

impl Nonces {
    /// Remembers a nonce of a node until it expires at `until_ms`.
    ///
    /// A sender may have as many nonces as there is free room (dynamic thresholds, Choudhury and
    /// Hahne, 1998): alone, half of all; and whatever other senders do, there is room for one more.
    pub(super) fn take(
        &mut self,
        sender: &str,
        nonce: Nonce,
        until_ms: u64,
        now_ms: u64,
    ) -> Result<(), NonceRefused> {
        self.forget(now_ms);
        if self.known.contains(&nonce) {
            return Err(NonceRefused::Known);
        }
        let (sender, count) = match self.senders.get_key_value(sender) {
            Some((sender, count)) => (Arc::clone(sender), *count),
            None => (Arc::from(sender), 0),
        };
        if count >= MAX_NONCES - self.queue.len() {
            return Err(NonceRefused::Full);
        }
        self.known.insert(nonce);
        self.senders.insert(Arc::clone(&sender), count + 1);
        self.queue.push_back(Noted {
            until_ms,
            nonce,
            sender,
        });
        Ok(())
    }

    fn forget(&mut self, now_ms: u64) {
        while let Some(noted) = self.queue.pop_front_if(|noted| noted.until_ms < now_ms) {
            self.known.remove(&noted.nonce);
            if let Entry::Occupied(mut count) = self.senders.entry(noted.sender) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nonce(number: usize) -> Nonce {
        (number as u128).to_be_bytes()
    }

    /// Takes all nonces that `sender` may have in addition to the known ones.
    fn fill(nonces: &mut Nonces, sender: &str) -> usize {
        let first = nonces.queue.len();
        let taken = |number| nonces.take(sender, nonce(number), 100, 0) == Ok(());
        (first..).map(taken).take_while(|taken| *taken).count()
    }

    #[test]
    fn a_nonce_is_taken_once_until_its_time_is_over() {
        let mut nonces = Nonces::default();
        assert_eq!(nonces.take("a", nonce(1), 100, 0), Ok(()));
        for sender in ["a", "b"] {
            let again = nonces.take(sender, nonce(1), 200, 100);
            assert_eq!(again, Err(NonceRefused::Known));
        }
        assert_eq!(nonces.take("a", nonce(2), 200, 100), Ok(()));
        assert_eq!(nonces.take("a", nonce(1), 200, 101), Ok(()));
        assert_eq!((nonces.known.len(), nonces.queue.len()), (2, 2));
    }

    #[test]
    fn more_than_the_bound_are_refused_until_some_are_forgotten() {
        let mut nonces = Nonces::default();
        assert_eq!(fill(&mut nonces, "a"), MAX_NONCES / 2);
        let next = nonce(MAX_NONCES);
        assert_eq!(nonces.take("a", next, 100, 0), Err(NonceRefused::Full));
        assert_eq!(nonces.take("a", next, 300, 101), Ok(()));
        assert_eq!(nonces.queue.len(), 1);
    }

    #[test]
    fn whatever_others_send_a_node_has_room() {
        let mut nonces = Nonces::default();
        let shares: Vec<usize> = ["a", "b", "c"]
            .map(|sender| fill(&mut nonces, sender))
            .into();
        assert_eq!(shares, [MAX_NONCES / 2, MAX_NONCES / 4, MAX_NONCES / 8]);
        for sender in 0..10 {
            assert!(fill(&mut nonces, &format!("n{sender}")) > 0, "{sender}");
        }
        assert_eq!(nonces.take("d", nonce(MAX_NONCES), 300, 101), Ok(()));
        assert_eq!(nonces.senders.len(), 1);
    }
}
