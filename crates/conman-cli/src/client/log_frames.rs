//! The pieces of a log that is sent as frames ([`conman_proto::LOG_FRAMES`]).

use bytes::{Buf as _, Bytes, BytesMut};
use conman_proto::{LOG_FRAME_NOTE, LogStream};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use super::StreamError;

/// The output, three zero bytes, the length.
const HEAD_BYTES: usize = 8;

/// Bound on one frame: the daemon reads a log in pieces of some KiB.
const MAX_FRAME_BYTES: usize = 16 * 1024 * 1024;

/// One frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LogFrame {
    /// Bytes that the program wrote.
    Output(LogStream, Bytes),
    /// What is lost here, in words.
    Note(String),
}

/// The frames of a response's body.
#[derive(Debug)]
pub(crate) struct LogFrames {
    body: Incoming,
    buffer: BytesMut,
}

impl LogFrames {
    pub(crate) fn new(body: Incoming) -> Self {
        Self {
            body,
            buffer: BytesMut::new(),
        }
    }

    /// The next frame; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Result<Option<LogFrame>, StreamError> {
        loop {
            if let Some(frame) = take_frame(&mut self.buffer)? {
                return Ok(Some(frame));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    self.buffer
                        .extend_from_slice(&frame.into_data().unwrap_or_default());
                }
                Some(Err(error)) => {
                    return Err(StreamError::Broken(std::io::Error::other(error)));
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(StreamError::NotFrames),
            }
        }
    }
}

/// Splits off the first whole frame.
fn take_frame(buffer: &mut BytesMut) -> Result<Option<LogFrame>, StreamError> {
    let Some((head, rest)) = buffer.split_first_chunk::<HEAD_BYTES>() else {
        return Ok(None);
    };
    let [output, 0, 0, 0, length @ ..] = *head else {
        return Err(StreamError::NotFrames);
    };
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_FRAME_BYTES {
        return Err(StreamError::TooLarge {
            max_bytes: MAX_FRAME_BYTES,
        });
    }
    if rest.len() < length {
        return Ok(None);
    }
    buffer.advance(HEAD_BYTES);
    let bytes = buffer.split_to(length).freeze();
    Ok(Some(match output {
        1 => LogFrame::Output(LogStream::Stdout, bytes),
        2 => LogFrame::Output(LogStream::Stderr, bytes),
        LOG_FRAME_NOTE => LogFrame::Note(String::from_utf8_lossy(&bytes).into_owned()),
        _ => return Err(StreamError::NotFrames),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_found_wherever_the_stream_is_cut() {
        let text = b"\x01\0\0\0\0\0\0\x02\xff\n\x02\0\0\0\0\0\0\x00\x03\0\0\0\0\0\0\x01x";
        for cut in 0..=text.len() {
            let (mut buffer, mut frames) = (BytesMut::new(), Vec::new());
            for piece in [&text[..cut], &text[cut..]] {
                buffer.extend_from_slice(piece);
                while let Some(frame) = take_frame(&mut buffer).expect("frames") {
                    frames.push(frame);
                }
            }
            let expected = [
                LogFrame::Output(LogStream::Stdout, Bytes::from_static(b"\xff\n")),
                LogFrame::Output(LogStream::Stderr, Bytes::new()),
                LogFrame::Note("x".to_owned()),
            ];
            assert_eq!(frames, expected, "cut at {cut}");
            assert!(buffer.is_empty());
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        for text in [
            &b"one line\n"[..],
            b"\x04\0\0\0\0\0\0\0",
            b"\x01\0\0\0\xff\0\0\0",
        ] {
            let refused = take_frame(&mut BytesMut::from(text));
            assert!(refused.is_err(), "{text:?}: {refused:?}");
        }
    }
}
