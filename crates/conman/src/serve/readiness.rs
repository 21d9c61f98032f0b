//! Maps the node's state and the watchdog to what load balancers see.

use std::sync::Arc;

use conman_node::{Leave, Node, StatusHandle, host_load};
use conman_proto::NodeState;
use conman_proxy::{AgentSource, BalancedLoad, Readiness, Share};
use conman_registry::Standing;
use conman_watchdog::Watchdog;

/// The node's state for load balancers. Cheap to clone and to read.
#[derive(Debug, Clone)]
pub(super) struct NodeReadiness {
    status: StatusHandle,
    watchdog: Watchdog,
    leave: Arc<Leave>,
}

impl NodeReadiness {
    pub(super) fn new(node: &Node, watchdog: &Watchdog) -> Self {
        Self {
            status: node.status().clone(),
            watchdog: watchdog.clone(),
            leave: Arc::clone(node.leave()),
        }
    }

    /// Returns the state, and notes that a load balancer has probed the node.
    pub(super) fn answer_probe(&self) -> Readiness {
        self.leave.probed();
        if !self.watchdog.still().is_empty() {
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

impl AgentSource for NodeReadiness {
    fn answer_probe(&self) -> Readiness {
        Self::answer_probe(self)
    }

    fn load(&self) -> BalancedLoad {
        let (view, host) = (self.status.view(), host_load());
        let limit = view.host_limit.as_ref().map(|limit| limit.max_sessions);
        let places = limit.map_or(view.max_sessions, |limit| limit.min(view.max_sessions));
        BalancedLoad {
            cpu_pressure_percent: host.cpu_pressure_percent,
            memory: Share {
                free: host.memory_available_bytes,
                all: host.memory_total_bytes,
            },
            places: Share {
                free: places.saturating_sub(view.sessions()),
                all: places,
            },
        }
    }
}
