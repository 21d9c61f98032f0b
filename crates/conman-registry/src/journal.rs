//! This node's events, in a separate file.
//!
//! One OS thread writes ([`writer`]); [`Journal::append`] only pushes into a bounded queue
//! ([`queue`]). Readers see an event once it is durable: from memory while it is among the newest
//! ([`tail`]), otherwise from the file ([`tables`]), on tokio's blocking threads.
//!
//! The journal is not part of ownership. A damaged file is renamed to `journal.redb.damaged`
//! (replacing an earlier one) with a warning, and a new journal begins. Positions still grow:
//! `journal-positions` holds a number that no shown position exceeds, and every open begins above
//! it.

mod error;
mod follow;
mod opening;
mod queue;
mod tables;
mod tail;
#[cfg(test)]
mod tests;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use conman_proto::{
    EndCause, Event, EventKind, EventPage, Generation, SessionId, Timeline, TimelinePhase,
};
use futures_util::stream::BoxStream;
use jiff::{SignedDuration, Timestamp};
use redb::Database;
use tokio::sync::watch;

pub use self::error::JournalError;
use self::queue::Queue;
use self::tables::{Extent, ReadFailure};
use self::tail::Tail;
use self::writer::Writer;

/// Maximum number of events in a page.
pub const MAX_EVENT_PAGE: usize = 1000;

/// A write that takes longer is reported.
const SLOW_WRITE: Duration = Duration::from_secs(5);

/// Maximum number of events in a timeline; of a session that has more, the newest are kept.
const MAX_TIMELINE: usize = 2000;

/// An event that has no position yet.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    pub at: Timestamp,
    pub kind: EventKind,
    pub session: Option<SessionId>,
    pub generation: Option<Generation>,
    /// Name of the phase that ended, with [`EventKind::SessionPhase`]; of the phase in which the start
    /// failed, with [`EventKind::SessionFailed`].
    pub phase: Option<String>,
    /// Why the session ended, with events of an end.
    pub cause: Option<EndCause>,
    pub duration_ms: Option<f64>,
    /// The event in words; truncated to 4 KiB.
    pub message: String,
}

impl NewEvent {
    /// An event of the node, at this moment.
    #[must_use]
    pub fn of_node(kind: EventKind, message: String) -> Self {
        Self {
            at: Timestamp::now(),
            kind,
            session: None,
            generation: None,
            phase: None,
            cause: None,
            duration_ms: None,
            message,
        }
    }
}

/// The events of one node, the newest `max_events` of them.
#[derive(Debug)]
pub struct Journal {
    shared: Arc<Shared>,
    durable: watch::Receiver<u64>,
    writer: Option<JoinHandle<()>>,
}

/// What the writer, the readers and the followers share.
#[derive(Debug)]
struct Shared {
    path: PathBuf,
    node: String,
    queue: Queue,
    tail: RwLock<Tail>,
    /// `None` after a failed write until the file is reopened, and when closed.
    database: RwLock<Option<Arc<Database>>>,
    /// The write under way.
    writing: Mutex<Option<Writing>>,
}

/// A write that has not succeeded yet.
#[derive(Debug)]
struct Writing {
    since: Instant,
    error: Option<String>,
}

impl Journal {
    /// Opens the journal in `dir`, which is created if missing, and starts its writer. Blocks on
    /// the disk. `max_events` of 0 counts as 1.
    ///
    /// # Errors
    /// [`JournalError::InUse`] when another process has it open, [`JournalError::OtherFormat`] when a
    /// another conman wrote it, or a disk error. Damage is not an error: see the module
    /// documentation.
    pub fn open(dir: &Path, node: &str, max_events: u64) -> Result<Self, JournalError> {
        let opened = opening::open(dir)?;
        let (sender, durable) = watch::channel(opened.extent.last_seq);
        let shared = Arc::new(Shared {
            path: opened.path.clone(),
            node: node.to_owned(),
            queue: Queue::default(),
            tail: RwLock::new(Tail::new(opened.extent)),
            database: RwLock::new(Some(Arc::new(opened.database))),
            writing: Mutex::default(),
        });
        let writer = Writer {
            shared: Arc::clone(&shared),
            path: opened.path,
            node: node.to_owned(),
            max_events: max_events.max(1),
            last_seq: opened.positions.through(),
            lost_before: opened.lost,
            positions: opened.positions,
            durable: sender,
        };
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run())
            .map_err(|source| JournalError::Io {
                action: "start the writer of",
                path: dir.to_owned(),
                source: Arc::new(source),
            })?;
        Ok(Self {
            shared,
            durable,
            writer: Some(thread),
        })
    }

    /// Appends events in this order. Never blocks and never fails: events that find no room in the
    /// queue are counted, and the count is written as [`EventKind::EventsLost`] in their place.
    pub fn append(&self, events: Vec<NewEvent>) {
        self.shared.queue.append(events);
    }

    /// Up to `limit` durable events after a position, oldest first. `limit` is clamped to
    /// 1..=[`MAX_EVENT_PAGE`]. A position that this journal never had, because an earlier one was
    /// lost, begins with the oldest event.
    ///
    /// # Errors
    /// Disk errors.
    pub async fn page(&self, after: u64, limit: usize) -> Result<EventPage, JournalError> {
        let limit = limit.clamp(1, MAX_EVENT_PAGE);
        let (mut events, mut extent) = self.shared.read(after, limit).await?;
        let is_unknown = after > extent.last_seq;
        let after = if is_unknown { 0 } else { after };
        if is_unknown {
            (events, extent) = self.shared.read(after, limit).await?;
        }
        let read_through = events.last().map_or(after, |event| event.seq);
        Ok(EventPage {
            cursor: read_through.to_string(),
            complete: events.len() < limit,
            events,
            last_seq: extent.last_seq,
            truncated: is_unknown || after < extent.dropped_through,
        })
    }

    /// The events of one session, as far as the journal reaches back. Empty for an unknown session.
    ///
    /// A session is remembered as truncated for as long as events of it are left, and after that
    /// until as many other sessions have left the journal as it holds events.
    ///
    /// # Errors
    /// Disk errors.
    pub async fn timeline(&self, id: &SessionId) -> Result<Timeline, JournalError> {
        let wanted = id.clone();
        let (events, truncated) = self
            .shared
            .with_database(move |database| tables::read_session(database, &wanted, MAX_TIMELINE))
            .await?;
        Ok(Timeline {
            id: id.clone(),
            phases: latest_phases(&events),
            events,
            truncated,
            fleet: None,
        })
    }

    /// Every event after a position: the stored ones, then new ones as they become durable, without
    /// a gap or a repetition between them. Ends when the journal is dropped.
    ///
    /// A reader that resumes (`after` above 0), or that is so slow that events were dropped before
    /// it read them, gets one [`EventKind::EventsLost`] in their place. So does one whose position this
    /// journal never had; it continues with the oldest event. Must be polled on a tokio runtime.
    pub fn follow(&self, after: u64) -> BoxStream<'static, Event> {
        follow::follow(Arc::clone(&self.shared), self.durable.clone(), after)
    }

    /// Returns why events cannot be stored at present: a write has failed and is retried, or takes
    /// long.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let path = self.shared.path.display();
        let writing = self.shared.writing.lock();
        let writing = writing.unwrap_or_else(PoisonError::into_inner);
        let Writing { since, error } = writing.as_ref()?;
        let lasted = since.elapsed();
        let why = match error {
            Some(error) => error.clone(),
            None if lasted > SLOW_WRITE => "the disk does not answer".to_owned(),
            None => return None,
        };
        Some(format!(
            "events are not stored: the journal {path} has not been writable for {} s: {why}",
            lasted.as_secs()
        ))
    }

    /// Writes what is queued, once, and closes the file. Later events are dropped.
    pub async fn close(&self) {
        self.shared.queue.close();
        let mut durable = self.durable.clone();
        // The writer drops its sender at its end.
        while durable.changed().await.is_ok() {}
    }

    /// Waits until everything appended before is durable, or until a write of it has failed; the
    /// write is then retried automatically.
    pub async fn flush(&self) {
        // An error means that the journal closes, and closing flushes.
        let _ = self.shared.queue.flush().await;
    }
}

/// Writes what is queued, once, and closes the file.
impl Drop for Journal {
    fn drop(&mut self) {
        self.shared.queue.close();
        if self
            .writer
            .take()
            .is_some_and(|writer| writer.join().is_err())
        {
            tracing::error!(path = %self.shared.path.display(), "the journal's writer panicked");
        }
    }
}

impl Shared {
    /// Durable events after a position, and the extent at the moment of the read.
    async fn read(&self, after: u64, limit: usize) -> Result<(Vec<Event>, Extent), JournalError> {
        let recent = self
            .tail
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .after(after, limit);
        match recent {
            Some(read) => Ok(read),
            None => {
                self.with_database(move |database| tables::read_after(database, after, limit))
                    .await
            }
        }
    }

    /// Runs a read on a blocking thread.
    async fn with_database<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Database) -> Result<T, ReadFailure> + Send + 'static,
    ) -> Result<T, JournalError> {
        let Some(database) = self.database() else {
            return Err(JournalError::Unavailable {
                path: self.path.clone(),
            });
        };
        let joined = tokio::task::spawn_blocking(move || read(&database)).await;
        let failed = |source| JournalError::Store {
            action: "read",
            path: self.path.clone(),
            source: Arc::new(source),
        };
        match joined {
            Ok(Ok(read)) => Ok(read),
            Ok(Err(ReadFailure::Store(source))) => Err(failed(source)),
            Ok(Err(ReadFailure::Unreadable { seq, source })) => Err(JournalError::Corrupt {
                seq,
                source: Arc::new(source),
            }),
            Err(panicked) => Err(failed(redb::Error::Corrupted(panicked.to_string()))),
        }
    }

    /// Notes the state of the write under way; `None` once it has succeeded.
    fn note_writing(&self, writing: Option<Writing>) {
        *self.writing.lock().unwrap_or_else(PoisonError::into_inner) = writing;
    }

    fn database(&self) -> Option<Arc<Database>> {
        self.database
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set_database(&self, database: Option<Arc<Database>>) {
        *self
            .database
            .write()
            .unwrap_or_else(PoisonError::into_inner) = database;
    }
}

/// The phases of the latest generation among the events.
fn latest_phases(events: &[Event]) -> Vec<TimelinePhase> {
    let latest = events.iter().filter_map(|event| event.generation).max();
    events
        .iter()
        .filter(|event| event.kind == EventKind::SessionPhase && event.generation == latest)
        .filter_map(|event| {
            let duration_ms = event.duration_ms?;
            let duration = SignedDuration::try_from_secs_f64(duration_ms / 1000.0).ok()?;
            Some(TimelinePhase {
                name: event.phase.clone()?,
                generation: event.generation?,
                started_at: event.at.checked_sub(duration).unwrap_or(event.at),
                duration_ms,
            })
        })
        .collect()
}
