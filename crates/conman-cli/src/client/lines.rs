//! Newline-delimited JSON.

use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use super::StreamError;

/// Bound on one line: a piece of a log has at most 64 KiB, which JSON escapes at most sixfold.
const MAX_LINE_BYTES: usize = 1024 * 1024;

/// The lines of a response's body.
#[derive(Debug)]
pub(crate) struct Lines {
    body: Incoming,
    buffer: BytesMut,
    /// Bytes at the buffer's beginning without a newline.
    searched: usize,
}

impl Lines {
    pub(crate) fn new(body: Incoming) -> Self {
        Self {
            body,
            buffer: BytesMut::new(),
            searched: 0,
        }
    }

    /// The next line without its newline; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, StreamError> {
        loop {
            if let Some(line) = take_line(&mut self.buffer, &mut self.searched)? {
                return Ok(Some(line));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    self.buffer
                        .extend_from_slice(&frame.into_data().unwrap_or_default());
                }
                Some(Err(error)) => return Err(StreamError::Broken(error)),
                None if self.buffer.is_empty() => return Ok(None),
                None => {
                    self.searched = 0;
                    return Ok(Some(self.buffer.split().freeze()));
                }
            }
        }
    }
}

/// Splits off the first whole line.
pub(super) fn take_line(
    buffer: &mut BytesMut,
    searched: &mut usize,
) -> Result<Option<Bytes>, StreamError> {
    let Some(end) = buffer[*searched..].iter().position(|byte| *byte == b'\n') else {
        *searched = buffer.len();
        if buffer.len() > MAX_LINE_BYTES {
            return Err(StreamError::TooLarge {
                max_bytes: MAX_LINE_BYTES,
            });
        }
        return Ok(None);
    };
    let line = buffer.split_to(*searched + end).freeze();
    buffer.advance(1);
    *searched = 0;
    Ok(Some(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_wherever_the_stream_is_cut() {
        let text = b"one\n\ntwo\n";
        for cut in 0..=text.len() {
            let (mut buffer, mut searched, mut lines) = (BytesMut::new(), 0, Vec::new());
            for piece in [&text[..cut], &text[cut..]] {
                buffer.extend_from_slice(piece);
                while let Some(line) = take_line(&mut buffer, &mut searched).expect("short") {
                    lines.push(line);
                }
            }
            assert_eq!(lines, ["one", "", "two"], "cut at {cut}");
            assert!(buffer.is_empty());
        }
    }

    #[test]
    fn an_endless_line_is_refused_instead_of_kept() {
        let mut buffer = BytesMut::from(&vec![b'x'; MAX_LINE_BYTES + 1][..]);
        assert!(matches!(
            take_line(&mut buffer, &mut 0),
            Err(StreamError::TooLarge { .. })
        ));
    }
}
