//! Routes to the sessions of this node, for its clients and for other nodes.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_node::{AccessHandle, NotHere, SessionRoute};
use conman_proto::{Generation, SessionId};
use conman_proxy::{Backend, OwnSessions, PeerRefusal, Route, Stream, Way};

/// Returns the proxy's route to a session of this node.
#[must_use]
pub fn own_route(route: SessionRoute) -> Route {
    Route {
        session: route.id.clone(),
        generation: route.generation,
        activity: Arc::clone(&route.activity),
        closing: route.closing.clone(),
        way: Way::Session,
        backend: Arc::new(SessionBackend(route)),
    }
}

/// A session's port, reached from inside its network namespace.
#[derive(Debug)]
struct SessionBackend(SessionRoute);

#[async_trait]
impl Backend for SessionBackend {
    async fn connect(&self) -> io::Result<Stream> {
        self.0.connect().await.map(Stream::from)
    }

    async fn has_closed(&self) -> bool {
        self.0.has_closed().await
    }
}

/// The sessions of this node, for other nodes.
#[derive(Debug)]
pub struct NodeSessions(pub AccessHandle);

impl OwnSessions for NodeSessions {
    fn own(&self, id: &SessionId, generation: Generation) -> Result<Route, PeerRefusal> {
        match self.0.own_route(id, generation) {
            Ok(route) => Ok(own_route(route)),
            Err(NotHere::NotOwner) => Err(PeerRefusal::NotOwner),
            Err(NotHere::NotReady) => Err(PeerRefusal::NotReady),
        }
    }
}
