//! Decides which sessions a fleet restarts automatically, and which node does it.
//!
//! ```text
//! record ─ not requested, ended by itself, stopped ─▶ Verdict::No
//!        ├ its node was lost, or a restart of it failed ─▶ Verdict::Restart(count) ─▶ Watch: when
//!        └ too often in a short time ─▶ Verdict::GivenUp
//! ```
//!
//! Every node reads the same records. For each session the nodes have a fixed order (a hash of both
//! names): the first node restarts it at once, each further one after an additional delay, in case
//! the nodes before it died from it. The restart count is stored in the session's record, so that a
//! session that brings down every node it runs on stops after a few of them, whichever nodes
//! restart it.
//!
//! This module does not decide ownership: the node that restarts a session still has to claim it.

use std::collections::BTreeMap;

use conman_proto::{Generation, NodeLoss, OnNodeLoss, ResolvedSpec, Restarted, SessionId};
use jiff::Timestamp;

use crate::EndCause;

/// Maximum number of restarts in a row within [`WINDOW_S`].
pub const MAX_RESTARTS: u32 = 5;
/// A session that has run for this long since its first restart counts as healthy again.
pub const WINDOW_S: i64 = 600;

/// Additional delay of each node in the order: a restart takes a second or two.
const TURN_MS: u64 = 5_000;
/// Delay before a second restart, doubled before each further one.
const PAUSE_MS: u64 = 1_000;
/// Maximum delay between two restart attempts.
const LONGEST_PAUSE_MS: u64 = 30_000;

/// State of a session that has no live owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownerless {
    /// Its node was declared dead before it gave the session up.
    NodeGone,
    /// Its node has given it up, or was about to.
    Ended {
        cause: EndCause,
        /// Whether it was ever ready.
        ran: bool,
        exit_code: Option<i32>,
    },
}

/// What follows from a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    No,
    /// Restart data for the record of its next start.
    Restart(Restarted),
    /// The session has been restarted too often.
    GivenUp {
        count: u32,
    },
}

/// Why the session lost its node, if that is why it does not run: a session that was stopped or
/// ended by itself has not lost its node. A session whose restart failed still lacks the node it
/// lost.
#[must_use]
pub fn lost_by(spec: &ResolvedSpec, end: Ownerless) -> Option<NodeLoss> {
    reported_loss(end).or_else(|| failed_restart(spec, end).map(|restarted| restarted.because))
}

/// Restart data for the record of a start that a connection requests: why the session lost its
/// node, so that a failed start does not hide this from the next connection. `from` is its last
/// node, if known; `gone` whether that node was seen to be lost. `None` if no node was lost.
///
/// This does not count as a restart: the count of a failed restart is kept, and starts at zero
/// after another loss.
#[must_use]
pub fn asked_for(
    spec: &ResolvedSpec,
    end: Ownerless,
    from: Option<&str>,
    gone: bool,
    now: Timestamp,
) -> Option<Restarted> {
    if let Some(failed) = failed_restart(spec, end) {
        return Some(failed.clone());
    }
    Some(Restarted {
        because: reported_loss(end).or(gone.then_some(NodeLoss::Lost))?,
        from: from?.to_owned(),
        count: 0,
        since: now,
    })
}

/// Whether this life was started by the last permitted restart.
#[must_use]
pub fn was_last(spec: &ResolvedSpec) -> bool {
    let count = spec.restarted.as_ref().map(|restarted| restarted.count);
    count.is_some_and(|count| count >= MAX_RESTARTS)
}

/// The loss given by the end itself.
fn reported_loss(end: Ownerless) -> Option<NodeLoss> {
    let Ownerless::Ended { cause, .. } = end else {
        return Some(NodeLoss::Lost);
    };
    match cause {
        EndCause::Preempted => Some(NodeLoss::Preempted),
        EndCause::Drained => Some(NodeLoss::Drained),
        EndCause::NodeLost => Some(NodeLoss::Lost),
        EndCause::Unrecorded
        | EndCause::Deleted
        | EndCause::Idle
        | EndCause::Lifetime
        | EndCause::DiskLimit
        | EndCause::ShutDown
        | EndCause::Disowned
        | EndCause::Exited
        | EndCause::OutOfMemory
        | EndCause::Killed
        | EndCause::StartFailed
        | EndCause::Unknown => None,
    }
}

/// The restart that this end is the failure of, if the program did not cause it.
fn failed_restart(spec: &ResolvedSpec, end: Ownerless) -> Option<&Restarted> {
    let failed = matches!(
        end,
        Ownerless::Ended {
            // Without an exit code, the program is not known to have caused it.
            cause: EndCause::Unrecorded | EndCause::StartFailed | EndCause::Exited,
            ran: false,
            exit_code: None,
        }
    );
    spec.restarted.as_ref().filter(|_| failed)
}

/// Whether the time at which the session has to stop is over. Then only a client's request starts it.
#[must_use]
pub fn is_expired(spec: &ResolvedSpec, now: Timestamp) -> bool {
    spec.expires_at.is_some_and(|at| at <= now)
}

/// Decides on a session by its record, whose latest life began at `created_at` on `node`.
#[must_use]
pub fn judge(
    spec: &ResolvedSpec,
    created_at: Timestamp,
    node: &str,
    end: Ownerless,
    now: Timestamp,
) -> Verdict {
    if spec.on_node_loss != OnNodeLoss::Restart {
        return Verdict::No;
    }
    if is_expired(spec, now) {
        return Verdict::No;
    }
    let failed = || failed_restart(spec, end).map(|last| (last.because, last.from.as_str()));
    let lost = reported_loss(end).map(|loss| (loss, node)).or_else(failed);
    let Some((because, from)) = lost else {
        return Verdict::No;
    };
    // The nodes' clocks may differ a little, which changes a generous limit slightly. If a clock
    // was far off, the earlier count is not used.
    let earlier = spec.restarted.as_ref().filter(|restarted| {
        let apart = created_at.duration_since(restarted.since);
        apart.as_secs().abs() <= WINDOW_S
    });
    let count = earlier.map_or(0, |restarted| restarted.count);
    if count >= MAX_RESTARTS {
        return Verdict::GivenUp { count };
    }
    Verdict::Restart(Restarted {
        from: from.to_owned(),
        because,
        count: count + 1,
        since: earlier.map_or(now, |restarted| restarted.since),
    })
}

/// The sessions that a node has seen without an owner, and when it restarts them.
#[derive(Debug, Default)]
pub struct Watch {
    seen: BTreeMap<SessionId, Seen>,
}

#[derive(Debug)]
struct Seen {
    generation: Generation,
    since_ms: u64,
    tries: u32,
    tried_ms: u64,
    under_way: bool,
}

impl Watch {
    /// Whether it is this node's turn to restart the session now; if so, the caller must start to.
    pub fn is_due(
        &mut self,
        now_ms: u64,
        (id, generation): (&SessionId, Generation),
        turn: usize,
        count: u32,
    ) -> bool {
        let fresh = || Seen {
            generation,
            since_ms: now_ms,
            tries: 0,
            tried_ms: 0,
            under_way: false,
        };
        let seen = self.seen.entry(id.clone()).or_insert_with(fresh);
        if seen.under_way {
            return false;
        }
        if seen.generation != generation {
            *seen = fresh();
        }
        let turn = u64::try_from(turn).unwrap_or(u64::MAX);
        let first = seen
            .since_ms
            .saturating_add(turn.saturating_mul(TURN_MS))
            .saturating_add(pause_ms(count.saturating_sub(1)));
        let again = seen.tried_ms.saturating_add(pause_ms(seen.tries));
        let due = now_ms >= first && (seen.tries == 0 || now_ms >= again);
        if due {
            seen.under_way = true;
            seen.tries = seen.tries.saturating_add(1);
            seen.tried_ms = now_ms;
        }
        due
    }

    /// A restart that was begun is over, whatever its result.
    pub fn tried(&mut self, now_ms: u64, id: &SessionId) {
        if let Some(seen) = self.seen.get_mut(id) {
            seen.under_way = false;
            seen.tried_ms = now_ms;
        }
    }

    /// After all sessions were read: forgets those for which `lack` is false, which have an owner
    /// again.
    pub fn keep(&mut self, lack: impl Fn(&SessionId) -> bool) {
        self.seen.retain(|id, seen| seen.under_way || lack(id));
    }

    /// Whether there are no sessions to watch.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.seen.is_empty()
    }
}

/// The delay after so many attempts.
fn pause_ms(tries: u32) -> u64 {
    match tries {
        0 => 0,
        _ => (PAUSE_MS << (tries - 1).min(16)).min(LONGEST_PAUSE_MS),
    }
}

#[cfg(test)]
mod tests;
