//! Reads one page of events from all nodes.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use conman_proto::{Event, EventPage};
use conman_registry::Journal;
use futures_util::stream::{self, StreamExt as _};
use jiff::Timestamp;
use tokio::time::sleep;

use super::cursor::{Cursor, MAX_NODES};
use super::notes::unreachable;
use super::remote::{NO_ROOM, RemoteJournal};
use super::{FleetEvents, Position, StreamPlaces, local};
use crate::problem::ApiError;

/// Nodes that are requested at a time: a page of each is in memory.
const PARALLEL: usize = 8;

/// How long all nodes together may take.
const PAGE_PATIENCE: Duration = Duration::from_secs(10);

/// The pages of several nodes.
struct Gathered {
    limit: usize,
    /// The earliest events. Each has the time of its node's latest event so far, so that events of
    /// one node stay in their order when clocks are set.
    events: Vec<(Timestamp, Arc<str>, Event)>,
    /// How many events each node sent, and the position behind its page.
    sent: Vec<(Arc<str>, usize, Option<u64>)>,
    /// Which nodes' events are missing; besides the limit, so that a page shows all of them.
    notes: Vec<Event>,
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
        notes: Vec::new(),
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
        gathered.note_missing(&node, &cursor, NO_ROOM);
    }
    let mut waiting: BTreeSet<_> = others.iter().cloned().collect();
    let requests = others.into_iter().map(|node| {
        let request = events.request(cursor.of(&node), limit);
        let journal = RemoteJournal::new(&events, &node);
        async move {
            let page = journal.page(&request).await;
            (node, page)
        }
    });
    let requests: Vec<_> = requests.collect();
    let pages = stream::iter(requests).buffer_unordered(PARALLEL);
    let mut pages = pin!(pages.take_until(sleep(PAGE_PATIENCE)));
    while let Some((node, page)) = pages.next().await {
        waiting.remove(&node);
        match page {
            Ok(page) => gathered.add(node, page),
            Err(why) => gathered.note_missing(&node, &cursor, &why),
        }
    }
    for node in waiting {
        gathered.note_missing(&node, &cursor, "other nodes did not answer in time");
    }
    gathered.advance(&mut cursor);
    let events = gathered.events.into_iter().map(|(.., event)| event);
    Ok(EventPage {
        events: events.chain(gathered.notes).collect(),
        last_seq: journal.page(0, 1).await?.last_seq,
        cursor: cursor.to_string(),
        truncated: gathered.truncated,
        complete: gathered.complete,
    })
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

    /// The node's position stays what it is.
    fn note_missing(&mut self, node: &str, cursor: &Cursor, why: &str) {
        self.notes.push(unreachable(node, cursor.of(node).0, why));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::notes::back;

    #[test]
    fn missing_nodes_take_no_places_of_a_page_and_do_not_keep_it_incomplete() {
        let mut cursor = Cursor::begin(None, "n1");
        let mut gathered = Gathered {
            limit: 1,
            events: Vec::new(),
            sent: Vec::new(),
            notes: Vec::new(),
            truncated: false,
            complete: true,
        };
        for node in ["n2", "n3"] {
            gathered.note_missing(node, &cursor, "it does not answer");
        }
        let page = EventPage {
            events: vec![back("n1", 7)],
            last_seq: 7,
            cursor: "9".to_owned(),
            truncated: false,
            complete: true,
        };
        gathered.add(Arc::from("n1"), page);
        gathered.advance(&mut cursor);
        assert_eq!((gathered.notes.len(), gathered.events.len()), (2, 1));
        assert!(gathered.complete);
        assert_eq!(cursor.of("n1").0, 9);
    }
}
