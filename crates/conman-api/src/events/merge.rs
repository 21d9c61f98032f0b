//! Merges the events of several nodes into one stream.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use conman_proto::Event;
use conman_registry::{Journal, JournalError};
use futures_util::future::{join_all, ready};
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt as _};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::cursor::{Cursor, MAX_NODES};
use super::notes::unreachable;
use super::places::{StreamPlace, StreamPlaces};
use super::remote::{self, NO_ROOM, RemoteJournal, STREAM_PAGE};
use super::{EventFilter, FleetEvents, PageRequest, Position};
use crate::problem::ApiError;

/// Interval between checks for new nodes.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a new stream waits for the other nodes' positions before it begins, so that it has no
/// earlier events, and does not miss those that its client causes after that.
const BEGIN_PATIENCE: Duration = Duration::from_secs(2);

/// Events of several nodes: those of each node in its order, interleaved as they arrive.
pub(crate) struct Merged {
    events: Arc<FleetEvents>,
    cursor: Cursor,
    news: SelectAll<BoxStream<'static, (Arc<str>, News)>>,
    /// The nodes that are read, and this one.
    read: BTreeSet<Arc<str>>,
    /// Nodes that are not read, after their events were reported as missing.
    missing: BTreeSet<Arc<str>>,
    looks: Interval,
    _place: StreamPlace,
}

/// News about a node.
#[derive(Debug)]
pub(super) enum News {
    Event(Event),
    /// An event that is in no journal.
    Note(Event),
    /// Its journal was read up to here.
    Through(u64),
    /// It is not read any longer: it has left the fleet, or is lost and was reported as missing.
    Left,
}

impl Merged {
    /// Begins at the client's position, or with future events.
    pub(crate) async fn open(
        events: FleetEvents,
        journal: &Journal,
        places: &StreamPlaces,
        position: Option<Position>,
    ) -> Result<Self, ApiError> {
        let place = places.take(&events.caller)?;
        let events = Arc::new(events);
        let me: Arc<str> = Arc::from(events.map.me());
        let is_new = position.is_none();
        let mut cursor = Cursor::begin(position, &me);
        if is_new {
            skip_stored(&events, journal, &mut cursor).await?;
        }
        let mut news = SelectAll::new();
        if events.includes(&me) {
            let PageRequest { after, filter, .. } = events.request(cursor.of(&me), STREAM_PAGE);
            let node = Arc::clone(&me);
            let own = journal.follow(after).map(move |event| {
                let news = match filter.wants(&event) {
                    true => News::Event(event),
                    false => News::Through(event.seq),
                };
                (Arc::clone(&node), news)
            });
            news.push(own.boxed());
        }
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self {
            events,
            cursor,
            news,
            read: BTreeSet::from([me]),
            missing: BTreeSet::new(),
            looks,
            _place: place,
        })
    }

    /// The position to resume from.
    pub(crate) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// The next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> Event {
        loop {
            // Cancel safe: what a node has sent stays in its stream, and a missed tick comes with the
            // next call.
            let (node, news) = tokio::select! {
                Some(news) = self.news.next() => news,
                _ = self.looks.tick() => {
                    self.look();
                    continue;
                }
            };
            match news {
                News::Event(event) => {
                    self.cursor.set(&node, event.seq);
                    return event;
                }
                News::Note(event) => return event,
                News::Through(seq) => self.cursor.set(&node, seq),
                News::Left => {
                    self.read.remove(&node);
                    self.missing.insert(node);
                }
            }
        }
    }

    /// Begins to read new nodes.
    fn look(&mut self) {
        let peers = self.events.map.fleet().peers();
        self.missing
            .retain(|node| peers.iter().any(|peer| *peer.name == **node));
        for node in self.events.others() {
            if self.read.contains(&node) {
                continue;
            }
            if self.read.len() < MAX_NODES {
                let is_back = self.missing.remove(&node);
                let request = self.events.request(self.cursor.of(&node), STREAM_PAGE);
                let news = remote::follow(&self.events, &node, request, is_back);
                self.news.push(news);
                self.read.insert(node);
            } else if self.missing.insert(Arc::clone(&node)) {
                let note = News::Note(unreachable(&node, 0, NO_ROOM));
                self.news.push(stream::once(ready((node, note))).boxed());
            }
        }
        self.cursor.make_room(self.read.iter());
    }
}

/// Moves the position of each node that answers in time to the end of its journal. The others send
/// what happened since now.
async fn skip_stored(
    events: &Arc<FleetEvents>,
    journal: &Journal,
    cursor: &mut Cursor,
) -> Result<(), JournalError> {
    let me = events.map.me();
    cursor.set(me, journal.page(0, 1).await?.last_seq);
    let others = events.others().into_iter().take(MAX_NODES - 1);
    let asked = others.map(|node| {
        let journal = RemoteJournal::new(events, &node);
        async move {
            let request = PageRequest {
                after: 0,
                limit: 1,
                filter: EventFilter::default(),
                waits: false,
            };
            let page = timeout(BEGIN_PATIENCE, journal.page(&request)).await;
            Some((node, page.ok()?.ok()?.last_seq))
        }
    });
    for (node, last_seq) in join_all(asked).await.into_iter().flatten() {
        cursor.set(&node, last_seq);
    }
    Ok(())
}
