//! Logs of removed containers, kept for a while.
//!
//! ```text
//! <directory>/<session>/<generation>           the end of its log
//! <directory>/<session>/<generation>.stderr    likewise of its standard error, if the two are kept separately
//! <directory>/<session>/….times                when its parts were written
//! <directory>/<session>/….cut                  how many bytes before it are not kept, if any, as a number
//! ```
//! A session has two at most: the last one's and the one's before. They are copies: a log belongs to its
//! container's disk limit.

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use conman_linux::remove_if_present;
use conman_proto::{Generation, SessionId};
use conman_shim_protocol::log_times::{self, LogMark};

use crate::shared::container_files::{host_error, if_present};
use crate::shared::log_files::{self, LogFile};
use crate::{ContainerKey, LogOptions, OutputStream, RuntimeError};

/// Logs kept for one session.
const GENERATIONS: usize = 2;

/// For root only: they may hold secrets.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Minimum interval between removals of old logs; they happen when a log is kept.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// Suffix of a copy that is not complete.
const UNFINISHED: &str = ".new";

/// Suffix of the number of bytes before a log that are not kept.
const CUT: &str = ".cut";

/// How much is kept, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptLogLimits {
    /// Bytes of each log, from its end; 0 keeps none.
    pub bytes: u64,
    /// Bytes of all logs; beyond that, the oldest are removed.
    pub total_bytes: u64,
    /// Time since its container was removed.
    pub age: Duration,
}

impl Default for KeptLogLimits {
    fn default() -> Self {
        Self {
            bytes: 1 << 20,
            total_bytes: 1 << 30,
            age: Duration::from_secs(24 * 60 * 60),
        }
    }
}

/// The end of an output that is in no file.
#[derive(Debug, Default)]
pub(crate) struct OutputEnd {
    pub(crate) bytes: VecDeque<u8>,
    /// Bytes before it.
    pub(crate) dropped: u64,
}

impl OutputEnd {
    /// Appends a piece, and keeps at most `most` bytes of the end.
    pub(crate) fn push(&mut self, piece: &[u8], most: u64) {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        self.bytes.extend(piece);
        let beyond = self.bytes.len().saturating_sub(most);
        self.bytes.drain(..beyond);
        self.dropped += beyond as u64;
    }
}

/// The kept logs of one instance.
#[derive(Debug)]
pub(crate) struct KeptLogs {
    directory: PathBuf,
    limits: KeptLogLimits,
    /// When logs were last removed. Held meanwhile: one thread at a time removes.
    swept: Mutex<Option<SystemTime>>,
    /// At least the bytes of all of them, those since the last sweep included.
    total: AtomicU64,
}

impl KeptLogs {
    pub(crate) fn open(directory: PathBuf, limits: KeptLogLimits) -> io::Result<Self> {
        make_directory(&directory)?;
        let kept = Self {
            directory,
            limits,
            swept: Mutex::default(),
            total: AtomicU64::default(),
        };
        // A log that cannot be read must not keep the node from running sessions.
        if let Err(error) = kept.sweep(SystemTime::now()) {
            tracing::warn!(directory = %kept.directory.display(), %error, "cannot remove old logs");
        }
        Ok(kept)
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Keeps the end of a container's logs. One that does not exist, or that its program has made
    /// unreadable, is not kept.
    pub(crate) fn keep(&self, key: &ContainerKey, stdout: &Path, stderr: &Path) -> io::Result<()> {
        if self.limits.bytes == 0 {
            return Ok(());
        }
        let kept = self.path(key);
        let copied = self.copy_end(stdout, &kept)? + self.copy_end(stderr, &errors_of(&kept))?;
        self.settle(key, &kept, copied)
    }

    /// Bytes of each output that are kept.
    pub(crate) fn most_bytes(&self) -> u64 {
        self.limits.bytes
    }

    /// Keeps the ends of a container's outputs.
    pub(crate) fn keep_ends(
        &self,
        key: &ContainerKey,
        stdout: OutputEnd,
        stderr: Option<OutputEnd>,
    ) -> io::Result<()> {
        if self.limits.bytes == 0 {
            return Ok(());
        }
        let kept = self.path(key);
        let mut copied = store(&kept, stdout.bytes, stdout.dropped)?;
        if let Some(stderr) = stderr {
            copied += store(&errors_of(&kept), stderr.bytes, stderr.dropped)?;
        }
        self.settle(key, &kept, copied)
    }

    fn path(&self, key: &ContainerKey) -> PathBuf {
        let session = self.directory.join(key.session.as_str());
        session.join(key.generation.to_string())
    }

    /// Removes older logs of the session, and old ones of all, now that `copied` bytes more are kept.
    fn settle(&self, key: &ContainerKey, kept: &Path, copied: u64) -> io::Result<()> {
        for older in self
            .generations(&key.session)?
            .iter()
            .rev()
            .skip(GENERATIONS)
        {
            let older = kept.with_file_name(older.to_string());
            remove(&errors_of(&older))?;
            remove(&older)?;
        }
        self.total.fetch_add(copied, Ordering::Relaxed);
        self.sweep_if_due(SystemTime::now())
    }

    /// Copies the last whole lines of a log, with their times; returns the bytes of both.
    fn copy_end(&self, original: &Path, path: &Path) -> io::Result<u64> {
        let Some(mut log) = log_files::open(original)? else {
            return Ok(0);
        };
        let metadata = log.metadata()?;
        if !metadata.is_file() {
            return Ok(0);
        }
        let first = metadata.len().saturating_sub(self.limits.bytes);
        // The beginning may be a hole already.
        let mut first = rustix::fs::seek(&log, rustix::fs::SeekFrom::Data(first)).unwrap_or(first);
        log.seek(SeekFrom::Start(first))?;
        let mut log = BufReader::new(io::Read::take(log, self.limits.bytes));
        if first > 0 {
            // The rest of a line.
            let mut cut = Vec::new();
            first += log.read_until(b'\n', &mut cut)? as u64;
        }
        let copied = store(path, log, first)?;
        let mut times = log_times::read_log_times(original)?;
        times.push(LogMark::of(&metadata));
        times.retain_mut(|mark| {
            mark.length = mark.length.saturating_sub(first);
            mark.length > 0
        });
        Ok(copied + log_times::write_log_times(path, &times)?)
    }

    /// A container's logs; with `previous`, the logs of the session's container before it. None if they are not
    /// kept.
    pub(crate) fn find(&self, key: &ContainerKey, previous: bool) -> io::Result<Vec<LogFile>> {
        let kept = self.generations(&key.session)?;
        let found = match previous {
            true => kept.into_iter().filter(|one| *one < key.generation).max(),
            false => kept.into_iter().find(|one| *one == key.generation),
        };
        let Some(generation) = found else {
            return Ok(Vec::new());
        };
        let directory = self.directory.join(key.session.as_str());
        let log = directory.join(generation.to_string());
        let errors = errors_of(&log);
        let errors = errors
            .exists()
            .then(|| kept_file(OutputStream::Stderr, errors));
        Ok([kept_file(OutputStream::Stdout, log)]
            .into_iter()
            .chain(errors)
            .collect())
    }

    /// Reads a container's kept log; `None` if there is none.
    pub(crate) fn find_for(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<Option<Vec<LogFile>>, RuntimeError> {
        let found = self.find(key, options.previous);
        let found = found.map_err(|source| host_error("read", &self.directory, source))?;
        Ok((!found.is_empty()).then_some(found))
    }

    fn sweep_if_due(&self, now: SystemTime) -> io::Result<()> {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_late = |last| now.duration_since(last).is_ok_and(|it| it > SWEEP_EVERY);
        let is_full = self.total.load(Ordering::Relaxed) > self.limits.total_bytes;
        if is_full || swept.is_none_or(is_late) {
            *swept = Some(now);
            self.sweep(now)?;
        }
        Ok(())
    }

    /// Removes logs that are too old, and the oldest of those that take too much: so many that not every
    /// later log causes this again.
    fn sweep(&self, now: SystemTime) -> io::Result<()> {
        let mut kept = Vec::new();
        for session in fs::read_dir(&self.directory)? {
            let session = session?.path();
            for log in fs::read_dir(&session)? {
                let log = log?.path();
                let is_log = log.extension().is_none_or(|kind| kind == "stderr");
                // Another thread may have given an unfinished one its name.
                let Some(data) = if_present(fs::symlink_metadata(&log))? else {
                    continue;
                };
                // A clock that was set back makes it young.
                if now.duration_since(data.modified()?).unwrap_or_default() > self.limits.age {
                    remove_if_present(&log)?;
                } else if is_log {
                    let times = if_present(fs::symlink_metadata(log_times::path(&log)))?;
                    let bytes = data.len() + times.map_or(0, |times| times.len());
                    kept.push((data.modified()?, bytes, log));
                }
            }
            // Only an empty one is removed.
            let _ = fs::remove_dir(&session);
        }
        kept.sort_unstable();
        let mut total: u64 = kept.iter().map(|(_, bytes, _)| bytes).sum();
        if total > self.limits.total_bytes {
            let wanted = self.limits.total_bytes / 8 * 7;
            for (_, bytes, log) in kept {
                if total <= wanted {
                    break;
                }
                remove(&log)?;
                total -= bytes;
                let _ = log.parent().map(fs::remove_dir);
            }
        }
        self.total.store(total, Ordering::Relaxed);
        Ok(())
    }

    /// The generations whose logs are kept, in order.
    fn generations(&self, session: &SessionId) -> io::Result<Vec<Generation>> {
        let listed = if_present(fs::read_dir(self.directory.join(session.as_str())))?;
        let mut found = Vec::new();
        for entry in listed.into_iter().flatten() {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.parse().ok());
            found.extend(number.and_then(Generation::new));
        }
        found.sort_unstable();
        Ok(found)
    }
}

/// Writes a kept log whole, or not at all; returns its bytes.
fn store(path: &Path, mut bytes: impl Read, dropped: u64) -> io::Result<u64> {
    path.parent().map_or(Ok(()), make_directory)?;
    let unfinished = conman_linux::with_suffix(path, UNFINISHED);
    let mut copy = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(FILE_MODE)
        .open(&unfinished)?;
    let copied = io::copy(&mut bytes, &mut copy)?;
    if dropped > 0 {
        fs::write(conman_linux::with_suffix(path, CUT), dropped.to_string())?;
    }
    fs::rename(&unfinished, path)?;
    Ok(copied)
}

fn kept_file(stream: OutputStream, path: PathBuf) -> LogFile {
    let cut = fs::read_to_string(conman_linux::with_suffix(&path, CUT));
    LogFile {
        stream,
        path,
        // A damaged number leaves only the note out.
        dropped: cut.ok().and_then(|cut| cut.parse().ok()).unwrap_or(0),
    }
}

fn errors_of(log: &Path) -> PathBuf {
    log.with_extension("stderr")
}

/// Removes a log, if it exists, with what belongs to it.
fn remove(log: &Path) -> io::Result<()> {
    let cut = conman_linux::with_suffix(log, CUT);
    for path in [log.to_owned(), log_times::path(log), cut] {
        remove_if_present(&path)?;
    }
    Ok(())
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
        ContainerKey::new(
            "s".parse().expect("an id"),
            Generation::new(generation).expect("not zero"),
        )
    }

    fn read(kept: &KeptLogs, generation: u64, previous: bool) -> Option<String> {
        let found = kept.find(&key(generation), previous).expect("readable");
        let path = &found.first()?.path;
        Some(fs::read_to_string(path).expect("readable"))
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
        let nothing = directory.path().join("nothing");
        kept.keep(&key(1), &log, &nothing).expect("there is none");
        for (generation, text) in [(1, "first\n"), (2, "one\ntwo\nthree\n"), (4, "last\n")] {
            fs::write(&log, text).expect("written");
            kept.keep(&key(generation), &log, &nothing).expect("kept");
        }
        assert_eq!(read(&kept, 1, false), None);
        assert_eq!(read(&kept, 2, false).as_deref(), Some("three\n"));
        let dropped = |generation| kept.find(&key(generation), false).expect("readable")[0].dropped;
        assert_eq!((dropped(2), dropped(4)), (8, 0));
        assert_eq!(read(&kept, 4, false).as_deref(), Some("last\n"));
        assert_eq!(read(&kept, 4, true).as_deref(), Some("three\n"));
        assert_eq!(read(&kept, 5, true).as_deref(), Some("last\n"));
        fs::write(&log, "").expect("written");
        kept.keep(&key(5), &log, &nothing).expect("kept");
        assert_eq!(read(&kept, 5, false).as_deref(), Some(""));
        let now = SystemTime::now();
        kept.sweep(now).expect("swept");
        assert!(read(&kept, 4, false).is_some());
        kept.sweep(now + limits.age * 2).expect("swept");
        assert_eq!(read(&kept, 4, false), None);
        assert_eq!(fs::read_dir(&kept.directory).expect("there").count(), 0);
    }

    #[test]
    fn the_ends_of_outputs_without_files_are_kept_too() {
        let directory = tempfile::tempdir().expect("a directory");
        let kept = KeptLogs::open(directory.path().join("kept"), KeptLogLimits::default());
        let kept = kept.expect("opened");
        let (mut stdout, mut stderr) = (OutputEnd::default(), OutputEnd::default());
        for piece in [&b"a\n"[..], b"b\nc"] {
            stdout.push(piece, 3);
        }
        stderr.push(b"oops", 3);
        kept.keep_ends(&key(1), stdout, Some(stderr)).expect("kept");
        let found = kept.find(&key(1), false).expect("readable");
        let texts = found
            .iter()
            .map(|log| fs::read(&log.path).expect("readable"));
        assert_eq!(
            texts.collect::<Vec<_>>(),
            [b"b\nc".to_vec(), b"ops".to_vec()]
        );
        let dropped: Vec<_> = found.iter().map(|log| log.dropped).collect();
        assert_eq!(dropped, [2, 1]);
    }

    #[test]
    fn all_logs_together_are_bounded_and_the_oldest_go_first() {
        let directory = tempfile::tempdir().expect("a directory");
        // A log, and the mark of its end.
        let each = 100 + 16;
        let limits = KeptLogLimits {
            total_bytes: 8 * each,
            ..KeptLogLimits::default()
        };
        let kept = KeptLogs::open(directory.path().join("kept"), limits).expect("opened");
        let log = directory.path().join("log");
        let nothing = directory.path().join("nothing");
        fs::write(&log, [b'x'; 100]).expect("written");
        let of = |number: u64| ContainerKey {
            session: format!("s{number}").parse().expect("an id"),
            ..key(number)
        };
        let mut time = SystemTime::now() - Duration::from_secs(60);
        for number in 1..=9 {
            kept.keep(&of(number), &log, &nothing).expect("kept");
            let found = kept.find(&of(number), false).expect("readable");
            time += Duration::from_secs(1);
            let file = File::options()
                .write(true)
                .open(&found[0].path)
                .expect("opened");
            file.set_modified(time).expect("set");
        }
        let are_kept = |numbers: std::ops::RangeInclusive<u64>| {
            let mut found = numbers.map(|number| kept.find(&of(number), false).expect("readable"));
            found.all(|logs| !logs.is_empty())
        };
        assert!(kept.find(&of(1), false).expect("readable").is_empty());
        assert!(kept.find(&of(2), false).expect("readable").is_empty());
        assert!(are_kept(3..=9));
        assert_eq!(fs::read_dir(&kept.directory).expect("there").count(), 7);
        // The next daemon counts what is there.
        drop(kept);
        let kept = KeptLogs::open(directory.path().join("kept"), limits).expect("opened");
        assert_eq!(kept.total.load(Ordering::Relaxed), 7 * each);
    }

    #[test]
    fn a_log_that_was_replaced_by_a_link_is_not_followed() {
        let directory = tempfile::tempdir().expect("a directory");
        let kept = KeptLogs::open(directory.path().join("kept"), KeptLogLimits::default());
        let kept = kept.expect("opened");
        let log = directory.path().join("log");
        let nothing = directory.path().join("nothing");
        std::os::unix::fs::symlink("/etc/passwd", &log).expect("linked");
        kept.keep(&key(1), &log, &nothing).expect_err("a link");
        assert_eq!(read(&kept, 1, false), None);
    }
}
