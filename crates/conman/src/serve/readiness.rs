//! Maps the node's state and the watchdog to what load balancers see.

use std::sync::Arc;

use conman_node::{Leave, Node, StatusHandle};
use conman_proto::NodeState;
use conman_proxy::Readiness;
use conman_registry::Standing;
use conman_vitals::Vitals;

/// The node's state for load balancers. Cheap to clone and to read.
#[derive(Debug, Clone)]
pub(super) struct NodeReadiness {
    pub(super) status: StatusHandle,
    vitals: Vitals,
    leave: Arc<Leave>,
}

impl NodeReadiness {
    pub(super) fn new(node: &Node, vitals: &Vitals) -> Self {
        Self {
            status: node.status().clone(),
            vitals: vitals.clone(),
            leave: Arc::clone(node.leave()),
        }
    }

    /// Returns the state, and notes that a load balancer has probed the node.
    pub(super) fn answer_probe(&self) -> Readiness {
        self.leave.probed();
        if !self.vitals.still().is_empty() {
            return Readiness::Down;
        }
        match self.status.state() {
            NodeState::Cordoned => Readiness::Cordoned,
            NodeState::Draining => Readiness::Draining,
            NodeState::Preempted => Readiness::Preempted,
            NodeState::Stopping => Readiness::Stopping,
            NodeState::Live | NodeState::Recovering => match self.status.standing() {
                Standing::Alone | Standing::Live if self.status.cut_off().is_some() => {
                    Readiness::CutOff
                }
                Standing::Alone | Standing::Live => Readiness::Ready,
                Standing::Joining { .. } | Standing::Late | Standing::Fenced => Readiness::Lapsed,
            },
        }
    }
}
