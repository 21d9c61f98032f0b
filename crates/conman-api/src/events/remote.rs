//! Reads another node's journal as frames, for as long as the stream has a reader.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use conman_auth::Caller;
use conman_fleet::node_api::EVENTS;
use conman_fleet::{FleetMap, caller_header, read_json};
use conman_proto::Problem;
use conman_registry::PeerStanding;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use tokio::time::{Instant, sleep, timeout};

use super::cursor::MAX_SKEW_MS;
use super::local::ALIVE_EVERY;
use super::{EventFilter, Frame, From};
use crate::hop;
use crate::node_errors::chain;

/// Time for the head of an answer, including the connection.
const ASK_PATIENCE: Duration = Duration::from_secs(5);

/// Time without a frame after which a connection is given up: three periodic frames, and one that
/// is late.
const SILENCE: Duration = Duration::from_millis(3_500 * ALIVE_EVERY.as_secs());

/// How long a connected node may be away before that is reported: a daemon restarts.
const GRACE: Duration = Duration::from_secs(3);

/// How long after the stream was opened a node is still asked for future events only, without
/// regard to the two clocks.
const PROMPT: Duration = Duration::from_secs(1);

/// Pause between two attempts, at first and at most.
const PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// Longest frame: an event's message has at most 4 KiB, and each byte of it at most six in JSON.
const MAX_FRAME_BYTES: usize = 64 * 1024;

/// Longest problem that is read for its reason.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;

/// News about a node.
#[derive(Debug)]
pub(super) enum NodeNews {
    Frame(Frame),
    /// Its events are missing from here on, and why; sent once.
    Unreachable(String),
    /// It can be reached again.
    Back,
}

/// The request to the node.
#[derive(Debug, Clone)]
pub(super) struct EventsRequest {
    pub(super) from: From,
    /// When the stream was opened. A node that is reached later, and was only asked for future
    /// events, sends the events since then.
    pub(super) opened_ms: u64,
    pub(super) opened_at: Instant,
    pub(super) filter: EventFilter,
    pub(super) caller: Caller,
}

struct Remote {
    map: Arc<FleetMap>,
    node: String,
    asked: EventsRequest,
    connection: Option<Lines>,
    pause: Duration,
    /// Since when it is unreachable; initially since the beginning.
    away_since: Option<Instant>,
    told: bool,
}

/// Never ends. `told`: its events were reported as missing before.
pub(super) fn frames(
    map: Arc<FleetMap>,
    node: &str,
    asked: EventsRequest,
    told: bool,
) -> BoxStream<'static, NodeNews> {
    let remote = Remote {
        map,
        node: node.to_owned(),
        asked,
        connection: None,
        pause: PAUSE,
        away_since: None,
        told,
    };
    let told = stream::unfold(remote, |mut remote| async move {
        let told = remote.next().await;
        Some((told, remote))
    });
    told.boxed()
}

impl Remote {
    async fn next(&mut self) -> NodeNews {
        loop {
            let why = match self.try_next().await {
                Ok(told) => return told,
                Err(why) => why,
            };
            let was_connected = self.connection.take().is_some();
            if was_connected {
                self.away_since = Some(Instant::now());
                self.pause = PAUSE;
            } else {
                self.miss_nothing();
            }
            let patient = self.away_since.is_some_and(|at| at.elapsed() < GRACE);
            if !patient && !std::mem::replace(&mut self.told, true) {
                return NodeNews::Unreachable(self.in_words(&why));
            }
            sleep(self.pause).await;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn try_next(&mut self) -> Result<NodeNews, String> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => {
                if self.asked.opened_at.elapsed() > PROMPT {
                    self.miss_nothing();
                }
                let connection = self.connect().await?;
                self.connection.insert(connection)
            }
        };
        if std::mem::take(&mut self.told) {
            return Ok(NodeNews::Back);
        }
        let next = timeout(SILENCE, connection.next()).await;
        let line = next.map_err(|_| format!("no frame for {} s", SILENCE.as_secs()))??;
        let frame: Frame =
            serde_json::from_slice(&line).map_err(|error| format!("invalid frame: {error}"))?;
        let seq = match &frame {
            Frame::Event(event) => event.seq,
            Frame::Reached { seq, .. } => *seq,
        };
        self.asked.from = From {
            after: Some(seq),
            ..self.asked.from
        };
        Ok(NodeNews::Frame(frame))
    }

    /// Requests all events since the stream was opened, instead of only future ones. The time is by
    /// that node's clock, which may be behind.
    fn miss_nothing(&mut self) {
        if self.asked.from.after.is_none() {
            self.asked.from = From {
                after: Some(0),
                since_ms: self.asked.opened_ms.saturating_sub(MAX_SKEW_MS),
            };
        }
    }

    async fn connect(&self) -> Result<Lines, String> {
        let node = self.map.node(&self.node);
        let address = node.address.map_err(|why| why.to_string())?;
        let mut target = format!("{EVENTS}?since_ms={}", self.asked.from.since_ms);
        if let Some(after) = self.asked.from.after {
            target.push_str(&format!("&after={after}"));
        }
        let EventFilter { session, kinds } = &self.asked.filter;
        if let Some(session) = session {
            target.push_str(&format!("&session={session}"));
        }
        if !kinds.is_empty() {
            let kinds: Vec<&str> = kinds.iter().map(|kind| kind.as_str()).collect();
            target.push_str(&format!("&kinds={}", kinds.join(",")));
        }
        let (name, value) = caller_header(&self.asked.caller);
        let request = Request::get(target)
            .header(name, value)
            .body(Empty::<Bytes>::new())
            .map_err(|error| chain(&error))?;
        let asking = timeout(ASK_PATIENCE, self.map.client().request(&address, request));
        let response = asking
            .await
            .map_err(|_| format!("it did not answer within {} s", ASK_PATIENCE.as_secs()))?
            .map_err(|error| chain(&error))?;
        // Events that it wrote under an earlier name carry that one.
        if let Some(who) = response.headers().get(hop::X_CONMAN_NODE)
            && who.as_bytes() != self.node.as_bytes()
        {
            return Err(not_it(&String::from_utf8_lossy(who.as_bytes())));
        }
        match response.status() {
            StatusCode::OK => Ok(Lines {
                body: response.into_body(),
                buffer: BytesMut::new(),
            }),
            status => Err(refused(status, response.into_body()).await),
        }
    }

    fn in_words(&self, why: &str) -> String {
        let peers = self.map.fleet().peers();
        let peer = peers.iter().find(|peer| peer.name == self.node);
        match peer.map(|peer| peer.standing) {
            Some(PeerStanding::Live) => why.to_owned(),
            Some(PeerStanding::Silent) => format!("it has not renewed for a while; {why}"),
            Some(PeerStanding::Fenced) => format!("it was declared dead; {why}"),
            None => format!("it has left the fleet; {why}"),
        }
    }
}

/// The address of a lost node may be another's.
fn not_it(who: &str) -> String {
    format!("node `{who}` answers where it listened")
}

async fn refused(status: StatusCode, body: Incoming) -> String {
    match read_json::<Problem, _>(body, MAX_PROBLEM_BYTES).await {
        Ok(problem) => problem.detail,
        Err(_) => format!("it answered {status}"),
    }
}

/// The lines of a body.
struct Lines {
    body: Incoming,
    buffer: BytesMut,
}

impl Lines {
    /// The next line, without its end. Cancel safe: received bytes are in the buffer.
    async fn next(&mut self) -> Result<Bytes, String> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..]
                .iter()
                .position(|byte| *byte == b'\n')
            {
                let mut line = self.buffer.split_to(searched + end + 1);
                line.truncate(searched + end);
                return Ok(line.freeze());
            }
            searched = self.buffer.len();
            if searched > MAX_FRAME_BYTES {
                return Err(format!("a line of it exceeds {MAX_FRAME_BYTES} bytes"));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    let data = frame.into_data().unwrap_or_default();
                    self.buffer.extend_from_slice(&data);
                }
                Some(Err(error)) => return Err(format!("the connection broke: {error}")),
                None => return Err("its daemon ended the connection".to_owned()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
