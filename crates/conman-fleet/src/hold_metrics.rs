//! Metrics of requests that wait at this node, by cause.

use conman_proto::NodeState;
use conman_registry::{Peer, PeerStanding};
use tokio::time::Instant;

const HELD: &str = "conman_held";
const SECONDS: &str = "conman_held_duration_seconds";

/// The reason why a request waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its session starts, or is not ready yet.
    Starting,
    /// Its session has ended, and is started again.
    Ended,
    /// Its node is being drained.
    Draining,
    /// Its node is being preempted.
    Preempted,
    /// Its node was declared dead.
    Fenced,
    /// Its node does not answer, and is not known to be dead.
    Silent,
    /// The registry does not answer, and this node does not know where the session is.
    Registry,
}

impl Cause {
    /// The reason for waiting for a session that is or was on this node: the node's state, or
    /// `otherwise` if that does not explain it.
    #[must_use]
    pub(crate) fn of(node: Option<&Peer>, otherwise: Self) -> Self {
        let Some(node) = node else {
            return otherwise;
        };
        let announced = node.announcement.as_ref();
        let state = announced.and_then(|announced| announced.view.as_ref().map(|view| view.state));
        match (node.standing, state) {
            (PeerStanding::Fenced, _) => Self::Fenced,
            (_, Some(NodeState::Preempted)) => Self::Preempted,
            (_, Some(NodeState::Draining)) => Self::Draining,
            (PeerStanding::Silent, _) => Self::Silent,
            (
                PeerStanding::Live,
                Some(
                    NodeState::Live
                    | NodeState::Recovering
                    | NodeState::Cordoned
                    | NodeState::Stopping,
                )
                | None,
            ) => otherwise,
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ended => "ended",
            Self::Draining => "draining",
            Self::Preempted => "preempted",
            Self::Fenced => "fenced",
            Self::Silent => "silent",
            Self::Registry => "registry",
        }
    }
}

/// A waiting request; counted until dropped.
#[derive(Debug)]
pub(crate) struct HeldRequest {
    cause: Cause,
    began: Instant,
}

impl HeldRequest {
    #[must_use]
    pub(crate) fn new(cause: Cause) -> Self {
        metrics::gauge!(HELD, "cause" => cause.as_str()).increment(1.0);
        Self {
            cause,
            began: Instant::now(),
        }
    }
}

impl Drop for HeldRequest {
    fn drop(&mut self) {
        let cause = self.cause.as_str();
        metrics::gauge!(HELD, "cause" => cause).decrement(1.0);
        let waited = self.began.elapsed().as_secs_f64();
        metrics::histogram!(SECONDS, "cause" => cause).record(waited);
    }
}

/// Describes the metrics, and sets them to zero.
pub(crate) fn describe() {
    metrics::describe_gauge!(
        HELD,
        "Requests that wait at this node for a session, by cause"
    );
    metrics::describe_histogram!(SECONDS, "How long requests waited at this node, by cause");
    for cause in [
        Cause::Starting,
        Cause::Ended,
        Cause::Draining,
        Cause::Preempted,
        Cause::Fenced,
        Cause::Silent,
        Cause::Registry,
    ] {
        metrics::gauge!(HELD, "cause" => cause.as_str()).set(0.0);
    }
}

#[cfg(test)]
mod tests {
    use conman_registry::Announcement;
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    fn peer(standing: PeerStanding, state: Option<NodeState>) -> Peer {
        let view = |state| conman_proto::Node {
            state,
            ..conman_proto::Node::unannounced("n1")
        };
        Peer {
            name: "n1".to_owned(),
            incarnation: 1,
            standing,
            fenced_at: None,
            is_late: false,
            heartbeat_ago_ms: 0,
            announcement: Some(Announcement {
                view: state.map(view),
                ..Announcement::default()
            }),
            announced_ago_ms: 0,
        }
    }

    #[test]
    fn the_state_of_the_node_is_the_cause_whatever_a_connection_waits_for() {
        use NodeState::{Draining, Live, Preempted, Recovering};
        use PeerStanding::{Fenced, Silent};
        for (standing, state, cause) in [
            (PeerStanding::Live, None, None),
            (PeerStanding::Live, Some(Live), None),
            (PeerStanding::Live, Some(Recovering), None),
            (PeerStanding::Live, Some(Draining), Some(Cause::Draining)),
            (PeerStanding::Live, Some(Preempted), Some(Cause::Preempted)),
            (Silent, None, Some(Cause::Silent)),
            (Silent, Some(Live), Some(Cause::Silent)),
            (Silent, Some(Recovering), Some(Cause::Silent)),
            // What it announced explains its silence.
            (Silent, Some(Draining), Some(Cause::Draining)),
            (Silent, Some(Preempted), Some(Cause::Preempted)),
            (Fenced, None, Some(Cause::Fenced)),
            (Fenced, Some(Live), Some(Cause::Fenced)),
            (Fenced, Some(Draining), Some(Cause::Fenced)),
            (Fenced, Some(Preempted), Some(Cause::Fenced)),
        ] {
            for otherwise in [Cause::Starting, Cause::Ended] {
                let found = Cause::of(Some(&peer(standing, state)), otherwise);
                let wanted = cause.unwrap_or(otherwise);
                assert_eq!(found, wanted, "{standing:?} and {state:?}");
                assert_eq!(Cause::of(None, otherwise), otherwise);
            }
        }
    }

    #[test]
    fn held_requests_are_counted_by_cause_and_timed_at_their_end() {
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            describe();
            let held = [
                HeldRequest::new(Cause::Silent),
                HeldRequest::new(Cause::Silent),
            ];
            let shown = recorder.handle().render();
            assert!(shown.contains("conman_held{cause=\"silent\"} 2"), "{shown}");
            assert!(
                shown.contains("conman_held{cause=\"draining\"} 0"),
                "{shown}"
            );
            drop(held);
            let shown = recorder.handle().render();
            assert!(shown.contains("conman_held{cause=\"silent\"} 0"), "{shown}");
            assert!(
                shown.contains("conman_held_duration_seconds_count{cause=\"silent\"} 2"),
                "{shown}"
            );
        });
    }
}
