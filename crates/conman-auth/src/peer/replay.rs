//! The nonces of connections that were seen.

use std::collections::{HashSet, VecDeque};

/// Nonces kept at a time: connections that other nodes open within twice the tolerance of clocks.
/// 64 bytes each.
const MAX_NONCES: usize = 1 << 17;

/// What names one connection of a peer.
pub(super) type Nonce = [u8; 16];

/// Nonces whose time is not over.
#[derive(Debug, Default)]
pub(super) struct Nonces {
    known: HashSet<Nonce>,
    /// The first to be forgotten in front, nearly: those that come late in time come late here.
    queue: VecDeque<(u64, Nonce)>,
}

/// Why a nonce is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NonceRefused {
    Known,
    /// More connections than anybody needs.
    Full,
}

impl Nonces {
    /// Takes note of a nonce that is worth nothing from `until_ms` on.
    pub(super) fn take(
        &mut self,
        nonce: Nonce,
        until_ms: u64,
        now_ms: u64,
    ) -> Result<(), NonceRefused> {
        while let Some((until, oldest)) = self.queue.front()
            && *until < now_ms
        {
            self.known.remove(oldest);
            self.queue.pop_front();
        }
        if self.known.contains(&nonce) {
            return Err(NonceRefused::Known);
        }
        if self.queue.len() >= MAX_NONCES {
            return Err(NonceRefused::Full);
        }
        self.known.insert(nonce);
        self.queue.push_back((until_ms, nonce));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nonce(number: usize) -> Nonce {
        (number as u128).to_be_bytes()
    }

    #[test]
    fn a_nonce_is_taken_once_until_its_time_is_over() {
        let mut nonces = Nonces::default();
        assert_eq!(nonces.take(nonce(1), 100, 0), Ok(()));
        assert_eq!(nonces.take(nonce(1), 200, 100), Err(NonceRefused::Known));
        assert_eq!(nonces.take(nonce(2), 200, 100), Ok(()));
        assert_eq!(nonces.take(nonce(1), 200, 101), Ok(()));
        assert_eq!((nonces.known.len(), nonces.queue.len()), (2, 2));
    }

    #[test]
    fn more_than_the_bound_are_refused_until_some_are_forgotten() {
        let mut nonces = Nonces::default();
        for number in 0..MAX_NONCES {
            assert_eq!(nonces.take(nonce(number), 100, 0), Ok(()));
        }
        assert_eq!(
            nonces.take(nonce(MAX_NONCES), 100, 0),
            Err(NonceRefused::Full)
        );
        assert_eq!(nonces.take(nonce(MAX_NONCES), 300, 101), Ok(()));
        assert_eq!(nonces.queue.len(), 1);
    }
}
