use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_proto::SessionId;
use hyper::client::conn::http1::SendRequest;
use tokio::time::Instant;

use crate::answer_heads::Awaited;
use crate::body::RequestBody;
use crate::{Route, Way};

/// Most idle connections that one worker keeps to all sessions together; each is a descriptor
/// here and one in the session.
const MAX_IDLE: usize = 1_024;
/// Likewise, to one generation of a session.
const MAX_PER_SESSION: usize = 16;
/// Likewise, to another node.
const MAX_PER_PEER: usize = 128;

/// The idle connections of one worker, to sessions and to other nodes.
///
/// Only connections of a session's greatest generation seen so far are kept, so an older
/// generation's can never carry a request of a newer one, or vice versa. Connections to a node
/// carry requests for all of its sessions, each with its generation, and are separated by the
/// node's incarnation.
pub(crate) struct Pool {
    shelves: Mutex<Shelves>,
    idle_timeout: Duration,
}

/// A connection that requests can be sent on, one after the other.
pub(crate) struct Wire {
    pub(crate) sender: SendRequest<RequestBody>,
    pub(crate) awaited: Awaited,
}

/// The peer of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum End {
    Session(SessionId, Option<u16>),
    Peer(Arc<str>),
    Api,
}

/// The peer of a connection, and its version: the session's generation, or the node's
/// incarnation.
fn end_of(route: &Route) -> (End, u64) {
    match &route.way {
        Way::Session => {
            let port = route.port.map(|request| request.port);
            (
                End::Session(route.session.clone(), port),
                route.generation.get(),
            )
        }
        Way::Peer { node, incarnation } => (End::Peer(Arc::clone(node)), *incarnation),
        Way::Api => (End::Api, 0),
    }
}

#[derive(Default)]
struct Shelves {
    by_end: HashMap<End, Shelf>,
    idle: usize,
}

struct Shelf {
    version: u64,
    /// The one used last is at the end.
    connections: Vec<Idle>,
}

struct Idle {
    wire: Wire,
    since: Instant,
}

impl Pool {
    pub(crate) fn new(idle_timeout: Duration) -> Self {
        Self {
            shelves: Mutex::default(),
            idle_timeout,
        }
    }

    /// A connection for this route that can take a request at once.
    pub(crate) fn take(&self, route: &Route) -> Option<Wire> {
        let (end, version) = end_of(route);
        let mut shelves = self.lock();
        shelves.outdate(&end, version);
        let shelves = &mut *shelves;
        let shelf = shelves.by_end.get_mut(&end)?;
        if shelf.version != version {
            return None;
        }
        let before = shelf.connections.len();
        shelf
            .connections
            .retain(|idle| !idle.wire.sender.is_closed());
        let at = shelf
            .connections
            .iter()
            .rposition(|idle| idle.wire.sender.is_ready());
        let found = at.map(|at| shelf.connections.remove(at).wire);
        shelves.idle -= before - shelf.connections.len();
        if shelf.connections.is_empty() {
            shelves.by_end.remove(&end);
        }
        found
    }

    fn put(&self, end: End, version: u64, wire: Wire) {
        let most = match end {
            End::Session(..) => MAX_PER_SESSION,
            End::Peer(_) | End::Api => MAX_PER_PEER,
        };
        if wire.sender.is_closed() {
            return;
        }
        let mut shelves = self.lock();
        shelves.outdate(&end, version);
        if shelves.idle >= MAX_IDLE {
            return;
        }
        let shelf = shelves.by_end.entry(end).or_insert_with(|| Shelf {
            version,
            connections: Vec::new(),
        });
        if shelf.version != version || shelf.connections.len() >= most {
            return;
        }
        shelf.connections.push(Idle {
            wire,
            since: Instant::now(),
        });
        shelves.idle += 1;
    }

    /// Closes connections that were idle for too long, and removes those that their session closed.
    pub(crate) fn sweep(&self) {
        let mut shelves = self.lock();
        let now = Instant::now();
        shelves.by_end.retain(|_, shelf| {
            shelf.connections.retain(|idle| {
                !idle.wire.sender.is_closed() && now.duration_since(idle.since) < self.idle_timeout
            });
            !shelf.connections.is_empty()
        });
        shelves.idle = shelves
            .by_end
            .values()
            .map(|shelf| shelf.connections.len())
            .sum();
    }

    /// Every single change leaves the maps valid, so a panic elsewhere does not corrupt them.
    fn lock(&self) -> MutexGuard<'_, Shelves> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelves {
    /// Closes connections of generations or incarnations before this one.
    fn outdate(&mut self, end: &End, version: u64) {
        if self
            .by_end
            .get(end)
            .is_some_and(|shelf| shelf.version < version)
            && let Some(shelf) = self.by_end.remove(end)
        {
            self.idle -= shelf.connections.len();
        }
    }
}

/// A connection in use by one request.
pub(crate) struct Lease {
    pool: Arc<Pool>,
    end: End,
    version: u64,
    wire: Wire,
    reusable: bool,
}

impl Lease {
    pub(crate) fn new(pool: Arc<Pool>, route: &Route, wire: Wire, reusable: bool) -> Self {
        let (end, version) = end_of(route);
        Self {
            pool,
            end,
            version,
            wire,
            reusable,
        }
    }

    /// The answer has ended. The connection returns to the pool, or is closed.
    pub(crate) fn give_back(self) {
        if self.reusable {
            self.pool.put(self.end, self.version, self.wire);
        }
    }
}
