use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_proto::{Generation, SessionId};
use hyper::client::conn::http1::SendRequest;
use tokio::time::Instant;

use crate::Route;
use crate::body::RequestBody;

/// Idle connections that one worker keeps to all sessions together; each is a descriptor here and
/// one in the session.
const MAX_IDLE: usize = 1_024;

/// The idle connections of one worker to sessions.
///
/// Only connections of a session's greatest generation seen so far are kept, so an older
/// generation's can never carry a request of a newer one, nor the other way round.
#[derive(Debug)]
pub(crate) struct Pool {
    shelves: Mutex<Shelves>,
    per_session: usize,
    idle_timeout: Duration,
}

#[derive(Debug, Default)]
struct Shelves {
    by_session: HashMap<SessionId, Shelf>,
    idle: usize,
}

#[derive(Debug)]
struct Shelf {
    generation: Generation,
    /// The one used last is at the end.
    connections: Vec<Idle>,
}

#[derive(Debug)]
struct Idle {
    sender: SendRequest<RequestBody>,
    since: Instant,
}

impl Pool {
    pub(crate) fn new(per_session: usize, idle_timeout: Duration) -> Self {
        Self {
            shelves: Mutex::default(),
            per_session,
            idle_timeout,
        }
    }

    /// A connection to this very generation that can take a request now.
    pub(crate) fn take(
        &self,
        session: &SessionId,
        generation: Generation,
    ) -> Option<SendRequest<RequestBody>> {
        let mut shelves = self.lock();
        shelves.outdate(session, generation);
        let shelves = &mut *shelves;
        let shelf = shelves.by_session.get_mut(session)?;
        if shelf.generation != generation {
            return None;
        }
        let before = shelf.connections.len();
        shelf.connections.retain(|idle| !idle.sender.is_closed());
        let at = shelf
            .connections
            .iter()
            .rposition(|idle| idle.sender.is_ready());
        let found = at.map(|at| shelf.connections.remove(at).sender);
        shelves.idle -= before - shelf.connections.len();
        if shelf.connections.is_empty() {
            shelves.by_session.remove(session);
        }
        found
    }

    fn put(&self, session: SessionId, generation: Generation, sender: SendRequest<RequestBody>) {
        if sender.is_closed() || self.per_session == 0 {
            return;
        }
        let mut shelves = self.lock();
        shelves.outdate(&session, generation);
        if shelves.idle >= MAX_IDLE {
            return;
        }
        let shelf = shelves.by_session.entry(session).or_insert_with(|| Shelf {
            generation,
            connections: Vec::new(),
        });
        if shelf.generation != generation || shelf.connections.len() >= self.per_session {
            return;
        }
        shelf.connections.push(Idle {
            sender,
            since: Instant::now(),
        });
        shelves.idle += 1;
    }

    /// Closes what has been idle for too long, and forgets what was closed by its session.
    pub(crate) fn sweep(&self) {
        let mut shelves = self.lock();
        let now = Instant::now();
        shelves.by_session.retain(|_, shelf| {
            shelf.connections.retain(|idle| {
                !idle.sender.is_closed() && now.duration_since(idle.since) < self.idle_timeout
            });
            !shelf.connections.is_empty()
        });
        shelves.idle = shelves
            .by_session
            .values()
            .map(|shelf| shelf.connections.len())
            .sum();
    }

    /// The maps are sound after every single step, so a panic elsewhere does not spoil them.
    fn lock(&self) -> MutexGuard<'_, Shelves> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelves {
    /// Closes what there is of generations before this one.
    fn outdate(&mut self, session: &SessionId, generation: Generation) {
        if self
            .by_session
            .get(session)
            .is_some_and(|shelf| shelf.generation < generation)
            && let Some(shelf) = self.by_session.remove(session)
        {
            self.idle -= shelf.connections.len();
        }
    }
}

/// A connection to a session in use by one request.
pub(crate) struct Lease {
    pool: Arc<Pool>,
    session: SessionId,
    generation: Generation,
    sender: SendRequest<RequestBody>,
    reusable: bool,
}

impl Lease {
    pub(crate) fn new(
        pool: Arc<Pool>,
        route: &Route,
        sender: SendRequest<RequestBody>,
        reusable: bool,
    ) -> Self {
        let session = route.session.clone();
        Self {
            pool,
            session,
            generation: route.generation,
            sender,
            reusable,
        }
    }

    /// The answer has ended. The connection goes to the pool, or is closed.
    pub(crate) fn give_back(self) {
        if self.reusable {
            self.pool.put(self.session, self.generation, self.sender);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Lease")
            .field("session", &self.session)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}
