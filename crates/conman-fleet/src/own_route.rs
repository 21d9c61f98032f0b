//! Routes to the sessions of this node.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_node::SessionRoute;
use conman_proxy::{Backend, Route, Stream, Way};

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
