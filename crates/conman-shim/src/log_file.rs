//! A container's log, read while it is written and bounded.
//!
//! Standard output and error go to one file, opened for append, in the order of the writes; the two are
//! not distinguished. The file never shrinks: its oldest blocks are punched out (see the sweeper), so an
//! offset always names the same byte, and the rest begins at the first data. A reader needs a descriptor
//! only while it reads, and no help of shim or daemon.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, SeekFrom, seek};

/// Longest part that is read at once.
pub const MAX_PART_BYTES: usize = 64 * 1_024;

/// Times that a part is read again because its beginning was removed meanwhile.
const TRIES: usize = 8;

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogPart {
    /// Offset of its first byte in the log.
    pub offset: u64,
    /// Bytes between the last part and this one that are no longer kept.
    pub lost: u64,
    /// The file was truncated: this part is from a new beginning.
    pub cut: bool,
    /// Empty at the end of the log.
    pub bytes: Vec<u8>,
}

/// A log and how far it has been read.
#[derive(Debug)]
pub struct LogFile {
    file: File,
    offset: u64,
}

impl LogFile {
    /// Opens the log at its beginning. `NotFound` before the container's start has created it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
            .open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        Ok(Self { file, offset: 0 })
    }

    /// Continues at the offset of an earlier reader.
    pub fn resume_at(&mut self, offset: u64) {
        self.offset = offset;
    }

    /// Offset of the next part.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Offset of the first byte that is still kept; the end when there is none.
    pub fn first_kept(&self) -> io::Result<u64> {
        self.data_from(0)
    }

    /// Moves to the beginning of the last `lines` lines, of at most `most_bytes` bytes together.
    pub fn seek_tail(&mut self, lines: usize, most_bytes: u64) -> io::Result<()> {
        let end = self.file.metadata()?.len();
        let first = self.data_from(end.saturating_sub(most_bytes))?;
        let whole = self.first_kept()? == 0;
        let (mut at, mut left) = (end, lines);
        // A newline at the end of the file ends the last line and begins none.
        let mut begin = first;
        'look: while at > first && left > 0 {
            let length = (at - first).min(MAX_PART_BYTES as u64);
            let from = at - length;
            let mut buffer = vec![0; usize::try_from(length).unwrap_or(MAX_PART_BYTES)];
            let read = self.file.read_at(&mut buffer, from)?;
            for (index, byte) in buffer[..read].iter().enumerate().rev() {
                let next = from + index as u64 + 1;
                if *byte == b'\n' && next < end {
                    left -= 1;
                    if left == 0 {
                        begin = next;
                        break 'look;
                    }
                }
            }
            at = from;
        }
        self.offset = if lines == 0 {
            end
        } else if begin == first && !(whole && first == 0) {
            self.line_from(first, end)?
        } else {
            begin
        };
        Ok(())
    }

    /// Returns the next part, at most [`MAX_PART_BYTES`]; an empty part at the end. To follow the log, call
    /// it again when the file's length has grown.
    pub fn next_part(&mut self) -> io::Result<LogPart> {
        let mut part = LogPart {
            offset: self.offset,
            lost: 0,
            cut: false,
            bytes: Vec::new(),
        };
        for _ in 0..TRIES {
            let end = self.file.metadata()?.len();
            if end < self.offset {
                (part.cut, part.lost, self.offset) = (true, 0, 0);
            }
            let kept = self.data_from(self.offset)?;
            if kept > self.offset {
                // Data after a hole begins in the middle of a line.
                let from = self.line_from(kept, end)?;
                part.lost += from - self.offset;
                self.offset = from;
            }
            let mut buffer = vec![0; MAX_PART_BYTES];
            let read = self.file.read_at(&mut buffer, self.offset)?;
            // If it was removed during the read, the bytes are zeros.
            if read > 0 && self.data_from(self.offset)? != self.offset {
                continue;
            }
            buffer.truncate(read);
            part.offset = self.offset;
            part.bytes = buffer;
            self.offset += read as u64;
            return Ok(part);
        }
        // The log is written faster than it can be read.
        part.offset = self.offset;
        Ok(part)
    }

    fn data_from(&self, offset: u64) -> io::Result<u64> {
        match seek(&self.file, SeekFrom::Data(offset)) {
            Ok(at) => Ok(at),
            // Nothing but a hole, or the end.
            Err(rustix::io::Errno::NXIO) => Ok(self.file.metadata()?.len().max(offset)),
            // The filesystem does not support it, so it has no holes.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(offset),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the first line that begins at `from` or later; `from` itself when there is none near.
    fn line_from(&self, from: u64, end: u64) -> io::Result<u64> {
        if from == 0 {
            return Ok(0);
        }
        let mut buffer = vec![0; MAX_PART_BYTES];
        let read = self.file.read_at(&mut buffer, from - 1)?;
        let line = buffer[..read].iter().position(|byte| *byte == b'\n');
        let line = line.map(|index| from + index as u64);
        Ok(line.filter(|line| *line < end).unwrap_or(from))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::sweeper::keep_last;

    struct Log {
        directory: tempfile::TempDir,
        file: File,
    }

    impl Log {
        fn new() -> Self {
            let directory = tempfile::tempdir().expect("a directory");
            let file = File::options()
                .append(true)
                .create(true)
                .open(directory.path().join("log"))
                .expect("made");
            Self { directory, file }
        }

        fn open(&self) -> LogFile {
            LogFile::open(&self.directory.path().join("log")).expect("opened")
        }

        fn write(&mut self, from: u32, to: u32) {
            for number in from..to {
                writeln!(self.file, "line {number:06}").expect("written");
            }
        }

        fn bound(&self, bytes: u64) {
            keep_last(&self.directory.path().join("log"), bytes).expect("bounded");
        }
    }

    fn rest(log: &mut LogFile) -> (String, u64) {
        let (mut text, mut lost) = (String::new(), 0);
        loop {
            let part = log.next_part().expect("read");
            lost += part.lost;
            if part.bytes.is_empty() {
                return (text, lost);
            }
            text.push_str(&String::from_utf8(part.bytes).expect("no zeros, no torn text"));
        }
    }

    #[test]
    fn what_is_left_begins_at_a_line_and_offsets_stay() {
        let mut log = Log::new();
        log.write(0, 50_000);
        log.bound(100_000);
        let mut reader = log.open();
        let (text, lost) = rest(&mut reader);
        assert!(text.starts_with("line ") && text.ends_with("line 049999\n"));
        assert!(text.len() as u64 <= 100_000, "{}", text.len());
        assert!(text.len() as u64 >= 80_000, "{}", text.len());
        assert_eq!(lost + text.len() as u64, 50_000 * 12);
        assert!(reader.first_kept().expect("told") <= lost);
        log.write(50_000, 50_001);
        assert_eq!(rest(&mut reader), ("line 050000\n".to_owned(), 0));
    }

    #[test]
    fn a_reader_that_is_overtaken_is_told_how_much_it_lost() {
        let mut log = Log::new();
        log.write(0, 100);
        let mut reader = log.open();
        assert_eq!(rest(&mut reader).0.len(), 1_200);
        log.write(100, 50_000);
        log.bound(50_000);
        let (text, lost) = rest(&mut reader);
        assert!(text.starts_with("line "));
        assert_eq!(1_200 + lost + text.len() as u64, 50_000 * 12);
    }

    #[test]
    fn the_tail_is_the_last_lines_as_far_as_they_are_kept() {
        let mut log = Log::new();
        log.write(0, 50_000);
        log.bound(50_000);
        let mut reader = log.open();
        reader.seek_tail(2, u64::MAX).expect("found");
        assert_eq!(rest(&mut reader).0, "line 049998\nline 049999\n");
        reader.seek_tail(0, u64::MAX).expect("found");
        assert_eq!(rest(&mut reader).0, "");
        reader.seek_tail(usize::MAX, u64::MAX).expect("found");
        assert!(rest(&mut reader).0.starts_with("line 04"));
        reader.seek_tail(10, 30).expect("found");
        assert_eq!(rest(&mut reader).0, "line 049998\nline 049999\n");
        let mut small = Log::new();
        small.write(0, 3);
        write!(small.file, "unfinished").expect("written");
        let mut reader = small.open();
        reader.seek_tail(2, u64::MAX).expect("found");
        assert_eq!(rest(&mut reader).0, "line 000002\nunfinished");
        reader.seek_tail(9, u64::MAX).expect("found");
        assert_eq!(rest(&mut reader).0.lines().count(), 4);
    }

    #[test]
    fn a_file_that_was_cut_is_read_from_its_new_beginning() {
        let mut log = Log::new();
        log.write(0, 10);
        let mut reader = log.open();
        assert_eq!(rest(&mut reader).0.len(), 120);
        log.file.set_len(0).expect("cut");
        log.write(7, 8);
        let part = reader.next_part().expect("read");
        assert!(part.cut);
        assert_eq!((part.offset, part.bytes), (0, b"line 000007\n".to_vec()));
    }

    #[test]
    fn nobody_reads_zeros_while_the_beginning_is_removed() {
        let mut log = Log::new();
        log.write(0, 20_000);
        let path = log.directory.path().join("log");
        let mut reader = log.open();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for step in 0..40_u32 {
                    log.write(20_000 + step * 1_000, 21_000 + step * 1_000);
                    keep_last(&path, 20_000).expect("bounded");
                }
            });
            let mut seen = 0;
            while !writer.is_finished() || seen == 0 {
                let part = reader.next_part().expect("read");
                assert!(!part.bytes.contains(&0), "at {}", part.offset);
                seen += part.bytes.len();
            }
        });
    }
}
