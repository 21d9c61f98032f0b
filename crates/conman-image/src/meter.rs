//! Streams that count, hash and limit what passes through them.

use std::cell::{Cell, Ref, RefCell};
use std::io::{self, Read};
use std::rc::Rc;

use crate::digest::{Digest, Hasher};
use crate::limits::ImageLimits;

/// A limit that a stream has exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// [`ImageLimits::max_unpacked_bytes`].
    #[error("it unpacks to more than {0} bytes")]
    UnpackedBytes(u64),
    /// [`ImageLimits::max_file_bytes`].
    #[error("a file is larger than {0} bytes")]
    FileBytes(u64),
    /// [`ImageLimits::max_entries`].
    #[error("it has more than {0} entries")]
    Entries(u64),
    /// [`ImageLimits::max_header_bytes`].
    #[error("an entry's headers take more than {0} bytes")]
    HeaderBytes(u64),
    /// [`ImageLimits::max_ratio`].
    #[error("it unpacks to more than {0} times its packed size")]
    Ratio(u64),
    /// [`ImageLimits::max_blob_bytes`].
    #[error("it is larger than {0} bytes packed")]
    BlobBytes(u64),
}

/// Archives are made of blocks of this size.
const BLOCK_BYTES: u64 = 512;

/// State shared by the two ends of an unpacking.
#[derive(Debug)]
pub(crate) struct Gauge {
    packed_bytes: Cell<u64>,
    stream_bytes: Cell<u64>,
    /// Bytes that may pass before the next entry must begin.
    header_left: Cell<Option<u64>>,
    /// The bytes since the last entry's data: its padding and the headers of the next.
    headers: RefCell<Vec<u8>>,
    padding: Cell<usize>,
    ended: Cell<bool>,
    hit: Cell<Option<Limit>>,
    hash: RefCell<Option<Hasher>>,
    max_stream_bytes: u64,
    limits: ImageLimits,
}

/// Bytes of headers and padding for one entry beyond its data, for the limit of the whole stream.
const ENTRY_OVERHEAD_BYTES: u64 = 4096;

impl Gauge {
    /// `hashed`: whether the uncompressed end is hashed.
    pub(crate) fn new(limits: &ImageLimits, hashed: bool) -> Rc<Self> {
        let overhead = limits.max_entries.saturating_mul(ENTRY_OVERHEAD_BYTES);
        Rc::new(Self {
            packed_bytes: Cell::new(0),
            stream_bytes: Cell::new(0),
            header_left: Cell::new(None),
            headers: RefCell::default(),
            padding: Cell::new(0),
            ended: Cell::new(false),
            hit: Cell::new(None),
            hash: RefCell::new(hashed.then(Hasher::default)),
            max_stream_bytes: limits.max_unpacked_bytes.saturating_add(overhead),
            limits: limits.clone(),
        })
    }

    /// The data of the last entry has been read to its end.
    pub(crate) fn expect_header(&self) {
        let past_block = self.stream_bytes.get() % BLOCK_BYTES;
        self.padding
            .set(((BLOCK_BYTES - past_block) % BLOCK_BYTES) as usize);
        self.headers.borrow_mut().clear();
        self.header_left.set(Some(self.limits.max_header_bytes));
    }

    pub(crate) fn expect_data(&self) {
        self.header_left.set(None);
    }

    /// The headers of the present entry, from a block's beginning.
    pub(crate) fn headers(&self) -> Ref<'_, [u8]> {
        Ref::map(self.headers.borrow(), |headers| {
            headers.get(self.padding.get()..).unwrap_or_default()
        })
    }

    pub(crate) fn hit(&self) -> Option<Limit> {
        self.hit.get()
    }

    /// Whether the unpacked stream has ended.
    pub(crate) fn ended(&self) -> bool {
        self.ended.get()
    }

    pub(crate) fn stream_bytes(&self) -> u64 {
        self.stream_bytes.get()
    }

    /// Digest of all unpacked bytes that passed, if it was requested.
    pub(crate) fn take_digest(&self) -> Option<Digest> {
        self.hash.take().map(Hasher::finish)
    }

    /// Whether `unpacked` bytes are too many for the bytes that were read.
    pub(crate) fn check_ratio(&self, unpacked: u64) -> Result<(), Limit> {
        let allowed = self
            .packed_bytes
            .get()
            .saturating_mul(self.limits.max_ratio)
            .max(self.limits.ratio_floor_bytes);
        if unpacked > allowed {
            return Err(Limit::Ratio(self.limits.max_ratio));
        }
        Ok(())
    }

    fn refuse(&self, limit: Limit) -> io::Error {
        self.hit.set(Some(limit));
        io::Error::other("limit reached")
    }
}

/// The compressed end.
pub(crate) struct Packed<R> {
    pub(crate) source: R,
    pub(crate) gauge: Rc<Gauge>,
}

impl<R: Read> Read for Packed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buffer)?;
        let gauge = &self.gauge;
        let total = gauge.packed_bytes.get() + count as u64;
        gauge.packed_bytes.set(total);
        let limit = gauge.limits.max_blob_bytes;
        if total > limit {
            return Err(gauge.refuse(Limit::BlobBytes(limit)));
        }
        Ok(count)
    }
}

/// The uncompressed end.
pub(crate) struct Unpacked<R> {
    pub(crate) source: R,
    pub(crate) gauge: Rc<Gauge>,
}

impl<R: Read> Read for Unpacked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let gauge = &self.gauge;
        let count = self.source.read(buffer)?;
        if count == 0 {
            gauge.ended.set(true);
            return Ok(0);
        }
        let total = gauge.stream_bytes.get() + count as u64;
        gauge.stream_bytes.set(total);
        if total > gauge.max_stream_bytes {
            return Err(gauge.refuse(Limit::UnpackedBytes(gauge.limits.max_unpacked_bytes)));
        }
        gauge
            .check_ratio(total)
            .map_err(|limit| gauge.refuse(limit))?;
        if let Some(left) = gauge.header_left.get() {
            match left.checked_sub(count as u64) {
                Some(left) => {
                    gauge.header_left.set(Some(left));
                    gauge
                        .headers
                        .borrow_mut()
                        .extend_from_slice(&buffer[..count]);
                }
                None => {
                    return Err(gauge.refuse(Limit::HeaderBytes(gauge.limits.max_header_bytes)));
                }
            }
        }
        if let Some(hash) = gauge.hash.borrow_mut().as_mut() {
            hash.update(&buffer[..count]);
        }
        Ok(count)
    }
}
