//! Where the sessions are that a session may talk to.
//!
//! Each answer is read from the registry, at most [`MAX_AGE`] ago: sessions move, and nothing is sent for it.
//!
//! A session's names are read one after the other, and a node bounds how many it reads for one session and for all.
//! So at most one read of each session waits for the node's next turn, however many queries it sends.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex as SyncMutex, MutexGuard as SyncMutexGuard, PoisonError};
use std::time::Duration;

use conman_core::{TalkName, TalkingSession};
use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep_until, timeout};

/// Maximum age of an answer.
const MAX_AGE: Duration = Duration::from_millis(500);
/// Answers that are kept for that time.
const MAX_RECENT: usize = 1_024;
/// Bound on the wait for a read, and on the read. Resolvers in sessions wait for about 5 s.
const TURN: Duration = Duration::from_secs(4);
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
    recent: SyncMutex<HashMap<TalkName, (Instant, Found)>>,
    pace: Mutex<Pace>,
}

impl TalkNames {
    pub(super) fn new(directory: Option<Arc<dyn TalkDirectory>>) -> Self {
        Self {
            directory,
            recent: SyncMutex::default(),
            pace: Mutex::new(Pace::of_node()),
        }
    }

    /// The addresses of a name for a session in `groups`; `None`: it does not exist.
    pub(super) async fn resolve(
        &self,
        name: &TalkName,
        groups: &[String],
        pace: &Mutex<Pace>,
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
        let turn = timeout(TURN, self.turn(name, pace)).await;
        let _turn = turn.map_err(|_| format!("no turn to read within {} s", TURN.as_secs()))?;
        let found = match self.recent(name) {
            Some(found) => found,
            None => self.read(&**directory, name).await?,
        };
        Ok(name.addresses(groups, &found))
    }

    /// Waits until the session may read this name, or another query has read it. The session's next query waits until
    /// the guard is dropped.
    async fn turn<'a>(&self, name: &TalkName, pace: &'a Mutex<Pace>) -> MutexGuard<'a, Pace> {
        let mut pace = pace.lock().await;
        if self.recent(name).is_none() {
            pace.turn().await;
            self.pace.lock().await.turn().await;
        }
        pace
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
    fn lock(&self) -> SyncMutexGuard<'_, HashMap<TalkName, (Instant, Found)>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bounds how often something is done: so many times at once, and then once in each interval.
#[derive(Debug)]
pub(super) struct Pace {
    interval: Duration,
    burst: u32,
    /// When the next turn would be if none was ever missed.
    next: Instant,
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
            next: now.checked_sub(interval * burst).unwrap_or(now),
        }
    }

    /// Waits for the next turn, and takes it. When it is dropped before, the turn is not taken.
    async fn turn(&mut self) {
        let now = Instant::now();
        let missed = now.checked_sub(self.interval * self.burst).unwrap_or(now);
        let turn = self.next.max(missed);
        sleep_until(turn).await;
        self.next = turn + self.interval;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::sleep;

    use super::*;

    /// Has no sessions, answers after some time, and counts its reads.
    #[derive(Debug, Default)]
    struct Empty(AtomicUsize);

    impl TalkDirectory for Empty {
        fn find(&self, _: TalkName) -> BoxFuture<'static, Result<Vec<TalkingSession>, String>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(async {
                sleep(Duration::from_millis(20)).await;
                Ok(Vec::new())
            })
        }
    }

    fn names() -> (Arc<TalkNames>, Arc<Empty>) {
        let directory = Arc::<Empty>::default();
        let names = TalkNames::new(Some(Arc::clone(&directory) as _));
        (Arc::new(names), directory)
    }

    /// A lookup by a session with this pace.
    async fn look_up(names: &TalkNames, id: &str, pace: &Mutex<Pace>) {
        let name = TalkName::parse(&format!("{id}.session.internal")).expect("a name");
        let found = names.resolve(&name, &["team".to_owned()], pace).await;
        assert_eq!(found, Ok(None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pace_allows_a_burst_and_then_one_in_each_interval() {
        let interval = Duration::from_secs(1);
        let mut pace = Pace::new(interval, 3);
        let began = Instant::now();
        let mut turns = Vec::new();
        for _ in 0..6 {
            pace.turn().await;
            turns.push(began.elapsed().as_secs());
        }
        assert_eq!(turns, [0, 0, 0, 0, 1, 2]);
        sleep(interval * 60).await;
        let began = Instant::now();
        pace.turn().await;
        assert_eq!(
            began.elapsed(),
            Duration::ZERO,
            "what was not used is not lost"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_is_dropped_takes_no_turn() {
        let mut pace = Pace::new(Duration::from_secs(1), 0);
        pace.turn().await;
        let began = Instant::now();
        for _ in 0..9 {
            let waited = timeout(Duration::from_millis(100), pace.turn()).await;
            waited.expect_err("it is not its turn");
        }
        pace.turn().await;
        assert!(began.elapsed() < Duration::from_secs(2));
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_that_flood_their_node_with_names_delay_another_one_by_a_turn_each() {
        let (names, _) = names();
        for session in 0..30 {
            let pace = Arc::new(Mutex::new(Pace::of_session()));
            for query in 0..100 {
                let (names, pace) = (Arc::clone(&names), Arc::clone(&pace));
                tokio::spawn(async move {
                    look_up(&names, &format!("flood-{session}-{query}"), &pace).await;
                });
            }
        }
        sleep(Duration::from_secs(1)).await;
        let began = Instant::now();
        look_up(&names, "quiet", &Mutex::new(Pace::of_session())).await;
        let waited = began.elapsed();
        assert!(waited < Duration::from_millis(250), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn queries_of_one_name_that_arrive_together_share_a_read() {
        let (names, directory) = names();
        let pace = Mutex::new(Pace::of_session());
        tokio::join!(
            look_up(&names, "alice", &pace),
            look_up(&names, "alice", &pace)
        );
        assert_eq!(directory.0.load(Ordering::Relaxed), 1);
        look_up(&names, "bob", &pace).await;
        assert_eq!(directory.0.load(Ordering::Relaxed), 2);
    }
}
