//! When the parts of a log were written.
//!
//! ```text
//! <log>.times    marks of 16 bytes: a length of the log, and the time at which it was seen (s since 1970)
//! ```
//! The sweeper appends a mark when a log has grown, at most one a second. So what stands between two marks was
//! written between their times. What stands after the last one was written until the file's own time. A container
//! cannot reach the file with the marks.

use std::fs::{File, Metadata};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

const MARK_BYTES: usize = 16;

/// Marks of one log; beyond that, every second one is dropped.
const MAX_MARKS: usize = 4_096;

/// A log had this length at this time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogMark {
    pub length: u64,
    /// Seconds since 1970.
    pub at_s: i64,
}

impl LogMark {
    /// The present length, and the time of the last write.
    #[must_use]
    pub fn of(log: &Metadata) -> Self {
        Self {
            length: log.len(),
            at_s: log.mtime(),
        }
    }
}

/// The marks of a log, oldest first. Damaged and missing ones are left out.
///
/// # Errors
/// The file cannot be read.
pub fn read_log_times(log: &Path) -> io::Result<Vec<LogMark>> {
    let file = match File::open(path(log)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    file.take((2 * MAX_MARKS * MARK_BYTES) as u64)
        .read_to_end(&mut bytes)?;
    let (marks, _) = bytes.as_chunks::<MARK_BYTES>();
    Ok(marks.iter().map(decode).collect())
}

/// Replaces the marks of a log; returns the bytes written.
///
/// # Errors
/// The file cannot be written.
pub fn write_log_times(log: &Path, marks: &[LogMark]) -> io::Result<u64> {
    let bytes: Vec<u8> = marks.iter().flat_map(encode).collect();
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path(log))?;
    file.write_all(&bytes)?;
    Ok(bytes.len() as u64)
}

/// The file with the marks of a log.
#[must_use]
pub fn path(log: &Path) -> PathBuf {
    conman_linux::with_suffix(log, ".times")
}

/// Appends a mark. One that is shorter than the last one begins again: the log was truncated.
pub fn append(log: &Path, mark: LogMark) -> io::Result<()> {
    let mut file = File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path(log))?;
    if file.metadata()?.len() < (MAX_MARKS * MARK_BYTES) as u64 {
        return file.write_all(&encode(&mark));
    }
    let marks = read_log_times(log)?;
    let kept: Vec<LogMark> = marks.into_iter().skip(1).step_by(2).chain([mark]).collect();
    write_log_times(log, &kept).map(drop)
}

fn encode(mark: &LogMark) -> [u8; MARK_BYTES] {
    let mut bytes = [0; MARK_BYTES];
    bytes[..8].copy_from_slice(&mark.length.to_le_bytes());
    bytes[8..].copy_from_slice(&mark.at_s.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8; MARK_BYTES]) -> LogMark {
    let half = |from: usize| {
        let mut half = [0; 8];
        half.copy_from_slice(&bytes[from..from + 8]);
        half
    };
    LogMark {
        length: u64::from_le_bytes(half(0)),
        at_s: i64::from_le_bytes(half(8)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_read_as_written_and_stay_bounded() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("log");
        assert_eq!(read_log_times(&log).expect("none"), []);
        let mark = |number: usize| LogMark {
            length: number as u64 * 10,
            at_s: 1_700_000_000 + i64::try_from(number).expect("small"),
        };
        for number in 0..MAX_MARKS + 1 {
            append(&log, mark(number)).expect("written");
        }
        let marks = read_log_times(&log).expect("read");
        assert_eq!(marks.len(), MAX_MARKS / 2 + 1);
        assert_eq!(marks.last(), Some(&mark(MAX_MARKS)));
        assert!(marks.is_sorted_by_key(|mark| (mark.length, mark.at_s)));
    }
}
