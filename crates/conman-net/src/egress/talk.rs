//! Where the sessions are that a session may talk to.
//!
//! Each answer is read from the registry, at most [`MAX_AGE`] ago: sessions move, and nothing is sent for it. A
//! session bounds how much it makes its node read.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::{TalkName, TalkingSession};
use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep_until, timeout};

/// Maximum age of an answer.
const MAX_AGE: Duration = Duration::from_millis(500);
/// Answers that are kept for that time.
const MAX_RECENT: usize = 1_024;
/// Bound on one read.
const READ: Duration = Duration::from_secs(4);

/// Finds sessions.
pub trait TalkDirectory: Send + Sync + fmt::Debug {
    /// The sessions of this name as they are now, or why they cannot be read.
    fn find(&self, name: TalkName) -> BoxFuture<'static, Result<Vec<TalkingSession>, String>>;
}

type Found = Arc<[TalkingSession]>;

/// The names of sessions on all nodes, as one node reads them.
#[derive(Debug)]
pub(super) struct TalkNames {
    directory: Option<Arc<dyn TalkDirectory>>,
    recent: Mutex<HashMap<TalkName, (Instant, Found)>>,
    pace: Pace,
}

impl TalkNames {
    pub(super) fn new(directory: Option<Arc<dyn TalkDirectory>>) -> Self {
        Self {
            directory,
            recent: Mutex::default(),
            pace: Pace::of_node(),
        }
    }

    /// The addresses of a name for a session in `groups`; `None`: it does not exist.
    pub(super) async fn resolve(
        &self,
        name: &TalkName,
        groups: &[String],
        pace: &Pace,
    ) -> Result<Option<Vec<IpAddr>>, String> {
        let Some(directory) = &self.directory else {
            return Ok(None);
        };
        if !name.may_exist_for(groups) {
            return Ok(None);
        }
        if let Some(found) = self.recent(name) {
            return Ok(name.addresses(groups, &found));
        }
        pace.turn().await;
        self.pace.turn().await;
        // Others may have read it meanwhile.
        let found = match self.recent(name) {
            Some(found) => found,
            None => self.read(&**directory, name).await?,
        };
        Ok(name.addresses(groups, &found))
    }

    async fn read(&self, directory: &dyn TalkDirectory, name: &TalkName) -> Result<Found, String> {
        // What is read is at least as new as this.
        let at = Instant::now();
        let found = timeout(READ, directory.find(name.clone())).await;
        let found = found.map_err(|_| format!("no answer within {} s", READ.as_secs()))??;
        let found = Found::from(found);
        let mut recent = self.lock();
        if recent.len() >= MAX_RECENT {
            recent.retain(|_, (at, _)| at.elapsed() < MAX_AGE);
        }
        if recent.len() < MAX_RECENT {
            recent.insert(name.clone(), (at, Arc::clone(&found)));
        }
        Ok(found)
    }

    fn recent(&self, name: &TalkName) -> Option<Found> {
        let recent = self.lock();
        let (at, found) = recent.get(name)?;
        (at.elapsed() < MAX_AGE).then(|| Arc::clone(found))
    }

    /// A panic while the lock is held cannot leave half a change: each is one map operation.
    fn lock(&self) -> MutexGuard<'_, HashMap<TalkName, (Instant, Found)>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bounds how often something is done: so many times at once, and then once in each interval.
#[derive(Debug)]
pub(super) struct Pace {
    interval: Duration,
    burst: u32,
    /// When the next turn would be if none was ever missed.
    next: Mutex<Instant>,
}

impl Pace {
    /// Reads for one session: 10 a second.
    pub(super) fn of_session() -> Self {
        Self::new(Duration::from_millis(100), 32)
    }

    /// Reads for all sessions of a node: 200 a second.
    fn of_node() -> Self {
        Self::new(Duration::from_millis(5), 200)
    }

    fn new(interval: Duration, burst: u32) -> Self {
        let now = Instant::now();
        Self {
            interval,
            burst,
            next: Mutex::new(now.checked_sub(interval * burst).unwrap_or(now)),
        }
    }

    /// Takes the next turn, and returns when it is.
    fn take(&self, now: Instant) -> Instant {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let missed = now.checked_sub(self.interval * self.burst).unwrap_or(now);
        let turn = (*next).max(missed);
        *next = turn + self.interval;
        turn
    }

    async fn turn(&self) {
        sleep_until(self.take(Instant::now())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_allows_a_burst_and_then_one_in_each_interval() {
        let interval = Duration::from_secs(1);
        let pace = Pace::new(interval, 3);
        let now = Instant::now() + Duration::from_secs(60);
        let turns: Vec<Instant> = (0..6).map(|_| pace.take(now)).collect();
        assert!(turns[..4].iter().all(|turn| *turn <= now), "{turns:?}");
        assert_eq!(turns[4..], [now + interval, now + interval * 2]);
        let later = now + interval * 60;
        assert!(pace.take(later) <= later, "what was not used is not lost");
    }
}
