//! A session's timeline as sentences: what happened, how long it took, what took longest, why it
//! ended, and what to do next.
//!
//! No I/O: the input is the API's data and the time, the output is text.

mod advice;
mod chapter;
mod fleet;
mod narration;
#[cfg(test)]
pub(crate) mod tests;

use conman_proto::{Event, EventKind, Generation, Session, Timeline};
use jiff::Timestamp;
use serde::Serialize;

use crate::human::{clock, count, printable};
use chapter::Chapter;

/// Endings of earlier generations that are listed; older ones are only counted.
const EARLIER_TOLD: usize = 3;

/// The story of one session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Story {
    /// The session's state, in one sentence.
    pub(crate) headline: String,
    /// What happened, oldest first.
    pub(crate) sentences: Vec<String>,
    /// What to do next.
    pub(crate) next: Vec<String>,
}

impl Story {
    /// Builds the story. `session` is `None` if the node forgot the session and only its journal
    /// has it.
    pub(crate) fn tell(session: Option<&Session>, timeline: &Timeline, now: Timestamp) -> Self {
        let id = timeline.id.as_str();
        let generation = session.map(|session| session.generation).or_else(|| {
            timeline
                .events
                .iter()
                .filter_map(|event| event.generation)
                .max()
        });
        let events: Vec<&Event> = timeline
            .events
            .iter()
            .filter(|event| event.generation.is_none() || event.generation == generation)
            .collect();
        let chapter = Chapter {
            id,
            session,
            timeline,
            generation,
            events,
            now,
        };
        let ending = chapter.ending();
        let mut sentences = Vec::new();
        if timeline.truncated {
            sentences.push("Its oldest events are no longer in the journal.".to_owned());
        }
        sentences.extend(earlier(timeline, generation));
        sentences.extend(fleet::taken_over(timeline, generation));
        sentences.extend(chapter.start());
        sentences.extend(chapter.life());
        sentences.extend(chapter.end(&ending));
        sentences.extend(fleet::present(timeline));
        Self {
            headline: fleet::headline(timeline, session)
                .unwrap_or_else(|| chapter.headline(&ending)),
            sentences,
            next: fleet::next(timeline, session).unwrap_or_else(|| chapter.next(&ending)),
        }
    }
}

/// What happened to the generations before the latest.
fn earlier(timeline: &Timeline, latest: Option<Generation>) -> Vec<String> {
    let mut generations: Vec<Generation> = timeline
        .events
        .iter()
        .filter_map(|event| event.generation)
        .filter(|generation| Some(*generation) != latest)
        .collect();
    generations.sort_unstable();
    generations.dedup();
    if generations.is_empty() {
        return Vec::new();
    }
    // Generations whose events are all dropped cannot be counted.
    let at_least = if timeline.truncated { "at least " } else { "" };
    let mut sentences = vec![format!(
        "It was started {at_least}{} before this.",
        times(generations.len())
    )];
    let told = generations.len().saturating_sub(EARLIER_TOLD);
    for generation in &generations[told..] {
        let ends = [
            EventKind::SessionFailed,
            EventKind::SessionExited,
            EventKind::SessionReleased,
            EventKind::SessionKilled,
        ];
        let own = || {
            timeline
                .events
                .iter()
                .filter(|event| event.generation == Some(*generation))
        };
        let end = ends
            .into_iter()
            .find_map(|kind| own().rfind(|event| event.kind == kind));
        let node = fleet::node_of(timeline, *generation);
        let on = node.map_or_else(String::new, |node| format!(" on {}", printable(node)));
        match (end, node) {
            (Some(end), _) => sentences.push(format!(
                "Generation {generation}{on} ended at {}: {}.",
                clock(end.at),
                without_stop(&printable(&end.message))
            )),
            (None, Some(_)) => sentences.push(format!(
                "Generation {generation} ran{on}, and no node that can be asked saw it end."
            )),
            (None, None) => {}
        }
    }
    sentences
}

fn times(number: usize) -> String {
    match number {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        _ => count(number as u64, "time"),
    }
}

/// Messages end with or without a full stop; a sentence has one.
fn without_stop(text: &str) -> &str {
    text.trim_end().trim_end_matches('.')
}
