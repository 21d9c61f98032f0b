//! The events of generations: those of the latest one by one, each earlier generation in one line.

use conman_proto::{Event, EventKind, Generation, SessionId, TAKEN_OVER_FROM, Timeline};

use super::latest::in_words;
use crate::human::{clock, milliseconds, since};

/// Most events that are shown; `conman events` has the others.
const MAX_EVENTS: usize = 200;

/// What a generation reports about its end, the most specific first.
const ENDS: [EventKind; 5] = [
    EventKind::SessionFailed,
    EventKind::SessionExited,
    EventKind::SessionReleased,
    EventKind::SessionKilled,
    // The shim may have killed it.
    EventKind::SessionDead,
];

/// One line for each event, with the time since the one before, and the node where it changes.
pub(super) fn lines(id: &SessionId, events: &[&Event]) -> Vec<String> {
    // The phases of the start are told together.
    let is_shown = |event: &&&Event| event.kind != EventKind::SessionPhase;
    let events: Vec<&Event> = events.iter().filter(is_shown).copied().collect();
    let hidden = events.len().saturating_sub(MAX_EVENTS);
    let mut lines = Vec::new();
    if hidden > 0 {
        lines.push(format!(
            "{hidden} earlier ones: `conman events --session {id} --no-follow`"
        ));
    }
    let mut before: Option<&Event> = None;
    for event in events.into_iter().skip(hidden) {
        let after = before.map_or_else(String::new, |before| {
            let passed = since(event.at, before.at).as_secs_f64() * 1e3;
            format!("+{}", milliseconds(passed))
        });
        let on = match before.is_some_and(|before| before.node == event.node) {
            true => String::new(),
            false => format!(" (on {})", event.node),
        };
        let (at, kind) = (clock(event.at), event.kind.as_str());
        lines.push(format!(
            "{at} {after:>12}  {kind:<18} {}{on}",
            event.message
        ));
        before = Some(event);
    }
    lines
}

/// One line for each generation before the latest, the newest first.
pub(super) fn earlier(timeline: &Timeline, latest: Option<Generation>) -> Vec<String> {
    let events = timeline.events.iter();
    let mut all: Vec<Generation> = events
        .filter_map(|event| event.generation)
        .chain(latest)
        .collect();
    all.sort_unstable();
    all.dedup();
    let pairs = all.windows(2).rev();
    pairs
        .map(|pair| summary(timeline, pair[0], pair[1]))
        .collect()
}

/// How a generation began and ended. The clocks of two nodes differ, so only what follows from the
/// ownership counts as an order of what they did.
fn summary(timeline: &Timeline, generation: Generation, next: Generation) -> String {
    let own = of_generation(timeline, generation);
    let Some(first) = own.first() else {
        return format!("generation {generation}");
    };
    let last = |kind| own.iter().rfind(|event| event.kind == kind);
    let end = ENDS.into_iter().find_map(last).map(|end| {
        let cause = end
            .cause
            .and_then(in_words)
            .map_or_else(String::new, |it| format!("{it}: "));
        format!("ended at {}: {cause}{}", clock(end.at), end.message)
    });
    let mut parts = vec![format!("started at {}", clock(first.at))];
    let taken = timeline.events.iter().find(|event| {
        event.generation == Some(next) && taken_from(event) == Some(first.node.as_str())
    });
    match (taken, end) {
        (None, Some(end)) => parts.push(end),
        (None, None) => parts.push("no journal shows its end".to_owned()),
        (Some(taken), end) => {
            let freeze = last(EventKind::NodeFrozen);
            parts.extend(freeze.map(|freeze| format!("frozen at {}", clock(freeze.at))));
            parts.push(format!(
                "taken over by {} at {}",
                taken.node,
                clock(taken.at)
            ));
            parts.extend(end.map(|end| format!("what was left of it {end}")));
        }
    }
    format!(
        "generation {generation} on {}: {}",
        first.node,
        parts.join("; ")
    )
}

/// Nodes that lost the session to another one, and whose events of it are missing.
pub(super) fn missing(timeline: &Timeline) -> Vec<&str> {
    let nodes = timeline.events.iter().filter_map(taken_from);
    let has_events = |node: &&str| timeline.events.iter().any(|event| event.node == *node);
    let mut nodes: Vec<&str> = nodes.filter(|node| !has_events(node)).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

/// The node that lost the session by this takeover.
fn taken_from(event: &Event) -> Option<&str> {
    let is_takeover = event.kind == EventKind::SessionTakenOver;
    let from = event.message.strip_prefix(TAKEN_OVER_FROM)?;
    from.split(',').next().filter(|_| is_takeover)
}

/// The events of a generation, and those of its node until its end.
pub(super) fn of_generation(timeline: &Timeline, generation: Generation) -> Vec<&Event> {
    let own = |event: &&Event| event.generation == Some(generation);
    let events = &timeline.events;
    let Some(first) = events.iter().find(own) else {
        return Vec::new();
    };
    let on_node = events.iter().filter(|event| event.node == first.node);
    let is_end = |event: &&Event| match event.kind {
        EventKind::SessionDead | EventKind::SessionReleased => own(event),
        _ => event.generation > Some(generation),
    };
    let end = on_node.filter(is_end).map(|event| event.seq).min();
    let is_meanwhile = |event: &&Event| {
        let seq = event.seq;
        event.generation.is_none()
            && event.node == first.node
            && seq > first.seq
            && end.is_none_or(|end| seq < end)
    };
    let all = events.iter();
    all.filter(|event| own(event) || is_meanwhile(event))
        .collect()
}
