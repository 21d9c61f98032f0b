//! The events of all nodes as one stream.
//!
//! ```text
//! journal ─> local ──────────────────────────┐
//! another node's journal ─> its local ─hop─> remote ─> merge ─> the client
//! ```
//!
//! [`local`] tells one journal as frames, to this node's own clients and, a line each, to other
//! nodes; [`remote`] asks another node for its frames for as long as it takes; [`merge`] puts them
//! in order and gives each event a [`cursor`] to go on from. Nothing here runs by itself: a stream
//! moves when its client reads, and what waits meanwhile is one event of each node, and what
//! connections hold.

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

/// A piece of one node's journal on its way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Frame {
    Event(Event),
    /// Everything up to here was told that was asked for. Comes at the beginning, when what was
    /// stored is told, and from time to time.
    Reached {
        seq: u64,
        /// Whether what was stored is told.
        live: bool,
        /// Whether events between the asked position and the first one were already dropped.
        truncated: bool,
    },
}

/// Which events of a node are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct From {
    /// Those with a greater position; `None`: those that happen from now on.
    pub(crate) after: Option<u64>,
    /// Those not earlier than that, in milliseconds since 1970.
    pub(crate) since_ms: u64,
}

/// Whether an event belongs to the session's story, or tells that events are missing.
pub(crate) fn is_for(event: &Event, session: Option<&SessionId>) -> bool {
    session.is_none_or(|session| event.session.as_ref() == Some(session))
        || event.kind == EventKind::EventsLost
}
