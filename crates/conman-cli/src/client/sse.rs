//! Server-sent events, as far as conman's API uses them (WHATWG HTML, section 9.2).

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use super::StreamError;
use super::lines::take_line;

/// Bound on one event: an event of the journal has a few hundred bytes.
const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// One event of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct SseMessage {
    /// The `event` field; empty when there is none.
    pub(crate) name: String,
    /// The `id` field of this event, not the last one that was seen.
    pub(crate) id: Option<String>,
    pub(crate) data: String,
}

/// The events in a response's body.
#[derive(Debug)]
pub(crate) struct SseEvents {
    body: Incoming,
    parser: SseParser,
}

impl SseEvents {
    pub(crate) fn new(body: Incoming) -> Self {
        Self {
            body,
            parser: SseParser::default(),
        }
    }

    /// The next event; `None` at the end of the stream. Cancel safe: a frame is passed to the parser
    /// as soon as it arrives.
    pub(crate) async fn next(&mut self) -> Result<Option<SseMessage>, StreamError> {
        loop {
            if let Some(message) = self.parser.next()? {
                return Ok(Some(message));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.parser.push(frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return Err(StreamError::Broken(error)),
                None => return Ok(None),
            }
        }
    }
}

/// Lines and fields; no I/O.
#[derive(Debug, Default)]
struct SseParser {
    buffer: BytesMut,
    searched: usize,
    event: SseMessage,
    has_data: bool,
}

impl SseParser {
    fn push(&mut self, bytes: Bytes) {
        self.buffer.extend_from_slice(&bytes);
    }

    /// The next complete event. An incomplete one at the end of the stream is dropped, as the
    /// standard requires.
    fn next(&mut self) -> Result<Option<SseMessage>, StreamError> {
        while let Some(line) = take_line(&mut self.buffer, &mut self.searched)? {
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            if line.is_empty() {
                let event = std::mem::take(&mut self.event);
                // An event with only an id just sets the position to resume from.
                if std::mem::take(&mut self.has_data) || event.id.is_some() {
                    return Ok(Some(event));
                }
            } else {
                self.field(&String::from_utf8_lossy(line));
            }
            if self.event.data.len() > MAX_EVENT_BYTES {
                return Err(StreamError::TooLarge {
                    max_bytes: MAX_EVENT_BYTES,
                });
            }
        }
        Ok(None)
    }

    fn field(&mut self, line: &str) {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(value);
            }
            "event" => value.clone_into(&mut self.event.name),
            "id" if !value.contains('\0') => self.event.id = Some(value.to_owned()),
            // A line that begins with a colon is a comment, mostly to keep the connection alive.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(pieces: &[&str]) -> Vec<SseMessage> {
        let mut parser = SseParser::default();
        let mut messages = Vec::new();
        for piece in pieces {
            parser.push(Bytes::copy_from_slice(piece.as_bytes()));
            while let Some(message) = parser.next().expect("small events") {
                messages.push(message);
            }
        }
        messages
    }

    #[test]
    fn events_are_found_wherever_the_stream_is_cut() {
        let text =
            ": hello\n\nid: 7\nevent: journal\ndata: {\"a\":\ndata: 1}\n\nid: 8\r\ndata: x\r\n\r\n";
        let whole = messages(&[text]);
        assert_eq!(whole.len(), 2);
        assert_eq!(whole[0].id.as_deref(), Some("7"));
        assert_eq!(whole[0].name, "journal");
        assert_eq!(whole[0].data, "{\"a\":\n1}");
        assert_eq!(whole[1].data, "x");
        for cut in 0..=text.len() {
            assert_eq!(
                messages(&[&text[..cut], &text[cut..]]),
                whole,
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn an_id_alone_is_told_and_a_comment_is_not() {
        let told = messages(&[": alive\n\nid: 7\n\nevent: x\n\n"]);
        assert_eq!(told.len(), 1);
        assert_eq!(
            (told[0].id.as_deref(), told[0].data.as_str()),
            (Some("7"), "")
        );
    }

    #[test]
    fn an_event_without_its_empty_line_is_not_told() {
        assert_eq!(messages(&["id: 1\ndata: half\n"]), []);
    }

    #[test]
    fn an_event_of_endlessly_many_lines_is_refused_instead_of_kept() {
        let mut parser = SseParser::default();
        let line = format!("data: {}\n", "x".repeat(64 * 1024));
        for _ in 0..=MAX_EVENT_BYTES / (64 * 1024) {
            parser.push(Bytes::from(line.clone()));
        }
        assert!(matches!(parser.next(), Err(StreamError::TooLarge { .. })));
    }
}
