//! Events for the journal.

use conman_proto::{EventKind, Generation, SessionId};
use conman_registry::{NewEvent, Phase};
use jiff::Timestamp;

/// Something that happened to the node.
pub(crate) fn node_event(kind: EventKind, message: String) -> NewEvent {
    NewEvent {
        at: Timestamp::now(),
        kind,
        session: None,
        generation: None,
        phase: None,
        duration_ms: None,
        message,
    }
}

/// Something that happened to a session.
pub(crate) fn session_event(
    kind: EventKind,
    id: &SessionId,
    generation: Generation,
    message: String,
) -> NewEvent {
    NewEvent {
        session: Some(id.clone()),
        generation: Some(generation),
        ..node_event(kind, message)
    }
}

/// One phase of a start that ended.
pub(crate) fn phase_event(id: &SessionId, generation: Generation, phase: &Phase) -> NewEvent {
    NewEvent {
        phase: Some(phase.name.clone()),
        duration_ms: Some(phase.duration_ms),
        ..session_event(
            EventKind::SessionPhase,
            id,
            generation,
            format!("{} took {:.1} ms", phase.name, phase.duration_ms),
        )
    }
}
