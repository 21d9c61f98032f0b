//! What a node does that cannot start: it lets others have its sessions.
//!
//! A daemon that has joined its fleet and then fails is started again by the service manager seconds
//! later, and each time it renews what it owns: nobody would serve its sessions, and nobody else might
//! take them over. After some such starts in a row one waits before it joins. What runs meanwhile is
//! its shim's, whose fence stops it in time.

use std::fs;
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::service_manager;
use super::signals::EndingSignals;

/// Failures in a row that may pass by themselves.
const MOST: u32 = 3;

/// Long enough for others to take over, and for somebody to look.
const LEAST_WAIT: Duration = Duration::from_secs(300);

/// What no start takes that will come to its end: adoption of a thousand sessions takes seconds.
const AMPLE: Duration = Duration::from_secs(60);

/// Between two looks at whether to wait on, and to the service manager.
const LOOK: Duration = Duration::from_secs(1);

/// Longest file that is read: it holds a number.
const MAX_FILE_BYTES: u64 = 16;

#[derive(Debug)]
pub(super) struct FalseStarts {
    file: PathBuf,
    wait: Duration,
    /// Since when this start counts.
    counted: OnceLock<Instant>,
}

impl FalseStarts {
    pub(super) fn new(state_dir: &Path, takeover: Duration) -> Self {
        Self {
            file: state_dir.join("failed-starts"),
            wait: LEAST_WAIT.max(takeover * 4),
            counted: OnceLock::new(),
        }
    }

    /// Waits where too many starts have failed; `false` when the daemon is to end meanwhile.
    pub(super) async fn make_way(&self, ending: &mut EndingSignals) -> bool {
        let failed = self.count();
        if failed < MOST {
            return true;
        }
        tracing::error!(
            failed,
            wait = ?self.wait,
            "the last starts of this node failed after it had joined its fleet (the log says why): it \
             stays away for some time, so that other nodes may take over its sessions; remove {} to \
             start at once",
            self.file.display()
        );
        tokio::select! {
            // Cancel safe: it only looks.
            () = self.wait_out() => true,
            name = ending.next() => {
                tracing::info!("stopping: {name}, while the node stayed away from its fleet");
                false
            }
        }
    }

    async fn wait_out(&self) {
        let until = Instant::now() + self.wait;
        while Instant::now() < until && self.count() >= MOST {
            service_manager::goes_on(LOOK * 5, "its last starts failed: others may take over");
            sleep(LOOK).await;
        }
    }

    /// From here on the node renews what it owns. It counts as failed until it serves, since
    /// whatever ends it before that may leave it no time to say so. One that has not come so far has
    /// kept nobody from anything, and may begin again at once.
    pub(super) fn joined(&self) {
        if self.counted.set(Instant::now()).is_err() {
            return;
        }
        self.write(self.count().saturating_add(1));
    }

    /// Somebody ends it before it serves: that is no failure of its, unless it has had the time to.
    /// Of a start that hangs it is the service manager who ends it.
    pub(super) fn stopped(&self) {
        let Some(since) = self.counted.get() else {
            return;
        };
        if since.elapsed() >= AMPLE {
            return;
        }
        match self.count().saturating_sub(1) {
            0 => self.started(),
            count => self.write(count),
        }
    }

    /// In place, and always as long: a full disk that has the file takes this, too, and no moment has
    /// half of it.
    fn write(&self, count: u32) {
        let mut options = fs::File::options();
        options.write(true).create(true).truncate(false).mode(0o600);
        let written = options
            .open(&self.file)
            .and_then(|file| file.write_all_at(format!("{count:010}").as_bytes(), 0));
        if let Err(error) = written {
            let path = self.file.display();
            tracing::warn!(%path, %error, "cannot write down how many starts have failed");
        }
    }

    /// From here on it serves.
    pub(super) fn started(&self) {
        match fs::remove_file(&self.file) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                let path = self.file.display();
                tracing::warn!(%path, %error, "cannot remove the number of failed starts");
            }
            _ => {}
        }
    }

    /// How many have failed; what cannot be read is none.
    fn count(&self) -> u32 {
        let read = || -> io::Result<String> {
            let mut text = String::new();
            let file = fs::File::open(&self.file)?;
            file.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
            Ok(text)
        };
        let text = read().unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::signals::Signals;
    use super::*;

    fn starts(dir: &Path) -> FalseStarts {
        FalseStarts::new(dir, Duration::from_secs(12))
    }

    /// It is gone once it has joined.
    fn fails(dir: &Path) {
        starts(dir).joined();
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_whose_starts_fail_in_a_row_stays_away_for_some_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut signals = Signals::listen().expect("listened");
        let mut waited = async || {
            let began = Instant::now();
            assert!(starts(dir.path()).make_way(&mut signals.ending).await);
            began.elapsed()
        };
        for _ in 0..MOST {
            assert_eq!(waited().await, Duration::ZERO);
            fails(dir.path());
            // Neither does one count that somebody ends, nor one that has not come so far.
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
        // What it says later changes nothing.
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
        let mut signals = Signals::listen().expect("listened");
        for _ in 0..MOST {
            fails(dir.path());
        }
        let waiting = starts(dir.path());
        let began = Instant::now();
        let (goes_on, ()) = tokio::join!(waiting.make_way(&mut signals.ending), async {
            sleep(LOOK * 3).await;
            fs::remove_file(&waiting.file).expect("removed");
        });
        assert!(goes_on);
        assert!(began.elapsed() < LEAST_WAIT / 2);
    }
}
