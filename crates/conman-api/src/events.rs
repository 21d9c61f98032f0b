//! The events of all nodes as one stream.
//!
//! ```text
//! journal ─> local ──────────────────────────┐
//! another node's journal ─> its local ─hop─> remote ─> merge ─> the client
//! ```
//!
//! [`local`] converts one journal to frames: for this node's clients and, as lines, for other
//! nodes. [`remote`] requests another node's frames for as long as needed. [`merge`] orders them
//! and gives each event a [`cursor`] to resume from. Nothing runs in the background: a stream
//! advances when its client reads. Meanwhile one event of each node is held, besides the
//! connections' buffers.

mod cursor;
mod local;
mod merge;
mod notes;
mod places;
mod remote;

use conman_proto::{Event, EventKind, SessionId};
use serde::{Deserialize, Serialize};

pub(crate) use cursor::{Cursor, Position};
pub(crate) use local::frames;
pub(crate) use merge::{Merged, OnlyOf};
pub use places::StreamPlaces;

/// A message about one node's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Frame {
    Event(Event),
    /// All requested events up to here were sent. Comes at the beginning, after the stored events,
    /// and periodically.
    Reached {
        seq: u64,
        /// Whether all stored events were sent.
        live: bool,
        /// Whether events between the requested position and the first one were already dropped.
        truncated: bool,
    },
}

/// The events that are requested of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct From {
    /// Those with a greater position; `None`: only future ones.
    pub(crate) after: Option<u64>,
    /// Those not earlier than this, in milliseconds since 1970.
    pub(crate) since_ms: u64,
}

/// The events that a client wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EventFilter {
    pub(crate) session: Option<SessionId>,
    /// Empty: all but the phases of starts.
    pub(crate) kinds: Vec<EventKind>,
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
        event.kind == EventKind::EventsLost || (is_session() && is_kind())
    }
}
