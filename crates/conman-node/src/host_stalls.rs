//! Records the longest time for which this host stood still: the fleet's takeover time has to bear such
//! stalls.
//!
//! A thread sleeps for short times and measures how late it wakes, which is how late the shim's fence would
//! act. It lives as long as the process. A process that was stopped by a signal gets SIGCONT when it goes
//! on, which shows that the daemon stood still, and not the host.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use conman_core::ownership::Timing;
use conman_linux::{Signal, StateFile};
use conman_proto::NodeTakeover;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::status::StatusHandle;

/// File in the state directory.
const FILE: &str = "longest-stall";
/// Duration of a sleep.
const SLEEP: Duration = Duration::from_millis(100);
/// A shorter delay is an ordinary one of a busy host.
const MIN_STALL_MS: u64 = 100;
/// Time for a SIGCONT to be noticed.
const SIGNAL_SETTLE: Duration = Duration::from_millis(200);
/// A longest stall counts for a week.
const VALID_S: u64 = 7 * 86_400;

/// The longest stall so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct LongestStall {
    stall_ms: u64,
    /// When it ended.
    unix_s: u64,
}

impl LongestStall {
    /// Takes a delay, unless only this process stood still. Returns whether it is the longest stall now.
    fn take(&mut self, stall_ms: u64, unix_s: u64, was_stopped: impl FnOnce() -> bool) -> bool {
        let is_longest = stall_ms >= MIN_STALL_MS
            && (stall_ms > self.stall_ms || unix_s.saturating_sub(self.unix_s) > VALID_S)
            && !was_stopped();
        if is_longest {
            *self = Self { stall_ms, unix_s };
        }
        is_longest
    }
}

/// The record of the longest stall in the state directory.
#[derive(Debug)]
pub struct HostStalls {
    file: StateFile,
    longest: LongestStall,
}

impl HostStalls {
    /// Opens the record. Without a readable one there was no stall.
    #[must_use]
    pub fn open(state_dir: &Path) -> Self {
        let file = StateFile::new(state_dir.join(FILE));
        let longest = file.read::<LongestStall>().unwrap_or_else(|error| {
            tracing::warn!(%error, path = %file.path().display(), "cannot read the longest stall");
            None
        });
        let is_valid = |longest: &LongestStall| unix_s().saturating_sub(longest.unix_s) <= VALID_S;
        Self {
            file,
            longest: longest.filter(is_valid).unwrap_or_default(),
        }
    }

    /// The longest stall of the last week, in milliseconds.
    #[must_use]
    pub fn longest_ms(&self) -> u64 {
        self.longest.stall_ms
    }

    /// Starts the thread. The node shows the longest stall next to what `timing` bears.
    ///
    /// # Errors
    /// SIGCONT cannot be watched, or there is no thread.
    #[expect(clippy::disallowed_methods, reason = "a thread that only sleeps")]
    pub fn watch(mut self, timing: &Timing, status: StatusHandle) -> io::Result<()> {
        let mut takeover = NodeTakeover {
            takeover_ms: timing.takeover_ms,
            longest_stall_ms: self.longest.stall_ms,
            borne_stall_ms: timing.slack_ms().unwrap_or(0),
        };
        status.set_takeover(takeover);
        let continued = watch_continued()?;
        let watch = move || {
            loop {
                let before = boot_time();
                thread::sleep(SLEEP);
                let late = boot_time().saturating_sub(before + SLEEP);
                let late_ms = u64::try_from(late.as_millis()).unwrap_or(u64::MAX);
                let was_stopped = || {
                    thread::sleep(SIGNAL_SETTLE);
                    continued.load(Ordering::Relaxed)
                };
                let is_longest = self.longest.take(late_ms, unix_s(), was_stopped);
                continued.store(false, Ordering::Relaxed);
                if is_longest {
                    takeover.longest_stall_ms = late_ms;
                    status.set_takeover(takeover);
                    self.record(&takeover);
                }
            }
        };
        let thread = thread::Builder::new().name("conman-stalls".to_owned());
        thread.spawn(watch)?;
        Ok(())
    }

    fn record(&self, takeover: &NodeTakeover) {
        let stall_ms = takeover.longest_stall_ms;
        match takeover.warning() {
            Some(warning) => tracing::warn!(stall_ms, "{warning}"),
            None => tracing::info!(stall_ms, "this host stood still"),
        }
        if let Err(error) = self.file.write(&self.longest) {
            let path = self.file.path().display();
            tracing::warn!(%error, %path, "cannot record the longest stall");
        }
    }
}

/// Set by each SIGCONT.
fn watch_continued() -> io::Result<Arc<AtomicBool>> {
    let kind = SignalKind::from_raw(Signal::SIGCONT as i32);
    let mut signals = signal(kind)?;
    let continued = Arc::<AtomicBool>::default();
    let noted = Arc::clone(&continued);
    tokio::spawn(async move {
        while signals.recv().await.is_some() {
            noted.store(true, Ordering::Relaxed);
        }
    });
    Ok(continued)
}

/// Includes the time in suspend.
fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::try_from(now).unwrap_or_default()
}

fn unix_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_stall_of_a_week_is_kept_across_restarts() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut stalls = HostStalls::open(directory.path());
        assert_eq!(stalls.longest_ms(), 0);
        let now = unix_s();
        let mut take = |ms, unix_s| stalls.longest.take(ms, unix_s, || false);
        assert!(!take(99, now), "ordinary");
        assert!(take(400, now - VALID_S));
        assert!(!take(300, now));
        assert!(take(300, now + 1), "the other is outdated");
        for (unix_s, found_ms) in [(now, 300), (now - VALID_S - 60, 0)] {
            stalls.longest.unix_s = unix_s;
            stalls.file.write(&stalls.longest).expect("written");
            let next = HostStalls::open(directory.path());
            assert_eq!(next.longest_ms(), found_ms);
        }
    }

    #[test]
    fn a_stop_of_this_process_is_no_stall_of_the_host() {
        let mut longest = LongestStall::default();
        assert!(!longest.take(30_000, 1, || true));
        assert_eq!(longest, LongestStall::default());
        assert!(longest.take(200, 2, || false));
    }

    #[tokio::test]
    async fn a_sigcont_is_noticed() {
        let continued = watch_continued().expect("watched");
        nix::sys::signal::raise(Signal::SIGCONT).expect("sent");
        while !continued.load(Ordering::Relaxed) {
            tokio::task::yield_now().await;
        }
    }
}
