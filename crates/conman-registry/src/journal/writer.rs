//! The thread that writes the journal.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use conman_proto::{Event, EventKind};
use tokio::sync::{oneshot, watch};

use super::queue::Taken;
use super::tables::{self, Extent};
use super::{JournalError, NewEvent, Shared, Writing, opening};
use crate::high_water::HighWater;

/// Positions reserved by one write of the positions file.
const BLOCK: u64 = 1000;

/// Pause after the first failed write; doubled up to `GREATEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const GREATEST_PAUSE: Duration = Duration::from_secs(5);

/// Maximum length of an event's message, in bytes.
const MAX_MESSAGE_BYTES: usize = 4096;
/// Maximum length of a phase name, in bytes.
const MAX_PHASE_BYTES: usize = 64;

/// Takes the waiting events, assigns positions, writes them in one durable transaction, and only
/// then shows them. A failed write is retried until it succeeds or the journal is closed.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    pub(super) path: PathBuf,
    pub(super) node: String,
    pub(super) max_events: u64,
    /// Positions up to its mark may have been shown.
    pub(super) positions: HighWater,
    pub(super) last_seq: u64,
    /// Why events may be missing before the first one, if so.
    pub(super) lost_before: Option<&'static str>,
    /// Greatest durable position; dropped with the writer, which ends all followers.
    pub(super) durable: watch::Sender<u64>,
}

impl Writer {
    /// Runs until the queue is closed and empty.
    pub(super) fn run(mut self) {
        let mut is_whole = true;
        while let Some(Taken {
            events,
            lost,
            mut flushes,
        }) = self.shared.queue.take()
        {
            let before = self.lost_before.take().map(|why| {
                NewEvent::of_node(
                    EventKind::EventsLost,
                    format!("events may be missing before this one: {why}"),
                )
            });
            let after = (lost > 0).then(|| {
                NewEvent::of_node(
                    EventKind::EventsLost,
                    format!(
                        "{lost} events were lost here: they came faster than the disk took them"
                    ),
                )
            });
            let all = before.into_iter().chain(events).chain(after);
            let batch: Vec<_> = all.map(|new| self.number(new)).collect();
            if !batch.is_empty() {
                is_whole &= self.write(batch, &mut flushes);
            }
            for flush in flushes {
                // The receiver may be gone.
                let _ = flush.send(());
            }
        }
        if is_whole
            && self.lost_before.is_none()
            && let Some(database) = self.shared.database()
            && let Err(error) = tables::close(&database, self.positions.through())
        {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "cannot mark the journal as closed");
        }
        self.shared.set_database(None);
    }

    fn number(&mut self, new: NewEvent) -> Arc<Event> {
        self.last_seq += 1;
        Arc::new(Event {
            seq: self.last_seq,
            at: new.at,
            kind: new.kind,
            node: self.node.clone(),
            session: new.session,
            generation: new.generation,
            phase: new.phase.map(|phase| cut(phase, MAX_PHASE_BYTES)),
            cause: new.cause,
            duration_ms: new.duration_ms.filter(|duration| duration.is_finite()),
            message: cut(new.message, MAX_MESSAGE_BYTES),
        })
    }

    /// Returns whether the events are durable; otherwise the journal is being closed.
    fn write(&mut self, batch: Vec<Arc<Event>>, flushes: &mut Vec<oneshot::Sender<()>>) -> bool {
        let mut pause = FIRST_PAUSE;
        let since = Instant::now();
        self.shared
            .note_writing(Some(Writing { since, error: None }));
        loop {
            match self.attempt(&batch) {
                Ok(extent) => {
                    if pause > FIRST_PAUSE {
                        tracing::info!(path = %self.path.display(), "journal is writable again");
                    }
                    let mut tail = self
                        .shared
                        .tail
                        .write()
                        .unwrap_or_else(PoisonError::into_inner);
                    tail.extend(batch, extent);
                    // Before the tail is unlocked, so that no trouble means that readers find the events.
                    self.shared.note_writing(None);
                    drop(tail);
                    self.durable.send_replace(extent.last_seq);
                    return true;
                }
                Err(failure) => {
                    let error = Some(conman_core::error_chain(&failure));
                    self.shared.note_writing(Some(Writing { since, error }));
                    self.shared.set_database(None);
                    // An attempt was made, which completes a flush.
                    flushes.clear();
                    if pause == FIRST_PAUSE {
                        tracing::warn!(
                            path = %self.path.display(),
                            error = &failure as &dyn std::error::Error,
                            "cannot write the journal; retrying"
                        );
                    }
                    if !self.shared.queue.pause(pause) {
                        return false;
                    }
                    pause = (pause * 2).min(GREATEST_PAUSE);
                }
            }
        }
    }

    fn attempt(&mut self, batch: &[Arc<Event>]) -> Result<Extent, JournalError> {
        let io = |source| JournalError::Io {
            action: "reserve positions of",
            path: self.path.clone(),
            source: Arc::new(source),
        };
        if self.last_seq > self.positions.through() {
            self.positions
                .raise(self.last_seq.saturating_add(BLOCK))
                .map_err(io)?;
        }
        let database = match self.shared.database() {
            Some(database) => database,
            None => {
                let before = batch.first().map_or(self.last_seq, |event| event.seq - 1);
                let (database, extent) = opening::reopen(&self.path, before)?;
                let database = Arc::new(database);
                self.shared.set_database(Some(Arc::clone(&database)));
                // The failed attempt had become durable.
                if extent.last_seq >= self.last_seq {
                    return Ok(extent);
                }
                database
            }
        };
        tables::write(&database, batch, self.max_events).map_err(|error| JournalError::Store {
            action: "write",
            path: self.path.clone(),
            source: Arc::new(error),
        })
    }
}

/// Truncates a text to at most `bytes` bytes at a character boundary.
fn cut(mut text: String, bytes: usize) -> String {
    text.truncate(text.floor_char_boundary(bytes));
    text
}
