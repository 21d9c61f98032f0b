//! What must be killed when the machine is about to stop, whatever else the daemon is doing.
//!
//! ```text
//! Claiming ──> Reserved ──> Sent ──> Running ──> (gone)
//!     └───────────┴───────────┴─────────────────────^
//! ```
//!
//! Session tasks write it, the emergency thread reads it. Both hold its lock only for a few map
//! operations and never across an await, a system call or a message, so neither can keep the other
//! waiting.
//!
//! A start is sent to the runtime only after its entry has [`StartStage::Sent`], and no entry gets that stage
//! once the table is closed. Hence a closed table has every container that exists or may still appear.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::Closing;
use conman_linux::{PidFd, SignalNumber};
use conman_proto::{Generation, SessionId};
use conman_registry::{Ending, Phases};
use conman_runtime::{PausedBy, Runtime};
use jiff::Timestamp;
use tokio::sync::{Notify, watch};

use crate::session::{Leaving, StopOrder};

/// How far the start of a container has come.
#[derive(Debug, Clone)]
pub(crate) enum StartStage {
    /// The registry has been asked for a generation.
    Claiming,
    /// Recorded; the runtime has not been asked to start anything.
    Reserved(Generation),
    /// The runtime was asked to start it: it may run now or later.
    Sent(Generation),
    /// It runs, or ran.
    Running(Generation, Arc<PidFd>),
}

impl StartStage {
    pub(crate) fn generation(&self) -> Option<Generation> {
        match self {
            Self::Claiming => None,
            Self::Reserved(generation) | Self::Sent(generation) | Self::Running(generation, _) => {
                Some(*generation)
            }
        }
    }
}

/// What the emergency thread did with a session.
#[derive(Debug, Clone)]
pub(crate) enum Fate {
    /// Dead and released with this ending.
    Released(Ending),
    /// Not certified or not released within the budget; the report says why.
    Unreleased,
}

/// One session, with all that is needed to kill it.
#[derive(Debug, Clone)]
pub(crate) struct KillEntry {
    pub(crate) stage: StartStage,
    /// `None` for a runtime that is no longer configured.
    pub(crate) runtime: Option<Arc<dyn Runtime>>,
    /// SignalNumber sent first on preemption, and the time between it and SIGKILL.
    pub(crate) warning: Option<(SignalNumber, Duration)>,
    /// Whether it is paused: then it is killed without a signal, which it could not act on.
    pub(crate) pausing: watch::Receiver<Option<PausedBy>>,
    /// Whether it has files that another node may use after its release.
    pub(crate) shares_files: bool,
    pub(crate) closing: Arc<watch::Sender<Option<Closing>>>,
    pub(crate) fate: Arc<watch::Sender<Option<Fate>>>,
    pub(crate) stop: Arc<watch::Sender<Option<StopOrder>>>,
    pub(crate) leaving: Arc<Leaving>,
    /// For the ending.
    pub(crate) started_at: Option<Timestamp>,
    pub(crate) phases: Phases,
}

/// The table is closed: a preemption is under way or over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Closed {
    pub(crate) reason: String,
}

#[derive(Debug, Default)]
pub(crate) struct KillTable {
    inner: Mutex<Inner>,
    /// Wakes the emergency thread during a preemption when something new must be killed.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    closed: Option<Closed>,
    entries: HashMap<SessionId, KillEntry>,
}

impl KillTable {
    /// A panic while the lock is held leaves at worst one entry too many, which is killed.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a start that is about to be claimed.
    pub(crate) fn admit(&self, id: &SessionId, entry: KillEntry) -> Result<(), Closed> {
        let mut inner = self.lock();
        if let Some(closed) = &inner.closed {
            return Err(closed.clone());
        }
        inner.entries.insert(id.clone(), entry);
        Ok(())
    }

    /// Adds what an earlier daemon left, even if the table is closed: it exists anyway.
    pub(crate) fn adopt(&self, id: &SessionId, entry: KillEntry) {
        self.lock().entries.insert(id.clone(), entry);
        self.changed.notify_waiters();
    }

    /// The claim was answered.
    pub(crate) fn reserve(&self, id: &SessionId, generation: Generation) -> Result<(), Closed> {
        self.advance(id, StartStage::Reserved(generation))
    }

    /// Asks whether the start may be sent to the runtime; after a refusal it never may.
    pub(crate) fn send(&self, id: &SessionId, generation: Generation) -> Result<(), Closed> {
        let mut inner = self.lock();
        if let Some(closed) = &inner.closed {
            return Err(closed.clone());
        }
        if let Some(entry) = inner.entries.get_mut(id) {
            entry.stage = StartStage::Sent(generation);
        }
        Ok(())
    }

    /// Records the container's init. Refused once the table is closed: the emergency thread knows the init
    /// from then on, and kills it.
    pub(crate) fn run(
        &self,
        id: &SessionId,
        generation: Generation,
        process: Arc<PidFd>,
    ) -> Result<(), Closed> {
        self.advance(id, StartStage::Running(generation, process))
    }

    fn advance(&self, id: &SessionId, stage: StartStage) -> Result<(), Closed> {
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.get_mut(id) {
            entry.stage = stage;
        }
        let closed = inner.closed.clone();
        drop(inner);
        match closed {
            None => Ok(()),
            Some(closed) => {
                self.changed.notify_waiters();
                Err(closed)
            }
        }
    }

    /// Records the start's data for the ending.
    pub(crate) fn note_start(&self, id: &SessionId, started_at: Timestamp, phases: Phases) {
        if let Some(entry) = self.lock().entries.get_mut(id) {
            entry.started_at = Some(started_at);
            entry.phases = phases;
        }
    }

    /// The session is released, or was never claimed.
    pub(crate) fn remove(&self, id: &SessionId, generation: Option<Generation>) {
        let mut inner = self.lock();
        if inner
            .entries
            .get(id)
            .is_some_and(|entry| entry.stage.generation() == generation)
        {
            inner.entries.remove(id);
        }
    }

    /// No start is sent from now on.
    pub(crate) fn close(&self, reason: String) {
        self.lock().closed = Some(Closed { reason });
    }

    /// Starts are sent again.
    pub(crate) fn reopen(&self) {
        self.lock().closed = None;
    }

    pub(crate) fn closed(&self) -> Option<Closed> {
        self.lock().closed.clone()
    }

    /// A copy of every entry.
    pub(crate) fn entries(&self) -> Vec<(SessionId, KillEntry)> {
        self.lock()
            .entries
            .iter()
            .map(|(id, entry)| (id.clone(), entry.clone()))
            .collect()
    }

    /// Completes at the next change after its first poll, and possibly without one.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}
