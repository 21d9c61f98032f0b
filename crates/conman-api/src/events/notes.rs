//! Events of a stream itself, which are in no journal.

use conman_proto::{Event, EventKind};
use jiff::Timestamp;

/// Whether events of this kind are in a journal, so that they have a position in it.
pub(super) fn is_recorded(kind: EventKind) -> bool {
    !matches!(kind, EventKind::NodeUnreachable | EventKind::NodeReached)
}

pub(super) fn unreachable(node: &str, seq: Option<u64>, why: &str) -> Event {
    let message = format!(
        "the events of node {node} are missing from here on, and follow when it can be reached \
         again: {why}"
    );
    note(EventKind::NodeUnreachable, node, seq, message)
}

pub(super) fn back(node: &str, seq: Option<u64>) -> Event {
    let message = format!("node {node} can be reached again; its events of the meantime follow");
    note(EventKind::NodeReached, node, seq, message)
}

fn note(kind: EventKind, node: &str, seq: Option<u64>, message: String) -> Event {
    Event {
        seq: seq.unwrap_or(0),
        at: Timestamp::now(),
        kind,
        node: node.to_owned(),
        session: None,
        generation: None,
        phase: None,
        cause: None,
        duration_ms: None,
        message,
    }
}
