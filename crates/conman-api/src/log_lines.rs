//! Splits a container's output into lines, stream by stream, in bounded memory.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use conman_proto::{LOG_FRAME_NOTE, LogLine, LogStream};
use conman_runtime::{LogChunk, OutputStream};
use jiff::Timestamp;

/// Longer lines are split, so that output without newlines needs no more memory than this for
/// each stream.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// Holds output that has not ended with a newline yet.
#[derive(Debug)]
pub(crate) struct LogLines {
    timestamps: bool,
    stdout: Partial,
    stderr: Partial,
}

/// One output's line that has not ended yet.
#[derive(Debug, Default)]
struct Partial {
    bytes: Vec<u8>,
    /// Bytes before it that are lost.
    dropped: u64,
}

impl LogLines {
    /// With `timestamps`, every line begins with an RFC 3339 time and a space.
    pub(crate) fn new(timestamps: bool) -> Self {
        Self {
            timestamps,
            stdout: Partial::default(),
            stderr: Partial::default(),
        }
    }

    /// The lines that end within `chunk`.
    pub(crate) fn push(&mut self, chunk: &LogChunk) -> Vec<LogLine> {
        let mut lines = Vec::new();
        if chunk.dropped > 0 {
            if !self.partial(chunk.stream).bytes.is_empty() {
                lines.push(self.take(chunk.stream));
            }
            self.partial(chunk.stream).dropped += chunk.dropped;
        }
        for piece in chunk.bytes.split_inclusive(|byte| *byte == b'\n') {
            let mut rest = piece;
            while !rest.is_empty() {
                let partial = &mut self.partial(chunk.stream).bytes;
                let (now, later) = rest.split_at(rest.len().min(MAX_LINE_BYTES - partial.len()));
                partial.extend_from_slice(now);
                rest = later;
                if partial.ends_with(b"\n") || partial.len() == MAX_LINE_BYTES {
                    lines.push(self.take(chunk.stream));
                }
            }
        }
        lines
    }

    /// The rest without a newline, at the end of the log.
    pub(crate) fn finish(&mut self) -> Vec<LogLine> {
        [OutputStream::Stdout, OutputStream::Stderr]
            .into_iter()
            .filter(|stream| {
                let partial = self.partial(*stream);
                !partial.bytes.is_empty() || partial.dropped > 0
            })
            .collect::<Vec<_>>()
            .into_iter()
            .map(|stream| self.take(stream))
            .collect()
    }

    fn partial(&mut self, stream: OutputStream) -> &mut Partial {
        match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }

    fn take(&mut self, stream: OutputStream) -> LogLine {
        let Partial { bytes, dropped } = std::mem::take(self.partial(stream));
        let (line, end) = match bytes.strip_suffix(b"\n") {
            None => (&bytes[..], Some("")),
            Some(line) => match line.strip_suffix(b"\r") {
                Some(line) => (line, Some("\r\n")),
                None => (line, None),
            },
        };
        let (at, line) = match self.timestamps {
            true => split_time(line),
            false => (None, line),
        };
        let (text, base64) = text_and_base64(line);
        LogLine {
            stream: match stream {
                OutputStream::Stdout => LogStream::Stdout,
                OutputStream::Stderr => LogStream::Stderr,
            },
            at,
            text,
            base64,
            end: end.map(str::to_owned),
            dropped,
        }
    }
}

/// The time before a line, if there is one, and the rest.
fn split_time(line: &[u8]) -> (Option<Timestamp>, &[u8]) {
    let blank = line.iter().position(|byte| *byte == b' ');
    let found = blank.and_then(|blank| {
        let at = std::str::from_utf8(&line[..blank]).ok()?.parse().ok()?;
        Some((at, &line[blank + 1..]))
    });
    found.map_or((None, line), |(at, rest)| (Some(at), rest))
}

/// Bytes as text, with U+FFFD for what is not UTF-8, and then also as base64.
pub(crate) fn text_and_base64(bytes: &[u8]) -> (String, Option<String>) {
    match String::from_utf8_lossy(bytes) {
        Cow::Borrowed(text) => (text.to_owned(), None),
        Cow::Owned(text) => (text, Some(BASE64.encode(bytes))),
    }
}

/// A piece of a log as a frame, after a note if something before it is lost.
pub(crate) fn to_frames(chunk: &LogChunk) -> Bytes {
    let mut frames = Vec::with_capacity(chunk.bytes.len() + 2 * FRAME_HEAD_BYTES);
    if chunk.dropped > 0 {
        let note = format!(
            "{} bytes of output were discarded before they were read",
            chunk.dropped
        );
        push_frame(&mut frames, LOG_FRAME_NOTE, note.as_bytes());
    }
    if !chunk.bytes.is_empty() {
        let output = match chunk.stream {
            OutputStream::Stdout => 1,
            OutputStream::Stderr => 2,
        };
        push_frame(&mut frames, output, &chunk.bytes);
    }
    frames.into()
}

/// The output, three zero bytes, the length.
const FRAME_HEAD_BYTES: usize = 8;

fn push_frame(frames: &mut Vec<u8>, output: u8, bytes: &[u8]) {
    // A piece is far smaller than 4 GiB.
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    frames.extend_from_slice(&[output, 0, 0, 0]);
    frames.extend_from_slice(&length.to_be_bytes());
    frames.extend_from_slice(bytes);
}

/// Lines as newline-delimited JSON.
pub(crate) fn to_ndjson(lines: &[LogLine]) -> Bytes {
    let mut bytes = Vec::new();
    for line in lines {
        // Writing plain data to memory cannot fail.
        let _ = serde_json::to_writer(&mut bytes, line);
        bytes.push(b'\n');
    }
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(stream: OutputStream, bytes: &[u8]) -> LogChunk {
        LogChunk::new(stream, Bytes::copy_from_slice(bytes))
    }

    fn texts(lines: &[LogLine]) -> Vec<&str> {
        lines.iter().map(|line| line.text.as_str()).collect()
    }

    #[test]
    fn lines_of_two_streams_that_interleave_in_mid_line_stay_apart() {
        let mut lines = LogLines::new(false);
        assert_eq!(
            texts(&lines.push(&chunk(OutputStream::Stdout, b"one\nhal"))),
            ["one"]
        );
        assert_eq!(
            texts(&lines.push(&chunk(OutputStream::Stderr, b"oops\n"))),
            ["oops"]
        );
        let last = lines.push(&chunk(OutputStream::Stdout, b"f\r\n\nend"));
        assert_eq!(texts(&last), ["half", ""]);
        assert_eq!(texts(&lines.finish()), ["end"]);
        assert!(lines.finish().is_empty());
    }

    #[test]
    fn a_line_without_end_comes_in_pieces_of_bounded_size() {
        let mut lines = LogLines::new(false);
        let huge = vec![b'x'; MAX_LINE_BYTES * 2 + 5];
        let pieces = lines.push(&chunk(OutputStream::Stdout, &huge));
        assert_eq!(pieces.len(), 2);
        assert!(
            pieces
                .iter()
                .all(|piece| piece.text.len() == MAX_LINE_BYTES)
        );
        assert_eq!(lines.finish()[0].text.len(), 5);
    }

    #[test]
    fn the_time_before_a_line_is_told_apart_from_its_text() {
        let mut lines = LogLines::new(true);
        let bytes = b"2024-05-01T10:00:00.123456789Z hello world\nno time here\n";
        let found = lines.push(&chunk(OutputStream::Stdout, bytes));
        assert_eq!(texts(&found), ["hello world", "no time here"]);
        assert!(found[0].at.is_some() && found[1].at.is_none());
    }

    #[test]
    fn each_line_of_ndjson_is_one_object() {
        let mut lines = LogLines::new(false);
        let found = lines.push(&chunk(OutputStream::Stderr, b"a\"b\n\xff\n"));
        assert_eq!(
            to_ndjson(&found),
            "{\"stream\":\"stderr\",\"text\":\"a\\\"b\"}\n\
             {\"stream\":\"stderr\",\"text\":\"\u{fffd}\",\"base64\":\"/w==\"}\n"
        );
    }

    /// The bytes that a reader of the lines puts together.
    fn bytes(lines: &[LogLine]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for line in lines {
            match &line.base64 {
                Some(base64) => bytes.extend(BASE64.decode(base64).expect("base64")),
                None => bytes.extend_from_slice(line.text.as_bytes()),
            }
            bytes.extend_from_slice(line.end.as_deref().unwrap_or("\n").as_bytes());
        }
        bytes
    }

    #[test]
    fn the_bytes_of_any_output_can_be_put_together_from_its_lines() {
        let mut long = vec![b'x'; MAX_LINE_BYTES - 1];
        // Cut within a character.
        long.extend_from_slice("€\r\n".as_bytes());
        let every: Vec<u8> = (0..=255).cycle().take(4_096).collect();
        for output in [&b"a\r\nb\n\r\n\nc\r"[..], b"\n", b"", &long, &every] {
            let mut lines = LogLines::new(false);
            let mut found = lines.push(&chunk(OutputStream::Stdout, output));
            found.extend(lines.finish());
            assert_eq!(bytes(&found), output);
        }
    }

    #[test]
    fn what_was_lost_is_said_where_it_is_missing() {
        let mut lines = LogLines::new(false);
        assert!(lines.push(&chunk(OutputStream::Stdout, b"cu")).is_empty());
        let after = LogChunk {
            dropped: 7,
            ..chunk(OutputStream::Stdout, b"next\n")
        };
        let found = lines.push(&after);
        assert_eq!(texts(&found), ["cu", "next"]);
        assert_eq!((found[0].dropped, found[1].dropped), (0, 7));
        assert_eq!(found[0].end.as_deref(), Some(""));
        let frames = to_frames(&after);
        assert_eq!(&frames[..8], b"\x03\0\0\0\0\0\0\x36");
        assert!(frames.ends_with(b"\x01\0\0\0\0\0\0\x05next\n"));
    }
}
