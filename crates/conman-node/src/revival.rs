//! Starts a session without an owner by its record.

use std::sync::Arc;

use async_trait::async_trait;
use conman_core::EndCause;
use conman_core::restart::{self, Ownerless, Verdict};
use conman_proto::{Generation, ResolvedSpec, SessionId, SessionState};
use conman_registry::{RecordState, RegistryError, SessionRecord};
use jiff::Timestamp;

use crate::access::{AccessHandle, template_starts_on_connect};
use crate::context::Context;
use crate::ensure;
use crate::error::{EnsureError, RestartError, RouteError};
use crate::route::SessionRoute;

/// Starts sessions of this node on other nodes.
#[async_trait]
pub trait Relocate: Send + Sync + std::fmt::Debug + 'static {
    /// Makes another node start a session that this one has released, by its record. Returns the node that
    /// runs it, or why none does.
    async fn relocate(&self, id: &SessionId, generation: Generation) -> Result<String, String>;

    /// Whether a node other than this one could start the session now.
    fn may_run_elsewhere(&self, id: &SessionId, spec: &ResolvedSpec) -> bool;
}

/// How the session of a record without an owner ended.
#[must_use]
pub fn end_of(record: &SessionRecord) -> Ownerless {
    let Some(cause) = record.state.end_cause() else {
        return Ownerless::NodeGone;
    };
    let (ran, exit_code) = match &record.state {
        RecordState::Ended(ending) => (ending.started_at.is_some(), ending.exit_code),
        // It was to end before its node was lost, for the reason that counts.
        _ => (true, None),
    };
    Ownerless::Ended {
        cause,
        ran,
        exit_code,
    }
}

/// The former node of a session that a connection is to start again.
#[derive(Debug, Clone, Copy)]
pub struct Former<'a> {
    /// Absent if the caller does not know it.
    pub node: Option<&'a str>,
    /// Whether that node is lost.
    pub is_lost: bool,
}

/// See [`AccessHandle::revive`].
pub(crate) async fn revive(
    access: &AccessHandle,
    id: &SessionId,
    may_start: bool,
    former: Former<'_>,
) -> Result<SessionRoute, RouteError> {
    let context = &access.context;
    let current = context.sessions.current(id);
    if current.is_some_and(|handle| !handle.is_ended()) {
        return access.route(id, may_start).await;
    }
    let not_started = |source| RouteError::NotStarted {
        id: id.clone(),
        source,
    };
    let record = read(context, id).await.map_err(not_started)?;
    let record = record.ok_or_else(|| RouteError::NoSuchSession { id: id.clone() })?;
    let (end, now) = (end_of(&record), Timestamp::now());
    let unwanted = record.state.end_cause() == Some(EndCause::Deleted);
    let gone = former.is_lost && !unwanted;
    let by_itself = match record.state.is_ended() {
        _ if restart::is_expired(&record.spec, now) => false,
        true => may_start && (gone || restart::lost_by(&record.spec, end).is_some()),
        false => !unwanted,
    };
    let template = record.spec.template.as_deref();
    if !(by_itself || may_start && template_starts_on_connect(context, template)) {
        return Err(ended(id, &record.state));
    }
    let asked_for = ResolvedSpec {
        restarted: restart::asked_for(&record.spec, end, former.node, gone, now),
        ..record.spec.clone()
    };
    ensure::ensure_by(context, id, &asked_for, Some(record), true)
        .await
        .map_err(not_started)?;
    access.route(id, false).await
}

async fn read(context: &Context, id: &SessionId) -> Result<Option<SessionRecord>, EnsureError> {
    let read = context.registry.get(id).await;
    read.map_err(|source| EnsureError::Registry {
        id: id.clone(),
        source: Arc::new(source),
    })
}

fn ended(id: &SessionId, state: &RecordState) -> RouteError {
    let (state, reason) = match state {
        RecordState::Ended(ending) => (crate::view::ended_state(ending), Some(&ending.reason)),
        RecordState::Stopping { reason, .. } | RecordState::Stuck { reason, .. } => {
            (SessionState::Stopped, Some(reason))
        }
        RecordState::Starting | RecordState::Running { .. } => (SessionState::Stopped, None),
    };
    RouteError::Ended {
        id: id.clone(),
        state,
        reason: reason.cloned(),
    }
}

/// What a node does with a restart that would fail without the image, as far as its runtime knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutImage {
    /// Begins nothing, so that no attempt is counted: another node may have the image.
    Refuse,
    /// Makes the attempt, which is shown and counted, so that restarts end.
    Try,
}

/// See [`crate::SessionsHandle::restart`].
pub(crate) async fn restart(
    context: &Arc<Context>,
    id: &SessionId,
    generation: Generation,
    from: &str,
    without_image: WithoutImage,
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
        ..record.spec.clone()
    };
    if without_image == WithoutImage::Refuse
        && let Some(why) = ensure::lacks_image(context, &spec).await
    {
        let id = id.clone();
        return Err(not_started(EnsureError::NoSuchImage { id, why }));
    }
    let ensured = ensure::ensure_by(context, id, &spec, Some(record), true).await;
    let ensured = ensured.map_err(|error| match &error {
        // A client deleted it meanwhile, or another node was first.
        EnsureError::Registry { source, .. }
            if matches!(**source, RegistryError::Changed { .. }) =>
        {
            not_wanted()
        }
        _ => not_started(error),
    })?;
    ensured.handle.generation().ok_or_else(not_wanted)
}
