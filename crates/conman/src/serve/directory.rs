use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_node::{Node, SessionRoute};
use conman_proto::SessionId;
use conman_proxy::{Backend, Directory, Link, Refusal, Route, Way};

/// When a client may ask again for a session that cannot be reached for a while.
const RETRY_AFTER_S: u32 = 1;

/// The node as the proxy's directory.
#[derive(Debug)]
pub(super) struct NodeDirectory {
    node: Arc<Node>,
}

impl NodeDirectory {
    pub(super) fn new(node: Arc<Node>) -> Self {
        Self { node }
    }
}

#[async_trait]
impl Directory for NodeDirectory {
    async fn route(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal> {
        match self.node.route(id, may_start).await {
            Ok(route) => Ok(Route {
                session: route.id.clone(),
                generation: route.generation,
                activity: Arc::clone(&route.activity),
                closing: route.closing.clone(),
                way: Way::Session,
                backend: Arc::new(SessionBackend(route)),
            }),
            Err(error) => {
                let problem = conman_api::route_problem(&error);
                let retry_after_s = problem.retryable.then_some(RETRY_AFTER_S);
                Err(Refusal {
                    problem,
                    retry_after_s,
                })
            }
        }
    }
}

/// A session's port, reached from inside its network namespace.
#[derive(Debug)]
struct SessionBackend(SessionRoute);

#[async_trait]
impl Backend for SessionBackend {
    async fn connect(&self) -> io::Result<Link> {
        self.0.connect().await.map(Link::from)
    }
}
