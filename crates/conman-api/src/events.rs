//! The events of all nodes as one stream.
//!
//! ```text
//! journal ─> local ────────────────────────────┬─> merge ─> the client
//! another node's journal ─> local ══> remote ──┘      (══: between two nodes)
//! ```
//!
//! [`local`] reads pages of this node's journal, for its clients and for other nodes. [`remote`]
//! requests one page after the other of another node. [`merge`] passes their events on as they
//! arrive, and gives each one a [`cursor`] to resume from. [`fleet_page`] reads one page from all
//! nodes. Nothing runs in the background: a stream advances when its client reads. Meanwhile one
//! short page of each node is held.

mod cursor;
mod fleet_page;
mod local;
mod merge;
mod notes;
mod places;
mod remote;

use std::sync::Arc;

use conman_auth::Caller;
use conman_fleet::FleetMap;
use conman_proto::{Event, EventKind, SessionId};
use conman_registry::PeerStanding;
use serde::{Deserialize, Serialize};

pub(crate) use cursor::Position;
pub(crate) use fleet_page::read_fleet_page;
pub(crate) use local::{awaited_page, page};
pub(crate) use merge::Merged;
pub use places::StreamPlaces;

/// A request for a page of one journal.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PageRequest {
    /// Only events with a greater position.
    pub(crate) after: u64,
    pub(crate) limit: usize,
    pub(crate) filter: EventFilter,
    /// Whether to wait a while if there is no event yet.
    pub(crate) waits: bool,
}

/// The events that a client wants.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EventFilter {
    pub(crate) session: Option<SessionId>,
    /// Empty: all but the phases of starts.
    pub(crate) kinds: Vec<EventKind>,
    /// Those not earlier than this, in milliseconds since 1970.
    pub(crate) since_ms: u64,
}

impl EventFilter {
    /// Whether the client wants an event. It gets those that report missing events in any case.
    pub(crate) fn wants(&self, event: &Event) -> bool {
        let is_session = || {
            let session = self.session.as_ref();
            session.is_none_or(|session| event.session.as_ref() == Some(session))
        };
        let is_kind = || match self.kinds.is_empty() {
            true => event.kind != EventKind::SessionPhase,
            false => self.kinds.contains(&event.kind),
        };
        let at_ms = u64::try_from(event.at.as_millisecond()).unwrap_or(0);
        let is_wanted = || is_session() && is_kind();
        at_ms >= self.since_ms && (event.kind == EventKind::EventsLost || is_wanted())
    }
}

/// The events of a fleet that a client wants.
#[derive(Debug)]
pub(crate) struct FleetEvents {
    pub(crate) map: Arc<FleetMap>,
    /// Of this node; `None`: of all nodes.
    pub(crate) only: Option<String>,
    pub(crate) filter: EventFilter,
    pub(crate) caller: Caller,
}

impl FleetEvents {
    fn includes(&self, node: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only == node)
    }

    /// The other nodes whose events are wanted. One that was declared dead must be named: its name
    /// stays known for a day, and its address may be another node's.
    fn others(&self) -> Vec<Arc<str>> {
        let peers = self.map.fleet().peers();
        let others = peers.iter().filter(|peer| {
            let counts = self.only.is_some() || peer.standing != PeerStanding::Fenced;
            counts && peer.name != self.map.me() && self.includes(&peer.name)
        });
        others.map(|peer| Arc::from(&*peer.name)).collect()
    }

    /// The request to a node: after a position, and since a time.
    fn request(&self, (after, since_ms): (u64, u64), limit: usize) -> PageRequest {
        let filter = EventFilter {
            since_ms,
            ..self.filter.clone()
        };
        PageRequest {
            after,
            limit,
            filter,
            waits: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_in_the_events_is_reported_whatever_is_filtered_but_not_an_old_one() {
        let gap = notes::lost("n1", 7);
        let now_ms = u64::try_from(gap.at.as_millisecond()).expect("after 1970");
        let since = |since_ms| EventFilter {
            kinds: vec![EventKind::NodeStarted],
            since_ms,
            ..EventFilter::default()
        };
        assert!(since(now_ms).wants(&gap));
        assert!(!since(now_ms + 1).wants(&gap));
        let back = notes::back("n1", 7);
        assert!(!since(0).wants(&back), "another kind");
    }
}
