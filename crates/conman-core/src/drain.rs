//! The order in which a drain moves a node's sessions away, and the time it takes: planned here,
//! shown by a dry run, executed by the node.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use conman_proto::{DrainPlan, DrainSession, Generation, SessionId};

/// Estimated time from SIGKILL to the death certificate: some milliseconds, on a busy machine some
/// tens.
pub const KILL_MS: u64 = 20;

/// A session that has not ended, as input of a drain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainCandidate {
    pub id: SessionId,
    pub generation: Generation,
    pub connections: u64,
    /// `None` without a limit.
    pub memory_bytes: Option<u64>,
    /// The signal sent first; `None` to kill at once.
    pub signal: Option<String>,
    /// Time from the signal to SIGKILL; 0 sends no signal.
    pub grace_ms: u64,
    /// Estimated time to record its release.
    pub release_ms: u64,
    /// Estimated time to start it on another node; 0 if it is not.
    pub start_ms: u64,
}

/// Orders sessions for a drain and predicts its time, with `parallel` sessions stopped at a time, of
/// which `processors` are worked on at a time: killed, released, started on other nodes.
///
/// Idle sessions come first, because no client notices; then small before large, so that most are
/// served elsewhere soonest; those without a limit last. Ties are ordered by name.
#[must_use]
pub fn plan(mut sessions: Vec<DrainCandidate>, parallel: u32, processors: u32) -> DrainPlan {
    let parallel = parallel.max(1);
    let workers = u64::from(parallel.min(processors).max(1));
    sessions.sort_by(|one, other| rank(one).cmp(&rank(other)));
    // The time at which each lane is free again.
    let mut lanes: BinaryHeap<Reverse<u64>> = (0..parallel).map(|_| Reverse(0)).collect();
    let mut predicted_ms = 0;
    let mut work_ms = 0;
    let mut planned = Vec::with_capacity(sessions.len());
    for session in sessions {
        let DrainCandidate {
            id,
            generation,
            connections,
            memory_bytes,
            signal,
            grace_ms,
            release_ms,
            start_ms,
        } = session;
        let signal = signal.filter(|_| grace_ms > 0);
        let grace_ms = if signal.is_some() { grace_ms } else { 0 };
        let at_ms = lanes.pop().map_or(0, |Reverse(free_at)| free_at);
        let stop_ms = KILL_MS + release_ms;
        let over_ms = at_ms.saturating_add(grace_ms).saturating_add(stop_ms);
        lanes.push(Reverse(over_ms));
        work_ms += stop_ms + start_ms;
        predicted_ms = predicted_ms.max(over_ms + start_ms).max(work_ms / workers);
        planned.push(DrainSession {
            id,
            generation,
            connections,
            memory_bytes,
            signal,
            grace_ms,
            at_ms,
        });
    }
    DrainPlan {
        sessions: planned,
        parallel,
        predicted_ms,
    }
}

/// Smaller values come first.
fn rank(session: &DrainCandidate) -> (bool, u64, u64, &SessionId) {
    (
        session.connections > 0,
        session.memory_bytes.unwrap_or(u64::MAX),
        session.connections,
        &session.id,
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(id: &str, connections: u64, memory_bytes: Option<u64>) -> DrainCandidate {
        DrainCandidate {
            id: id.parse().expect("a session id"),
            generation: Generation::FIRST,
            connections,
            memory_bytes,
            signal: None,
            grace_ms: 0,
            release_ms: 30,
            start_ms: 0,
        }
    }

    const STOP_MS: u64 = KILL_MS + 30;

    #[test]
    fn starts_on_other_nodes_take_their_time() {
        let starting = |number: usize| DrainCandidate {
            start_ms: 1_000,
            ..candidate(&format!("s{number}"), 0, None)
        };
        let one = STOP_MS + 1_000;
        assert_eq!(plan(vec![starting(1)], 8, 4).predicted_ms, one);
        let many = plan((0..80).map(starting).collect(), 8, 4);
        assert_eq!(many.predicted_ms, 20 * one);
    }

    #[test]
    fn idle_sessions_go_first_and_light_ones_before_heavy_ones() {
        let sessions = vec![
            candidate("busy-light", 1, Some(1)),
            candidate("idle-unlimited", 0, None),
            candidate("idle-heavy", 0, Some(9)),
            candidate("busy-heavy", 1, Some(9)),
            candidate("idle-light", 0, Some(1)),
        ];
        let plan = plan(sessions, 1, 4);
        let order: Vec<_> = plan.sessions.iter().map(|one| one.id.as_str()).collect();
        let wanted = [
            "idle-light",
            "idle-heavy",
            "idle-unlimited",
            "busy-light",
            "busy-heavy",
        ];
        assert_eq!(order, wanted);
        assert_eq!(plan.predicted_ms, 5 * STOP_MS);
    }

    #[test]
    fn a_grace_without_a_signal_is_none_and_a_signal_without_a_grace_is_not_sent() {
        let mut mute = candidate("a", 0, None);
        mute.grace_ms = 5_000;
        let mut hasty = candidate("b", 0, None);
        hasty.signal = Some("SIGTERM".to_owned());
        let plan = plan(vec![mute, hasty], 8, 4);
        assert_eq!(plan.predicted_ms, STOP_MS);
        for one in plan.sessions {
            assert_eq!((one.signal, one.grace_ms), (None, 0), "{}", one.id);
        }
    }

    proptest! {
        #[test]
        fn the_prediction_holds_every_session_and_no_more_at_a_time_than_allowed(
            graces in proptest::collection::vec(0_u64..10_000, 0..40), parallel in 1_u32..10,
        ) {
            let sessions = graces.iter().enumerate().map(|(number, grace_ms)| DrainCandidate {
                signal: Some("SIGTERM".to_owned()),
                grace_ms: *grace_ms,
                ..candidate(&format!("s{number}"), number as u64 % 3, None)
            });
            let plan = plan(sessions.collect(), parallel, 4);
            prop_assert_eq!(plan.sessions.len(), graces.len());
            for one in &plan.sessions {
                let until = one.at_ms + one.grace_ms + STOP_MS;
                prop_assert!(until <= plan.predicted_ms);
                let overlapping = plan.sessions.iter().filter(|other| {
                    other.at_ms <= one.at_ms && one.at_ms < other.at_ms + other.grace_ms + STOP_MS
                });
                prop_assert!(overlapping.count() <= parallel as usize);
            }
        }
    }
}
