//! Logs of removed containers, kept for a while.
//!
//! ```text
//! <directory>/<session>/<generation>    the end of its log
//! ```
//! A session has two at most: the last one's and the one's before. They are copies: a log belongs to its
//! container's disk limit.

use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use conman_proto::{Generation, SessionId};
use rustix::fs::OFlags;

use crate::ContainerKey;

/// Logs kept for one session.
const GENERATIONS: usize = 2;

/// For root only: they may hold secrets.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Minimum interval between removals of old logs; they happen when a log is kept.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// Suffix of a copy that is not complete.
const UNFINISHED: &str = ".new";

/// How much is kept, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptLogLimits {
    /// Bytes of each log, from its end; 0 keeps none.
    pub bytes: u64,
    /// Time since its container was removed.
    pub age: Duration,
}

impl Default for KeptLogLimits {
    fn default() -> Self {
        Self {
            bytes: 1 << 20,
            age: Duration::from_secs(24 * 60 * 60),
        }
    }
}

/// The kept logs of one instance.
#[derive(Debug)]
pub(super) struct KeptLogs {
    directory: PathBuf,
    limits: KeptLogLimits,
    swept: Mutex<Option<SystemTime>>,
}

impl KeptLogs {
    pub(super) fn open(directory: PathBuf, limits: KeptLogLimits) -> io::Result<Self> {
        make_directory(&directory)?;
        Ok(Self {
            directory,
            limits,
            swept: Mutex::default(),
        })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Keeps the end of a container's log. One that does not exist, or that its program has made
    /// unreadable, is not kept.
    pub(super) fn keep(&self, key: &ContainerKey, log: &Path) -> io::Result<()> {
        if self.limits.bytes == 0 {
            return Ok(());
        }
        let opened = File::options()
            .read(true)
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
            .open(log);
        let mut log = match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        };
        let metadata = log.metadata()?;
        if !metadata.is_file() {
            return Ok(());
        }
        let first = metadata.len().saturating_sub(self.limits.bytes);
        // The beginning may be a hole already.
        let first = rustix::fs::seek(&log, rustix::fs::SeekFrom::Data(first)).unwrap_or(first);
        log.seek(SeekFrom::Start(first))?;
        let mut log = BufReader::new(io::Read::take(log, self.limits.bytes));
        if first > 0 {
            // The rest of a line.
            let mut cut = Vec::new();
            log.read_until(b'\n', &mut cut)?;
        }
        let directory = self.directory.join(key.session.as_str());
        make_directory(&directory)?;
        let path = directory.join(key.generation.to_string());
        let unfinished = conman_linux::with_suffix(&path, UNFINISHED);
        let mut copy = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(FILE_MODE)
            .open(&unfinished)?;
        io::copy(&mut log, &mut copy)?;
        fs::rename(&unfinished, &path)?;
        let generations = self.generations(&key.session)?;
        for older in generations.iter().rev().skip(GENERATIONS) {
            fs::remove_file(directory.join(older.to_string()))?;
        }
        self.sweep_from_time_to_time(SystemTime::now())
    }

    /// A container's log; with `previous`, the log of the session's container before it.
    pub(super) fn find(&self, key: &ContainerKey, previous: bool) -> io::Result<Option<PathBuf>> {
        let kept = self.generations(&key.session)?;
        let found = match previous {
            true => kept.into_iter().filter(|one| *one < key.generation).max(),
            false => kept.into_iter().find(|one| *one == key.generation),
        };
        let directory = self.directory.join(key.session.as_str());
        Ok(found.map(|generation| directory.join(generation.to_string())))
    }

    fn sweep_from_time_to_time(&self, now: SystemTime) -> io::Result<()> {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
        let due =
            swept.is_none_or(|last| now.duration_since(last).is_ok_and(|it| it > SWEEP_EVERY));
        if due {
            *swept = Some(now);
            drop(swept);
            self.sweep(now)?;
        }
        Ok(())
    }

    /// Removes logs that are too old.
    fn sweep(&self, now: SystemTime) -> io::Result<()> {
        for session in fs::read_dir(&self.directory)? {
            let session = session?.path();
            for log in fs::read_dir(&session)? {
                let log = log?;
                let kept_at = log.metadata()?.modified()?;
                // A clock that was set back makes it young.
                if now.duration_since(kept_at).unwrap_or_default() > self.limits.age {
                    fs::remove_file(log.path())?;
                }
            }
            // Only an empty one is removed.
            let _ = fs::remove_dir(&session);
        }
        Ok(())
    }

    /// The generations whose logs are kept, in order.
    fn generations(&self, session: &SessionId) -> io::Result<Vec<Generation>> {
        let listed = match fs::read_dir(self.directory.join(session.as_str())) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed?,
        };
        let mut found = Vec::new();
        for entry in listed {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.parse().ok());
            found.extend(number.and_then(Generation::new));
        }
        found.sort_unstable();
        Ok(found)
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(generation: u64) -> ContainerKey {
        ContainerKey {
            session: "s".parse().expect("an id"),
            generation: Generation::new(generation).expect("not zero"),
        }
    }

    fn read(kept: &KeptLogs, generation: u64, previous: bool) -> Option<String> {
        let found = kept.find(&key(generation), previous).expect("readable");
        found.map(|path| fs::read_to_string(path).expect("readable"))
    }

    #[test]
    fn the_end_of_the_last_two_logs_is_kept_in_whole_lines_until_it_is_old() {
        let directory = tempfile::tempdir().expect("a directory");
        let limits = KeptLogLimits {
            bytes: 10,
            ..KeptLogLimits::default()
        };
        let kept = KeptLogs::open(directory.path().join("kept"), limits).expect("opened");
        let log = directory.path().join("log");
        kept.keep(&key(1), &log).expect("there is none");
        for (generation, text) in [(1, "first\n"), (2, "one\ntwo\nthree\n"), (4, "last\n")] {
            fs::write(&log, text).expect("written");
            kept.keep(&key(generation), &log).expect("kept");
        }
        assert_eq!(read(&kept, 1, false), None);
        assert_eq!(read(&kept, 2, false).as_deref(), Some("three\n"));
        assert_eq!(read(&kept, 4, false).as_deref(), Some("last\n"));
        assert_eq!(read(&kept, 4, true).as_deref(), Some("three\n"));
        assert_eq!(read(&kept, 5, true).as_deref(), Some("last\n"));
        fs::write(&log, "").expect("written");
        kept.keep(&key(5), &log).expect("kept");
        assert_eq!(read(&kept, 5, false).as_deref(), Some(""));
        let now = SystemTime::now();
        kept.sweep(now).expect("swept");
        assert!(read(&kept, 4, false).is_some());
        kept.sweep(now + limits.age * 2).expect("swept");
        assert_eq!(read(&kept, 4, false), None);
        assert_eq!(fs::read_dir(&kept.directory).expect("there").count(), 0);
    }

    #[test]
    fn a_log_that_was_replaced_by_a_link_is_not_followed() {
        let directory = tempfile::tempdir().expect("a directory");
        let kept = KeptLogs::open(directory.path().join("kept"), KeptLogLimits::default());
        let kept = kept.expect("opened");
        let log = directory.path().join("log");
        std::os::unix::fs::symlink("/etc/passwd", &log).expect("linked");
        kept.keep(&key(1), &log).expect_err("a link");
        assert_eq!(read(&kept, 1, false), None);
    }
}
