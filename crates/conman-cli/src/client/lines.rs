//! Newline-delimited JSON.

use std::io;

use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio_util::codec::{AnyDelimiterCodec, AnyDelimiterCodecError, FramedRead};
use tokio_util::io::StreamReader;

use super::StreamError;

/// Bound on one line: a piece of a log has at most 64 KiB, which JSON escapes at most sixfold.
const MAX_LINE_BYTES: usize = 1024 * 1024;

type Pieces = BoxStream<'static, io::Result<Bytes>>;

/// The lines of a response's body.
pub(crate) struct Lines(FramedRead<StreamReader<Pieces, Bytes>, AnyDelimiterCodec>);

impl Lines {
    pub(crate) fn new(body: Incoming) -> Self {
        Self::of(body.into_data_stream().map_err(io::Error::other))
    }

    pub(super) fn of(pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Self {
        let newline = b"\n".to_vec();
        let codec =
            AnyDelimiterCodec::new_with_max_length(newline.clone(), newline, MAX_LINE_BYTES);
        Self(FramedRead::new(StreamReader::new(pieces.boxed()), codec))
    }

    /// The next line without its newline; `None` at the end of the stream. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, StreamError> {
        match self.0.next().await.transpose() {
            Ok(line) => Ok(line),
            Err(AnyDelimiterCodecError::Io(error)) => Err(StreamError::Broken(error)),
            Err(AnyDelimiterCodecError::MaxChunkLengthExceeded) => Err(StreamError::TooLarge {
                max_bytes: MAX_LINE_BYTES,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    #[tokio::test]
    async fn an_endless_line_is_refused_instead_of_kept() {
        let piece = Bytes::from(vec![b'x'; 64 * 1024]);
        let endless = stream::repeat_with(move || Ok(piece.clone()));
        let refused = Lines::of(endless).next().await;
        assert!(matches!(refused, Err(StreamError::TooLarge { .. })));
    }

    #[tokio::test]
    async fn a_stream_that_breaks_off_reports_why_after_its_whole_lines() {
        let cut = io::Error::new(io::ErrorKind::UnexpectedEof, "cut");
        let pieces = stream::iter([Ok(Bytes::from_static(b"one\ntw")), Err(cut)]);
        let mut lines = Lines::of(pieces);
        let line = lines.next().await.expect("a whole line");
        assert_eq!(line.as_deref(), Some(&b"one"[..]));
        let broken = lines.next().await.expect_err("half a line");
        assert!(matches!(broken, StreamError::Broken(error) if error.to_string() == "cut"));
    }
}
