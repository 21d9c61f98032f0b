//! Requests on their way to the writer thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_proto::{Generation, ResolvedSpec, SessionId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::rules::Change;
use crate::{RecordState, RegistryError, Release, SessionRecord};

/// How long a note without a waiting caller is delayed so that it shares the commit of another
/// request: at a hundred starts a second the next claim comes sooner than this.
const LINGER: Duration = Duration::from_millis(20);

/// Maximum number of waiting claims and notes; further callers wait for room. All waiting requests
/// share one commit, so a longer queue gains no throughput, and a spec may have 128 KiB.
const MAX_WAITING: usize = 256;

/// Maximum number of waiting releases. They have separate room, so that a flood of starts never
/// delays a release: it is in the next commit, or in the one after.
const MAX_WAITING_RELEASES: usize = 256;

/// A request to the writer, with the channel for its answer.
#[derive(Debug)]
pub(super) enum Request {
    Claim {
        id: SessionId,
        spec: Box<ResolvedSpec>,
        read: Option<Box<SessionRecord>>,
        reply: oneshot::Sender<Result<Arc<SessionRecord>, RegistryError>>,
    },
    Change {
        id: SessionId,
        generation: Generation,
        change: Box<Change>,
        reply: oneshot::Sender<Result<(), RegistryError>>,
    },
    Release {
        batch: Vec<Release>,
        reply: oneshot::Sender<Vec<Result<(), RegistryError>>>,
    },
}

impl Request {
    /// Whether a caller, or safety, depends on its commit. A session that answers is shown as
    /// running at once; a daemon that dies before the note is durable finds the container recorded,
    /// and checks whether its program answers.
    fn hurries(&self) -> bool {
        match self {
            Self::Claim { .. } | Self::Release { .. } => true,
            Self::Change { change, .. } => {
                !matches!(**change, Change::SetState(RecordState::Running { .. }))
            }
        }
    }
}

/// A claim that succeeded after its caller was gone.
pub(super) type Abandoned = (SessionId, Generation);

/// What the writer takes at once.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) queued: Vec<Queued>,
    pub(super) abandoned: Vec<Abandoned>,
}

/// A request and its place in the queue; dropping this frees the place.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) request: Request,
    pub(super) place: OwnedSemaphorePermit,
}

/// Many senders on any runtime, one receiving thread.
///
/// A plain mutex and condition variable, because the receiver takes everything at once and is not
/// an async task. The mutex is held only to push or to swap a vector.
#[derive(Debug)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    filled: Condvar,
    places: Arc<Semaphore>,
    release_places: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: Vec<Queued>,
    /// Something in `waiting` hurries.
    hurried: bool,
    /// Bounded by the number of claims that had a place in the queue while the writer was busy.
    abandoned: Vec<Abandoned>,
    closed: Option<String>,
}

impl Inner {
    /// Whether the waiting requests may be delayed; false when more callers may be waiting for a
    /// place.
    fn is_unhurried(&self) -> bool {
        !self.hurried
            && self.abandoned.is_empty()
            && self.closed.is_none()
            && self.waiting.len() < MAX_WAITING / 2
    }
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            inner: Mutex::default(),
            filled: Condvar::new(),
            places: Arc::new(Semaphore::new(MAX_WAITING)),
            release_places: Arc::new(Semaphore::new(MAX_WAITING_RELEASES)),
        }
    }

    /// Queues a request after waiting for a place. Cancelling the wait withdraws the request.
    pub(super) async fn push(&self, request: Request) -> Result<(), RegistryError> {
        let places = match request {
            Request::Release { .. } => &self.release_places,
            Request::Claim { .. } | Request::Change { .. } => &self.places,
        };
        let Ok(place) = Arc::clone(places).acquire_owned().await else {
            return Err(self.closed());
        };
        let mut inner = self.lock();
        if inner.closed.is_some() {
            drop(inner);
            return Err(self.closed());
        }
        inner.hurried |= request.hurries();
        let was_empty = inner.waiting.is_empty();
        inner.waiting.push(Queued { request, place });
        let wakes = was_empty || !inner.is_unhurried();
        drop(inner);
        if wakes {
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Records that no caller will release this claim. Never waits, so that a destructor may call
    /// it.
    pub(super) fn give_up(&self, abandoned: Abandoned) {
        self.lock().abandoned.push(abandoned);
        self.filled.notify_one();
    }

    /// Takes all waiting requests; blocks while there are none. `None` once closed and empty.
    pub(super) fn take(&self) -> Option<Batch> {
        let mut inner = self.lock();
        while inner.waiting.is_empty() && inner.abandoned.is_empty() {
            if inner.closed.is_some() {
                return None;
            }
            inner = self
                .filled
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if inner.is_unhurried() {
            let lingered = self
                .filled
                .wait_timeout_while(inner, LINGER, |inner| inner.is_unhurried());
            inner = lingered.unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.hurried = false;
        let Inner {
            waiting, abandoned, ..
        } = &mut *inner;
        Some(Batch {
            queued: std::mem::take(waiting),
            abandoned: std::mem::take(abandoned),
        })
    }

    /// Refuses new requests. Waiting requests are still served.
    pub(super) fn close(&self, reason: &str) {
        self.lock().closed.get_or_insert_with(|| reason.to_owned());
        self.places.close();
        self.release_places.close();
        self.filled.notify_all();
    }

    /// Closes, and drops the waiting requests: their callers get an error.
    pub(super) fn abandon(&self, reason: &str) {
        self.close(reason);
        let waiting = std::mem::take(&mut self.lock().waiting);
        drop(waiting);
    }

    /// The error for a request that gets no answer.
    pub(super) fn closed(&self) -> RegistryError {
        let reason = self.lock().closed.clone();
        RegistryError::Closed {
            reason: reason.unwrap_or_else(|| "it gave no answer".to_owned()),
        }
    }

    /// No panic can happen while the lock is held, so a poisoned one is consistent.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
