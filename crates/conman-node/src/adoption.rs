//! Takes over what an earlier daemon left, by its records and the kernel alone.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use conman_core::EndCause;
use conman_core::lifecycle::Cause;
use conman_linux::{PidFd, ProcessIdentity};
use conman_proto::{EventKind, SessionId, SessionState};
use conman_registry::{
    ContainerIdentity, Ending, RecordState, RegistryError, SessionRecord, Standing,
};
use conman_runtime::{ContainerKey, PausedBy};
use futures_util::{StreamExt as _, stream};
use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::drain::signalled::DrainSignal;
use crate::ensure::kill_entry;
use crate::error::NodeStartError;
use crate::kill_table::StartStage;
use crate::session::{self, Beginning, SessionHandle, StopOrder, View};

mod gone;

use gone::{booted_since, rebooted, release_gone};

/// How many of each were found.
#[derive(Debug, Default)]
pub(crate) struct Adopted {
    running: usize,
    starting: usize,
    stopping: usize,
    released: usize,
    unresolved: usize,
    ended: usize,
}

impl Adopted {
    /// Counts a life that was begun.
    fn count(&mut self, beginning: &Beginning) {
        let count = match beginning {
            Beginning::Running(_) => &mut self.running,
            Beginning::Unready(_) => &mut self.starting,
            Beginning::KillTarget(..) => &mut self.stopping,
            Beginning::Unresolved(_) | Beginning::Fresh(_) => &mut self.unresolved,
        };
        *count += 1;
    }
}

impl fmt::Display for Adopted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "adopted {} running, {} starting and {} stopping sessions; released {} whose process \
             was gone; {} unanswered starts are being looked for; {} ended ones are known",
            self.running, self.starting, self.stopping, self.released, self.unresolved, self.ended
        )
    }
}

/// What a record and the kernel together show about a session.
enum Finding {
    Goes(Beginning),
    Gone,
    Ended(Box<Ending>),
}

/// How long to retry when the registry does not answer, for example while it elects a leader. A node
/// that has joined must not end because of that.
const REGISTRY_PATIENCE: Duration = Duration::from_secs(30);
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// Most concurrent requests to the runtimes about what was found.
const QUESTIONS: usize = 64;

async fn records(context: &Context) -> Result<Vec<SessionRecord>, NodeStartError> {
    let deadline = Instant::now() + REGISTRY_PATIENCE;
    loop {
        match context.registry.list().await {
            Err(error @ RegistryError::Unavailable { .. }) if Instant::now() < deadline => {
                let error = conman_core::error_chain(&error);
                tracing::warn!(error, "cannot list the registry's records; retrying");
                sleep(ASK_AGAIN).await;
            }
            read => return read.map_err(NodeStartError::Records),
        }
    }
}

/// Adopts everything. On failure nothing has changed, except that sessions without a record may have
/// been ended in the registry.
pub(crate) async fn adopt(context: &Arc<Context>) -> Result<Adopted, NodeStartError> {
    let records = records(context).await?;
    let mut found = Vec::with_capacity(records.len());
    for record in records {
        let finding = examine(&record)?;
        found.push((record, finding));
    }
    let signals = drain_signals(context).await;
    let mut gone = release_gone(context, &found, &signals).await?;
    let paused = paused(context, &found).await;
    let mut adopted = Adopted::default();
    let mut none_may_obey = true;
    let mut ended: Vec<_> = Vec::new();
    for (record, finding) in found {
        match finding {
            Finding::Goes(beginning) => {
                let paused_by = paused.get(&record.id).copied();
                let beginning = match beginning {
                    // Only what was ready can be paused. The record of that follows later, and a
                    // probe of a paused session would fail.
                    Beginning::Unready(process) if paused_by.is_some() => {
                        Beginning::Running(process)
                    }
                    other => other,
                };
                // Each record is of another session, and no other task starts a life yet.
                let signal = signals.get(&key(&record)).filter(|signal| signal.holds());
                none_may_obey &= signal.is_none();
                take_on(
                    context,
                    &record,
                    (beginning, paused_by),
                    signal,
                    &mut adopted,
                );
            }
            Finding::Gone if let Some(ending) = gone.unreleased.remove(&record.id) => {
                let cause = Cause::Asked(ending.cause.unwrap_or(EndCause::Unknown), ending.reason);
                let beginning = (Beginning::Unresolved(cause), None);
                take_on(context, &record, beginning, None, &mut adopted);
            }
            Finding::Gone => {
                adopted.released += 1;
                let ending = gone.released.remove(&record.id);
                ended.extend(ending.map(|ending| (record, ending)));
            }
            Finding::Ended(ending) => {
                adopted.ended += 1;
                ended.push((record, *ending));
            }
        }
    }
    if none_may_obey {
        let signalled = context.drain.signalled.clone();
        // What stays is removed by the next daemon.
        let _ = tokio::task::spawn_blocking(move || signalled.clear()).await;
    }
    // The oldest are forgotten first, so the order matters.
    ended.sort_by_key(|(_, ending)| ending.ended_at);
    for (record, ending) in ended {
        context.sessions.adopt_ended(&ended_handle(record, ending));
    }
    let kept = context.options.limits.max_stopped_kept;
    forget(context, context.sessions.trim(kept));
    Ok(adopted)
}

fn examine(record: &SessionRecord) -> Result<Finding, NodeStartError> {
    if let RecordState::Ended(ending) = &record.state {
        return Ok(Finding::Ended(Box::new(ending.clone())));
    }
    let Some(container) = &record.container else {
        // No record says whether the start succeeded.
        return Ok(Finding::Goes(Beginning::Unresolved(unfinished(record))));
    };
    let process = match PidFd::open_verified(&identity(container)) {
        Ok(process) => Arc::new(process),
        Err(error) if error.proves_death() => return Ok(Finding::Gone),
        Err(source) => {
            let (id, generation) = (record.id.clone(), record.generation);
            return Err(NodeStartError::Adopt {
                id,
                generation,
                source,
            });
        }
    };
    if process.is_dead().unwrap_or(false) {
        return Ok(Finding::Gone);
    }
    Ok(match &record.state {
        RecordState::Running { .. } => Finding::Goes(Beginning::Running(process)),
        RecordState::Starting => Finding::Goes(Beginning::Unready(process)),
        RecordState::Stopping { reason, cause } | RecordState::Stuck { reason, cause } => {
            let cause = cause.unwrap_or(EndCause::Unknown);
            Finding::Goes(Beginning::KillTarget(process, cause, reason.clone()))
        }
        RecordState::Ended(_) => Finding::Gone,
    })
}

fn identity(container: &ContainerIdentity) -> ProcessIdentity {
    ProcessIdentity {
        pid: container.pid,
        start_time_ticks: container.start_time_ticks,
        boot_id: container.boot_id.clone(),
    }
}

/// Sessions that an earlier daemon paused.
async fn paused(
    context: &Context,
    found: &[(SessionRecord, Finding)],
) -> HashMap<SessionId, PausedBy> {
    let running = found.iter().filter(|(_, finding)| {
        matches!(
            finding,
            Finding::Goes(Beginning::Running(_) | Beginning::Unready(_))
        )
    });
    let asked = running.map(async |(record, _)| {
        let runtime = context.runtime(record.spec.runtime)?;
        let by = runtime.paused_by(&key(record)).await?;
        Some((record.id.clone(), by))
    });
    let asked: Vec<_> = stream::iter(asked).buffered(QUESTIONS).collect().await;
    asked.into_iter().flatten().collect()
}

fn key(record: &SessionRecord) -> ContainerKey {
    ContainerKey::new(record.id.clone(), record.generation)
}

/// Sessions that an earlier daemon's drain signalled, and why.
async fn drain_signals(context: &Context) -> HashMap<ContainerKey, DrainSignal> {
    let signalled = context.drain.signalled.clone();
    let read = tokio::task::spawn_blocking(move || signalled.read()).await;
    read.unwrap_or_else(|error| Err(io::Error::other(error)))
        .unwrap_or_else(|error| {
            tracing::warn!(
                %error,
                "cannot read which sessions an earlier daemon's drain signalled; those that exited \
                 since are not restarted on another node"
            );
            HashMap::new()
        })
}

/// Why a life ends when no record says whether its start succeeded.
fn unfinished(record: &SessionRecord) -> Cause {
    match &record.state {
        RecordState::Stopping { reason, cause } | RecordState::Stuck { reason, cause } => {
            match cause.unwrap_or(EndCause::Unknown) {
                EndCause::StartFailed | EndCause::Exited => Cause::StartFailed(reason.clone()),
                cause => Cause::Asked(cause, reason.clone()),
            }
        }
        RecordState::Starting | RecordState::Running { .. } | RecordState::Ended(_) => {
            match booted_since(record) {
                true => Cause::Asked(EndCause::NodeLost, rebooted()),
                false => {
                    Cause::StartFailed("an earlier daemon did not finish this start".to_owned())
                }
            }
        }
    }
}

/// Begins the life of a record, unless the session has one already. Returns whether it did.
fn take_on(
    context: &Arc<Context>,
    record: &SessionRecord,
    (beginning, paused_by): (Beginning, Option<PausedBy>),
    signal: Option<&DrainSignal>,
    adopted: &mut Adopted,
) -> bool {
    let generation = record.generation;
    let handle = live_handle(record, &beginning);
    if let Some(signal) = signal {
        handle.leaving.order(StopOrder {
            cause: EndCause::Drained,
            why: signal.why.clone(),
        });
    }
    let stage = match handle.view().process {
        Some(process) => StartStage::Running(generation, process),
        None => StartStage::Sent(generation),
    };
    let runtime = context.runtime(record.spec.runtime).cloned();
    let entry = kill_entry(&handle, stage, runtime);
    let enter = || context.table.adopt(&record.id, entry);
    if !context.sessions.take_on(&handle, enter) {
        return false;
    }
    adopted.count(&beginning);
    let message = "taken over from an earlier daemon";
    context.note_session(EventKind::SessionAdopted, &record.id, generation, message);
    session::spawn(Arc::clone(context), Arc::clone(&handle), beginning);
    // Its task records a change.
    handle.pausing.set(paused_by);
    true
}

/// The handle of a session that has not ended, as its record and its beginning show it.
fn live_handle(record: &SessionRecord, beginning: &Beginning) -> Arc<SessionHandle> {
    let mut view = View {
        generation: Some(record.generation),
        created_at: record.created_at,
        recorded: record.container.is_some(),
        ..View::starting()
    };
    let (state, process) = match beginning {
        Beginning::Running(process) => (SessionState::Running, Some(process)),
        Beginning::Unready(process) => (SessionState::Starting, Some(process)),
        Beginning::KillTarget(process, _, reason) => {
            view.reason = Some(reason.clone());
            (SessionState::Stopping, Some(process))
        }
        Beginning::Unresolved(_) | Beginning::Fresh(_) => (SessionState::Stopping, None),
    };
    view.state = state;
    view.process = process.cloned();
    let mut was_paused = false;
    if let RecordState::Running {
        started_at,
        phases,
        paused,
    } = &record.state
    {
        view.started_at = Some(*started_at);
        view.phases.clone_from(phases);
        was_paused = *paused;
    }
    let handle = SessionHandle::new(record.id.clone(), record.spec.clone(), view);
    handle
        .pausing
        .set(was_paused.then_some(PausedBy::IdleTimeout));
    // An earlier daemon may have attached some, and started others.
    handle.may_have_links.store(true, Ordering::Relaxed);
    handle.kept_commands.store(true, Ordering::Relaxed);
    let unknown = SessionHandle::OOM_UNKNOWN;
    handle.oom_noted.store(unknown, Ordering::Relaxed);
    if let RecordState::Stopping { reason, .. } | RecordState::Stuck { reason, .. } = &record.state
        && record.state.end_cause() == Some(EndCause::Deleted)
    {
        handle.order_stop(EndCause::Deleted, reason);
    }
    handle
}

/// Begins a life that looks for remains of a record's container, unless the session has a life.
pub(crate) fn take_on_unresolved(context: &Arc<Context>, record: &SessionRecord) -> bool {
    let mut adopted = Adopted::default();
    take_on(
        context,
        record,
        (Beginning::Unresolved(unfinished(record)), None),
        None,
        &mut adopted,
    )
}

pub(crate) fn ended_handle(record: SessionRecord, ending: Ending) -> Arc<SessionHandle> {
    let view = View {
        state: if ending.failed {
            SessionState::Failed
        } else {
            SessionState::Stopped
        },
        end: Some(ending.end()),
        reason: Some(ending.reason),
        exit_code: ending.exit_code,
        generation: Some(record.generation),
        created_at: record.created_at,
        started_at: ending.started_at,
        ended_at: Some(ending.ended_at),
        phases: ending.phases,
        ..View::starting()
    };
    SessionHandle::new(record.id, record.spec, view)
}

/// Deletes the records of ended sessions in the background. A record that remains after a failure is
/// deleted later: in a fleet by the node that sweeps the records, else at the next start of the daemon,
/// which shows the session again.
pub(crate) fn forget(context: &Arc<Context>, mut forgotten: Vec<Arc<SessionHandle>>) {
    // Another node restarts a session that lost this one by its record.
    let alone = *context.options.standing.borrow() == Standing::Alone;
    forgotten.retain(|handle| alone || !handle.is_to_be_restarted());
    if forgotten.is_empty() {
        return;
    }
    let context = Arc::clone(context);
    tokio::spawn(async move {
        for handle in forgotten {
            let (id, Some(generation)) = (&handle.id, handle.generation()) else {
                continue;
            };
            if let Err(error) = context.registry.forget(id, generation).await {
                let reason = conman_core::error_chain(&error);
                tracing::debug!(
                    session = %id,
                    reason,
                    "cannot delete the record of an ended session"
                );
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    fn claimed(created_at: Timestamp) -> SessionRecord {
        let spec = serde_json::json!({
            "runtime": "process", "image": "none", "command": [], "args": [], "env": {},
            "ready_timeout_s": 60, "network": "loopback", "pids": 128, "labels": {}, "binds": [],
            "idle_timeout_s": 0, "max_lifetime_s": 0, "preempt_grace_ms": 0
        });
        SessionRecord {
            id: "alice".parse().expect("an id"),
            generation: conman_proto::Generation::FIRST,
            state: RecordState::Starting,
            spec: serde_json::from_value(spec).expect("a spec"),
            container: None,
            created_at,
        }
    }

    #[test]
    fn a_start_from_before_the_machine_was_booted_has_lost_its_node() {
        let before = unfinished(&claimed(Timestamp::UNIX_EPOCH));
        assert_eq!(before.end_cause(), EndCause::NodeLost);
        let since = unfinished(&claimed(Timestamp::now()));
        assert_eq!(since.end_cause(), EndCause::StartFailed);
    }
}
