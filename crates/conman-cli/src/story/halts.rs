//! When a generation did not run: frozen with its node, or paused. And which events are missing.

use conman_proto::{Event, EventKind};

use super::chapter::Chapter;
use super::{times, without_stop};
use crate::human::{clock, printable};

impl Chapter<'_> {
    pub(super) fn halts(&self) -> Vec<String> {
        let freezes = self.intervals(EventKind::NodeFrozen, EventKind::NodeThawed);
        let pauses = self.intervals(EventKind::SessionPaused, EventKind::SessionResumed);
        let lost = self.all(EventKind::EventsLost);
        let lost = lost.map(|event| {
            let message = printable(&event.message);
            format!(
                "At {}, the journal reports: {}.",
                clock(event.at),
                without_stop(&message)
            )
        });
        let freezes = halted("frozen with its node", "thawed", &freezes);
        let pauses = halted("paused", "resumed", &pauses);
        freezes.into_iter().chain(pauses).chain(lost).collect()
    }

    /// Each event of the first kind, with the next one of the second.
    fn intervals(&self, begins: EventKind, ends: EventKind) -> Vec<(&Event, Option<&Event>)> {
        let mut intervals = Vec::new();
        for event in &self.events {
            if event.kind == begins {
                intervals.push((*event, None));
            } else if event.kind == ends
                && let Some((_, end)) = intervals.last_mut()
            {
                *end = Some(*event);
            }
        }
        intervals
    }
}

/// The last interval in full; the others are only counted.
fn halted(how: &str, back: &str, intervals: &[(&Event, Option<&Event>)]) -> Option<String> {
    let (begin, end) = intervals.last()?;
    let often = match intervals.len() {
        1 => String::new(),
        count => format!("{}, the last time ", times(count)),
    };
    let until = end.map_or_else(
        || "and not continued since".to_owned(),
        |end| format!("and {back} at {}", clock(end.at)),
    );
    Some(format!(
        "It was {how} {often}at {} ({}) {until}.",
        clock(begin.at),
        without_stop(&printable(&begin.message))
    ))
}
