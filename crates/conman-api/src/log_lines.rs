//! Splits a container's output into lines, stream by stream, in bounded memory.

use bytes::Bytes;
use conman_proto::{LogLine, LogStream};
use conman_runtime::{LogChunk, OutputStream};
use jiff::Timestamp;

/// Longer lines are split, so that output without newlines needs no more memory than this for
/// each stream.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// Holds output that has not ended with a newline yet.
#[derive(Debug)]
pub(crate) struct LogLines {
    timestamps: bool,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl LogLines {
    /// With `timestamps`, every line begins with an RFC 3339 time and a space.
    pub(crate) fn new(timestamps: bool) -> Self {
        Self {
            timestamps,
            stdout: Vec::new(),
            stderr: Vec::new(),
        }
    }

    /// The lines that end within `chunk`.
    pub(crate) fn push(&mut self, chunk: &LogChunk) -> Vec<LogLine> {
        let mut lines = Vec::new();
        for piece in chunk.bytes.split_inclusive(|byte| *byte == b'\n') {
            let mut rest = piece;
            while !rest.is_empty() {
                let partial = self.partial(chunk.stream);
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
            .filter(|stream| !self.partial(*stream).is_empty())
            .collect::<Vec<_>>()
            .into_iter()
            .map(|stream| self.take(stream))
            .collect()
    }

    fn partial(&mut self, stream: OutputStream) -> &mut Vec<u8> {
        match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }

    fn take(&mut self, stream: OutputStream) -> LogLine {
        let bytes = std::mem::take(self.partial(stream));
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
        let text = String::from_utf8_lossy(bytes);
        let (at, text) = match text.split_once(' ') {
            Some((first, rest)) if self.timestamps => match first.parse::<Timestamp>() {
                Ok(at) => (Some(at), rest.to_owned()),
                Err(_) => (None, text.into_owned()),
            },
            _ => (None, text.into_owned()),
        };
        let stream = match stream {
            OutputStream::Stdout => LogStream::Stdout,
            OutputStream::Stderr => LogStream::Stderr,
        };
        LogLine { stream, at, text }
    }
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
        LogChunk {
            stream,
            bytes: Bytes::copy_from_slice(bytes),
        }
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
            "{\"stream\":\"stderr\",\"text\":\"a\\\"b\"}\n{\"stream\":\"stderr\",\"text\":\"\u{fffd}\"}\n"
        );
    }
}
