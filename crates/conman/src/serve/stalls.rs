//! Records the longest time for which this host stood still: the fleet's takeover time has to bear such
//! stalls.
//!
//! A thread sleeps for short times and measures how late it wakes, which is how late the shim's fence would
//! act. It lives as long as the process. A stop of the daemon alone counts, too.

use std::path::Path;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use conman_core::ownership::Timing;
use conman_linux::StateFile;
use conman_node::StatusHandle;
use conman_proto::NodeTakeover;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// File in the state directory.
const FILE: &str = "longest-stall";
/// Duration of a sleep.
const SLEEP: Duration = Duration::from_millis(100);
/// A shorter delay is an ordinary one of a busy host.
const MIN_STALL_MS: u64 = 100;
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
    /// Takes a delay. Returns whether it is the longest stall now.
    fn take(&mut self, stall_ms: u64, unix_s: u64) -> bool {
        let is_longest = stall_ms >= MIN_STALL_MS
            && (stall_ms > self.stall_ms || unix_s.saturating_sub(self.unix_s) > VALID_S);
        if is_longest {
            *self = Self { stall_ms, unix_s };
        }
        is_longest
    }
}

/// The record of the longest stall in the state directory.
#[derive(Debug)]
pub(super) struct Stalls {
    file: StateFile,
    longest: LongestStall,
}

impl Stalls {
    pub(super) fn open(state_dir: &Path) -> Self {
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

    pub(super) fn longest_ms(&self) -> u64 {
        self.longest.stall_ms
    }

    /// Starts the thread. The node shows the longest stall next to what `timing` bears.
    #[expect(clippy::disallowed_methods, reason = "a thread that only sleeps")]
    pub(super) fn watch(mut self, timing: &Timing, status: StatusHandle) -> Result<()> {
        let mut takeover = NodeTakeover {
            takeover_ms: timing.takeover_ms,
            longest_stall_ms: self.longest.stall_ms,
            borne_stall_ms: timing.slack_ms().unwrap_or(0),
        };
        status.set_takeover(takeover);
        let watch = move || {
            loop {
                let before = boot_time();
                thread::sleep(SLEEP);
                let late = boot_time().saturating_sub(before + SLEEP);
                let late_ms = u64::try_from(late.as_millis()).unwrap_or(u64::MAX);
                if self.longest.take(late_ms, unix_s()) {
                    takeover.longest_stall_ms = late_ms;
                    status.set_takeover(takeover);
                    self.record(&takeover);
                }
            }
        };
        let thread = thread::Builder::new().name("conman-stalls".to_owned());
        thread.spawn(watch).context("cannot start a thread")?;
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
        let mut stalls = Stalls::open(directory.path());
        assert_eq!(stalls.longest_ms(), 0);
        let now = unix_s();
        assert!(!stalls.longest.take(99, now), "ordinary");
        assert!(stalls.longest.take(400, now - VALID_S));
        assert!(!stalls.longest.take(300, now));
        assert!(stalls.longest.take(300, now + 1), "the other is outdated");
        for (unix_s, found_ms) in [(now, 300), (now - VALID_S - 60, 0)] {
            stalls.longest.unix_s = unix_s;
            stalls.file.write(&stalls.longest).expect("written");
            let next = Stalls::open(directory.path());
            assert_eq!(next.longest_ms(), found_ms);
        }
    }
}
