//! A session's timeline as sentences: what happened, how long it took, what took longest, why it
//! ended, and what to do next.
//!
//! No I/O: the input is the API's data and the time, the output is text.

mod advice;
mod chapter;
mod fleet;
mod halts;
mod history;
mod narration;
#[cfg(test)]
pub(crate) mod tests;

use conman_proto::{Session, Timeline};
use jiff::Timestamp;
use serde::Serialize;

use crate::human::{count, printable};
use chapter::Chapter;

/// The story of one session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Story {
    /// The session's state, in one sentence.
    pub(crate) headline: String,
    /// What happened: the latest generation from its start to its end, and then the earlier ones.
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
        let events = generation.map(|latest| history::of_generation(timeline, latest));
        let chapter = Chapter {
            id,
            session,
            timeline,
            generation,
            events: events.unwrap_or_default(),
            now,
        };
        let ending = chapter.ending();
        let mut sentences = chapter.start();
        sentences.extend(chapter.life());
        sentences.extend(chapter.end(&ending));
        sentences.extend(fleet::present(timeline));
        sentences.extend(history::earlier(timeline, generation));
        let missing = history::missing(timeline).into_iter();
        sentences.extend(missing.map(|node| {
            let node = printable(node);
            format!("What happened to it on {node} is missing: its journal cannot be read.")
        }));
        if timeline.truncated {
            sentences.push("Its oldest events are no longer in the journal.".to_owned());
        }
        Self {
            headline: fleet::headline(timeline, session)
                .unwrap_or_else(|| chapter.headline(&ending)),
            sentences,
            next: fleet::next(&chapter).unwrap_or_else(|| chapter.next(&ending)),
        }
    }
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
