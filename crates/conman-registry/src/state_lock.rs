//! The lock file: at most one daemon uses a state directory.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::RegistryError;
use crate::files::open_options;

const NAME: &str = "lock";
/// The number is padded to its maximum width, so that a write never changes the file's length.
const CONTENT_BYTES: usize = 20;
const MARK: &str = "used";

/// Holds the directory until it is dropped or the process ends: the kernel drops the lock with the
/// last descriptor.
///
/// The file also records the holder, and whether a registry was ever complete here, so that a
/// directory that lost every other file is not taken for a new one.
#[derive(Debug)]
pub struct StateLock {
    file: File,
    path: PathBuf,
    used: bool,
}

impl StateLock {
    /// Takes the lock, or fails at once when another process holds it.
    pub fn acquire(dir: &Path) -> Result<Self, RegistryError> {
        let path = dir.join(NAME);
        let failed = |action| {
            let path = path.clone();
            move |source| RegistryError::Io {
                action,
                path,
                source: Arc::new(source),
            }
        };
        let file = open_options()
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed("open the lock file"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = content(&file).ok().and_then(|text| holder(&text));
                return Err(RegistryError::InUse {
                    path: dir.to_owned(),
                    holder,
                });
            }
            Err(TryLockError::Error(source)) => return Err(failed("lock")(source)),
        }
        let text = content(&file).map_err(failed("read the lock file"))?;
        let used = text.contains(MARK);
        let lock = Self {
            file,
            path: path.clone(),
            used,
        };
        lock.write().map_err(failed("write the lock file"))?;
        Ok(lock)
    }

    /// Whether this directory has ever held a complete registry.
    pub fn was_used(&self) -> bool {
        self.used
    }

    /// Records that the registry in this directory is complete.
    pub fn mark_used(&mut self) -> Result<(), RegistryError> {
        self.used = true;
        self.write()
            .and_then(|()| self.file.sync_all())
            .map_err(|source| RegistryError::Io {
                action: "write the lock file",
                path: self.path.clone(),
                source: Arc::new(source),
            })
    }

    fn write(&self) -> io::Result<()> {
        let mark = if self.used { MARK } else { "" };
        let text = format!("pid {:010} {mark:4}\n", std::process::id());
        debug_assert_eq!(text.len(), CONTENT_BYTES, "the content has one length");
        self.file.write_all_at(text.as_bytes(), 0)
    }
}

impl Drop for StateLock {
    fn drop(&mut self) {
        // A child process between fork and exec holds the descriptor too.
        if let Err(error) = self.file.unlock() {
            tracing::debug!(path = %self.path.display(), %error, "the lock goes with its descriptors");
        }
    }
}

fn content(file: &File) -> io::Result<String> {
    let mut buffer = [0; CONTENT_BYTES];
    let read = file.read_at(&mut buffer, 0)?;
    Ok(String::from_utf8_lossy(&buffer[..read]).into_owned())
}

fn holder(content: &str) -> Option<u32> {
    content
        .strip_prefix("pid ")?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}
