//! Events as they become durable.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use conman_proto::{Event, EventKind};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use jiff::Timestamp;
use tokio::sync::watch;

use super::Shared;
use super::tables::Extent;

/// Events read at a time; a follower holds at most so many in memory.
const PAGE: usize = 256;

/// Delay after a failed read, unless an event becomes durable sooner.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// State of a follower. It only reads pages after its position and waits when there are none, so
/// there is no gap between stored and new events.
struct Follower {
    shared: Arc<Shared>,
    durable: watch::Receiver<u64>,
    position: u64,
    read: VecDeque<Event>,
    /// Whether a gap before the next event is reported: not to a reader that starts from the
    /// beginning.
    holes_matter: bool,
}

pub(super) fn follow(
    shared: Arc<Shared>,
    durable: watch::Receiver<u64>,
    after: u64,
) -> BoxStream<'static, Event> {
    let follower = Follower {
        shared,
        durable,
        position: after,
        read: VecDeque::new(),
        holes_matter: after > 0,
    };
    stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await?;
        Some((event, follower))
    })
    .boxed()
}

impl Follower {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.read.pop_front() {
                self.position = event.seq;
                self.holes_matter = true;
                return Some(event);
            }
            // Marked as seen before the read, so that what becomes durable during the read is not
            // missed.
            self.durable.borrow_and_update();
            match self.shared.read(self.position, PAGE).await {
                Ok((events, extent)) => {
                    let is_unknown = self.position > extent.last_seq;
                    let hole = is_unknown || self.position < extent.dropped_through;
                    if hole && self.holes_matter {
                        self.read.push_back(self.hole(extent, is_unknown));
                    }
                    // Otherwise the next read begins behind the hole.
                    if !is_unknown {
                        self.read.extend(events);
                    }
                    if self.read.is_empty() {
                        self.durable.changed().await.ok()?;
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "cannot read the journal for a follower"
                    );
                    // Cancelling either arm loses nothing: the position is unchanged, and the next
                    // iteration reads from it.
                    tokio::select! {
                        changed = self.durable.changed() => changed.ok()?,
                        () = tokio::time::sleep(PAUSE_AFTER_FAILURE) => {}
                    }
                }
            }
        }
    }

    fn hole(&self, extent: Extent, is_unknown: bool) -> Event {
        let (position, through) = (self.position, extent.dropped_through);
        Event {
            seq: through,
            at: Timestamp::now(),
            kind: EventKind::EventsLost,
            node: self.shared.node.clone(),
            session: None,
            generation: None,
            phase: None,
            cause: None,
            duration_ms: None,
            message: match is_unknown {
                true => format!(
                    "the journal with event {position} was lost; this one begins after {through}"
                ),
                false => format!(
                    "events after {position} and up to {through} were already dropped from the \
                     journal"
                ),
            },
        }
    }
}
