//! Starts by its record what has no owner any more.

use std::sync::Arc;

use async_trait::async_trait;
use conman_core::restart::{self, End, Verdict};
use conman_proto::{Generation, ResolvedSpec, SessionId};
use conman_registry::{Ending, RecordState, SessionRecord};
use jiff::Timestamp;

use crate::access::{route, template_starts_on_connect};
use crate::context::Context;
use crate::ensure;
use crate::error::{EnsureError, RestartError, RouteError};
use crate::route::SessionRoute;

/// Who has sessions of this node started on others.
#[async_trait]
pub trait Relocate: Send + Sync + std::fmt::Debug + 'static {
    /// Has another node start a session that this one has given up, by its record: the node that
    /// it runs on then, or why it runs on none.
    async fn relocate(&self, id: &SessionId, generation: Generation) -> Result<String, String>;
}

/// How a record stands that nobody owns.
#[must_use]
pub fn end_of(record: &SessionRecord) -> End<'_> {
    match &record.state {
        RecordState::Ended(ending) => End::Ended {
            reason: &ending.reason,
            failed: ending.failed,
            ran: ending.started_at.is_some(),
            exit_code: ending.exit_code,
        },
        // It was to end before its node went, for the reason that counts.
        RecordState::Stopping { reason } | RecordState::Stuck { reason } => End::Ended {
            reason,
            failed: false,
            ran: true,
            exit_code: None,
        },
        RecordState::Starting | RecordState::Running { .. } => End::NodeGone,
    }
}

/// See [`crate::Node::revive`].
pub(crate) async fn revive(
    context: &Arc<Context>,
    id: &SessionId,
    may_start: bool,
    lost: bool,
) -> Result<SessionRoute, RouteError> {
    if context
        .sessions
        .current(id)
        .is_some_and(|handle| !handle.is_ended())
    {
        return route(context, id, may_start).await;
    }
    let not_started = |source| RouteError::NotStarted {
        id: id.clone(),
        source,
    };
    let record = read(context, id).await.map_err(not_started)?;
    let record = record.ok_or_else(|| RouteError::NoSuchSession { id: id.clone() })?;
    if let RecordState::Ended(ending) = &record.state
        && !(may_start
            && (lost
                || restart::lost_by(&record.spec, end_of(&record)).is_some()
                || template_starts_on_connect(context, record.spec.template.as_deref())))
    {
        return Err(ended(id, ending));
    }
    let asked_for = ResolvedSpec {
        restarted: None,
        ..record.spec
    };
    ensure::ensure(context, id, &asked_for, true)
        .await
        .map_err(not_started)?;
    route(context, id, false).await
}

async fn read(context: &Context, id: &SessionId) -> Result<Option<SessionRecord>, EnsureError> {
    let read = context.registry.get(id).await;
    read.map_err(|source| EnsureError::Registry {
        id: id.clone(),
        source: Arc::new(source),
    })
}

fn ended(id: &SessionId, ending: &Ending) -> RouteError {
    RouteError::Ended {
        id: id.clone(),
        state: crate::view::ended_state(ending),
        reason: Some(ending.reason.clone()),
    }
}

/// See [`crate::Node::restart`].
pub(crate) async fn restart(
    context: &Arc<Context>,
    id: &SessionId,
    generation: Generation,
    from: &str,
) -> Result<Generation, RestartError> {
    let not_wanted = || RestartError::NotWanted {
        id: id.clone(),
        generation,
    };
    let not_started = |source| RestartError::NotStarted {
        id: id.clone(),
        source,
    };
    let current = context.sessions.current(id);
    if current.is_some_and(|handle| !handle.is_ended()) {
        return Err(not_wanted());
    }
    let record = read(context, id).await.map_err(not_started)?;
    let record = record.filter(|record| record.generation == generation);
    let record = record.ok_or_else(not_wanted)?;
    let end = end_of(&record);
    let verdict = restart::judge(&record.spec, record.created_at, from, end, Timestamp::now());
    let Verdict::Restart(restarted) = verdict else {
        return Err(not_wanted());
    };
    let spec = ResolvedSpec {
        restarted: Some(restarted),
        ..record.spec
    };
    let ensured = ensure::ensure(context, id, &spec, true).await;
    let ensured = ensured.map_err(not_started)?;
    ensured.handle.generation().ok_or_else(not_wanted)
}
