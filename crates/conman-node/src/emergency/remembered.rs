//! A preemption outlives its daemon: the machine is going, whoever restarts what on it meanwhile.
//!
//! A file in the state directory says so until the node is readmitted, or the machine has booted
//! anew. A thread of its own changes it: the emergency thread waits for no disk.
//!
//! [`Memory`] ──words, bounded, dropped when full──> the thread, which ends with the last [`Memory`].

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use conman_linux::replace_file;
use serde::{Deserialize, Serialize};

/// File in the state directory.
const FILE: &str = "preempted.json";

/// Longest file that is read: a reason has at most 500 bytes.
const MAX_FILE_BYTES: u64 = 16_384;

/// Words that wait for the disk; there are a handful a day.
const WORDS: usize = 64;

/// What is written down. What a newer conman adds is passed over.
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    reason: String,
    boot_id: String,
}

#[derive(Debug, Clone)]
pub(crate) struct Memory {
    words: SyncSender<Word>,
}

#[derive(Debug)]
enum Word {
    Keep(String),
    Forget,
}

impl Memory {
    pub(crate) fn start(state_dir: &Path) -> io::Result<Self> {
        let path = state_dir.join(FILE);
        let (words, queue) = sync_channel(WORDS);
        thread::Builder::new()
            .name("conman-emergency-memory".to_owned())
            .spawn(move || {
                while let Ok(word) = queue.recv() {
                    if let Err(error) = change(&path, word) {
                        let path = path.display();
                        tracing::warn!(
                            %path,
                            %error,
                            "cannot write down whether the node is preempted: a daemon that is \
                             restarted may not know"
                        );
                    }
                }
            })?;
        Ok(Self { words })
    }

    /// The machine is going, and why.
    pub(super) fn keep(&self, reason: String) {
        self.say(Word::Keep(reason));
    }

    /// It stays.
    pub(super) fn forget(&self) {
        self.say(Word::Forget);
    }

    fn say(&self, word: Word) {
        // A word that finds no room is lost: nothing here may wait.
        let _ = self.words.try_send(word);
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

fn change(path: &Path, word: Word) -> io::Result<()> {
    let Word::Keep(reason) = word else {
        return match fs::remove_file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
    };
    let boot_id = conman_linux::boot_id()?;
    replace_file(path, &serde_json::to_vec(&Known { reason, boot_id })?)
}
