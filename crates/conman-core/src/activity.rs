//! Counts what people do in a session, to detect idleness.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// What people do in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ActivityKind {
    /// A tunnel or request to one of its ports.
    Connection = 1,
    /// A forwarded port.
    Forward,
    /// A command, kept or not.
    Command,
    /// A client that is attached to a terminal or to a kept command.
    Attachment,
    /// Files that are read or written.
    Files,
}

impl ActivityKind {
    const ALL: [Self; 5] = [
        Self::Connection,
        Self::Forward,
        Self::Command,
        Self::Attachment,
        Self::Files,
    ];

    /// For messages, with its article.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connection => "a connection",
            Self::Forward => "a forwarded port",
            Self::Command => "a command",
            Self::Attachment => "a client of a terminal",
            Self::Files => "a transfer of files",
        }
    }
}

/// Counts what is open or in flight in a session, without a clock: to detect idleness, compare two readings.
#[derive(Debug, Default)]
pub struct Activity {
    begun: AtomicU64,
    ended: AtomicU64,
    /// The latest [`ActivityKind`]; 0 for none.
    latest: AtomicU8,
}

impl Activity {
    /// Counts one connection until the guard is dropped.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> ActivityGuard {
        self.begin_as(ActivityKind::Connection)
    }

    /// Counts one activity of this kind until the guard is dropped.
    #[must_use]
    pub fn begin_as(self: &Arc<Self>, kind: ActivityKind) -> ActivityGuard {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.note(kind);
        ActivityGuard {
            activity: Arc::clone(self),
            kind,
        }
    }

    /// Sets the latest kind, without counting anything.
    pub fn note(&self, kind: ActivityKind) {
        self.latest.store(kind as u8, Ordering::Relaxed);
    }

    /// Activities that have begun and not ended.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        // In this order: what begins in between makes the result greater.
        let ended = self.ended.load(Ordering::Acquire);
        self.begun().saturating_sub(ended)
    }

    /// Activities that have ever begun.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Beginnings and ends so far; two equal readings with nothing in flight mean that nothing happened in
    /// between.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.begun()
            .wrapping_add(self.ended.load(Ordering::Acquire))
    }

    /// What began or ended last; `None` if nothing did.
    #[must_use]
    pub fn latest(&self) -> Option<ActivityKind> {
        let latest = self.latest.load(Ordering::Relaxed);
        ActivityKind::ALL
            .into_iter()
            .find(|kind| *kind as u8 == latest)
    }
}

/// One activity; dropping it ends it.
#[derive(Debug)]
pub struct ActivityGuard {
    activity: Arc<Activity>,
    kind: ActivityKind,
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.activity.note(self.kind);
        self.activity.ended.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_activity_is_a_change_and_the_latest_one_is_known() {
        let activity = Arc::new(Activity::default());
        assert_eq!((activity.latest(), activity.changes()), (None, 0));
        let command = activity.begin_as(ActivityKind::Command);
        let connection = activity.begin();
        assert_eq!(activity.latest(), Some(ActivityKind::Connection));
        assert_eq!((activity.in_flight(), activity.changes()), (2, 2));
        drop(connection);
        drop(command);
        assert_eq!(activity.latest(), Some(ActivityKind::Command));
        let counts = (activity.in_flight(), activity.begun(), activity.changes());
        assert_eq!(counts, (0, 2, 4));
    }
}
