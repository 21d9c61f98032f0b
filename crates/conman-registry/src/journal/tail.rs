//! The newest durable events in memory.

use std::collections::VecDeque;
use std::sync::Arc;

use conman_proto::Event;

use super::tables::Extent;

/// Number of events in memory. Followers read from here and use the disk only when they lag.
const MAX_EVENTS: usize = 1024;

/// Every durable event after `begins_after`, and how far the journal reaches.
#[derive(Debug)]
pub(super) struct Tail {
    events: VecDeque<Arc<Event>>,
    begins_after: u64,
    extent: Extent,
}

impl Tail {
    /// Nothing in memory yet.
    pub(super) fn new(extent: Extent) -> Self {
        Self {
            events: VecDeque::new(),
            begins_after: extent.last_seq,
            extent,
        }
    }

    /// Adds events that just became durable, and notes how far the journal reaches now.
    pub(super) fn extend(&mut self, events: Vec<Arc<Event>>, extent: Extent) {
        self.events.extend(events);
        let excess = self.events.len().saturating_sub(MAX_EVENTS);
        if let Some(last) = self.events.drain(..excess).next_back() {
            self.begins_after = last.seq;
        }
        self.extent = extent;
    }

    /// Up to `limit` events after a position; `None` when some of them are only on disk.
    pub(super) fn after(&self, after: u64, limit: usize) -> Option<(Vec<Event>, Extent)> {
        // A small limit of the journal may drop events that are still here; both must return the
        // same.
        let after_dropped = after.max(self.extent.dropped_through);
        if after_dropped < self.begins_after {
            return None;
        }
        let begin = self
            .events
            .partition_point(|event| event.seq <= after_dropped);
        let events = self
            .events
            .iter()
            .skip(begin)
            .take(limit)
            .map(|event| Event::clone(event))
            .collect();
        Some((events, self.extent))
    }
}
