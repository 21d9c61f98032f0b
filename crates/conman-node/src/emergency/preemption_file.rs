//! Makes a preemption outlive its daemon: the machine is about to stop even if the daemon is restarted.
//!
//! A file in the state directory records it until the node is readmitted or the machine reboots. A
//! dedicated thread changes the file and retries failed writes: the emergency thread waits for no disk.
//! A readmission does not wait for the disk either, since a node whose disk fails must still serve.
//!
//! [`PreemptionFile`] ──the latest change──> the thread, which ends with the last [`PreemptionFile`].

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use conman_linux::StateFile;
use serde::{Deserialize, Serialize};

/// File in the state directory.
const FILE: &str = "preempted.json";

/// Pause before a failed write is retried.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    reason: String,
    boot_id: String,
}

#[derive(Debug, Clone)]
pub(crate) struct PreemptionFile(Arc<Writer>);

/// Dropping the last one ends the thread.
#[derive(Debug)]
struct Writer {
    pending: Arc<Pending>,
    thread: Thread,
}

/// The change to be written. A newer change replaces one that is not written yet.
#[derive(Debug, Default)]
struct Pending {
    latest: ArcSwapOption<Change>,
    is_closed: AtomicBool,
}

#[derive(Debug, PartialEq, Eq)]
enum Change {
    Keep(String),
    Forget,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangeKind {
    Keep,
    Forget,
}

impl Change {
    fn kind(&self) -> ChangeKind {
        match self {
            Self::Keep(_) => ChangeKind::Keep,
            Self::Forget => ChangeKind::Forget,
        }
    }
}

impl PreemptionFile {
    pub(crate) fn start(state_dir: &Path) -> io::Result<Self> {
        let file = StateFile::new(state_dir.join(FILE));
        let mut reported = None;
        Self::written_by(RETRY_PAUSE, move |wanted| {
            let written = change(&file, wanted);
            log_outcome(file.path(), wanted, &written, &mut reported);
            written
        })
    }

    fn written_by(
        again: Duration,
        write: impl FnMut(&Change) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let pending = Arc::new(Pending::default());
        let read_by_thread = Arc::clone(&pending);
        let thread = thread::Builder::new()
            .name("conman-emergency-file".to_owned())
            .spawn(move || write_changes(&read_by_thread, again, write))?;
        let thread = thread.thread().clone();
        Ok(Self(Arc::new(Writer { pending, thread })))
    }

    /// Records that the machine is about to stop, and why. Does not wait.
    pub(super) fn keep(&self, reason: String) {
        self.set(Change::Keep(reason));
    }

    /// Records that the machine stays. Does not wait.
    pub(super) fn forget(&self) {
        self.set(Change::Forget);
    }

    fn set(&self, wanted: Change) {
        self.0.pending.latest.store(Some(Arc::new(wanted)));
        self.0.thread.unpark();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.pending.is_closed.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// Writes each change. A failed write is retried until it succeeds, a newer change replaces it, or the
/// last [`PreemptionFile`] is dropped.
fn write_changes(
    pending: &Pending,
    again: Duration,
    mut write: impl FnMut(&Change) -> io::Result<()>,
) {
    let mut unwritten = None;
    loop {
        // Read first, so that a change from before the end is not missed.
        let is_closed = pending.is_closed.load(Ordering::Acquire);
        match pending.latest.swap(None).or(unwritten.take()) {
            Some(wanted) if write(&wanted).is_ok() => {}
            Some(_) | None if is_closed => return,
            Some(wanted) => {
                unwritten = Some(wanted);
                thread::park_timeout(again);
            }
            None => thread::park(),
        }
    }
}

/// Warns once about a failed write, and reports when it succeeded.
fn log_outcome(
    path: &Path,
    wanted: &Change,
    written: &io::Result<()>,
    reported: &mut Option<ChangeKind>,
) {
    let path = path.display();
    let error = match written {
        Ok(()) => {
            if reported.take().is_some() {
                tracing::info!(%path, "saved the preemption state");
            }
            return;
        }
        Err(error) => error,
    };
    let kind = wanted.kind();
    if *reported == Some(kind) {
        tracing::debug!(%path, %error, "cannot save the preemption state yet");
        return;
    }
    *reported = Some(kind);
    match kind {
        ChangeKind::Keep => tracing::warn!(
            %path,
            %error,
            "cannot save that the node is preempted; retrying: a restarted daemon would admit \
             sessions"
        ),
        ChangeKind::Forget => tracing::warn!(
            %path,
            %error,
            "cannot save that the node is readmitted; retrying: a restarted daemon would kill all \
             sessions; to prevent that, remove the file"
        ),
    }
}

/// Returns why an earlier daemon of this boot was preempted, unless it was readmitted. Blocks on the
/// disk.
pub(crate) fn recall(state_dir: &Path) -> Option<String> {
    let file = StateFile::new(state_dir.join(FILE));
    let saved: Content = file.read().unwrap_or_else(|error| {
        let path = file.path().display();
        tracing::warn!(%path, %error, "cannot read whether the node was preempted; it is not");
        None
    })?;
    let present = conman_linux::boot_id().ok()?;
    (saved.boot_id == present).then_some(saved.reason)
}

/// Not synced: after a crash of the machine the file is from an earlier boot and has no effect. So a
/// notice does not load the disk that the releases are written to.
fn change(file: &StateFile, wanted: &Change) -> io::Result<()> {
    match wanted {
        Change::Keep(reason) => file.write_unsynced(&Content {
            reason: reason.clone(),
            boot_id: conman_linux::boot_id()?,
        }),
        Change::Forget => file.remove(),
    }
}

#[cfg(test)]
impl PreemptionFile {
    /// A file whose changes are not written.
    pub(super) fn unwritten() -> Self {
        Self(Arc::new(Writer {
            pending: Arc::default(),
            thread: thread::current(),
        }))
    }

    /// Returns the last change: a reason to keep, or none.
    pub(super) fn last_change(&self) -> Option<Option<String>> {
        self.0
            .pending
            .latest
            .swap(None)
            .map(|wanted| match &*wanted {
                Change::Keep(reason) => Some(reason.clone()),
                Change::Forget => None,
            })
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Long enough on any machine.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A memory whose disk refuses `count` times to forget, and the changes that the disk gets.
    fn refusing(mut count: usize, again: Duration) -> (PreemptionFile, Receiver<Option<String>>) {
        let (given, changes) = channel();
        let memory = PreemptionFile::written_by(again, move |wanted| {
            let reason = match wanted {
                Change::Keep(reason) => Some(reason.clone()),
                Change::Forget => None,
            };
            let is_refused = reason.is_none() && count > 0;
            // At the end of the test there is no receiver.
            let _ = given.send(reason);
            if is_refused {
                count -= 1;
                return Err(ErrorKind::ReadOnlyFilesystem.into());
            }
            Ok(())
        });
        (memory.expect("a thread"), changes)
    }

    #[test]
    fn a_change_that_the_disk_refuses_is_written_later() {
        let (memory, changes) = refusing(3, Duration::from_millis(1));
        memory.forget();
        for _ in 0..4 {
            assert_eq!(changes.recv_timeout(PATIENCE), Ok(None));
        }
        // That was the last failure: the next change is another one.
        memory.keep("a test".to_owned());
        let kept = changes.recv_timeout(PATIENCE);
        assert_eq!(kept, Ok(Some("a test".to_owned())));
    }

    #[test]
    fn a_newer_change_replaces_one_that_is_not_written() {
        let (memory, changes) = refusing(usize::MAX, Duration::from_millis(1));
        memory.forget();
        assert_eq!(changes.recv_timeout(PATIENCE), Ok(None));
        memory.keep("a test".to_owned());
        while changes
            .recv_timeout(PATIENCE)
            .expect("it continues")
            .is_none()
        {}
        drop(memory);
        changes
            .recv()
            .expect_err("nothing else, and the thread ends");
    }
}
