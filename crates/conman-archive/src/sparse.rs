//! Files with holes, in GNU tar's first form: which parts of a file have data, then these parts.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::os::fd::AsFd as _;
use std::vec::IntoIter;

use rustix::fs::{SeekFrom as Position, seek};
use rustix::io::Errno;
use tar::{EntryType, GnuExtSparseHeader, Header};

/// Maximum number of parts: readers may take time that grows with its square. A file with more is written as if it
/// had no holes.
const MAX_PARTS: usize = 10_000;

/// A part of a file that has data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    start: u64,
    length: u64,
}

/// The parts of a file that have data.
#[derive(Debug)]
pub(crate) struct SparseMap {
    size: u64,
    parts: Vec<Part>,
}

impl SparseMap {
    /// `None` for a file without holes, or on a file system that does not report them.
    pub(crate) fn of(file: &File, size: u64) -> io::Result<Option<Self>> {
        let mut parts = Vec::new();
        let mut offset = 0;
        while offset < size && parts.len() < MAX_PARTS {
            let start = match seek(file.as_fd(), Position::Data(offset)) {
                Ok(start) if start < size => start,
                Ok(_) | Err(Errno::NXIO) => size,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            };
            if start == size {
                // An empty last part states the size.
                parts.push(Part { start, length: 0 });
                break;
            }
            offset = seek(file.as_fd(), Position::Hole(start))
                .unwrap_or(size)
                .min(size);
            let length = offset - start;
            parts.push(Part { start, length });
        }
        seek(file.as_fd(), Position::Start(0))?;
        let whole = Part {
            start: 0,
            length: size,
        };
        let is_sparse = parts != [whole] && parts.len() < MAX_PARTS;
        Ok(is_sparse.then_some(Self { size, parts }))
    }

    /// Makes a file's header that of a sparse one; returns what follows it.
    pub(crate) fn entry(self, header: &mut Header, file: File) -> io::Result<impl Read + use<>> {
        header.set_entry_type(EntryType::GNUSparse);
        header.set_size(self.parts.iter().map(|part| part.length).sum());
        let gnu = header.as_gnu_mut().ok_or(io::ErrorKind::InvalidInput)?;
        gnu.set_real_size(self.size);
        for (slot, part) in gnu.sparse.iter_mut().zip(&self.parts) {
            slot.set_offset(part.start);
            slot.set_length(part.length);
        }
        gnu.set_is_extended(self.parts.len() > gnu.sparse.len());
        let mut extensions = Vec::new();
        let mut parts = self.parts.iter().skip(gnu.sparse.len()).peekable();
        while parts.peek().is_some() {
            let mut extension = GnuExtSparseHeader::new();
            for slot in extension.sparse_mut() {
                let Some(part) = parts.next() else { break };
                slot.set_offset(part.start);
                slot.set_length(part.length);
            }
            extension.set_is_extended(parts.peek().is_some());
            extensions.extend_from_slice(extension.as_bytes());
        }
        let data = PartsReader {
            file,
            parts: self.parts.into_iter(),
            left: 0,
        };
        Ok(io::Cursor::new(extensions).chain(data))
    }
}

/// Reads the parts one after the other. What a file that becomes shorter lacks is filled with zeros: the
/// archive states the lengths first.
struct PartsReader {
    file: File,
    parts: IntoIter<Part>,
    /// Bytes of the present part.
    left: u64,
}

impl Read for PartsReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.left == 0 {
            let Some(part) = self.parts.next() else {
                return Ok(0);
            };
            self.file.seek(SeekFrom::Start(part.start))?;
            self.left = part.length;
        }
        let most = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let buffer = &mut buffer[..most];
        let mut read = self.file.read(buffer)?;
        if read == 0 {
            buffer.fill(0);
            read = buffer.len();
        }
        self.left -= read as u64;
        Ok(read)
    }
}
