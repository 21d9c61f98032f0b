//! The process that bounds logs: a child of the shim, since the shim must not touch a disk.
//!
//! It reads the size of each log, punches out its oldest blocks and frees blocks beyond its end. A log
//! that changes is checked every [`SHORTEST`], one that does not every [`LONGEST`]. So a log takes at
//! most its bound and what its container can allocate in [`LONGEST`] after a silence, and in
//! [`SHORTEST`] while it continues.
//!
//! It also notes when a log has grown ([`log_times`]).
//!
//! The container has a descriptor to write to its log, and may open the log again for writing. So it
//! may truncate or extend the log, write anywhere in it, and allocate blocks beyond its end
//! (`FALLOC_FL_KEEP_SIZE`). The bound holds for the blocks, whatever the length is.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use conman_fence::{BoundedLog, LogOrder};
use conman_shim_protocol::{
    decode,
    log_times::{self, LogMark},
    seqpacket,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, OFlags, fallocate};

/// Pause between two checks of a log that changes, and of one that does not. Ten thousand silent logs
/// cost five thousand checks of a microsecond or two a second.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(2);

/// Minimum interval between two marks of a log's times.
const MARK_INTERVAL: Duration = Duration::from_secs(1);

/// Blocks are punched out whole; the largest size of usual filesystems.
const BLOCK: u64 = 4_096;

/// The unit of `st_blocks` (stat(3type)).
const BLOCKS_OF: u64 = 512;

/// The sweeper's state of a log.
#[derive(Debug)]
struct Watched {
    log: BoundedLog,
    size: LogSize,
    /// The length and the time of the last mark.
    marked: Option<(u64, Instant)>,
    pause: Duration,
    due: Instant,
}

/// Serves the shim until its end of the socket closes.
///
/// # Errors
/// When the socket fails.
pub(crate) fn serve(socket: &OwnedFd) -> io::Result<()> {
    let mut all: BTreeMap<PathBuf, Watched> = BTreeMap::new();
    let mut buffer = seqpacket::buffer();
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        let timeout = Timespec::try_from(SHORTEST).ok();
        if rustix::io::retry_on_intr(|| poll(&mut fds, timeout.as_ref()))? > 0 {
            let Some(received) = seqpacket::receive(socket, &mut buffer)? else {
                return Ok(());
            };
            match decode(received.bytes).map_err(io::Error::other)? {
                LogOrder::Watch(log) => {
                    let path = log.path.clone();
                    let watched = Watched {
                        log,
                        size: LogSize::default(),
                        marked: None,
                        pause: SHORTEST,
                        due: Instant::now(),
                    };
                    all.insert(path, watched);
                }
                LogOrder::Forget(path) => {
                    if let Some(mut watched) = all.remove(&path) {
                        watched.look();
                    }
                }
            }
        }
        let now = Instant::now();
        for watched in all.values_mut().filter(|watched| watched.due <= now) {
            watched.look();
            watched.mark();
        }
    }
}

/// What a check compares.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct LogSize {
    length: u64,
    allocated_bytes: u64,
}

impl Watched {
    fn look(&mut self) {
        let size = match bound(&self.log.path, self.log.bytes) {
            Ok(size) => size,
            // Before its start has created it, or after it was removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.size,
            Err(error) => {
                if self.pause < LONGEST {
                    let path = self.log.path.display();
                    tracing::warn!(%path, %error, "cannot bound a log");
                }
                self.size
            }
        };
        self.pause = if size == self.size {
            (self.pause * 2).min(LONGEST)
        } else {
            SHORTEST
        };
        self.size = size;
        self.due = Instant::now() + self.pause;
    }
}

impl Watched {
    /// Notes when the log had its present length, unless another was noted just before.
    fn mark(&mut self) {
        let length = self.size.length;
        let due = match self.marked {
            None => length > 0,
            Some((marked, at)) => length != marked && at.elapsed() >= MARK_INTERVAL,
        };
        if !due {
            return;
        }
        let at_s = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        // A session whose disk is full has lines with wrong times.
        if let Err(error) = log_times::append(&self.log.path, LogMark { length, at_s }) {
            tracing::debug!(path = %self.log.path.display(), %error, "cannot note a log's time");
        }
        self.marked = Some((length, Instant::now()));
    }
}

/// Removes the oldest blocks when the log exceeds its bound; returns the size from before.
fn bound(path: &Path, bytes: u64) -> io::Result<LogSize> {
    let data = std::fs::symlink_metadata(path)?;
    let size = LogSize {
        length: data.len(),
        allocated_bytes: data.blocks() * BLOCKS_OF,
    };
    if size.allocated_bytes > bytes {
        keep_last(path, bytes)?;
    }
    Ok(size)
}

/// Keeps the last seven eighths of so many bytes, so that not every line causes work.
pub(crate) fn keep_last(path: &Path, bytes: u64) -> io::Result<()> {
    let file = File::options()
        .write(true)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
        .open(path)?;
    let data = file.metadata()?;
    if !data.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let end = data.len().saturating_sub(bytes / 8 * 7) / BLOCK * BLOCK;
    if end > 0 {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, how, 0, end)?;
    }
    let data = file.metadata()?;
    if data.blocks() * BLOCKS_OF > bytes {
        // The rest is beyond its end, where ext4 and btrfs punch no holes. Setting the present length
        // frees these blocks. Output written between these two lines is lost.
        file.set_len(data.len())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bytes_of_a_log_are_kept_where_they_are() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("log");
        let text: Vec<u8> = (0..600_000_u32).map(|at| b'a' + (at % 26) as u8).collect();
        std::fs::write(&path, &text).expect("written");
        keep_last(&path, 100_000).expect("bounded");
        let data = std::fs::metadata(&path).expect("there");
        assert_eq!(data.len(), text.len() as u64);
        assert!(data.blocks() * BLOCKS_OF <= 100_000, "{}", data.blocks());
        let kept = std::fs::read(&path).expect("read");
        assert_eq!(kept[520_000..], text[520_000..]);
        assert!(kept[..400_000].iter().all(|byte| *byte == 0));
    }
}
