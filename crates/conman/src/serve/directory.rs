//! The proxy's directory: where a session is, on this node or in the fleet.

use std::sync::Arc;

use async_trait::async_trait;
use conman_fleet::{Locator, own_route};
use conman_node::AccessHandle;
use conman_peer::PeerRefusal;
use conman_proto::{Problem, SessionId};
use conman_proxy::{Directory, Readiness, Refusal, Route};

use super::readiness::NodeReadiness;

/// Retry-After for a session that cannot be reached for a while.
const RETRY_AFTER_S: u32 = 1;

/// The proxy's directory: this node, and in a fleet all nodes.
#[derive(Debug)]
pub(super) struct NodeDirectory {
    access: AccessHandle,
    readiness: NodeReadiness,
    locator: Option<Arc<Locator>>,
}

impl NodeDirectory {
    pub(super) fn new(
        access: AccessHandle,
        readiness: NodeReadiness,
        locator: Option<Arc<Locator>>,
    ) -> Self {
        Self {
            access,
            readiness,
            locator,
        }
    }
}

#[async_trait]
impl Directory for NodeDirectory {
    async fn route(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal> {
        match &self.locator {
            Some(locator) => {
                let found = locator.find(id, may_start, false).await;
                found.map_err(|error| refusal(conman_api::locate_problem(&error)))
            }
            None => {
                let route = self.access.route(id, may_start).await;
                route
                    .map(own_route)
                    .map_err(|error| refusal(conman_api::route_problem(&error)))
            }
        }
    }

    async fn route_again(
        &self,
        from: &Route,
        why: &PeerRefusal,
        times: u32,
        may_start: bool,
    ) -> Result<Route, Refusal> {
        match &self.locator {
            Some(locator) => {
                let found = locator.find_again(from, why, times, may_start).await;
                found.map_err(|error| refusal(conman_api::locate_problem(&error)))
            }
            None => self.route(&from.session, may_start).await,
        }
    }

    async fn may_be_public(&self, id: &SessionId, port: u16) -> bool {
        match (self.access.has_public_port(id, port), &self.locator) {
            (Some(is_public), _) => is_public,
            (None, Some(locator)) => locator.is_elsewhere(id).await,
            (None, None) => false,
        }
    }

    fn readiness(&self) -> Readiness {
        self.readiness.answer_probe()
    }
}

/// The answer to a client about a session that cannot be reached.
fn refusal(problem: Problem) -> Refusal {
    let retry_after_s = problem.retryable.then_some(RETRY_AFTER_S);
    Refusal {
        problem,
        retry_after_s,
    }
}
