//! What happened to a session, as lines of text: its state and why, how long its start took, its events,
//! its earlier generations, and what to do next.
//!
//! No I/O: the input is the API's data and the time, the output is text.

mod advice;
mod events;
mod fleet;
mod latest;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;

use conman_proto::{NodeState, Session, Timeline};
use jiff::Timestamp;
use serde::Serialize;

use crate::human::printable;
use latest::Latest;

/// The story of one session, safe to print.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Story {
    /// The session's state, and why it is in it.
    headline: String,
    /// The start, the place in the fleet, and what is not known.
    facts: Vec<String>,
    /// The events of the latest generation, oldest first.
    events: Vec<String>,
    /// The generations before it, newest first.
    earlier: Vec<String>,
    /// What to do next.
    next: Vec<String>,
}

impl Story {
    /// Builds the story. `session` is `None` if the node forgot the session and only its journal
    /// has it; `node` is the state of a node outside a fleet.
    pub(crate) fn new(
        session: Option<&Session>,
        timeline: &Timeline,
        node: Option<NodeState>,
        now: Timestamp,
    ) -> Self {
        let of_events = timeline.events.iter().filter_map(|event| event.generation);
        let generation = session
            .map(|session| session.generation)
            .or(of_events.max());
        let events = generation.map(|latest| events::of_generation(timeline, latest));
        let latest = Latest {
            session,
            timeline,
            node,
            generation,
            events: events.unwrap_or_default(),
            now,
        };
        Self {
            headline: printable(&latest.headline()).into_owned(),
            facts: safe(&latest.facts()),
            events: safe(&events::lines(&timeline.id, &latest.events)),
            earlier: safe(&events::earlier(timeline, generation)),
            next: safe(&latest.next()),
        }
    }
}

impl fmt::Display for Story {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.headline)?;
        for fact in &self.facts {
            write!(formatter, "\n{fact}")?;
        }
        let lists = [
            ("Events", &self.events),
            ("Earlier", &self.earlier),
            ("Next", &self.next),
        ];
        for (title, lines) in lists.into_iter().filter(|(_, lines)| !lines.is_empty()) {
            write!(formatter, "\n\n{title}:")?;
            for line in lines {
                write!(formatter, "\n  {line}")?;
            }
        }
        Ok(())
    }
}

/// Messages and names come from programs, images and other nodes.
fn safe(lines: &[String]) -> Vec<String> {
    let lines = lines.iter();
    lines.map(|line| printable(line).into_owned()).collect()
}
