//! Pauses sessions and resumes them.
//!
//! A paused session's processes do not run, and its memory may be reclaimed. The shim freezes it by an order
//! that is independent of the fence: a closed fence keeps it frozen after a resume, and an opened one
//! does not resume it. Whatever begins with a session that was paused for being idle resumes it first: a
//! connection, a command, a client of a terminal. An operator's pause stays until it is resumed by an order, unless
//! the session's template has `resume_on_connect`.
//!
//! A connection that got its route just before a pause may begin after it. So a pause that gives way to
//! connections looks once more for them.

use std::sync::Arc;
use std::time::Duration;

use conman_linux::DiskUsage;
use conman_proto::EventKind;
use conman_runtime::{ContainerKey, DiskExcess, PausedBy, Runtime, RuntimeError};
use tokio::sync::{Mutex, watch};

use crate::access::{answering, container_of, failed, template_resumes_on_connect};
use crate::context::Context;
use crate::error::AccessError;
use crate::session::SessionHandle;

/// Time after which a connection whose route was found before a pause has begun.
const LATE_CONNECTION: Duration = Duration::from_millis(250);

/// Whether a session is paused.
#[derive(Debug, Default)]
pub(crate) struct Pausing {
    paused_by: watch::Sender<Option<PausedBy>>,
    /// Held while the runtime pauses or resumes it.
    changing: Mutex<()>,
}

impl Pausing {
    /// True from the beginning of a pause to the end of the resume, so that connections wait for both.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused_by.borrow().is_some()
    }

    pub(crate) fn set(&self, paused: Option<PausedBy>) {
        self.paused_by
            .send_if_modified(|before| std::mem::replace(before, paused) != paused);
    }

    /// For the session's task, which records every change, so that other nodes show it.
    pub(crate) fn watch(&self) -> watch::Receiver<Option<PausedBy>> {
        self.paused_by.subscribe()
    }
}

/// What resumes a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PauseState {
    /// It is not paused.
    Runs,
    /// Whatever begins in it.
    ResumedByUse,
    /// An order only.
    ResumedByOrder,
}

pub(crate) fn state(context: &Context, handle: &SessionHandle) -> PauseState {
    let paused_by = *handle.pausing.paused_by.borrow();
    match paused_by {
        None => PauseState::Runs,
        Some(by) if gives_way(context, handle, by) => PauseState::ResumedByUse,
        Some(_) => PauseState::ResumedByOrder,
    }
}

fn gives_way(context: &Context, handle: &SessionHandle, by: PausedBy) -> bool {
    let template = handle.spec().template.clone();
    by == PausedBy::IdleTimeout || template_resumes_on_connect(context, template.as_deref())
}

/// Pauses a running session; one that is paused stays so. If more than `begun` uses of it have begun, and such
/// resume it, it is resumed after a moment. `order`: who pauses it, and why.
pub(crate) async fn pause(
    context: &Arc<Context>,
    handle: &Arc<SessionHandle>,
    begun: u64,
    (by, why): (PausedBy, &str),
) -> Result<(), AccessError> {
    let (runtime, key) = container_of(context, handle)?;
    {
        let _changing = handle.pausing.changing.lock().await;
        let paused_by = *handle.pausing.paused_by.borrow();
        if paused_by.is_some_and(|former| former == by || by == PausedBy::IdleTimeout) {
            return Ok(());
        }
        // Not sent to a silent runtime: the session runs, and must not need a resume.
        let sent = answering(context, runtime, "pause", async { Ok(()) });
        sent.await.map_err(failed(&handle.id))?;
        handle.pausing.set(Some(by));
        let pausing = answering(context, runtime, "pause", runtime.pause(&key, by));
        if let Err(error) = pausing.await {
            // It may be frozen all the same. Unless it surely runs it stays paused, so that the next
            // connection resumes it.
            let resuming = answering(context, runtime, "resume", runtime.resume(&key));
            if resuming.await.is_ok() {
                handle.pausing.set(None);
            }
            return Err(failed(&handle.id)(error));
        }
    }
    tracing::info!(session = %handle.id, "paused");
    let message = format!("paused: {why}");
    context.note_session(
        EventKind::SessionPaused,
        &handle.id,
        key.generation,
        message,
    );
    if !gives_way(context, handle, by) {
        return Ok(());
    }
    let (context, handle) = (Arc::clone(context), Arc::clone(handle));
    tokio::spawn(async move {
        tokio::time::sleep(LATE_CONNECTION).await;
        if handle.activity.begun() != begun
            && let Err(error) = resume(&context, &handle).await
        {
            tracing::warn!(session = %handle.id, %error, "cannot resume a session for a connection");
        }
    });
    Ok(())
}

/// Measures a session's disk usage while it does not run: it is frozen meanwhile, unless it is paused.
pub(crate) async fn measure_frozen(
    runtime: &dyn Runtime,
    handle: &SessionHandle,
    key: &ContainerKey,
    limits: DiskUsage,
) -> Result<Option<DiskExcess>, RuntimeError> {
    let changing = handle.pausing.changing.lock().await;
    if handle.pausing.is_paused() {
        // Connections may resume it meanwhile.
        drop(changing);
        return runtime.excess_disk_usage(key, limits, false).await;
    }
    runtime.excess_disk_usage(key, limits, true).await
}

/// Resumes a session; one that is not paused continues.
pub(crate) async fn resume(context: &Context, handle: &SessionHandle) -> Result<(), AccessError> {
    let (runtime, key) = container_of(context, handle)?;
    let _changing = handle.pausing.changing.lock().await;
    if !handle.pausing.is_paused() {
        return Ok(());
    }
    let resuming = answering(context, runtime, "resume", runtime.resume(&key));
    let resumed = resuming.await;
    resumed.map_err(failed(&handle.id))?;
    handle.pausing.set(None);
    tracing::info!(session = %handle.id, "resumed");
    context.note_session(
        EventKind::SessionResumed,
        &handle.id,
        key.generation,
        "resumed",
    );
    Ok(())
}
