//! Compressed streams, identified by their first bytes and never by a name.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::BlockDecodingStrategy;
use ruzstd::decoding::FrameDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};

/// Largest window of a zstd frame: what `zstd --ultra -22` uses. It is allocated.
const MAX_ZSTD_WINDOW_BYTES: u64 = 128 << 20;

/// Bytes that identify a format: `ustar` ends at 262.
pub(crate) const SNIFFED_BYTES: usize = 512;

/// The compression of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Plain,
    Gzip,
    Zstd,
}

/// Common compressions that this store does not support, for the error message.
const FOREIGN: [(&[u8], &str); 5] = [
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
    (b"hsqs", "squashfs"),
];

impl Compression {
    pub(crate) fn detect(head: &[u8]) -> Self {
        // Skippable frames (magic 0x184D2A50 to 5F) may come first in a zstd stream.
        let skippable =
            head.len() >= 4 && head[0] & 0xf0 == 0x50 && head[1..4] == [0x2a, 0x4d, 0x18];
        if head.starts_with(&[0x1f, 0x8b]) {
            Self::Gzip
        } else if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) || skippable {
            Self::Zstd
        } else {
            Self::Plain
        }
    }

    pub(crate) fn decoder<'a>(self, source: impl BufRead + 'a) -> Box<dyn Read + 'a> {
        match self {
            Self::Plain => Box::new(source),
            Self::Gzip => Box::new(MultiGzDecoder::new(source)),
            Self::Zstd => Box::new(ZstdFrames::new(source)),
        }
    }
}

/// The name of a compression that is known but not supported.
pub(crate) fn foreign_format(head: &[u8]) -> Option<&'static str> {
    FOREIGN
        .iter()
        .find(|(magic, _)| head.starts_with(magic))
        .map(|(_, name)| *name)
}

/// Decodes `source` by its first bytes.
pub(crate) fn decode<'a>(mut source: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut head = Vec::new();
    let mut sniffed = (&mut source).take(SNIFFED_BYTES as u64);
    sniffed.read_to_end(&mut head)?;
    let compression = Compression::detect(&head);
    let whole = io::Cursor::new(head).chain(source);
    Ok(compression.decoder(BufReader::with_capacity(64 << 10, whole)))
}

/// All the frames of a zstd stream, with their checksums verified.
///
/// A decoder in safe Rust: archives are hostile and the daemon is root.
struct ZstdFrames<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> ZstdFrames<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_ZSTD_WINDOW_BYTES);
        Self {
            source,
            decoder,
            in_frame: false,
        }
    }

    /// Starts the next frame; false at the end of the stream.
    fn next_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.source) {
                Ok(()) => {
                    self.in_frame = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let mut skipped = (&mut self.source).take(u64::from(length));
                    if io::copy(&mut skipped, &mut io::sink())? < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(frame_error(error)),
            }
        }
    }

    fn end_frame(&mut self) -> io::Result<()> {
        self.in_frame = false;
        let (stated, computed) = (
            self.decoder.get_checksum_from_data(),
            self.decoder.get_calculated_checksum(),
        );
        if stated.is_some() && stated != computed {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a zstd frame's checksum does not match its content",
            ));
        }
        Ok(())
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame && !self.next_frame()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(frame_error)?;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            self.end_frame()?;
        }
    }
}

/// The decoder wraps its source's errors. Their kind distinguishes a truncated stream, a damaged
/// one and a failing disk.
fn frame_error(error: FrameDecoderError) -> io::Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(inner) = cause {
        if let Some(source) = inner.downcast_ref::<io::Error>() {
            if let Some(code) = source.raw_os_error() {
                return io::Error::from_raw_os_error(code);
            }
            return io::Error::new(source.kind(), error);
        }
        cause = inner.source();
    }
    io::Error::new(io::ErrorKind::InvalidData, error)
}
