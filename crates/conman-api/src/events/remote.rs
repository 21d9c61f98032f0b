//! Reads another node's journal, page by page, for as long as the stream has a reader.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use conman_fleet::node_api::EVENTS;
use conman_fleet::read_json;
use conman_peer::caller_header;
use conman_proto::{EventPage, Problem};
use conman_registry::PeerStanding;
use futures_util::future::ready;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use http::{Request, StatusCode};
use http_body_util::Empty;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::time::{Instant, sleep, timeout};

use super::local::WAIT;
use super::merge::News;
use super::notes::{back, lost, unreachable};
use super::{FleetEvents, PageRequest};
use crate::forwarding;
use crate::node_errors::chain;

/// Why a node's events are missing if the fleet has more nodes than a position.
pub(super) const NO_ROOM: &str = "the fleet has more nodes than a stream of events";

/// Time for an answer, including the connection, besides the wait for an event.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a node that was reached may be away before that is reported: a daemon restarts.
const GRACE: Duration = Duration::from_secs(3);

/// Pause between two attempts, at first and at most.
const PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// Events that a stream requests at a time, and holds for a slow client.
pub(super) const STREAM_PAGE: usize = 50;

/// Longest event: its message has at most 4 KiB, and each byte of it at most six in JSON.
const MAX_EVENT_BYTES: usize = 32 * 1024;

/// Longest problem that is read for its reason, and longest page without events.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;

/// The journal of another node.
pub(super) struct RemoteJournal {
    events: Arc<FleetEvents>,
    node: Arc<str>,
}

impl RemoteJournal {
    pub(super) fn new(events: &Arc<FleetEvents>, node: &Arc<str>) -> Self {
        Self {
            events: Arc::clone(events),
            node: Arc::clone(node),
        }
    }

    /// Requests a page, or returns why there is none.
    pub(super) async fn page(&self, request: &PageRequest) -> Result<EventPage, String> {
        let wait = if request.waits { WAIT } else { Duration::ZERO };
        let patience = wait + ANSWER_TIMEOUT;
        let answer = timeout(patience, self.request(request)).await;
        let late = |_| Err(format!("it did not answer within {} s", patience.as_secs()));
        let why = match answer.unwrap_or_else(late) {
            Ok(page) => return Ok(page),
            Err(why) => why,
        };
        Err(match self.standing() {
            Some(PeerStanding::Live) => why,
            Some(PeerStanding::Silent) => format!("it has not renewed for a while; {why}"),
            Some(PeerStanding::Fenced) => format!("it was declared dead; {why}"),
            None => format!("it has left the fleet; {why}"),
        })
    }

    async fn request(&self, page: &PageRequest) -> Result<EventPage, String> {
        let map = &self.events.map;
        let address = map.node(&self.node).address;
        let address = address.map_err(|why| why.to_string())?;
        let json = serde_json::to_string(page).map_err(|error| chain(&error))?;
        let json = utf8_percent_encode(&json, NON_ALPHANUMERIC);
        let (name, value) = caller_header(&self.events.caller);
        let request = Request::get(format!("{EVENTS}?page={json}"))
            .header(name, value)
            .body(Empty::<Bytes>::new())
            .map_err(|error| chain(&error))?;
        let response = map.client().request(&address, request).await;
        let response = response.map_err(|error| chain(&error))?;
        // The address of a lost node may be another's. Events that it wrote under an earlier name
        // carry that one.
        if let Some(who) = response.headers().get(forwarding::X_CONMAN_NODE)
            && who.as_bytes() != self.node.as_bytes()
        {
            let who = String::from_utf8_lossy(who.as_bytes());
            return Err(format!("node `{who}` answers where it listened"));
        }
        let status = response.status();
        if status == StatusCode::OK {
            let max_bytes = MAX_PROBLEM_BYTES + page.limit * MAX_EVENT_BYTES;
            return read_json(response.into_body(), max_bytes).await;
        }
        match read_json::<Problem, _>(response.into_body(), MAX_PROBLEM_BYTES).await {
            Ok(problem) => Err(problem.detail),
            Err(_) => Err(format!("it answered {status}")),
        }
    }

    fn standing(&self) -> Option<PeerStanding> {
        let peers = self.events.map.fleet().peers();
        let peer = peers.iter().find(|peer| *peer.name == *self.node);
        peer.map(|peer| peer.standing)
    }
}

/// Reads a journal to its end, and then what is added.
struct Follower {
    journal: RemoteJournal,
    request: PageRequest,
    pause: Duration,
    /// Until when the node may be away without a report.
    grace_until: Instant,
    /// Whether its events were reported as missing.
    is_missing: bool,
}

/// The news of a node, until it leaves the fleet. `is_missing`: its events were reported as missing
/// before.
pub(super) fn follow(
    events: &Arc<FleetEvents>,
    node: &Arc<str>,
    request: PageRequest,
    is_missing: bool,
) -> BoxStream<'static, (Arc<str>, News)> {
    let follower = Follower {
        journal: RemoteJournal::new(events, node),
        request,
        pause: PAUSE,
        grace_until: Instant::now(),
        is_missing,
    };
    let news = stream::unfold(follower, |mut follower| async move {
        let news = follower.next().await?;
        Some((stream::iter(news), follower))
    });
    let node = Arc::clone(node);
    news.flatten()
        .chain(stream::once(ready(News::Left)))
        .map(move |news| (Arc::clone(&node), news))
        .boxed()
}

impl Follower {
    /// The next news; `None` if the node has left the fleet, or is lost and was reported as missing.
    async fn next(&mut self) -> Option<Vec<News>> {
        loop {
            let why = match self.read().await {
                Ok(news) => return Some(news),
                Err(why) => why,
            };
            // Only a node that answers is waited for.
            if std::mem::take(&mut self.request.waits) {
                self.grace_until = Instant::now() + GRACE;
                self.pause = PAUSE;
            }
            let is_named = self.journal.events.only.is_some();
            match self.journal.standing() {
                None => return None,
                Some(PeerStanding::Fenced) if self.is_missing && !is_named => return None,
                Some(PeerStanding::Live | PeerStanding::Silent | PeerStanding::Fenced) => {}
            }
            let is_late = Instant::now() >= self.grace_until;
            if is_late && !std::mem::replace(&mut self.is_missing, true) {
                let note = unreachable(&self.journal.node, self.request.after, &why);
                return Some(vec![News::Note(note)]);
            }
            sleep(self.pause).await;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One page. The first one does not wait for an event, so that a node that is back is reported
    /// at once.
    async fn read(&mut self) -> Result<Vec<News>, String> {
        let page = self.journal.page(&self.request).await?;
        let through = page.cursor.parse::<u64>();
        let through = through.map_err(|_| format!("invalid position `{}`", page.cursor))?;
        let after = std::mem::replace(&mut self.request.after, through);
        self.request.waits = true;
        let mut news = Vec::new();
        if std::mem::take(&mut self.is_missing) {
            news.push(News::Note(back(&self.journal.node, after)));
        }
        if page.truncated && after > 0 {
            news.push(News::Note(lost(&self.journal.node, after)));
        }
        news.extend(page.events.into_iter().map(News::Event));
        news.push(News::Through(through));
        Ok(news)
    }
}

#[cfg(test)]
mod tests;
