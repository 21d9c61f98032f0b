//! Maps the node's state and the watchdog to what load balancers see.

use conman_node::{Node, StatusHandle};
use conman_proto::NodeState;
use conman_proxy::Readiness;
use conman_registry::Standing;
use conman_vitals::Vitals;

/// The node's state for load balancers. Cheap to clone and to read.
#[derive(Debug, Clone)]
pub(super) struct NodeReadiness {
    pub(super) status: StatusHandle,
    vitals: Vitals,
}

impl NodeReadiness {
    pub(super) fn new(node: &Node, vitals: &Vitals) -> Self {
        Self {
            status: node.status().clone(),
            vitals: vitals.clone(),
        }
    }

    pub(super) fn get(&self) -> Readiness {
        if !self.vitals.still().is_empty() {
            return Readiness::Down;
        }
        match self.status.state() {
            NodeState::Cordoned => Readiness::Cordoned,
            NodeState::Draining => Readiness::Draining,
            NodeState::Preempted => Readiness::Preempted,
            NodeState::Stopping => Readiness::Stopping,
            NodeState::Live | NodeState::Recovering => match self.status.standing() {
                Standing::Alone | Standing::Live => Readiness::Ready,
                Standing::Joining { .. } | Standing::Late | Standing::Fenced => Readiness::Lapsed,
            },
        }
    }
}
