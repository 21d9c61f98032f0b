//! Events of a stream itself, which are in no journal.

use conman_proto::{Event, EventKind};
use jiff::Timestamp;

pub(super) fn unreachable(node: &str, seq: u64, why: &str) -> Event {
    let message = format!(
        "the events of node {node} are missing from here on, and follow when it can be reached \
         again: {why}"
    );
    note(EventKind::NodeUnreachable, node, seq, message)
}

pub(super) fn back(node: &str, seq: u64) -> Event {
    let message = format!("node {node} can be reached again; its events of the meantime follow");
    note(EventKind::NodeReached, node, seq, message)
}

pub(super) fn lost(node: &str, seq: u64) -> Event {
    let message =
        format!("events after {seq} were already dropped from the journal, or it was lost");
    note(EventKind::EventsLost, node, seq, message)
}

fn note(kind: EventKind, node: &str, seq: u64, message: String) -> Event {
    Event {
        seq,
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
