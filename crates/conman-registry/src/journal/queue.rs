//! New events on their way to the journal's writer thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::NewEvent;

/// Maximum number of events that wait to be written. A start makes about a dozen events, so this is
/// a burst of a thousand starts on a stalled disk; with messages of maximum size it is 64 MiB.
pub(super) const MAX_WAITING: usize = 16_384;

/// How long the writer waits for more events after the first one. It writes to the same disk as the
/// registry, and fewer syncs here make the registry's shorter. A reader of events does not notice.
const LINGER: Duration = Duration::from_millis(25);

/// The writer stops waiting for more at this many events.
const ENOUGH: usize = MAX_WAITING / 2;

/// The queue of events. Bounded; only the writer blocks on it.
#[derive(Debug, Default)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: VecDeque<NewEvent>,
    /// Events that found no room since the last take; all of them come after `waiting`.
    lost: u64,
    flushes: Vec<oneshot::Sender<()>>,
    closed: bool,
}

/// What the writer takes at once.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) events: VecDeque<NewEvent>,
    pub(super) lost: u64,
    pub(super) flushes: Vec<oneshot::Sender<()>>,
}

impl Queue {
    /// Queues events in order, and counts those that find no room.
    pub(super) fn append(&self, events: Vec<NewEvent>) {
        let mut inner = self.lock();
        let was_idle = inner.is_idle();
        for event in events {
            if inner.closed || inner.waiting.len() >= MAX_WAITING {
                inner.lost += 1;
            } else {
                inner.waiting.push_back(event);
            }
        }
        let wakes = was_idle || inner.waiting.len() >= ENOUGH;
        drop(inner);
        // A writer that waits for more need not wake for each of the dozen events of a start.
        if wakes {
            self.changed.notify_one();
        }
    }

    /// Returns a channel that is notified after a write of everything appended before was
    /// attempted. The sender is dropped at once when the queue is closed.
    pub(super) fn flush(&self) -> oneshot::Receiver<()> {
        let (done, wait) = oneshot::channel();
        let mut inner = self.lock();
        if !inner.closed {
            inner.flushes.push(done);
        }
        drop(inner);
        self.changed.notify_one();
        wait
    }

    /// Blocks until there is something to write. `None` once closed and empty.
    pub(super) fn take(&self) -> Option<Taken> {
        let mut inner = self.lock();
        while inner.is_idle() && !inner.closed {
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if inner.flushes.is_empty() && !inner.closed {
            let lingered = self.changed.wait_timeout_while(inner, LINGER, |inner| {
                !inner.closed && inner.flushes.is_empty() && inner.waiting.len() < ENOUGH
            });
            inner = lingered.unwrap_or_else(PoisonError::into_inner).0;
        }
        if inner.is_idle() {
            return None;
        }
        Some(Taken {
            events: std::mem::take(&mut inner.waiting),
            lost: std::mem::take(&mut inner.lost),
            flushes: std::mem::take(&mut inner.flushes),
        })
    }

    /// Waits before the next write attempt, and completes the waiting flushes, because an attempt
    /// was made. `false` when the queue was closed meanwhile.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let inner = self.lock();
        let waited = self.changed.wait_timeout_while(inner, pause, |inner| {
            inner.flushes.clear();
            !inner.closed
        });
        !waited.unwrap_or_else(PoisonError::into_inner).0.closed
    }

    /// Refuses new events. Waiting ones are still written.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// No panic can happen while the lock is held, so a poisoned one is consistent.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.lost == 0 && self.flushes.is_empty()
    }
}
