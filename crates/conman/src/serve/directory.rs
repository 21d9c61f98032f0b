use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_node::{AccessHandle, RouteError, SessionRoute};
use conman_proto::SessionId;
use conman_proxy::{Backend, Directory, PeerRefusal, Refusal, Route, Stream, Way};

use super::seeker::Seeker;

/// Retry-After for a session that cannot be reached for a while.
const RETRY_AFTER_S: u32 = 1;

/// The proxy's directory: this node, and in a fleet all nodes.
#[derive(Debug)]
pub(super) struct NodeDirectory {
    access: AccessHandle,
    seeker: Option<Arc<Seeker>>,
}

impl NodeDirectory {
    pub(super) fn new(access: AccessHandle, seeker: Option<Arc<Seeker>>) -> Self {
        Self { access, seeker }
    }
}

#[async_trait]
impl Directory for NodeDirectory {
    async fn route(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal> {
        match &self.seeker {
            Some(seeker) => seeker.find(id, may_start, false).await,
            None => match self.access.route(id, may_start).await {
                Ok(route) => Ok(own_route(route)),
                Err(error) => Err(refusal(&error)),
            },
        }
    }

    async fn route_anew(
        &self,
        from: &Route,
        why: &PeerRefusal,
        times: u32,
        may_start: bool,
    ) -> Result<Route, Refusal> {
        match &self.seeker {
            Some(seeker) => seeker.find_anew(from, why, times, may_start).await,
            None => self.route(&from.session, may_start).await,
        }
    }
}

/// The route to a session of this node.
pub(super) fn own_route(route: SessionRoute) -> Route {
    Route {
        session: route.id.clone(),
        generation: route.generation,
        activity: Arc::clone(&route.activity),
        closing: route.closing.clone(),
        way: Way::Session,
        backend: Arc::new(SessionBackend(route)),
    }
}

/// The answer to a client about a session that cannot be reached.
pub(super) fn refusal(error: &RouteError) -> Refusal {
    let problem = conman_api::route_problem(error);
    let retry_after_s = problem.retryable.then_some(RETRY_AFTER_S);
    Refusal {
        problem,
        retry_after_s,
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
