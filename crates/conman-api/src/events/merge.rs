//! Merges the frames of several nodes into one stream of events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use conman_auth::Caller;
use conman_fleet::FleetMap;
use conman_proto::Event;
use conman_registry::{Journal, JournalError, Peer, PeerStanding};
use futures_util::future::poll_fn;
use futures_util::stream::{BoxStream, StreamExt as _};
use jiff::Timestamp;
use tokio::time::{Instant, sleep_until};

use super::notes::{back, is_recorded, unreachable};
use super::places::{StreamPlace, StreamPlaces};
use super::remote::{self, EventsRequest, NodeNews};
use super::{Cursor, EventFilter, Frame, From, Position, local};
use crate::problem::ApiError;

/// Interval between checks for new nodes.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long the others wait for a node that still sends stored events, so that these are in
/// order.
const ORDER_PATIENCE: Duration = Duration::from_secs(3);

/// How long a stream waits for the other nodes before it begins, so that it does not miss events
/// that its client causes after that.
const BEGIN_PATIENCE: Duration = Duration::from_secs(2);

/// Longest time for a page.
const PAGE_PATIENCE: Duration = Duration::from_secs(10);

/// The nodes whose events are requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OnlyOf {
    All,
    Node(String),
}

/// Events of several nodes: those of one node in its order, stored ones by their time, and later
/// ones as they arrive.
pub(crate) struct Merged {
    map: Arc<FleetMap>,
    only: OnlyOf,
    asked: EventsRequest,
    /// Whether the client gave a position.
    resumes: bool,
    cursor: Cursor,
    sources: BTreeMap<String, Source>,
    /// Nodes that were removed after their events were reported as missing.
    missing: BTreeSet<String>,
    look_at: Instant,
    truncated: bool,
    place: StreamPlace,
}

/// A node whose events are merged.
struct Source {
    told: BoxStream<'static, NodeNews>,
    head: Option<Event>,
    /// Whether it has sent anything.
    begun: bool,
    /// Whether it has sent all stored events, or cannot.
    live: bool,
    /// Whether its events were reported as missing.
    missing: bool,
    heard_at: Instant,
}

/// A page of the events of several nodes.
pub(crate) struct MergedPage {
    pub(crate) events: Vec<Event>,
    pub(crate) cursor: Cursor,
    pub(crate) truncated: bool,
    /// Whether no more stored events are available at present.
    pub(crate) complete: bool,
}

impl Merged {
    /// Begins at the client's position, or with future events.
    pub(crate) async fn open(
        (map, places): (&Arc<FleetMap>, &StreamPlaces),
        journal: &Journal,
        (position, filter): (Option<Position>, EventFilter),
        only: OnlyOf,
        caller: Caller,
    ) -> Result<Self, ApiError> {
        let place = places.take(&caller)?;
        let now_ms = u64::try_from(Timestamp::now().as_millisecond()).unwrap_or(0);
        let cursor = match &position {
            None => Cursor::since(now_ms),
            Some(Position::Own(0)) => Cursor::since(0),
            Some(Position::Own(seq)) => {
                let mut cursor = Cursor::since(now_ms);
                cursor.set(map.me(), *seq);
                cursor
            }
            Some(Position::Fleet(cursor)) => cursor.clone(),
        };
        let asked = EventsRequest {
            from: From {
                after: None,
                since_ms: 0,
            },
            opened_ms: now_ms,
            opened_at: Instant::now(),
            filter,
            caller,
        };
        let now = Instant::now();
        let mut merged = Self {
            map: Arc::clone(map),
            only,
            asked,
            resumes: position.is_some(),
            cursor,
            sources: BTreeMap::new(),
            missing: BTreeSet::new(),
            look_at: now,
            truncated: false,
            place,
        };
        merged.open_own(journal).await?;
        merged.look();
        // A node that joins later is new: all of its events count.
        merged.resumes = true;
        merged.begin(now + BEGIN_PATIENCE).await;
        Ok(merged)
    }

    /// Waits until every node has sent its first frame, or cannot be reached.
    async fn begin(&mut self, end: Instant) {
        while self.sources.values().any(|source| !source.begun) && Instant::now() < end {
            // Cancel safe: frames that were received are kept.
            tokio::select! {
                () = poll_fn(|cx| self.poll_heads(cx)) => {}
                () = sleep_until(end) => {}
            }
        }
    }

    async fn open_own(&mut self, journal: &Journal) -> Result<(), JournalError> {
        let me = self.map.me().to_owned();
        if !self.includes(&me) {
            return Ok(());
        }
        // This node's events are the last to be left out.
        let peers = self.map.fleet().peers();
        let there = peers.iter().filter(|peer| !is_gone(peer));
        let present = there.map(|peer| peer.name.as_str());
        self.cursor.has_room(&me, 0, present);
        let from = self.from(&me);
        let frames = local::frames(journal, from, self.asked.filter.clone()).await?;
        self.sources
            .insert(me, Source::new(frames.map(NodeNews::Frame).boxed()));
        Ok(())
    }

    /// The position to resume from.
    pub(crate) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// The next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> Event {
        loop {
            let now = Instant::now();
            if now >= self.look_at {
                self.look();
                self.look_at = now + LOOK_EVERY;
            }
            if let Some(event) = self.take(now) {
                return event;
            }
            let until = self
                .patience(now)
                .map_or(self.look_at, |at| at.min(self.look_at));
            // Cancel safe: heads are kept, and times are checked again.
            tokio::select! {
                () = poll_fn(|cx| self.poll_heads(cx)) => {}
                () = sleep_until(until) => {}
            }
        }
    }

    /// Returns stored events, at most `limit`.
    pub(crate) async fn page(mut self, limit: usize) -> MergedPage {
        let mut events = Vec::new();
        let end = Instant::now() + PAGE_PATIENCE;
        while events.len() < limit {
            let now = Instant::now();
            if let Some(event) = self.take(now) {
                events.push(event);
                continue;
            }
            if now >= end || self.is_told() {
                break;
            }
            let until = self.patience(now).map_or(end, |at| at.min(end));
            // Cancel safe, as in `next`.
            tokio::select! {
                () = poll_fn(|cx| self.poll_heads(cx)) => {}
                () = sleep_until(until) => {}
            }
        }
        MergedPage {
            complete: self.is_told(),
            events,
            cursor: self.cursor,
            truncated: self.truncated,
        }
    }

    fn includes(&self, node: &str) -> bool {
        match &self.only {
            OnlyOf::All => true,
            OnlyOf::Node(only) => only == node,
        }
    }

    fn from(&self, node: &str) -> From {
        match (self.resumes, self.cursor.seq(node)) {
            (false, None) => From {
                after: None,
                since_ms: 0,
            },
            _ => self.cursor.of(node),
        }
    }

    /// Adds sources for new nodes, and removes those of nodes that have left.
    fn look(&mut self) {
        let peers = self.map.fleet().peers();
        let me = self.map.me().to_owned();
        let find = |name: &str| peers.iter().find(|peer| peer.name == name);
        // A node that was requested by name stays, whatever its state.
        let is_named = self.only != OnlyOf::All;
        let left = self.sources.extract_if(.., |name, source| {
            let stays = match find(name) {
                // It may still be reachable, whatever the registry says.
                Some(peer) => !is_gone(peer) || !source.missing || is_named,
                None => false,
            };
            // Events that it has sent already are passed on before it is removed.
            *name != me && source.head.is_none() && !stays
        });
        let missing = left.filter(|(_, source)| source.missing);
        self.missing.extend(missing.map(|(name, _)| name));
        self.missing.retain(|name| find(name).is_some());
        for peer in peers.iter() {
            let name = peer.name.as_str();
            if name == me || !self.includes(name) || self.sources.contains_key(name) {
                continue;
            }
            if is_gone(peer) && !is_named {
                continue;
            }
            // Nodes that have sent none yet will have a position, too.
            let begun = self.sources.keys();
            let pending = begun.filter(|name| self.cursor.seq(name).is_none()).count();
            let there = |peer: &&Peer| !is_gone(peer) || self.sources.contains_key(&peer.name);
            let present = peers.iter().filter(there).map(|peer| peer.name.as_str());
            if !self.cursor.has_room(name, pending, present) {
                self.place.has_no_room_for(name);
                continue;
            }
            let asked = EventsRequest {
                from: self.from(name),
                ..self.asked.clone()
            };
            let missing = self.missing.remove(name);
            let told = remote::frames(Arc::clone(&self.map), name, asked, missing);
            self.sources.insert(name.to_owned(), Source::new(told));
        }
    }

    /// The earliest event, once no node is expected to send an earlier one.
    fn take(&mut self, now: Instant) -> Option<Event> {
        if self.sources.values().any(|source| source.is_awaited(now)) {
            return None;
        }
        let heads = self
            .sources
            .iter()
            .filter_map(|(name, source)| Some((source.head.as_ref()?.at, name.clone())));
        let (_, name) = heads.min()?;
        let event = self.sources.get_mut(&name)?.head.take()?;
        if is_recorded(event.kind) {
            self.cursor.set(&name, event.seq);
        }
        Some(event)
    }

    /// When to stop waiting for a node that still sends stored events.
    fn patience(&self, now: Instant) -> Option<Instant> {
        let awaited = self
            .sources
            .values()
            .filter(|source| source.is_awaited(now));
        awaited.map(|source| source.heard_at + ORDER_PATIENCE).min()
    }

    /// Ready when any node has sent something.
    fn poll_heads(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut progress = false;
        for (name, source) in &mut self.sources {
            while source.head.is_none() {
                let told = match source.told.poll_next_unpin(cx) {
                    Poll::Ready(Some(told)) => told,
                    // A closed journal ends, and its node is about to stop.
                    Poll::Ready(None) => {
                        progress |= !std::mem::replace(&mut source.live, true);
                        break;
                    }
                    Poll::Pending => break,
                };
                progress = true;
                source.begun = true;
                source.heard_at = Instant::now();
                match told {
                    NodeNews::Frame(Frame::Event(event)) => source.head = Some(event),
                    NodeNews::Frame(Frame::Reached {
                        seq,
                        live,
                        truncated,
                    }) => {
                        source.live |= live;
                        self.truncated |= truncated;
                        self.cursor.set(name, seq);
                    }
                    NodeNews::Unreachable(why) => {
                        (source.live, source.missing) = (true, true);
                        source.head = Some(unreachable(name, self.cursor.seq(name), &why));
                    }
                    NodeNews::Back => {
                        source.missing = false;
                        source.head = Some(back(name, self.cursor.seq(name)));
                    }
                }
            }
        }
        if progress {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Whether every node has sent its stored events.
    fn is_told(&self) -> bool {
        let told = |source: &Source| source.live && source.head.is_none();
        self.sources.values().all(told)
    }
}

impl Source {
    fn new(told: BoxStream<'static, NodeNews>) -> Self {
        Self {
            // A closed journal ends, and is polled again.
            told: told.fuse().boxed(),
            head: None,
            begun: false,
            live: false,
            missing: false,
            heard_at: Instant::now(),
        }
    }

    fn is_awaited(&self, now: Instant) -> bool {
        !self.live && self.head.is_none() && now < self.heard_at + ORDER_PATIENCE
    }
}

/// Whether it was declared dead: its name may stay known for a day, and its address be another's.
fn is_gone(peer: &Peer) -> bool {
    peer.standing == PeerStanding::Fenced
}
