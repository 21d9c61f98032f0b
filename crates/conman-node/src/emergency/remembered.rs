//! A preemption outlives its daemon: the machine is going, whoever restarts what on it meanwhile.
//!
//! A file in the state directory says so until the node is readmitted, or the machine has booted
//! anew. A thread of its own changes it, and tries again what the disk refuses: the emergency thread
//! waits for no disk. Nor does who readmits, since a node whose disk fails is to serve all the same.
//!
//! [`Memory`] ──the latest word──> the thread, which ends with the last [`Memory`].

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};

/// File in the state directory.
const FILE: &str = "preempted.json";

/// Longest file that is read: a reason has at most 500 bytes.
const MAX_FILE_BYTES: u64 = 16_384;

/// Before what could not be written down is written down again.
const WRITE_AGAIN: Duration = Duration::from_secs(2);

/// What is written down. What a newer conman adds is passed over.
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    reason: String,
    boot_id: String,
}

#[derive(Debug, Clone)]
pub(crate) struct Memory(Arc<Speaker>);

/// The end of the last one ends the thread.
#[derive(Debug)]
struct Speaker {
    said: Arc<Said>,
    listener: Thread,
}

/// What is to be written down. A word takes the place of one that is not written down yet.
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
        let path = state_dir.join(FILE);
        let mut complained = None;
        Self::written_by(WRITE_AGAIN, move |word| {
            let written = change(&path, word);
            tell(&path, word, &written, &mut complained);
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

    /// The machine is going, and why. Waits for nobody.
    pub(super) fn keep(&self, reason: String) {
        self.say(Word::Keep(reason));
    }

    /// It stays. Waits for nobody.
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

/// Has what is said written down. What cannot be is tried again until it is, or something else is
/// said, or nobody is left to say anything.
fn listen(said: &Said, again: Duration, mut write: impl FnMut(&Word) -> io::Result<()>) {
    let mut unwritten = None;
    loop {
        // Looked at first: what was said before the end is heard.
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

/// Warns of what cannot be written down, once, and says when it is.
fn tell(path: &Path, word: &Word, written: &io::Result<()>, complained: &mut Option<Kind>) {
    let path = path.display();
    let error = match written {
        Ok(()) => {
            if complained.take().is_some() {
                tracing::info!(%path, "whether the node is preempted is written down by now");
            }
            return;
        }
        Err(error) => error,
    };
    let kind = word.kind();
    if *complained == Some(kind) {
        tracing::debug!(%path, %error, "whether the node is preempted is not written down yet");
        return;
    }
    *complained = Some(kind);
    match kind {
        Kind::Keep => tracing::warn!(
            %path,
            %error,
            "cannot write down that the node is preempted, which is tried again: a daemon that is \
             restarted would admit sessions"
        ),
        Kind::Forget => tracing::warn!(
            %path,
            %error,
            "cannot write down that the node is not preempted any more, which is tried again: a \
             daemon that is restarted would kill all that runs here; remove {path}"
        ),
    }
}

/// Why an earlier daemon of the present boot was preempted, if it was and stayed so. Blocks on the
/// disk.
pub(crate) fn recall(state_dir: &Path) -> Option<String> {
    let path = state_dir.join(FILE);
    let known = read(&path).unwrap_or_else(|error| {
        let path = path.display();
        tracing::warn!(%path, %error, "cannot read whether the node was preempted; it is not");
        None
    })?;
    let present = conman_linux::boot_id().ok()?;
    (known.boot_id == present).then_some(known.reason)
}

fn read(path: &Path) -> io::Result<Option<Known>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

/// Nothing is synced: a machine that goes down is booted anew, and what its disk holds then is of
/// no account. So a notice takes nothing from the disk that the releases are written to.
fn change(path: &Path, word: &Word) -> io::Result<()> {
    let Word::Keep(reason) = word else {
        return match fs::remove_file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
    };
    let known = Known {
        reason: reason.clone(),
        boot_id: conman_linux::boot_id()?,
    };
    let new = path.with_extension("new");
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&new)?;
    file.write_all(&serde_json::to_vec(&known)?)?;
    fs::rename(&new, path)
}

#[cfg(test)]
impl Memory {
    /// Whose words nobody writes down.
    pub(super) fn unheard() -> Self {
        Self(Arc::new(Speaker {
            said: Arc::default(),
            listener: thread::current(),
        }))
    }

    /// What was said last: a reason to keep, or nothing to.
    pub(super) fn said_last(&self) -> Option<Option<String>> {
        self.0.said.latest.swap(None).map(|word| match &*word {
            Word::Keep(reason) => Some(reason.clone()),
            Word::Forget => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Long enough on any machine.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A memory whose disk refuses so many times to forget, and what the disk is given.
    fn refusing(mut count: usize, again: Duration) -> (Memory, Receiver<Option<String>>) {
        let (given, words) = channel();
        let memory = Memory::written_by(again, move |word| {
            let reason = match word {
                Word::Keep(reason) => Some(reason.clone()),
                Word::Forget => None,
            };
            let is_refused = reason.is_none() && count > 0;
            // At the end of the test nobody listens.
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
        // It was the last time: the next word is another one.
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
        while words.recv_timeout(PATIENCE).expect("it goes on").is_none() {}
        drop(memory);
        words.recv().expect_err("nothing else, and the thread ends");
    }
}
