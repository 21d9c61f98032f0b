//! Reads one page of events from all nodes.

use std::sync::Arc;

use conman_proto::{Event, EventPage};
use conman_registry::Journal;
use futures_util::stream::{self, StreamExt as _};
use jiff::Timestamp;

use super::cursor::{Cursor, MAX_NODES};
use super::notes::unreachable;
use super::remote::{NO_ROOM, RemoteJournal};
use super::{FleetEvents, Position, StreamPlaces, local};
use crate::problem::ApiError;

/// Nodes that are requested at a time.
const PARALLEL: usize = 32;

/// The pages of several nodes.
struct Gathered {
    limit: usize,
    /// The earliest events. Each has the time of its node's latest event so far, so that events of
    /// one node stay in their order when clocks are set.
    events: Vec<(Timestamp, Arc<str>, Event)>,
    /// How many events each node sent, and the position behind its page.
    sent: Vec<(Arc<str>, usize, Option<u64>)>,
    truncated: bool,
    complete: bool,
}

/// The stored events of all nodes after a position, ordered by time. Events of nodes that do not
/// answer are reported as missing.
pub(crate) async fn read_fleet_page(
    events: FleetEvents,
    journal: &Journal,
    places: &StreamPlaces,
    (position, limit): (Position, usize),
) -> Result<EventPage, ApiError> {
    let _place = places.take(&events.caller)?;
    let me: Arc<str> = Arc::from(events.map.me());
    let mut cursor = Cursor::begin(Some(position), &me);
    let mut gathered = Gathered {
        limit,
        events: Vec::new(),
        sent: Vec::new(),
        truncated: false,
        complete: true,
    };
    let events = Arc::new(events);
    let mut others = events.others();
    let beyond = others.split_off(others.len().min(MAX_NODES - 1));
    cursor.make_room(others.iter().chain([&me]));
    if events.includes(&me) {
        let request = events.request(cursor.of(&me), limit);
        gathered.add(me, local::page(journal, &request).await?);
    }
    for node in beyond {
        let page = missing(&node, cursor.of(&node).0, NO_ROOM);
        gathered.add(node, page);
    }
    let requests = others.into_iter().map(|node| {
        let request = events.request(cursor.of(&node), limit);
        let journal = RemoteJournal::new(&events, &node);
        async move {
            let page = journal.page(&request).await;
            let page = page.unwrap_or_else(|why| missing(&node, request.after, &why));
            (node, page)
        }
    });
    let requests: Vec<_> = requests.collect();
    let mut pages = stream::iter(requests).buffer_unordered(PARALLEL);
    while let Some((node, page)) = pages.next().await {
        gathered.add(node, page);
    }
    gathered.advance(&mut cursor);
    Ok(EventPage {
        events: gathered
            .events
            .into_iter()
            .map(|(.., event)| event)
            .collect(),
        last_seq: journal.page(0, 1).await?.last_seq,
        cursor: cursor.to_string(),
        truncated: gathered.truncated,
        complete: gathered.complete,
    })
}

/// Instead of the page of a node that has not answered.
fn missing(node: &str, after: u64, why: &str) -> EventPage {
    EventPage {
        events: vec![unreachable(node, after, why)],
        last_seq: 0,
        // Its position stays what it was.
        cursor: String::new(),
        truncated: false,
        complete: true,
    }
}

impl Gathered {
    fn add(&mut self, node: Arc<str>, page: EventPage) {
        self.truncated |= page.truncated;
        self.complete &= page.complete;
        let mut at = Timestamp::MIN;
        let through = page.cursor.parse::<u64>().ok();
        self.sent
            .push((Arc::clone(&node), page.events.len(), through));
        self.events.extend(page.events.into_iter().map(|event| {
            at = at.max(event.at);
            (at, Arc::clone(&node), event)
        }));
        self.events.sort_by_key(|(at, ..)| *at);
        self.events.truncate(self.limit);
    }

    /// Moves each node's position behind its last event that is on the page.
    fn advance(&mut self, cursor: &mut Cursor) {
        for (node, sent, through) in &self.sent {
            let mut shown = self.events.iter().filter(|(_, of, _)| of == node);
            let is_whole = shown.clone().count() == *sent;
            self.complete &= is_whole;
            let last = match is_whole {
                true => *through,
                false => shown.next_back().map(|(.., event)| event.seq),
            };
            if let Some(seq) = last {
                cursor.set(node, seq);
            }
        }
    }
}
