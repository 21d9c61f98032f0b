//! Reading a container's log files, from a place near their end if so asked, and following them.
//!
//! The two outputs are kept apart, so what was written before comes ordered by output, not by
//! time, and a line's timestamp is the time at which it was read.

use std::collections::VecDeque;
use std::io::{self, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use jiff::Timestamp;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

use super::Inner;
use super::store::ContainerDir;
use crate::container_files::host_error;
use crate::exec_channels::OUTPUT_CHUNK_BYTES;
use crate::{ContainerKey, LogChunk, LogOptions, OutputStream, RuntimeError};

/// How far back the last lines are looked for.
const TAIL_WINDOW_BYTES: u64 = 1 << 20;

/// How often a followed file is read again.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(20);

struct LogReader {
    dir: ContainerDir,
    options: LogOptions,
    sources: Vec<Source>,
    /// Read and not yet handed out.
    ready: VecDeque<LogChunk>,
    finished: bool,
}

struct Source {
    stream: OutputStream,
    path: PathBuf,
    /// `None` until the file exists.
    file: Option<File>,
    at_line_start: bool,
}

pub(super) async fn logs(
    inner: Arc<Inner>,
    key: ContainerKey,
    options: LogOptions,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    let dir = inner.store.container(&key);
    if dir.plan()?.is_none() {
        return Err(RuntimeError::NoSuchContainer {
            subject: key.to_string(),
        });
    }
    let sources = vec![
        Source::new(OutputStream::Stdout, dir.stdout()),
        Source::new(OutputStream::Stderr, dir.stderr()),
    ];
    let mut reader = LogReader {
        dir,
        options,
        sources,
        ready: VecDeque::new(),
        finished: false,
    };
    if let Some(lines) = options.tail {
        reader.skip_to_tail(lines).await?;
    }
    let stream = stream::unfold(reader, |mut reader| async move {
        reader.next().await.map(|chunk| (chunk, reader))
    });
    Ok(stream.boxed())
}

impl LogReader {
    async fn next(&mut self) -> Option<Result<LogChunk, RuntimeError>> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Some(Ok(chunk));
            }
            if self.finished {
                return None;
            }
            // Asked before the files are read, so that nothing written before the end is missed.
            let ended = !self.options.follow || self.dir.has_ended();
            if let Err(error) = self.read_sources().await {
                self.finished = true;
                return Some(Err(error));
            }
            if self.ready.is_empty() {
                if ended {
                    self.finished = true;
                } else {
                    tokio::time::sleep(FOLLOW_INTERVAL).await;
                }
            }
        }
    }

    async fn read_sources(&mut self) -> Result<(), RuntimeError> {
        for source in &mut self.sources {
            let bytes = source
                .read()
                .await
                .map_err(|error| host_error("read", &source.path, error))?;
            if !bytes.is_empty() {
                let bytes = if self.options.timestamps {
                    source.stamp(&bytes)
                } else {
                    bytes.into()
                };
                self.ready.push_back(LogChunk {
                    stream: source.stream,
                    bytes,
                });
            }
        }
        Ok(())
    }

    /// Puts the positions so that `lines` lines follow, counted from the last source's end.
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
    fn new(stream: OutputStream, path: PathBuf) -> Self {
        Self {
            stream,
            path,
            file: None,
            at_line_start: true,
        }
    }

    async fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        if let Some(file) = open(&mut self.file, &self.path).await? {
            file.take(OUTPUT_CHUNK_BYTES as u64)
                .read_to_end(&mut bytes)
                .await?;
        }
        Ok(bytes)
    }

    /// Goes to where at most `wanted` lines follow and tells how many do.
    async fn seek_to_last(&mut self, wanted: u64) -> io::Result<u64> {
        let Some(file) = open(&mut self.file, &self.path).await? else {
            return Ok(0);
        };
        let end = file.seek(SeekFrom::End(0)).await?;
        let start = end.saturating_sub(TAIL_WINDOW_BYTES);
        file.seek(SeekFrom::Start(start)).await?;
        let mut window = Vec::new();
        file.take(end - start).read_to_end(&mut window).await?;
        let mut found = 0;
        let mut position = window.len();
        while position > 0 && found < wanted {
            // A newline at the very end ends the last line and begins none.
            let line_start = window[..position - 1]
                .iter()
                .rposition(|byte| *byte == b'\n');
            position = line_start.map_or(0, |newline| newline + 1);
            found += 1;
        }
        file.seek(SeekFrom::Start(start + position as u64)).await?;
        Ok(found)
    }

    fn stamp(&mut self, bytes: &[u8]) -> Bytes {
        let now = format!("{:.9} ", Timestamp::now());
        let mut stamped = Vec::with_capacity(bytes.len() + now.len());
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.at_line_start {
                stamped.extend_from_slice(now.as_bytes());
            }
            stamped.extend_from_slice(line);
            self.at_line_start = line.ends_with(b"\n");
        }
        stamped.into()
    }
}

async fn open<'a>(file: &'a mut Option<File>, path: &Path) -> io::Result<Option<&'a mut File>> {
    if file.is_none() {
        match File::open(path).await {
            Ok(opened) => *file = Some(opened),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(file.as_mut())
}
