//! Converts one journal to frames.

use std::time::Duration;

use conman_proto::{Event, EventKind};
use conman_registry::{Journal, JournalError};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use tokio::time::{Interval, MissedTickBehavior};

use super::{EventFilter, Frame, From};

/// Interval between frames with the position in the journal, also without events. The reader
/// learns from them that the node is alive.
pub(super) const ALIVE_EVERY: Duration = Duration::from_secs(2);

/// Events are ordered by time up to this error: a phase is recorded at the end of a start, and
/// clocks may be set.
const CLOCK_STEPS_MS: u64 = 60_000;

/// Events that are scanned one by one.
const SCANNED: u64 = 256;

struct Local {
    raw: BoxStream<'static, Event>,
    since_ms: u64,
    filter: EventFilter,
    position: u64,
    /// Where the journal ended when it was opened; `None` once it was sent.
    stored_through: Option<u64>,
    truncated: bool,
    begun: bool,
    tick: Interval,
}

/// The frames of a journal; they end with it.
pub(crate) async fn frames(
    journal: &Journal,
    from: From,
    filter: EventFilter,
) -> Result<BoxStream<'static, Frame>, JournalError> {
    let page = journal.page(from.after.unwrap_or(0), 1).await?;
    let after = from.after.unwrap_or(page.last_seq);
    let is_more = after != page.last_seq && !page.events.is_empty();
    let is_unknown = after > page.last_seq;
    let after = match from.since_ms {
        0 => after,
        since_ms => after.max(seek(journal, since_ms, page.last_seq).await?),
    };
    let mut tick = tokio::time::interval(ALIVE_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick.reset();
    let local = Local {
        raw: journal.follow(after),
        since_ms: from.since_ms,
        filter,
        position: if is_unknown { 0 } else { after },
        stored_through: is_more.then_some(page.last_seq),
        truncated: from.after.is_some() && page.truncated,
        begun: false,
        tick,
    };
    let frames = stream::unfold(local, |mut local| async move {
        let frame = local.next().await?;
        Some((frame, local))
    });
    Ok(frames.boxed())
}

/// A position before everything since `since_ms`, and after nearly everything earlier.
async fn seek(journal: &Journal, since_ms: u64, last_seq: u64) -> Result<u64, JournalError> {
    let since_ms = since_ms.saturating_sub(CLOCK_STEPS_MS);
    let (mut earlier, mut end) = (0, last_seq);
    while end.saturating_sub(earlier) > SCANNED {
        let middle = earlier + (end - earlier) / 2;
        let page = journal.page(middle, 1).await?;
        match page.events.first() {
            Some(event) if at_ms(event) < since_ms => earlier = event.seq,
            Some(_) | None => end = middle,
        }
    }
    Ok(earlier)
}

fn at_ms(event: &Event) -> u64 {
    u64::try_from(event.at.as_millisecond()).unwrap_or(0)
}

impl Local {
    async fn next(&mut self) -> Option<Frame> {
        if !std::mem::replace(&mut self.begun, true) {
            return Some(self.reached());
        }
        loop {
            if self.stored_through.is_some_and(|end| self.position >= end) {
                self.stored_through = None;
                return Some(self.reached());
            }
            // Cancel safe: the follower keeps what it has read, and a tick that was due comes at
            // once.
            tokio::select! {
                event = self.raw.next() => {
                    let event = event?;
                    self.position = event.seq;
                    if self.is_wanted(&event) {
                        return Some(Frame::Event(event));
                    }
                }
                _ = self.tick.tick() => return Some(self.reached()),
            }
        }
    }

    fn is_wanted(&self, event: &Event) -> bool {
        let is_news = at_ms(event) >= self.since_ms || event.kind == EventKind::EventsLost;
        is_news && self.filter.wants(event)
    }

    fn reached(&self) -> Frame {
        Frame::Reached {
            seq: self.position,
            live: self.stored_through.is_none(),
            truncated: self.truncated,
        }
    }
}
