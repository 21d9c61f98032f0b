//! Which generations there were before the latest, and how each ended.

use conman_proto::{Event, EventKind, Generation, TAKEN_OVER_FROM, Timeline};

use super::{times, without_stop};
use crate::human::{clock, printable};

/// What a generation reports about its end, the most specific first.
const ENDS: [EventKind; 4] = [
    EventKind::SessionFailed,
    EventKind::SessionExited,
    EventKind::SessionReleased,
    EventKind::SessionKilled,
];

/// One sentence for each generation before the latest, the newest first.
pub(super) fn earlier(timeline: &Timeline, latest: Option<Generation>) -> Vec<String> {
    let mut all: Vec<Generation> = timeline
        .events
        .iter()
        .filter_map(|event| event.generation)
        .chain(latest)
        .collect();
    all.sort_unstable();
    all.dedup();
    let before: Vec<String> = all
        .windows(2)
        .rev()
        .map(|pair| ended(timeline, pair[0], pair[1]))
        .collect();
    if before.is_empty() {
        return before;
    }
    // Generations whose events are all dropped, or whose node does not answer, cannot be counted.
    let has_unreachable = timeline.fleet.as_ref();
    let has_unreachable = has_unreachable.is_some_and(|fleet| !fleet.unasked.is_empty());
    let is_partial = timeline.truncated || has_unreachable || !missing(timeline).is_empty();
    let at_least = if is_partial { "at least " } else { "" };
    let count = format!(
        "It was started {at_least}{} before this.",
        times(before.len())
    );
    [count].into_iter().chain(before).collect()
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

/// How a generation ended. The clocks of two nodes differ, so only what follows from the ownership
/// counts as an order of what they did.
fn ended(timeline: &Timeline, generation: Generation, next: Generation) -> String {
    let own = of_generation(timeline, generation);
    let last = |kind| own.iter().rfind(|event| event.kind == kind);
    let on = match (&timeline.fleet, own.first()) {
        (Some(_), Some(first)) => format!(" on {}", printable(&first.node)),
        _ => String::new(),
    };
    let end = ENDS.into_iter().find_map(last);
    let mut after = timeline.events.iter();
    let from = own.first().map(|first| first.node.as_str());
    let taken = after.find(|event| {
        event.generation == Some(next) && from.is_some() && taken_from(event) == from
    });
    let Some(taken) = taken else {
        return match end {
            Some(end) => format!(
                "Generation {generation}{on} ended at {}: {}.",
                clock(end.at),
                without_stop(&printable(&end.message))
            ),
            None => format!("Generation {generation} ran{on}, and no journal shows its end."),
        };
    };
    let (taker, at) = (printable(&taken.node), clock(taken.at));
    let mut text = match last(EventKind::NodeFrozen) {
        Some(freeze) => format!(
            "Generation {generation}{on} was frozen at {} and not continued; {taker} took the \
             session over at {at}.",
            clock(freeze.at)
        ),
        None => format!(
            "Generation {generation}{on} was never released; {taker} took the session over at {at}, \
             when its node was dead or had frozen it."
        ),
    };
    if let Some(end) = end {
        text = format!(
            "{text} Its node ended what was left of it at {}.",
            clock(end.at)
        );
    }
    text
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
