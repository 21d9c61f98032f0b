//! Reads a container's log files, optionally only their last lines, and follows them.
//!
//! Where outputs are in separate files, past output comes ordered by output, not by time. A
//! line's timestamp is the time at which the shim noticed it ([`conman_shim_protocol::log_times`]), or else at which it
//! was read. A file may begin with a hole, where the
//! oldest part was discarded to keep it bounded: reading continues with the first whole line
//! after it. A file that is truncated while it is followed, for example by a program that reopens
//! its output, is read from its beginning.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use conman_shim_protocol::log_times::{self, LogMark};
use futures_util::stream::{self, BoxStream, StreamExt};
use jiff::Timestamp;
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;

use crate::shared::container_files::{host_error, if_present};
use crate::shared::exec_channels::OUTPUT_CHUNK_BYTES;
use crate::{LogChunk, LogOptions, OutputStream, RuntimeError};

/// How far back the last lines are searched for.
const TAIL_WINDOW_BYTES: u64 = 1 << 20;

/// How often a piece is read again if its beginning was discarded meanwhile.
const READ_TRIES: usize = 8;

/// Pause before a followed file is read again: the first one, and the longest one after a time
/// without output. (inotify is not used: a host allows few instances.)
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(250);

struct LogReader<F> {
    options: LogOptions,
    sources: Vec<Source>,
    /// Whether nothing more will be written.
    has_ended: F,
    /// Read and not yet returned.
    ready: VecDeque<LogChunk>,
    finished: bool,
    pauses: Pauses,
}

/// Pauses that grow while nothing is read.
struct Pauses(Duration);

impl Pauses {
    fn next(&mut self) -> Duration {
        let next = (self.0 * 2).min(LAST_PAUSE);
        std::mem::replace(&mut self.0, next)
    }

    fn begin_anew(&mut self) {
        self.0 = FIRST_PAUSE;
    }
}

/// A file with one output of a container.
#[derive(Debug, Clone)]
pub struct LogFile {
    pub stream: OutputStream,
    pub path: PathBuf,
    /// Bytes before its beginning that are no longer kept.
    pub dropped: u64,
}

impl LogFile {
    /// A file with all of an output.
    #[must_use]
    pub fn new(stream: OutputStream, path: PathBuf) -> Self {
        Self {
            stream,
            path,
            dropped: 0,
        }
    }
}

struct Source {
    stream: OutputStream,
    path: PathBuf,
    /// `None` until the file exists.
    file: Option<Arc<File>>,
    position: u64,
    /// Where reading ends although more may be written; `None` to continue.
    end: Option<u64>,
    at_line_start: bool,
    /// After a hole: bytes are skipped until the next line begins.
    in_cut_line: bool,
    /// Bytes that were discarded before they could be read, and whose number has not been returned yet.
    dropped: u64,
    /// When its parts were written.
    times: Vec<LogMark>,
}

/// Bytes from a place in a file.
struct Piece {
    bytes: Vec<u8>,
    /// Where they begin: beyond the requested place if there is a hole, before it if the file has
    /// become shorter.
    begin: u64,
}

/// If the log is followed, missing files are waited for. `has_ended` is called before each read.
pub async fn read(
    files: Vec<LogFile>,
    options: LogOptions,
    has_ended: impl FnMut() -> bool + Send + 'static,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    // The last lines may be wanted without those before.
    let is_part = options.tail.is_some() || options.since.is_some();
    let sources = files.into_iter().map(|log| Source {
        stream: log.stream,
        path: log.path,
        file: None,
        position: 0,
        end: None,
        at_line_start: true,
        in_cut_line: false,
        dropped: if is_part { 0 } else { log.dropped },
        times: Vec::new(),
    });
    let mut reader = LogReader {
        options,
        sources: sources.collect(),
        has_ended,
        ready: VecDeque::new(),
        finished: false,
        pauses: Pauses(FIRST_PAUSE),
    };
    if !options.follow {
        // Otherwise a program that writes faster than it is read would be read for ever.
        for source in &mut reader.sources {
            let found = source.find_end().await;
            found.map_err(|error| host_error("read", &source.path, error))?;
        }
    }
    if let Some(lines) = options.tail {
        reader.skip_to_tail(lines).await?;
    }
    if options.timestamps || options.since.is_some() {
        for source in &mut reader.sources {
            let read = source.read_times(options.since).await;
            read.map_err(|error| host_error("read", &source.path, error))?;
        }
    }
    let stream = stream::unfold(reader, |mut reader| async move {
        reader.next().await.map(|chunk| (chunk, reader))
    });
    Ok(stream.boxed())
}

impl<F: FnMut() -> bool> LogReader<F> {
    async fn next(&mut self) -> Option<Result<LogChunk, RuntimeError>> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Some(Ok(chunk));
            }
            if self.finished {
                return None;
            }
            // Checked before the files are read, so that nothing written before the end is missed.
            let ended = !self.options.follow || (self.has_ended)();
            if let Err(error) = self.read_sources().await {
                self.finished = true;
                return Some(Err(error));
            }
            if self.ready.is_empty() {
                if ended {
                    self.finished = true;
                } else {
                    tokio::time::sleep(self.pauses.next()).await;
                }
            } else {
                self.pauses.begin_anew();
            }
        }
    }

    async fn read_sources(&mut self) -> Result<(), RuntimeError> {
        for source in &mut self.sources {
            let bytes = source
                .read()
                .await
                .map_err(|error| host_error("read", &source.path, error))?;
            if !bytes.is_empty() || source.dropped > 0 {
                let bytes = if self.options.timestamps {
                    source.stamp(&bytes)
                } else {
                    bytes.into()
                };
                self.ready.push_back(LogChunk {
                    stream: source.stream,
                    bytes,
                    dropped: std::mem::take(&mut source.dropped),
                });
            }
        }
        Ok(())
    }

    /// Sets the positions so that `lines` lines follow, counted from the last source's end.
    async fn skip_to_tail(&mut self, lines: u32) -> Result<(), RuntimeError> {
        let mut wanted = u64::from(lines);
        for source in self.sources.iter_mut().rev() {
            let found = source
                .seek_to_last(wanted)
                .await
                .map_err(|error| host_error("read", &source.path, error))?;
            wanted -= found;
        }
        Ok(())
    }
}

impl Source {
    /// Returns the bytes at the position, without the rest of a line that a hole cut; empty at the
    /// file's end.
    async fn read(&mut self) -> io::Result<Vec<u8>> {
        let Some(file) = self.open().await? else {
            return Ok(Vec::new());
        };
        loop {
            let position = self.position;
            let left = self
                .end
                .map_or(u64::MAX, |end| end.saturating_sub(position));
            let most = usize::try_from(left).unwrap_or(usize::MAX);
            let most = most.min(OUTPUT_CHUNK_BYTES);
            let same = Arc::clone(&file);
            let mut piece = away(move || read_piece(&same, position, most)).await?;
            if piece.begin < position {
                // It was truncated: its content was written since.
                if self.end.is_some() {
                    return Ok(Vec::new());
                }
                self.position = 0;
                self.times.clear();
                self.at_line_start = true;
                self.in_cut_line = false;
                continue;
            }
            if let Some(end) = self.end {
                // A hole may have moved it beyond the end.
                let left = end.saturating_sub(piece.begin);
                piece
                    .bytes
                    .truncate(usize::try_from(left).unwrap_or(usize::MAX));
            }
            // A line that is cut for `since` is not lost.
            let was_discarded = piece.begin > position || self.dropped > 0;
            self.dropped += piece.begin - position;
            self.in_cut_line |= piece.begin > position;
            self.position = piece.begin + piece.bytes.len() as u64;
            if piece.bytes.is_empty() || !self.in_cut_line {
                return Ok(piece.bytes);
            }
            let newline = piece.bytes.iter().position(|byte| *byte == b'\n');
            if was_discarded {
                self.dropped += newline.map_or(piece.bytes.len(), |newline| newline + 1) as u64;
            }
            if let Some(newline) = newline {
                self.in_cut_line = false;
                self.at_line_start = true;
                let rest = &piece.bytes[newline + 1..];
                if !rest.is_empty() {
                    return Ok(rest.to_vec());
                }
            }
        }
    }

    /// Seeks to where at most `wanted` lines follow and returns how many do.
    async fn seek_to_last(&mut self, wanted: u64) -> io::Result<u64> {
        let Some(file) = self.open().await? else {
            return Ok(0);
        };
        let end = self.end;
        let (window, begin, cut) = away(move || {
            let end = end.map_or_else(|| Ok(file.metadata()?.len()), Ok::<u64, io::Error>)?;
            let start = end.saturating_sub(TAIL_WINDOW_BYTES);
            let mut window = Vec::new();
            let mut first = start;
            loop {
                let at = first + window.len() as u64;
                let length = usize::try_from(end.saturating_sub(at)).unwrap_or(0);
                let piece = read_piece(&file, at, length)?;
                if piece.bytes.is_empty() {
                    return Ok((window, first, first > 0));
                }
                if piece.begin > at {
                    window.clear();
                    first = piece.begin;
                }
                window.extend(piece.bytes);
            }
        })
        .await?;
        // The first line of the window may be incomplete.
        let whole = if cut {
            let newline = window.iter().position(|byte| *byte == b'\n');
            newline.map_or(window.len(), |newline| newline + 1)
        } else {
            0
        };
        let mut found = 0;
        let mut position = window.len();
        while position > whole && found < wanted {
            // A newline at the very end ends the last line and begins none.
            let line_start = window[..position - 1]
                .iter()
                .rposition(|byte| *byte == b'\n');
            position = line_start.map_or(0, |newline| newline + 1);
            found += 1;
        }
        self.position = begin + position as u64;
        Ok(found)
    }

    /// Puts the time before each line of the bytes before the position.
    fn stamp(&mut self, bytes: &[u8]) -> Bytes {
        let now = Timestamp::now();
        let mut stamped = Vec::with_capacity(bytes.len() + 32);
        let mut begin = self.position - bytes.len() as u64;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.at_line_start {
                let at = self.written_at(begin).unwrap_or(now);
                stamped.extend_from_slice(format!("{at:.9} ").as_bytes());
            }
            stamped.extend_from_slice(line);
            begin += line.len() as u64;
            self.at_line_start = line.ends_with(b"\n");
        }
        stamped.into()
    }

    /// When the byte at a place was written, if that was noted.
    fn written_at(&self, place: u64) -> Option<Timestamp> {
        let after = self.times.partition_point(|mark| mark.length <= place);
        Timestamp::from_second(self.times.get(after)?.at_s).ok()
    }

    /// Reads when its parts were written, and skips what was written before `since`.
    async fn read_times(&mut self, since: Option<Timestamp>) -> io::Result<()> {
        let Some(file) = self.open().await? else {
            return Ok(());
        };
        let path = self.path.clone();
        let mut times = away(move || {
            let mut times = log_times::read_log_times(&path)?;
            times.push(LogMark::of(&file.metadata()?));
            Ok(times)
        })
        .await?;
        // After a truncation, earlier marks have no meaning.
        let begin = times
            .windows(2)
            .rposition(|two| two[1].length < two[0].length);
        times.drain(..begin.map_or(0, |at| at + 1));
        self.times = times;
        let before = since.and_then(|since| {
            let earlier = |mark: &&LogMark| mark.at_s < since.as_second();
            self.times.iter().rfind(earlier)
        });
        if let Some(mark) = before
            && mark.length > self.position
        {
            // The line at the mark begins there, or may have begun before it.
            self.position = mark.length - 1;
            self.in_cut_line = true;
        }
        Ok(())
    }

    /// Ends reading at the file's present end.
    async fn find_end(&mut self) -> io::Result<()> {
        let end = match self.open().await? {
            Some(file) => away(move || Ok(file.metadata()?.len())).await?,
            None => 0,
        };
        self.end = Some(end);
        Ok(())
    }

    async fn open(&mut self) -> io::Result<Option<Arc<File>>> {
        if self.file.is_none() {
            let path = self.path.clone();
            self.file = away(move || open(&path)).await?.map(Arc::new);
        }
        Ok(self.file.clone())
    }
}

/// Opens a log for reading; `None` before it exists. It does not block if a container holds a
/// lease or has put something else in its place.
pub fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = File::options();
    options.read(true).custom_flags(flags.bits().cast_signed());
    if_present(options.open(path))
}

/// Empty at the end of the file, and if data is discarded faster than it can be read.
fn read_piece(file: &File, position: u64, most: usize) -> io::Result<Piece> {
    let mut begin = position;
    for _ in 0..READ_TRIES {
        begin = match rustix::fs::seek(file, SeekFrom::Data(begin)) {
            Ok(begin) => begin,
            // Only a hole up to the end, or the end itself.
            Err(Errno::NXIO) => {
                let length = file.metadata()?.len();
                return Ok(Piece {
                    bytes: Vec::new(),
                    begin: position.min(length),
                });
            }
            Err(errno) => return Err(errno.into()),
        };
        let mut bytes = vec![0; most];
        let read = file.read_at(&mut bytes, begin)?;
        bytes.truncate(read);
        // Data that was discarded while it was read would be zeros.
        if rustix::fs::seek(file, SeekFrom::Data(begin)) == Ok(begin) {
            return Ok(Piece { bytes, begin });
        }
    }
    Ok(Piece {
        bytes: Vec::new(),
        begin: position,
    })
}

/// Reading may block on a disk.
async fn away<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)?
}

#[cfg(test)]
mod tests;
