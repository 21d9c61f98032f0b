//! Starts and stops sessions.

use std::sync::Arc;

use conman_core::EndCause;
use conman_proto::{Generation, OnNodeLoss, ResolvedSpec, SessionId, SessionState, StopReport};
use conman_registry::{RecordState, RegistryError, SessionRecord, Standing};
use tokio::time::{Instant, timeout, timeout_at};

use crate::context::Context;
use crate::error::{EnsureError, FailureKind, StopError};
use crate::kill_table::{KillEntry, StartStage};
use crate::session::{self, Beginning, Failure, SessionHandle, View, reason_of_deleted};
use crate::session_table::Admission;

/// The result of an ensure.
#[derive(Debug)]
pub(crate) struct Ensured {
    pub(crate) handle: Arc<SessionHandle>,
    /// Whether this very call began the start.
    pub(crate) created: bool,
}

/// See [`crate::SessionsHandle::ensure`].
pub(crate) async fn ensure(
    context: &Arc<Context>,
    id: &SessionId,
    spec: &ResolvedSpec,
    wait: bool,
) -> Result<Ensured, EnsureError> {
    ensure_by(context, id, spec, None, wait).await
}

/// Like [`ensure`], but begins a start only if the record is still as `read`.
pub(crate) async fn ensure_by(
    context: &Arc<Context>,
    id: &SessionId,
    spec: &ResolvedSpec,
    read: Option<SessionRecord>,
    wait: bool,
) -> Result<Ensured, EnsureError> {
    let deadline = Instant::now() + context.options.bounds.ending;
    let ensured = loop {
        if is_to_look_for_image(context, id, spec)
            && let Some(why) = lacks_image(context, spec).await
        {
            let id = id.clone();
            return Err(EnsureError::NoSuchImage { id, why });
        }
        match admit(context, id, spec) {
            Admission::Start(handle) => {
                let beginning = Beginning::Fresh(read.map(Box::new));
                session::spawn(Arc::clone(context), Arc::clone(&handle), beginning);
                break Ensured {
                    handle,
                    created: true,
                };
            }
            Admission::Join(handle) => {
                break Ensured {
                    handle,
                    created: false,
                };
            }
            Admission::WaitForEnd(handle) => {
                refuse_silent_runtime(context, id, spec)?;
                wait_for_end(context, &handle, deadline).await?;
            }
            Admission::Refuse(error) => return Err(error),
        }
    };
    let handle = &ensured.handle;
    let view = handle
        .wait_for(|view| match view.state {
            SessionState::Starting => !wait && view.generation.is_some(),
            // Whether it started shows only once the runtime answers again.
            SessionState::Stopping => {
                is_unanswered(view) && context.health.silence(spec.runtime).is_some()
            }
            SessionState::Running
            | SessionState::Frozen
            | SessionState::Paused
            | SessionState::Stuck
            | SessionState::Stopped
            | SessionState::Failed => true,
        })
        .await;
    match failure(context, handle, &view) {
        Some(error) => Err(error),
        None => Ok(ensured),
    }
}

fn is_unanswered(view: &View) -> bool {
    matches!(
        view.failure,
        Some(Failure::Kind(FailureKind::RuntimeUnavailable))
    )
}

/// A runtime that is silent is sent no start: nobody would know when it takes effect.
fn refuse_silent_runtime(
    context: &Context,
    id: &SessionId,
    spec: &ResolvedSpec,
) -> Result<(), EnsureError> {
    match context.health.silence(spec.runtime) {
        Some(reason) => Err(EnsureError::RuntimeSilent {
            id: id.clone(),
            reason,
        }),
        None => Ok(()),
    }
}

/// Whether to check for the image before a start begins. In a fleet another node may have the image, so
/// a start that would fail without it is not begun, and nothing is recorded. A node that is alone tries
/// and shows the failed attempt. So does an automatic restart, unless another node can be asked: its
/// attempts are counted, so that they end.
fn is_to_look_for_image(context: &Context, id: &SessionId, spec: &ResolvedSpec) -> bool {
    let alone = *context.options.standing.borrow() == Standing::Alone;
    let counts = spec.restarted.as_ref().is_some_and(|one| one.count > 0);
    let current = context.sessions.current(id);
    !(alone || counts || current.is_some_and(|handle| !handle.is_ended()))
}

/// Returns why a start would fail without the image, as far as its runtime knows.
pub(crate) async fn lacks_image(context: &Context, spec: &ResolvedSpec) -> Option<String> {
    // A node that takes no sessions says so at once, without waiting for its runtime.
    if refusal(context).is_some() {
        return None;
    }
    let runtime = context.runtime(spec.runtime)?;
    let asked = timeout(
        context.options.bounds.prepare,
        runtime.lacks_image(&spec.image),
    );
    // If the check itself fails, the error shows, bounded, when the container is created.
    let error = asked.await.ok().flatten()?;
    Some(format!(
        "{}: {}",
        crate::phases::CREATE,
        conman_core::error_chain(&error)
    ))
}

/// Returns why the node takes no sessions now.
pub(crate) fn refusal(context: &Context) -> Option<EnsureError> {
    if let Some(closed) = context.table.closed() {
        return Some(EnsureError::Preempted {
            reason: closed.reason,
        });
    }
    if let Some(reason) = context.drain.reason() {
        return Some(EnsureError::Draining { reason });
    }
    context.cordon.is_set().then_some(EnsureError::Cordoned)
}

fn admit(context: &Arc<Context>, id: &SessionId, spec: &ResolvedSpec) -> Admission {
    let Some(runtime) = context.runtime(spec.runtime) else {
        let known: Vec<_> = context.runtimes.keys().map(ToString::to_string).collect();
        return Admission::Refuse(EnsureError::NoSuchRuntime {
            runtime: spec.runtime,
            known: known.join(", "),
        });
    };
    let host = context.host_limits.of(spec.runtime);
    let max_sessions = context.options.limits.max_sessions;
    let admission = context
        .sessions
        .admit(id, spec, max_sessions, host, |handle| {
            if let Some(missing) = missing_labels(context, spec) {
                let id = id.clone();
                return Err(EnsureError::LacksLabels { id, missing });
            }
            // A drain lists the lives after it has set its reason.
            if let Some(error) = refusal(context) {
                return Err(error);
            }
            refuse_silent_runtime(context, id, spec)?;
            let entry = kill_entry(handle, StartStage::Claiming, Some(Arc::clone(runtime)));
            context
                .table
                .admit(id, entry)
                .map_err(|closed| EnsureError::Preempted {
                    reason: closed.reason,
                })
        });
    if let Admission::Refuse(EnsureError::NoRoom { .. }) = admission {
        context.host_limits.met.notify_one();
    }
    admission
}

/// The labels that a session asks for and that this node, being alone, does not have.
fn missing_labels(context: &Context, spec: &ResolvedSpec) -> Option<String> {
    if *context.options.standing.borrow() != Standing::Alone {
        return None;
    }
    let own = &context.options.labels;
    let missing = spec.node_labels.iter();
    let missing = missing.filter(|(name, value)| own.get(*name) != Some(*value));
    let missing: Vec<String> = missing
        .map(|(name, value)| format!("`{name}={value}`"))
        .collect();
    (!missing.is_empty()).then(|| missing.join(", "))
}

/// The kill table's entry of a life.
pub(crate) fn kill_entry(
    handle: &SessionHandle,
    stage: StartStage,
    runtime: Option<Arc<dyn conman_runtime::Runtime>>,
) -> KillEntry {
    let spec = handle.spec();
    let signal = spec.preempt_signal.as_deref();
    let signal = signal.and_then(conman_linux::parse_signal);
    let grace = std::time::Duration::from_millis(spec.preempt_grace_ms.into());
    let view = handle.view();
    KillEntry {
        stage,
        runtime,
        warning: signal.map(|signal| (signal, grace)),
        pausing: handle.pausing.watch(),
        shares_files: !spec.binds.is_empty(),
        closing: Arc::clone(&handle.closing),
        fate: Arc::clone(&handle.fate),
        stop: handle.stop_orders(),
        leaving: Arc::clone(&handle.leaving),
        started_at: view.started_at,
        phases: view.phases,
    }
}

async fn wait_for_end(
    context: &Context,
    handle: &SessionHandle,
    deadline: Instant,
) -> Result<(), EnsureError> {
    let over = |view: &View| view.state.is_ended() || view.state == SessionState::Stuck;
    let view = timeout_at(deadline, handle.wait_for(over))
        .await
        .map_err(|_| EnsureError::StillEnding {
            id: handle.id.clone(),
            waited: context.options.bounds.ending,
        })?;
    let id = handle.id.clone();
    match (view.state, view.generation) {
        (SessionState::Stuck, Some(generation)) => Err(EnsureError::Stuck {
            id,
            generation,
            reason: view.reason.unwrap_or_default(),
        }),
        // Its claim was never answered, so the registry's state is unknown.
        (SessionState::Stuck, None) => {
            let waited = context.options.bounds.registry;
            Err(EnsureError::RegistrySlow { id, waited })
        }
        _ => Ok(()),
    }
}

/// Returns what kept a life from running, if anything did.
pub(crate) fn failure(
    context: &Context,
    handle: &SessionHandle,
    view: &View,
) -> Option<EnsureError> {
    let id = handle.id.clone();
    let session = || Box::new(crate::view::session(context, handle));
    let error = match view.failure.as_ref()? {
        Failure::Unclaimed(source) => EnsureError::Registry {
            id,
            source: Arc::clone(source),
        },
        Failure::ClaimSlow => EnsureError::RegistrySlow {
            id,
            waited: context.options.bounds.registry,
        },
        // The client's order to stop it takes precedence over what ended it.
        Failure::Kind(FailureKind::Stopped | FailureKind::Drained | FailureKind::ShutDown)
            if handle.caused_by(EndCause::ShutDown) == EndCause::Deleted =>
        {
            EnsureError::Stopped {
                id,
                session: session(),
            }
        }
        Failure::Kind(FailureKind::Stopped) => EnsureError::Stopped {
            id,
            session: session(),
        },
        Failure::Kind(FailureKind::Drained) => {
            let reason = context.drain.reason().or_else(|| view.reason.clone());
            EnsureError::Draining {
                reason: reason.unwrap_or_default(),
            }
        }
        Failure::Kind(FailureKind::ShutDown) => EnsureError::ShuttingDown,
        Failure::Kind(FailureKind::Preempted) => {
            let reason = context
                .table
                .closed()
                .map_or_else(String::new, |closed| closed.reason);
            EnsureError::Preempted { reason }
        }
        Failure::Kind(kind) => EnsureError::StartFailed {
            id,
            kind: *kind,
            session: session(),
        },
    };
    Some(error)
}

/// See [`crate::SessionsHandle::stop`].
pub(crate) async fn stop(
    context: &Context,
    id: &SessionId,
    why: &str,
) -> Result<StopReport, StopError> {
    let asked = Instant::now();
    let none = || StopError::NoSuchSession { id: id.clone() };
    let handle = context.sessions.current(id).ok_or_else(none)?;
    handle.order_stop(EndCause::Deleted, why);
    let bounds = &context.options.bounds;
    let over = |view: &View| view.state.is_ended() || view.state == SessionState::Stuck;
    let bound = bounds.registry + bounds.stuck_after + bounds.exit_code;
    let view = match timeout(bound, handle.wait_for(over)).await {
        Ok(view) => view,
        Err(_) => {
            let view = handle.view();
            if view.dead_at.is_some() {
                let reason = view.reason.unwrap_or_default();
                return Err(StopError::NotReleased {
                    id: id.clone(),
                    reason,
                });
            }
            view
        }
    };
    match (view.state, view.generation) {
        // The session may have ended before this order.
        (state, _) if state.is_ended() => call_off(context, &handle).await?,
        (SessionState::Stuck | SessionState::Stopping, Some(generation)) => {
            let cause = view.cause().unwrap_or(EndCause::Unknown);
            let reason = reason_of_deleted(cause, view.reason.clone().unwrap_or_default(), why);
            note_unwanted(context, &handle, generation, reason).await?;
        }
        _ => {}
    }
    let Some(generation) = view.generation else {
        if let Some(Failure::Unclaimed(source)) = &view.failure {
            match &**source {
                // Another node was first, or the record was changed: the session continues there.
                RegistryError::Elsewhere { .. } | RegistryError::Changed { .. } => {
                    return Err(StopError::Moved { id: id.clone() });
                }
                // Its record is still there, and another node may start it by that.
                RegistryError::Unavailable { .. } => {
                    return Err(StopError::NotForgotten {
                        id: id.clone(),
                        source: Arc::clone(source),
                    });
                }
                _ => {}
            }
        }
        // The start was stopped, or failed, before it was recorded: what is shown is older.
        return match context.sessions.shown(id) {
            Some(former) => report(id, &former.view(), asked).ok_or_else(none),
            None => Err(none()),
        };
    };
    let reason = view.reason.clone();
    Ok(report(id, &view, asked).unwrap_or(StopReport {
        id: id.clone(),
        generation,
        // Neither dead nor dying for long enough to be called stuck: the same to the caller.
        state: SessionState::Stuck,
        reason,
        dead_ms: None,
        released_ms: None,
    }))
}

/// Records that the session is unwanted, so that its next owner, perhaps another node, does not start it.
async fn note_unwanted(
    context: &Context,
    handle: &SessionHandle,
    generation: Generation,
    reason: String,
) -> Result<(), StopError> {
    let cause = Some(EndCause::Deleted);
    let state = RecordState::Stuck { reason, cause };
    let noted = context.registry.set_state(&handle.id, generation, state);
    match noted.await {
        Ok(()) | Err(RegistryError::Superseded { .. }) => Ok(()),
        // Its release was on its way.
        Err(RegistryError::Ended { .. }) => {
            let ended = |view: &View| view.state.is_ended();
            // If the life does not see it in time, the record counts.
            let bound = context.options.bounds.registry;
            let _ = timeout(bound, handle.wait_for(ended)).await;
            call_off(context, handle).await
        }
        // It is not restarted automatically, so it does not need the note.
        Err(_) if handle.spec().on_node_loss != OnNodeLoss::Restart => Ok(()),
        Err(source) => Err(StopError::NotForgotten {
            id: handle.id.clone(),
            source: Arc::new(source),
        }),
    }
}

/// Deletes the record of a session that lost its node, so that neither another node nor a connection can
/// start it by that.
pub(crate) async fn call_off(context: &Context, handle: &SessionHandle) -> Result<(), StopError> {
    let Some(generation) = handle.generation().filter(|_| handle.is_lost()) else {
        return Ok(());
    };
    let id = handle.id.clone();
    match context.registry.forget(&id, generation).await {
        Ok(()) | Err(RegistryError::Superseded { current: None, .. }) => Ok(()),
        Err(RegistryError::Superseded { .. } | RegistryError::Owned { .. }) => {
            Err(StopError::Moved { id })
        }
        Err(source) => Err(StopError::NotForgotten {
            id,
            source: Arc::new(source),
        }),
    }
}

fn report(id: &SessionId, view: &View, asked: Instant) -> Option<StopReport> {
    let since = |at: Option<Instant>| {
        at.map(|at| at.saturating_duration_since(asked).as_secs_f64() * 1_000.0)
    };
    let ended = view.state.is_ended();
    (ended || view.state == SessionState::Stuck).then_some(StopReport {
        id: id.clone(),
        generation: view.generation?,
        state: view.state,
        reason: view.reason.clone(),
        dead_ms: since(view.dead_at).filter(|_| ended),
        released_ms: since(view.released_at).filter(|_| ended),
    })
}
