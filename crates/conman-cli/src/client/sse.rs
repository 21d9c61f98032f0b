//! Server-sent events, as far as conman's API uses them (WHATWG HTML, section 9.2).

use hyper::body::Incoming;

use super::StreamError;
use super::lines::Lines;

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
pub(crate) struct SseEvents {
    lines: Lines,
    /// What its lines so far say, and whether there is data among them.
    event: SseMessage,
    has_data: bool,
}

impl SseEvents {
    pub(crate) fn new(body: Incoming) -> Self {
        Self::of(Lines::new(body))
    }

    fn of(lines: Lines) -> Self {
        Self {
            lines,
            event: SseMessage::default(),
            has_data: false,
        }
    }

    /// The next event; `None` at the end of the stream, where an incomplete one is dropped, as the standard
    /// requires. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Option<SseMessage>, StreamError> {
        while let Some(line) = self.lines.next().await? {
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
    use bytes::Bytes;
    use futures_util::stream;

    use super::*;

    async fn messages(pieces: &[&str]) -> Result<Vec<SseMessage>, StreamError> {
        let pieces: Vec<_> = pieces
            .iter()
            .map(|piece| Ok(Bytes::copy_from_slice(piece.as_bytes())))
            .collect();
        let mut events = SseEvents::of(Lines::of(stream::iter(pieces)));
        let mut messages = Vec::new();
        while let Some(message) = events.next().await? {
            messages.push(message);
        }
        Ok(messages)
    }

    #[tokio::test]
    async fn events_are_found_wherever_the_stream_is_cut() {
        let text =
            ": hello\n\nid: 7\nevent: journal\ndata: {\"a\":\ndata: 1}\n\nid: 8\r\ndata: x\r\n\r\n";
        let whole = messages(&[text]).await.expect("small events");
        assert_eq!(whole.len(), 2);
        assert_eq!(whole[0].id.as_deref(), Some("7"));
        assert_eq!(whole[0].name, "journal");
        assert_eq!(whole[0].data, "{\"a\":\n1}");
        assert_eq!(whole[1].data, "x");
        for cut in 0..=text.len() {
            let found = messages(&[&text[..cut], &text[cut..]]).await;
            assert_eq!(found.expect("small events"), whole, "cut at {cut}");
        }
    }

    #[tokio::test]
    async fn an_id_alone_is_returned_and_a_comment_is_not() {
        let found = messages(&[": alive\n\nid: 7\n\nevent: x\n\n"]).await;
        let found = found.expect("small events");
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].id.as_deref(), found[0].data.as_str()),
            (Some("7"), "")
        );
    }

    #[tokio::test]
    async fn an_event_without_its_empty_line_is_dropped() {
        let found = messages(&["id: 1\ndata: half\n"]).await;
        assert_eq!(found.expect("a small event"), []);
    }

    #[tokio::test]
    async fn an_event_of_endlessly_many_lines_is_refused_instead_of_kept() {
        let line = format!("data: {}\n", "x".repeat(64 * 1024));
        let lines = vec![&*line; MAX_EVENT_BYTES / (64 * 1024) + 1];
        let refused = messages(&lines).await;
        assert!(matches!(refused, Err(StreamError::TooLarge { .. })));
    }
}
