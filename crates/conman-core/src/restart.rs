//! Which sessions a fleet starts again by itself, and which of its nodes sees to it.
//!
//! ```text
//! record ─ not asked for, ended by itself, stopped ─▶ Verdict::No
//!        ├ its node has gone, or a restart of it failed ─▶ Verdict::Restart(count) ─▶ Watch: when
//!        └ too often in a short time ─▶ Verdict::GivenUp
//! ```
//!
//! Every node looks at the same records. For each session the nodes have an order of their own (a
//! hash of both names): the first restarts it at once, each other one after a while longer, in case
//! those before it died over it. How often it was restarted stands in its record, so that a session
//! that brings down every node it comes to ends with a few of them, whoever restarts it.
//!
//! It decides nothing about ownership: whoever restarts a session still has to claim it.

use std::collections::BTreeMap;

use conman_proto::{Generation, NodeLoss, OnNodeLoss, ResolvedSpec, Restarted, SessionId};
use jiff::Timestamp;

use crate::EndCause;
use crate::placement::rank;

/// Restarts that may follow each other within [`WINDOW_S`].
pub const MAX_RESTARTS: u32 = 5;
/// A session that has run for so long since its first restart counts as well again.
pub const WINDOW_S: i64 = 600;

/// How much longer each node waits than the one before it: a restart takes a second or two.
const TURN_MS: u64 = 5_000;
/// Before a second restart, doubled before each further one.
const PAUSE_MS: u64 = 1_000;
/// Between two tries that no node took, at most.
const LONGEST_PAUSE_MS: u64 = 30_000;

/// How a session stands that has no live owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its node was declared dead before it gave the session up.
    NodeGone,
    /// Its node has given it up, or was about to.
    Ended {
        cause: EndCause,
        /// Whether it was ready at some time.
        ran: bool,
        exit_code: Option<i32>,
    },
}

/// What a record comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    No,
    /// What the record of its next start says.
    Restart(Restarted),
    /// It was restarted so often already.
    GivenUp {
        count: u32,
    },
}

/// What took its node from a session, if that is why it does not run: a session that was stopped or
/// ended by itself has lost nothing. One whose restart failed is still without the node it lost.
#[must_use]
pub fn lost_by(spec: &ResolvedSpec, end: End) -> Option<NodeLoss> {
    told_loss(end).or_else(|| failed_restart(spec, end).map(|restarted| restarted.because))
}

/// What the record of a start says that somebody's connection asks for: what took its node from the
/// session, so that a start that fails does not lose it for the next connection. `from` is the node
/// that it was on, where that is known; `gone` whether that one was seen to be gone. `None` where
/// nothing was lost.
///
/// It is no restart by itself: a failed one's count stays, and after another loss it begins anew, as
/// whenever somebody asks.
#[must_use]
pub fn asked_for(
    spec: &ResolvedSpec,
    end: End,
    from: Option<&str>,
    gone: bool,
    now: Timestamp,
) -> Option<Restarted> {
    if let Some(failed) = failed_restart(spec, end) {
        return Some(failed.clone());
    }
    Some(Restarted {
        because: told_loss(end).or(gone.then_some(NodeLoss::Lost))?,
        from: from?.to_owned(),
        count: 0,
        since: now,
    })
}

/// Whether the restart that began this life was the last of those that may follow each other.
#[must_use]
pub fn was_last(spec: &ResolvedSpec) -> bool {
    let count = spec.restarted.as_ref().map(|restarted| restarted.count);
    count.is_some_and(|count| count >= MAX_RESTARTS)
}

/// What the end itself says.
fn told_loss(end: End) -> Option<NodeLoss> {
    let End::Ended { cause, .. } = end else {
        return Some(NodeLoss::Lost);
    };
    match cause {
        EndCause::Preempted => Some(NodeLoss::Preempted),
        EndCause::Drained => Some(NodeLoss::Drained),
        EndCause::NodeLost => Some(NodeLoss::Lost),
        EndCause::Unrecorded
        | EndCause::Deleted
        | EndCause::Expired
        | EndCause::DiskLimit
        | EndCause::ShutDown
        | EndCause::Disowned
        | EndCause::Exited
        | EndCause::Failed
        | EndCause::Unknown => None,
    }
}

/// The restart that this is the bad end of, for no doing of its program's.
fn failed_restart(spec: &ResolvedSpec, end: End) -> Option<&Restarted> {
    let failed = matches!(
        end,
        End::Ended {
            // Where nobody knows its program's exit code, nobody knows that it was its doing.
            cause: EndCause::Unrecorded | EndCause::Failed | EndCause::Exited,
            ran: false,
            exit_code: None,
        }
    );
    spec.restarted.as_ref().filter(|_| failed)
}

/// What follows from a session's record, whose latest life began at `created_at` on `node`.
#[must_use]
pub fn judge(
    spec: &ResolvedSpec,
    created_at: Timestamp,
    node: &str,
    end: End,
    now: Timestamp,
) -> Verdict {
    if spec.on_node_loss != OnNodeLoss::Restart {
        return Verdict::No;
    }
    let failed = || failed_restart(spec, end).map(|last| (last.because, last.from.as_str()));
    let lost = told_loss(end).map(|loss| (loss, node)).or_else(failed);
    let Some((because, from)) = lost else {
        return Verdict::No;
    };
    // Clocks of nodes may differ a little: that lengthens or shortens a limit that is generous. A
    // clock that was far off, either way, gives no ground to count on.
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

/// Which node of those that are `live` sees to the session: 0 for the first. `None` for one that is
/// not among them.
#[must_use]
pub fn turn(me: &str, live: &[&str], session: &SessionId) -> Option<usize> {
    let score = |name: &str| rank(session, name);
    live.contains(&me).then(|| {
        let mine = (score(me), me);
        live.iter()
            .filter(|other| (score(other), **other) > mine)
            .count()
    })
}

/// The sessions that a node has seen without an owner, and when it does something about them.
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
    /// Whether it is this node's turn to restart the session now; the caller begins to.
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

    /// A restart that was begun is over, whatever it came to.
    pub fn tried(&mut self, now_ms: u64, id: &SessionId) {
        if let Some(seen) = self.seen.get_mut(id) {
            seen.under_way = false;
            seen.tried_ms = now_ms;
        }
    }

    /// All sessions were looked at: those that `lack` no owner any more are forgotten.
    pub fn keep(&mut self, lack: impl Fn(&SessionId) -> bool) {
        self.seen.retain(|id, seen| seen.under_way || lack(id));
    }

    /// Whether there is any session to look after.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.seen.is_empty()
    }
}

/// After so many tries.
fn pause_ms(tries: u32) -> u64 {
    match tries {
        0 => 0,
        _ => (PAUSE_MS << (tries - 1).min(16)).min(LONGEST_PAUSE_MS),
    }
}

#[cfg(test)]
mod tests;
