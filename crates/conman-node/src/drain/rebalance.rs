//! Moves sessions of a node that has more than its share to other nodes, by order of an operator.
//!
//! One task stops one session at a time, in the order of a drain, and at most ten a second. If the session
//! is to be restarted, the task waits until it runs elsewhere before it stops the next one. The node admits
//! sessions meanwhile, and a stopped session may come back to it: each session is stopped at most once. The
//! order does not outlive the daemon.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::drain::KILL_MS;
use conman_proto::{DrainPlan, DrainRequest, EventKind, OnNodeLoss, RebalanceReport, SessionId};
use conman_registry::NewEvent;
use jiff::Timestamp;
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{Order, Outcome, Turns, candidates, plan_for, take_turn};
use crate::context::Context;
use crate::session::SessionHandle;

/// Least time between two stops: other nodes start sessions at least as fast.
const INTERVAL_MS: u64 = 100;

/// How long a further order is refused after the last move. The excess follows from what the nodes have
/// announced, which they do every 5 s: until then it would count the moved sessions as still here.
const SETTLE: Duration = Duration::from_secs(6);

fn order() -> Order {
    Order::of(&DrainRequest {
        parallel: Some(1),
        reason: Some("the node had more than its share of the sessions".to_owned()),
        ..DrainRequest::default()
    })
}

/// Returns which `count` sessions would be moved now.
pub(super) fn plan_now(context: &Context, count: u32) -> DrainPlan {
    let order = order();
    let mut sessions = candidates(context, &order, &Turns::new());
    sessions.retain(|session| {
        let handle = context.sessions.current(&session.id);
        handle.is_some_and(|handle| may_move(context, &handle))
    });
    for session in &mut sessions {
        // The next one waits for this one's start.
        let took_ms = session.release_ms + std::mem::take(&mut session.start_ms);
        session.release_ms = took_ms.max(INTERVAL_MS - KILL_MS);
    }
    let mut plan = plan_for(sessions, &order);
    let count = count as usize;
    if let Some(next) = plan.sessions.get(count) {
        plan.predicted_ms = next.at_ms;
    }
    plan.sessions.truncate(count);
    plan
}

/// Begins to move `count` sessions. False if an earlier order is carried out, or was just now.
pub(super) fn begin(context: &Arc<Context>, count: u32) -> bool {
    let Ok(only) = Arc::clone(&context.drain.rebalancing).try_lock_owned() else {
        return false;
    };
    if count == 0 {
        return true;
    }
    let message = format!("moving {count} sessions: the node has more than its share");
    tracing::info!("{message}");
    context.note(NewEvent::of_node(EventKind::RebalanceStarted, message));
    let context = Arc::clone(context);
    *lock(&context) = Some(RebalanceReport {
        started_at: Timestamp::now(),
        finished_at: None,
        planned: count.into(),
        moved: 0,
        waiting: 0,
        not_moved: 0,
    });
    tokio::spawn(async move {
        run(&context, count).await;
        note(&context, |report| {
            report.finished_at = Some(Timestamp::now())
        });
        let message = report(&context).map_or_else(String::new, |report| {
            format!(
                "moved {} of {} sessions to other nodes; {} start again where they are needed; {} could not \
                 be moved",
                report.moved, report.planned, report.waiting, report.not_moved
            )
        });
        tracing::info!("{message}");
        context.note(NewEvent::of_node(EventKind::RebalanceFinished, message));
        sleep(SETTLE).await;
        drop(only);
    });
    true
}

/// Returns what the latest rebalance has done.
pub(super) fn report(context: &Context) -> Option<RebalanceReport> {
    lock(context).clone()
}

fn lock(context: &Context) -> MutexGuard<'_, Option<RebalanceReport>> {
    let report = context.drain.rebalanced.lock();
    report.unwrap_or_else(PoisonError::into_inner)
}

/// Counts a session that was stopped.
fn note(context: &Context, count: impl FnOnce(&mut RebalanceReport)) {
    if let Some(report) = &mut *lock(context) {
        count(report);
    }
}

/// Stops `count` sessions at most. Ends early if the node leaves.
async fn run(context: &Arc<Context>, count: u32) {
    let (order, mut had) = (order(), BTreeSet::new());
    let mut tick = interval(Duration::from_millis(INTERVAL_MS));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let places = Arc::new(Semaphore::new(1));
    for _ in 0..count {
        tick.tick().await;
        let leaves = context.drain.reason().is_some()
            || context.table.closed().is_some()
            || context.leave.is_stopping();
        if leaves {
            break;
        }
        let Some(handle) = next(context, &order, &mut had) else {
            break;
        };
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            break;
        };
        let (id, wants_restart) = (handle.id.clone(), wants_restart(&handle));
        let outcome = take_turn(Arc::clone(context), handle, order.clone(), place).await;
        let came_back = context.sessions.current(&id);
        let came_back = came_back.is_some_and(|handle| !handle.is_ended());
        match outcome {
            Outcome::Moved(_) if !came_back => note(context, |report| report.moved += 1),
            Outcome::Released if !came_back && !wants_restart => {
                note(context, |report| report.waiting += 1);
            }
            Outcome::Moved(_) | Outcome::Released | Outcome::Unreleased(_) => {
                note(context, |report| report.not_moved += 1);
            }
        }
    }
}

fn wants_restart(handle: &SessionHandle) -> bool {
    handle.spec().on_node_loss == OnNodeLoss::Restart
}

/// Returns the session whose turn is next: of one that came back, the later life has no further turn.
fn next(
    context: &Context,
    order: &Order,
    had: &mut BTreeSet<SessionId>,
) -> Option<Arc<SessionHandle>> {
    let planned = plan_for(candidates(context, order, &Turns::new()), order);
    let handles = planned.sessions.into_iter();
    let mut handles = handles.filter_map(|session| context.sessions.current(&session.id));
    handles.find(|handle| had.insert(handle.id.clone()) && may_move(context, handle))
}

/// A session that only this node can run would be interrupted for nothing.
fn may_move(context: &Context, handle: &SessionHandle) -> bool {
    let others = context.relocate.get();
    others.is_some_and(|others| others.may_run_elsewhere(&handle.id, &handle.spec()))
}
