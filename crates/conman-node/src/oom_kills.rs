//! How many processes of a session were killed because memory ran out. The cgroup's count is read only if the
//! host's count has changed since the last read, because reading it for thousands of sessions is expensive.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is known of one session.
#[derive(Debug, Default)]
pub(crate) struct OomKills(Mutex<Option<Counts>>);

/// The session's count, and the host's count that was read before it.
#[derive(Debug, Clone, Copy)]
struct Counts {
    host: u64,
    session: u64,
}

impl OomKills {
    /// Returns the session's count if it is known, for the host's count now.
    pub(crate) fn known(&self, host: Option<u64>) -> Option<u64> {
        let counts = (*self.lock())?;
        (host == Some(counts.host)).then_some(counts.session)
    }

    /// `host`: the host's count before the session's was read; `None` if the kernel has none.
    pub(crate) fn learn(&self, host: Option<u64>, session: Option<u64>) {
        let counts = host.zip(session);
        *self.lock() = counts.map(|(host, session)| Counts { host, session });
    }

    fn lock(&self) -> MutexGuard<'_, Option<Counts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sessions_count_is_known_until_the_host_kills_a_process() {
        let kills = OomKills::default();
        assert_eq!(kills.known(Some(0)), None, "nothing was read yet");
        kills.learn(Some(7), Some(0));
        assert_eq!(
            (kills.known(Some(7)), kills.known(Some(8))),
            (Some(0), None)
        );
        kills.learn(Some(8), Some(1));
        assert_eq!(
            (kills.known(Some(8)), kills.known(Some(9))),
            (Some(1), None)
        );
        kills.learn(None, Some(1));
        assert_eq!(kills.known(None), None, "the host counts none");
    }
}
