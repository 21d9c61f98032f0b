//! Makes a preemption outlive its daemon: the machine is about to stop even if the daemon is restarted.
//!
//! A file in the state directory records it until the node is readmitted or the machine reboots. A
//! dedicated thread changes the file and retries failed writes: the emergency thread waits for no disk.
//! A readmission does not wait for the disk either, since a node whose disk fails must still serve.
//!
//! [`Memory`] ──the latest change──> the thread, which ends with the last [`Memory`].

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
const WRITE_AGAIN: Duration = Duration::from_secs(2);

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    reason: String,
    boot_id: String,
}

#[derive(Debug, Clone)]
pub(crate) struct Memory(Arc<Speaker>);

/// Dropping the last one ends the thread.
#[derive(Debug)]
struct Speaker {
    said: Arc<Said>,
    listener: Thread,
}

/// The change to be written. A newer change replaces one that is not written yet.
#[derive(Debug, Default)]
struct Said {
    latest: ArcSwapOption<Word>,
    is_all: AtomicBool,
}

#[derive(Debug, PartialEq, Eq)]
enum Word {
    Keep(String),
    Forget,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Keep,
    Forget,
}

impl Word {
    fn kind(&self) -> Kind {
        match self {
            Self::Keep(_) => Kind::Keep,
            Self::Forget => Kind::Forget,
        }
    }
}

impl Memory {
    pub(crate) fn start(state_dir: &Path) -> io::Result<Self> {
        let file = StateFile::new(state_dir.join(FILE));
        let mut complained = None;
        Self::written_by(WRITE_AGAIN, move |word| {
            let written = change(&file, word);
            tell(file.path(), word, &written, &mut complained);
            written
        })
    }

    fn written_by(
        again: Duration,
        write: impl FnMut(&Word) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let said = Arc::new(Said::default());
        let heard = Arc::clone(&said);
        let listener = thread::Builder::new()
            .name("conman-emergency-memory".to_owned())
            .spawn(move || listen(&heard, again, write))?;
        let listener = listener.thread().clone();
        Ok(Self(Arc::new(Speaker { said, listener })))
    }

    /// Records that the machine is about to stop, and why. Does not wait.
    pub(super) fn keep(&self, reason: String) {
        self.say(Word::Keep(reason));
    }

    /// Records that the machine stays. Does not wait.
    pub(super) fn forget(&self) {
        self.say(Word::Forget);
    }

    fn say(&self, word: Word) {
        self.0.said.latest.store(Some(Arc::new(word)));
        self.0.listener.unpark();
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        self.said.is_all.store(true, Ordering::Release);
        self.listener.unpark();
    }
}

/// Writes each change. A failed write is retried until it succeeds, a newer change replaces it, or the
/// last [`Memory`] is dropped.
fn listen(said: &Said, again: Duration, mut write: impl FnMut(&Word) -> io::Result<()>) {
    let mut unwritten = None;
    loop {
        // Read first, so that a change from before the end is not missed.
        let is_all = said.is_all.load(Ordering::Acquire);
        match said.latest.swap(None).or(unwritten.take()) {
            Some(word) if write(&word).is_ok() => {}
            Some(_) | None if is_all => return,
            Some(word) => {
                unwritten = Some(word);
                thread::park_timeout(again);
            }
            None => thread::park(),
        }
    }
}

/// Warns once about a failed write, and reports when it succeeded.
fn tell(path: &Path, word: &Word, written: &io::Result<()>, complained: &mut Option<Kind>) {
    let path = path.display();
    let error = match written {
        Ok(()) => {
            if complained.take().is_some() {
                tracing::info!(%path, "saved the preemption state");
            }
            return;
        }
        Err(error) => error,
    };
    let kind = word.kind();
    if *complained == Some(kind) {
        tracing::debug!(%path, %error, "cannot save the preemption state yet");
        return;
    }
    *complained = Some(kind);
    match kind {
        Kind::Keep => tracing::warn!(
            %path,
            %error,
            "cannot save that the node is preempted; retrying: a restarted daemon would admit \
             sessions"
        ),
        Kind::Forget => tracing::warn!(
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
    let known: Known = file.read().unwrap_or_else(|error| {
        let path = file.path().display();
        tracing::warn!(%path, %error, "cannot read whether the node was preempted; it is not");
        None
    })?;
    let present = conman_linux::boot_id().ok()?;
    (known.boot_id == present).then_some(known.reason)
}

/// Not synced: after a crash of the machine the file is from an earlier boot and has no effect. So a
/// notice does not load the disk that the releases are written to.
fn change(file: &StateFile, word: &Word) -> io::Result<()> {
    match word {
        Word::Keep(reason) => file.write_unsynced(&Known {
            reason: reason.clone(),
            boot_id: conman_linux::boot_id()?,
        }),
        Word::Forget => file.remove(),
    }
}

#[cfg(test)]
impl Memory {
    /// A memory whose changes are not written.
    pub(super) fn unheard() -> Self {
        Self(Arc::new(Speaker {
            said: Arc::default(),
            listener: thread::current(),
        }))
    }

    /// Returns the last change: a reason to keep, or none.
    pub(super) fn said_last(&self) -> Option<Option<String>> {
        self.0.said.latest.swap(None).map(|word| match &*word {
            Word::Keep(reason) => Some(reason.clone()),
            Word::Forget => None,
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
    fn refusing(mut count: usize, again: Duration) -> (Memory, Receiver<Option<String>>) {
        let (given, words) = channel();
        let memory = Memory::written_by(again, move |word| {
            let reason = match word {
                Word::Keep(reason) => Some(reason.clone()),
                Word::Forget => None,
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
        (memory.expect("a thread"), words)
    }

    #[test]
    fn what_the_disk_refuses_is_written_down_when_it_can_be() {
        let (memory, words) = refusing(3, Duration::from_millis(1));
        memory.forget();
        for _ in 0..4 {
            assert_eq!(words.recv_timeout(PATIENCE), Ok(None));
        }
        // That was the last failure: the next change is another one.
        memory.keep("a test".to_owned());
        let kept = words.recv_timeout(PATIENCE);
        assert_eq!(kept, Ok(Some("a test".to_owned())));
    }

    #[test]
    fn a_new_word_takes_the_place_of_one_that_is_not_written_down() {
        let (memory, words) = refusing(usize::MAX, Duration::from_millis(1));
        memory.forget();
        assert_eq!(words.recv_timeout(PATIENCE), Ok(None));
        memory.keep("a test".to_owned());
        while words
            .recv_timeout(PATIENCE)
            .expect("it continues")
            .is_none()
        {}
        drop(memory);
        words.recv().expect_err("nothing else, and the thread ends");
    }
}
