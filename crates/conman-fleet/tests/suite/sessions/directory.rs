//! What the daemon composes: the proxies' traits over the node and its API.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use conman_api::{ServeOptions, locate_problem, serve_node};
use conman_fleet::{LocateError, Locator, own_route};
use conman_node::{Node, NotHere};
use conman_proto::{Generation, SessionId};
use conman_proxy::{Backend, Directory, OwnSessions, PeerRefusal, Refusal, Route, Stream};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

pub(super) struct FleetDirectory(pub(super) Arc<Locator>);

fn refusal(error: LocateError) -> Refusal {
    Refusal::from(locate_problem(&error))
}

#[async_trait]
impl Directory for FleetDirectory {
    async fn route(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal> {
        let found = self.0.find(id, may_start, false).await;
        found.map_err(refusal)
    }

    async fn route_again(
        &self,
        from: &Route,
        why: &PeerRefusal,
        times: u32,
        may_start: bool,
    ) -> Result<Route, Refusal> {
        let found = self.0.find_again(from, why, times, may_start).await;
        found.map_err(refusal)
    }
}

pub(super) struct OwnSessionsOf(pub(super) Arc<Node>);

impl OwnSessions for OwnSessionsOf {
    fn own(&self, id: &SessionId, generation: Generation) -> Result<Route, PeerRefusal> {
        match self.0.own_route(id, generation) {
            Ok(route) => Ok(own_route(route)),
            Err(NotHere::NotOwner) => Err(PeerRefusal::NotOwner),
            Err(NotHere::NotReady) => Err(PeerRefusal::NotReady),
        }
    }
}

/// The API at the other end of a pipe.
pub(super) struct Api {
    router: Router,
    closing: CancellationToken,
    main: Handle,
}

impl Api {
    pub(super) fn new(router: Router, closing: CancellationToken) -> Self {
        let main = Handle::current();
        Self {
            router,
            closing,
            main,
        }
    }
}

#[async_trait]
impl Backend for Api {
    async fn connect(&self) -> io::Result<Stream> {
        let (here, there) = tokio::io::duplex(64 * 1024);
        let (router, options) = (self.router.clone(), ServeOptions::default());
        self.main
            .spawn(serve_node(there, router, options, self.closing.clone()));
        Ok(Stream::Other(Box::new(here)))
    }
}
