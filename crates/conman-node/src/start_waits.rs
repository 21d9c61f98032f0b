//! Connections that wait for a session to start, bounded for each session and in all.

use std::sync::Arc;
use std::time::Duration;

use conman_proto::{SessionId, SessionState};
use tokio::time::{sleep, timeout};

use crate::access::{template_starts_on_connect, to_running};
use crate::context::Context;
use crate::ensure;
use crate::error::{RouteError, Waiting};
use crate::options::NodeLimits;
use crate::pause::{self, PauseState};
use crate::route::SessionRoute;
use crate::session::{SessionHandle, View};

/// Pause between two attempts to resume a session for a connection.
const RESUME_RETRY: Duration = Duration::from_millis(100);

/// Counts held connections: each has a reference, and so has the owner of the count.
pub(crate) type HeldCount = Arc<()>;

/// Returns the number of connections that are held now.
pub(crate) fn held_now(count: &HeldCount) -> usize {
    Arc::strong_count(count) - 1
}

/// A held connection, which counts for its session and for the node until it is dropped.
#[derive(Debug)]
pub(crate) struct HeldConnection {
    _node: HeldCount,
    _session: HeldCount,
}

impl HeldConnection {
    /// Of connections that begin at the same moment, each may take the last place.
    pub(crate) fn begin(
        node: &HeldCount,
        session: &SessionHandle,
        limits: &NodeLimits,
    ) -> Result<Self, RouteError> {
        let is_full = |count, limit| held_now(count) >= limit;
        let (what, limit) = if is_full(&session.held, limits.max_held_per_session) {
            let what = Waiting::Session(session.id.clone());
            (what, limits.max_held_per_session)
        } else if is_full(node, limits.max_held) {
            (Waiting::Node, limits.max_held)
        } else {
            return Ok(Self {
                _node: Arc::clone(node),
                _session: Arc::clone(&session.held),
            });
        };
        Err(RouteError::TooManyWaiting { what, limit })
    }
}

/// Upper bound on a hold: the sum of the bounds of a start's steps.
pub(crate) fn bound(context: &Context, handle: &SessionHandle) -> Duration {
    let bounds = &context.options.bounds;
    Duration::from_secs(handle.spec().ready_timeout_s.into())
        + bounds.ending
        + bounds.queue
        + bounds.create
        + bounds.start
}

/// Returns the route to a session's program once it runs; starts the session if it has ended, and
/// `may_start` and its template allow that.
pub(crate) async fn wait_for_route(
    context: &Arc<Context>,
    mut handle: Arc<SessionHandle>,
    may_start: bool,
) -> Result<SessionRoute, RouteError> {
    loop {
        let view = handle.view();
        match view.state {
            SessionState::Running | SessionState::Frozen | SessionState::Paused => {
                if let Some(route) = route_or_change(context, &handle, view.state).await? {
                    return Ok(route);
                }
            }
            SessionState::Starting => wait_for_start(context, &handle).await?,
            SessionState::Stuck => return Err(stuck(&handle.id, &view)),
            SessionState::Stopping | SessionState::Stopped | SessionState::Failed
                if may_start && starts_on_connect(context, &handle) =>
            {
                handle = start_again(context, &handle).await?;
            }
            SessionState::Stopping => {
                // Another node may take it as soon as it has ended here.
                handle
                    .wait_for(|view| view.state != SessionState::Stopping)
                    .await;
            }
            SessionState::Stopped | SessionState::Failed => return Err(ended(&handle.id, view)),
        }
    }
}

/// Returns the route to a session that runs. If it has none, resumes the session or waits for a change,
/// and returns `None`. `shown` is its public state.
async fn route_or_change(
    context: &Context,
    handle: &SessionHandle,
    shown: SessionState,
) -> Result<Option<SessionRoute>, RouteError> {
    let mut standing = context.options.standing.clone();
    let fenced = standing.borrow_and_update().is_frozen();
    if let Some(route) = to_running(context, handle)? {
        return Ok(Some(route));
    }
    let paused = pause::state(context, handle);
    if paused == PauseState::ResumedByOrder {
        return Err(RouteError::Paused {
            id: handle.id.clone(),
        });
    }
    if paused == PauseState::ResumedByUse && !fenced {
        if let Err(error) = pause::resume(context, handle).await {
            let id = &handle.id;
            tracing::warn!(session = %id, %error, "cannot resume a session; retrying");
            sleep(RESUME_RETRY).await;
        }
        return Ok(None);
    }
    // Cancel safe: both only wait for a change.
    tokio::select! {
        // Killed, and not yet shown as ending.
        _ = handle.wait_for(|present| present.state != shown) => {}
        // When nothing can change it any more, the daemon ends.
        Ok(()) = standing.changed() => {
            if fenced && !context.is_fenced() {
                ended_if_lost(context, handle).await;
            }
        }
    }
    Ok(None)
}

/// Waits until a start is over, which must not have failed.
async fn wait_for_start(context: &Context, handle: &SessionHandle) -> Result<(), RouteError> {
    // The full reason of a failed start, with the program's exit code, is known only once the session
    // has ended.
    let view = handle
        .wait_for(|view| !matches!(view.state, SessionState::Starting | SessionState::Stopping))
        .await;
    match ensure::failure(context, handle, &view) {
        Some(source) => Err(RouteError::NotStarted {
            id: handle.id.clone(),
            source,
        }),
        None => Ok(()),
    }
}

/// Starts a session that has ended or is about to.
async fn start_again(
    context: &Arc<Context>,
    former: &SessionHandle,
) -> Result<Arc<SessionHandle>, RouteError> {
    let id = &former.id;
    let spec = (*former.spec()).clone();
    let ensured = ensure::ensure(context, id, &spec, true).await;
    let ensured = ensured.map_err(|source| RouteError::NotStarted {
        id: id.clone(),
        source,
    })?;
    if ensured.handle.is_ended() {
        // Its program ended as soon as it ran; starting it repeatedly does not help.
        return Err(ended(id, ensured.handle.view()));
    }
    Ok(ensured.handle)
}

/// Waits until the end of a session that this node lost while it was fenced is carried out. The end
/// is ordered once the node is live again.
async fn ended_if_lost(context: &Context, handle: &SessionHandle) {
    let read = timeout(
        context.options.bounds.registry,
        context.registry.get(&handle.id),
    );
    if let Ok(Ok(record)) = read.await
        && record.map(|record| record.generation) != handle.generation()
    {
        // A session that cannot be killed here may still be served by another node.
        let over = |view: &View| view.state.is_ended() || view.state == SessionState::Stuck;
        handle.wait_for(over).await;
    }
}

fn ended(id: &SessionId, view: View) -> RouteError {
    RouteError::Ended {
        id: id.clone(),
        state: view.state,
        reason: view.reason,
    }
}

fn stuck(id: &SessionId, view: &View) -> RouteError {
    let reason = view.reason.clone().unwrap_or_default();
    RouteError::Stuck {
        id: id.clone(),
        reason,
    }
}

fn starts_on_connect(context: &Context, handle: &SessionHandle) -> bool {
    template_starts_on_connect(context, handle.spec().template.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: &str) -> Arc<SessionHandle> {
        let spec = crate::session_table::tests::spec();
        SessionHandle::new(id.parse().expect("id"), spec, View::starting())
    }

    #[test]
    fn a_full_session_leaves_room_for_others_until_the_node_is_full() {
        let (alice, bob) = (session("alice"), session("bob"));
        let node = HeldCount::default();
        let limits = NodeLimits {
            max_held: 3,
            max_held_per_session: 2,
            ..NodeLimits::default()
        };
        let hold = |session: &SessionHandle| HeldConnection::begin(&node, session, &limits);

        let first = hold(&alice).expect("room");
        let second = hold(&alice).expect("room");
        let refused = hold(&alice).expect_err("alice is full");
        assert!(refused.to_string().contains("session alice"), "{refused}");
        let third = hold(&bob).expect("room for bob");
        let refused = hold(&bob).expect_err("the node is full");
        assert!(refused.to_string().contains("this node"), "{refused}");

        drop((first, second, third));
        let held = [&node, &alice.held, &bob.held].map(held_now);
        assert_eq!(held, [0, 0, 0]);
    }
}
