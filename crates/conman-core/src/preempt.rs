//! The plan of a preemption, as data: planned here, shown by a dry run, executed by the node.

use conman_proto::{Generation, PreemptPlan, PreemptSession, SessionId};

/// Part of the budget that no grace may use: reserved for the kill and the release. A thousand
/// containers on one bridge were dead 2.0 s after SIGKILL.
pub const RESERVE_MS: u64 = 3_000;

/// A session that has not ended, as input of a preemption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreemptCandidate {
    pub id: SessionId,
    pub generation: Generation,
    /// `None` while its container has no known process.
    pub pid: Option<i32>,
    /// From its spec.
    pub signal: Option<String>,
    /// From its spec.
    pub grace_ms: u32,
}

/// Plans a preemption of these sessions: ordered by id, with each grace limited to what the budget
/// allows.
///
/// A session without a signal or a process is killed at once. If the budget is less than twice
/// [`RESERVE_MS`], grace gets half of it.
#[must_use]
pub fn plan(sessions: &[PreemptCandidate], budget_ms: u64) -> PreemptPlan {
    let longest_grace_ms = budget_ms - RESERVE_MS.min(budget_ms.div_ceil(2));
    let mut planned: Vec<PreemptSession> = sessions
        .iter()
        .map(|session| {
            let signal = session.signal.clone().filter(|_| session.pid.is_some());
            let grace_ms = match signal {
                Some(_) => u64::from(session.grace_ms).min(longest_grace_ms),
                None => 0,
            };
            let PreemptCandidate {
                id,
                generation,
                pid,
                ..
            } = session;
            PreemptSession {
                id: id.clone(),
                generation: *generation,
                pid: *pid,
                signal,
                grace_ms,
            }
        })
        .collect();
    planned.sort_by(|one, other| one.id.cmp(&other.id));
    let last_kill_ms = planned
        .iter()
        .map(|session| session.grace_ms)
        .max()
        .unwrap_or(0);
    PreemptPlan {
        sessions: planned,
        last_kill_ms,
        budget_ms,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidates() -> impl Strategy<Value = Vec<PreemptCandidate>> {
        let one = (
            "[a-z0-9]{1,8}",
            1_u64..1_000,
            proptest::option::of(2_i32..4_000_000),
            proptest::option::of(Just("SIGTERM".to_owned())),
            0_u32..=60_000,
        );
        proptest::collection::vec(one, 0..20).prop_map(|list| {
            list.into_iter()
                .map(|(id, generation, pid, signal, grace_ms)| PreemptCandidate {
                    id: id.parse().expect("a session id"),
                    generation: Generation::new(generation).expect("not zero"),
                    pid,
                    signal,
                    grace_ms,
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn no_session_is_left_out_and_none_is_killed_after_the_budget(
            sessions in candidates(), budget_ms: u32,
        ) {
            let plan = plan(&sessions, u64::from(budget_ms));
            let mut ids: Vec<_> = sessions.iter().map(|session| &session.id).collect();
            ids.sort();
            prop_assert_eq!(plan.sessions.iter().map(|s| &s.id).collect::<Vec<_>>(), ids);
            for session in &plan.sessions {
                prop_assert!(session.grace_ms <= plan.last_kill_ms);
                prop_assert!(session.grace_ms == 0 || session.signal.is_some());
                prop_assert!(session.signal.is_none() || session.pid.is_some());
            }
            let kept = plan.budget_ms - plan.last_kill_ms;
            prop_assert!(kept >= RESERVE_MS || kept * 2 >= plan.budget_ms);
        }

        #[test]
        fn grace_that_fits_is_given_in_full(sessions in candidates()) {
            let plan = plan(&sessions, 60_000 + RESERVE_MS);
            for planned in plan.sessions.iter().filter(|session| session.signal.is_some()) {
                let given = sessions.iter().any(|given| {
                    given.id == planned.id && u64::from(given.grace_ms) == planned.grace_ms
                });
                prop_assert!(given, "{:?}", planned);
            }
        }
    }
}
