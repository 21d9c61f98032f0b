//! A preemption outlives its daemon: the machine is going, whoever restarts what on it meanwhile.
//!
//! A file in the state directory says so until the node is readmitted, or the machine has booted
//! anew. A thread of its own changes it: the emergency thread waits for no disk.
//!
//! [`Memory`] ──the latest word──> the thread, which ends with the last [`Memory`].

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};

/// File in the state directory.
const FILE: &str = "preempted.json";

/// Longest file that is read: a reason has at most 500 bytes.
const MAX_FILE_BYTES: u64 = 16_384;

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

impl Memory {
    pub(crate) fn start(state_dir: &Path) -> io::Result<Self> {
        let path = state_dir.join(FILE);
        let said = Arc::new(Said::default());
        let heard = Arc::clone(&said);
        let listener = thread::Builder::new()
            .name("conman-emergency-memory".to_owned())
            .spawn(move || listen(&heard, &path))?;
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

fn listen(said: &Said, path: &Path) {
    loop {
        // Looked at first: what was said before the end is heard.
        let is_all = said.is_all.load(Ordering::Acquire);
        match said.latest.swap(None) {
            Some(word) => {
                if let Err(error) = change(path, &word) {
                    let path = path.display();
                    tracing::warn!(
                        %path,
                        %error,
                        "cannot write down whether the node is preempted: a daemon that is \
                         restarted may not know"
                    );
                }
            }
            None if is_all => return,
            None => thread::park(),
        }
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
