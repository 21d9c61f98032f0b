//! Idle connections, and how a request gets one.

use std::collections::HashMap;
use std::hash::Hash;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use thiserror::Error;
use tokio::time::Instant;

use crate::Connection;

/// Most idle connections of one pool; each is a descriptor here and one at the other end.
const MAX_IDLE: usize = 1_024;

/// How many idle connections to one destination are kept, and how old they may become.
#[derive(Debug, Clone, Copy)]
pub struct KeepLimits {
    pub most: usize,
    /// Maximum age, however often a connection is used.
    pub max_age: Duration,
}

/// Where a connection leads to. Connections of a smaller version than the greatest that was seen are
/// closed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination<K> {
    pub key: K,
    /// A session's generation, or a node's incarnation; after it, what else separates connections.
    pub version: (u64, u64),
}

/// The idle connections of one thread or client, to destinations `K`.
///
/// A connection is returned once its answer has been read to the end, so it never carries two requests
/// at a time.
pub struct Pool<K, B> {
    idle: Mutex<IdleTable<K, B>>,
    idle_timeout: Duration,
    limits: fn(&K) -> KeepLimits,
}

struct IdleTable<K, B> {
    by_key: HashMap<K, IdleConnections<B>>,
    count: usize,
}

struct IdleConnections<B> {
    version: (u64, u64),
    /// The one used last is at the end.
    connections: Vec<(Connection<B>, Instant)>,
}

/// Why a request has no answer. `E`: why there is no connection; `S`: why the wait was given up.
#[derive(Debug, Error)]
pub enum SendError<E, S> {
    /// There is no connection.
    #[error("no connection")]
    NotConnected(E),
    /// The other end has closed a new connection before a byte was sent.
    #[error("the new connection was closed")]
    NotSent(#[source] hyper::Error),
    /// The request may have been executed.
    #[error("no answer")]
    Unanswered {
        source: hyper::Error,
        /// It was sent on a connection that had been idle.
        was_idle: bool,
    },
    /// Likewise.
    #[error("the wait for an answer was given up")]
    GivenUp(S),
}

impl<K, B> Pool<K, B>
where
    K: Clone + Eq + Hash,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    #[must_use]
    pub fn new(idle_timeout: Duration, limits: fn(&K) -> KeepLimits) -> Self {
        let idle = Mutex::new(IdleTable {
            by_key: HashMap::new(),
            count: 0,
        });
        Self {
            idle,
            idle_timeout,
            limits,
        }
    }

    /// Sends a request, on an idle connection if `may_reuse` and there is one, otherwise on a new one that
    /// `connect` opens. A request of which not a byte was sent on an idle connection is sent on the next one;
    /// otherwise it is sent once. `give_up`: ends the wait for the answer.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn send<F, E, S>(
        self: &Arc<Self>,
        to: &Destination<K>,
        may_reuse: bool,
        connect: impl Fn() -> F,
        give_up: impl Future<Output = S>,
        mut request: Request<B>,
    ) -> Result<(Response<Incoming>, Lease<K, B>), SendError<E, S>>
    where
        F: Future<Output = Result<Connection<B>, E>>,
    {
        let mut give_up = pin!(give_up);
        loop {
            let idle = match may_reuse {
                true => self.take(to),
                false => None,
            };
            let was_idle = idle.is_some();
            let mut connection = match idle {
                Some(connection) => connection,
                None => connect().await.map_err(SendError::NotConnected)?,
            };
            let sent = connection.send(request);
            let answered = tokio::select! {
                biased;
                // Dropped if the wait is given up, which closes the connection.
                answered = sent => answered,
                // Polled again if the request is sent again.
                why = &mut give_up => return Err(SendError::GivenUp(why)),
            };
            let mut error = match answered {
                Ok(response) => return Ok((response, Lease::new(self, to, connection))),
                Err(error) => error,
            };
            match error.take_message() {
                Some(unsent) if was_idle => request = unsent,
                Some(_) => return Err(SendError::NotSent(error.into_error())),
                None => {
                    let source = error.into_error();
                    return Err(SendError::Unanswered { source, was_idle });
                }
            }
        }
    }
}

impl<K: Clone + Eq + Hash, B> Pool<K, B> {
    /// An idle connection that can take a request at once.
    fn take(&self, to: &Destination<K>) -> Option<Connection<B>> {
        let mut idle = self.lock();
        let idle = &mut *idle;
        idle.close_older(to);
        let kept = idle.by_key.get_mut(&to.key)?;
        if kept.version != to.version {
            return None;
        }
        let before = kept.connections.len();
        kept.connections
            .retain(|(connection, since)| self.is_kept(&to.key, connection, *since));
        let ready = |(connection, _): &(Connection<B>, _)| connection.is_ready();
        let at = kept.connections.iter().rposition(ready);
        let found = at.map(|at| kept.connections.remove(at).0);
        idle.count -= before - kept.connections.len();
        if kept.connections.is_empty() {
            idle.by_key.remove(&to.key);
        }
        found
    }

    fn put(&self, to: Destination<K>, connection: Connection<B>) {
        if connection.is_closed() {
            return;
        }
        let most = (self.limits)(&to.key).most;
        let mut idle = self.lock();
        idle.close_older(&to);
        if idle.count >= MAX_IDLE {
            self.sweep_table(&mut idle);
        }
        if idle.count >= MAX_IDLE {
            return;
        }
        let kept = idle
            .by_key
            .entry(to.key)
            .or_insert_with(|| IdleConnections {
                version: to.version,
                connections: Vec::new(),
            });
        if kept.version != to.version || kept.connections.len() >= most {
            return;
        }
        kept.connections.push((connection, Instant::now()));
        idle.count += 1;
    }

    /// Closes all connections to a destination, because one of them has failed.
    pub fn forget(&self, key: &K) {
        let mut idle = self.lock();
        if let Some(kept) = idle.by_key.remove(key) {
            idle.count -= kept.connections.len();
        }
    }

    /// Closes connections that were idle for too long or are too old, and removes those that the other
    /// end closed.
    pub fn sweep(&self) {
        self.sweep_table(&mut self.lock());
    }

    fn sweep_table(&self, idle: &mut IdleTable<K, B>) {
        idle.by_key.retain(|key, kept| {
            kept.connections
                .retain(|(connection, since)| self.is_kept(key, connection, *since));
            !kept.connections.is_empty()
        });
        idle.count = idle
            .by_key
            .values()
            .map(|kept| kept.connections.len())
            .sum();
    }

    fn is_kept(&self, key: &K, connection: &Connection<B>, since: Instant) -> bool {
        !connection.is_closed()
            && since.elapsed() < self.idle_timeout
            && connection.age() < (self.limits)(key).max_age
    }

    /// Every single change leaves the table valid, so a panic elsewhere does not corrupt it.
    fn lock(&self) -> MutexGuard<'_, IdleTable<K, B>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K, B> std::fmt::Debug for Pool<K, B> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pool").finish_non_exhaustive()
    }
}

impl<K: Eq + Hash, B> IdleTable<K, B> {
    /// Closes connections of versions before this one.
    fn close_older(&mut self, to: &Destination<K>) {
        if self
            .by_key
            .get(&to.key)
            .is_some_and(|kept| kept.version < to.version)
            && let Some(kept) = self.by_key.remove(&to.key)
        {
            self.count -= kept.connections.len();
        }
    }
}

/// A connection in use by one request.
pub struct Lease<K, B> {
    pool: Arc<Pool<K, B>>,
    to: Destination<K>,
    connection: Connection<B>,
}

impl<K: Clone + Eq + Hash, B> Lease<K, B> {
    fn new(pool: &Arc<Pool<K, B>>, to: &Destination<K>, connection: Connection<B>) -> Self {
        Self {
            pool: Arc::clone(pool),
            to: to.clone(),
            connection,
        }
    }

    /// Returns the connection to the pool: its answer has been read to the end. Without this call, it is
    /// closed.
    pub fn give_back(self) {
        self.pool.put(self.to, self.connection);
    }
}

impl<K, B> std::fmt::Debug for Lease<K, B> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Lease").finish_non_exhaustive()
    }
}
