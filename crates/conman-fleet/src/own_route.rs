//! Routes to the sessions of this node, for its clients and for other nodes.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_node::{AccessHandle, NotHere, SessionRoute};
use conman_peer::{PeerRefusal, Stream};
use conman_proto::{Generation, SessionId};
use conman_proxy::{Backend, OwnSessions, PortRequest, Route, Way};

/// Returns the proxy's route to a session of this node.
#[must_use]
pub fn own_route(route: SessionRoute) -> Route {
    Route {
        session: route.id.clone(),
        generation: route.generation,
        activity: Arc::clone(&route.activity),
        closing: route.closing.clone(),
        port: None,
        strip_prefix: route.spec.strip_prefix,
        way: Way::Session,
        backend: Arc::new(SessionBackend { route, port: None }),
    }
}

/// A session's port, reached from inside its network namespace.
#[derive(Debug)]
struct SessionBackend {
    route: SessionRoute,
    /// The main one if absent.
    port: Option<u16>,
}

#[async_trait]
impl Backend for SessionBackend {
    async fn connect(&self) -> io::Result<Stream> {
        let port = self.port.unwrap_or(self.route.port);
        self.route.connect(port).await.map(Stream::from)
    }

    fn at_port(&self, request: PortRequest) -> Option<Arc<dyn Backend>> {
        let PortRequest { port, public_only } = request;
        if !self.route.has_port(port, public_only) {
            return None;
        }
        let route = self.route.clone();
        let port = Some(port);
        Some(Arc::new(Self { route, port }))
    }

    async fn has_closed(&self) -> bool {
        self.route.has_closed().await
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
