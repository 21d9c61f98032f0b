//! Crash-loop protection: a node that fails repeatedly lets other nodes take over its sessions.
//!
//! The service manager restarts a daemon that fails after it has joined its fleet, and each
//! restart renews its ownership: no node would serve its sessions, and no other could take them
//! over. After some such failures in a row, the daemon waits before it joins. Meanwhile the
//! shim's fence stops what runs.

use std::fs;
use std::future::Future;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Failures in a row without a wait; they may be transient.
const MOST: u32 = 3;

/// Long enough for a takeover and for an operator to notice.
const LEAST_WAIT: Duration = Duration::from_secs(300);

/// More than any start that succeeds: the adoption of a thousand sessions takes seconds.
const AMPLE: Duration = Duration::from_secs(60);

/// Interval between checks whether to wait on, and reports to the service manager.
const LOOK: Duration = Duration::from_secs(1);

/// The starts of this node that failed after it had joined its fleet.
#[derive(Debug)]
pub struct CrashLoopBackoff {
    file: PathBuf,
    wait: Duration,
    /// When this start began to count.
    counted: OnceLock<Instant>,
}

impl CrashLoopBackoff {
    /// `takeover`: how long another node waits before it takes over from this one.
    #[must_use]
    pub fn new(state_dir: &Path, takeover: Duration) -> Self {
        Self {
            file: state_dir.join("failed-starts"),
            wait: LEAST_WAIT.max(takeover * 4),
            counted: OnceLock::new(),
        }
    }

    /// Delays joining the fleet if too many starts have failed, so that other nodes can take over. Returns
    /// `false` if the daemon is stopped meanwhile. `extend` is called repeatedly during the wait, with how much
    /// longer the start takes at least, and why.
    pub async fn wait(
        &self,
        stopped: impl Future<Output = &'static str>,
        extend: impl Fn(Duration, &str),
    ) -> bool {
        let failed = self.count();
        if failed < MOST {
            return true;
        }
        tracing::error!(
            failed,
            wait = ?self.wait,
            "the last starts of this node failed after it had joined its fleet (see the log); \
             it waits so that other nodes can take over its sessions; remove {} to \
             start at once",
            self.file.display()
        );
        tokio::select! {
            // Cancel safe: it only checks.
            () = self.wait_out(extend) => true,
            // Cancel safe: nothing else waits for it then.
            name = stopped => {
                tracing::info!("stopping: {name}, during the wait before joining the fleet");
                false
            }
        }
    }

    async fn wait_out(&self, extend: impl Fn(Duration, &str)) {
        let until = Instant::now() + self.wait;
        while Instant::now() < until && self.count() >= MOST {
            extend(LOOK * 5, "its last starts failed: others may take over");
            sleep(LOOK).await;
        }
    }

    /// Call it when the node begins to renew its ownership. The start counts as failed until it
    /// serves, since a crash may leave no time to record it. A start that has not come so far has
    /// blocked no takeover, so it does not count.
    pub fn joined(&self) {
        if self.counted.set(Instant::now()).is_err() {
            return;
        }
        self.write(self.count().saturating_add(1));
    }

    /// Call it when the daemon is stopped before it serves. That is no failure, unless the start took
    /// too long: the service manager stops a start that hangs.
    pub fn stopped(&self) {
        if self
            .counted
            .get()
            .is_some_and(|since| since.elapsed() < AMPLE)
        {
            self.write(self.count().saturating_sub(1));
        }
    }

    /// Written in place with a fixed length: that works on a full disk if the file exists, and is
    /// never half done.
    fn write(&self, count: u32) {
        let mut options = fs::File::options();
        options.write(true).create(true).truncate(false).mode(0o600);
        let written = options
            .open(&self.file)
            .and_then(|file| file.write_all_at(format!("{count:010}").as_bytes(), 0));
        if let Err(error) = written {
            let path = self.file.display();
            tracing::warn!(%path, %error, "cannot record the number of failed starts");
        }
    }

    /// Call it when the daemon serves.
    pub fn started(&self) {
        match fs::remove_file(&self.file) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                let path = self.file.display();
                tracing::warn!(%path, %error, "cannot remove the number of failed starts");
            }
            _ => {}
        }
    }

    /// Number of failed starts; 0 if it cannot be read.
    fn count(&self) -> u32 {
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn starts(dir: &Path) -> CrashLoopBackoff {
        CrashLoopBackoff::new(dir, Duration::from_secs(12))
    }

    /// A start that fails after joining.
    fn fails(dir: &Path) {
        starts(dir).joined();
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_whose_starts_fail_in_a_row_stays_away_for_some_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let waited = async || {
            let began = Instant::now();
            assert!(starts(dir.path()).wait(pending(), |_, _| ()).await);
            began.elapsed()
        };
        for _ in 0..MOST {
            assert_eq!(waited().await, Duration::ZERO);
            fails(dir.path());
            // Starts that are stopped, or fail before joining, do not count.
            let ended = starts(dir.path());
            ended.stopped();
            ended.joined();
            ended.stopped();
        }
        assert!(waited().await >= LEAST_WAIT);
        // It has failed again.
        fails(dir.path());
        assert!(waited().await >= LEAST_WAIT);
        let good = starts(dir.path());
        good.joined();
        good.started();
        // Later calls have no effect.
        good.joined();
        assert_eq!(waited().await, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_that_hangs_until_it_is_ended_has_failed() {
        let dir = tempfile::tempdir().expect("a directory");
        for failed in 1..=MOST {
            let hung = starts(dir.path());
            hung.joined();
            sleep(AMPLE).await;
            hung.stopped();
            assert_eq!(starts(dir.path()).count(), failed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_removes_the_file_has_the_node_start_at_once() {
        let dir = tempfile::tempdir().expect("a directory");
        for _ in 0..MOST {
            fails(dir.path());
        }
        let waiting = starts(dir.path());
        let began = Instant::now();
        let (goes_on, ()) = tokio::join!(waiting.wait(pending(), |_, _| ()), async {
            sleep(LOOK * 3).await;
            fs::remove_file(&waiting.file).expect("removed");
        });
        assert!(goes_on);
        assert!(began.elapsed() < LEAST_WAIT / 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_is_stopped_during_the_wait_does_not_join() {
        let dir = tempfile::tempdir().expect("a directory");
        for _ in 0..MOST {
            fails(dir.path());
        }
        let stopped = async {
            sleep(LOOK).await;
            "SIGTERM"
        };
        assert!(!starts(dir.path()).wait(stopped, |_, _| ()).await);
    }
}
