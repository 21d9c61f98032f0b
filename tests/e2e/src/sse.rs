//! Reads server-sent events.

use std::time::Duration;

use conman_proto::Event;
use http::{HeaderValue, Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::Value;
use tokio::time::timeout;

use crate::{Api, Streamed};

/// Bound on the wait for the next event.
const PATIENCE: Duration = Duration::from_secs(60);

/// Server-sent events, of `GET /v1/events` unless another is named.
#[derive(Debug)]
pub struct EventStream {
    streamed: Streamed,
    buffer: Vec<u8>,
}

impl EventStream {
    /// Opens the stream as a browser does that has seen an event before.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn open(api: &Api, path: &str, last_event_id: Option<u64>) -> Self {
        let mut request = api.request(Method::GET, path, None);
        if let Some(seq) = last_event_id {
            let headers = request.headers_mut();
            headers.insert("last-event-id", HeaderValue::from(seq));
        }
        let streamed = api.open(request).await.expect("the daemon answers");
        assert_eq!(streamed.response.status(), StatusCode::OK);
        Self {
            streamed,
            buffer: Vec::new(),
        }
    }

    /// The next event; `None` at the stream's end, also a violent one.
    ///
    /// # Panics
    /// When none comes in time, or its id is neither its number nor a fleet's.
    pub async fn next(&mut self) -> Option<Event> {
        let message = self.message().await?;
        let event: Event =
            serde_json::from_str(field(&message, "data")?).expect("an event is JSON");
        let id = field(&message, "id").expect("an event has an id");
        // A fleet's ids are positions on every node.
        assert!(id == event.seq.to_string() || id.starts_with("f1-"), "{id}");
        Some(event)
    }

    /// The data of the next event of any kind, as JSON.
    ///
    /// # Panics
    /// When none comes in time, or it is no JSON.
    pub async fn next_data(&mut self) -> Option<Value> {
        let message = self.message().await?;
        Some(serde_json::from_str(field(&message, "data")?).expect("JSON"))
    }

    /// The next message with data.
    async fn message(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let message: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let message = String::from_utf8_lossy(&message).into_owned();
                if field(&message, "data").is_some() {
                    return Some(message);
                }
                continue;
            }
            let frame = timeout(PATIENCE, self.streamed.response.body_mut().frame())
                .await
                .expect("another event comes in time");
            let data = frame?.ok()?.into_data().ok()?;
            self.buffer.extend_from_slice(&data);
        }
    }
}

fn field<'m>(message: &'m str, name: &str) -> Option<&'m str> {
    let mut lines = message.lines();
    lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
}
