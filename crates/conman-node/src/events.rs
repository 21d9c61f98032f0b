//! Events for the journal.

use conman_proto::{EventKind, Generation, SessionEnd, SessionId};
use conman_registry::{NewEvent, Phase};
use jiff::{SignedDuration, Timestamp};

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
        ..NewEvent::of_node(kind, message)
    }
}

/// The end of a session.
pub(crate) fn end_event(
    kind: EventKind,
    id: &SessionId,
    generation: Generation,
    end: &SessionEnd,
    reason: &str,
) -> NewEvent {
    NewEvent {
        phase: end.phase.clone(),
        cause: Some(end.cause),
        ..session_event(kind, id, generation, reason.to_owned())
    }
}

/// One phase of a start that ended.
pub(crate) fn phase_event(id: &SessionId, generation: Generation, phase: &Phase) -> NewEvent {
    let lasted = SignedDuration::try_from_secs_f64(phase.duration_ms / 1_000.0);
    let ended_at = lasted.and_then(|lasted| phase.started_at.checked_add(lasted));
    NewEvent {
        // Phases may be reported later than they end, several at a time; readers compute the
        // beginning from the end.
        at: ended_at.unwrap_or_else(|_| Timestamp::now()),
        phase: Some(phase.name.clone().into_owned()),
        duration_ms: Some(phase.duration_ms),
        ..session_event(
            EventKind::SessionPhase,
            id,
            generation,
            format!("{} took {:.1} ms", phase.name, phase.duration_ms),
        )
    }
}
