//! Sessions whose process died while no daemon ran: their ending, and their release.

use std::collections::HashMap;
use std::time::Duration;

use conman_core::{EndCause, FENCED, LOST};
use conman_proto::{EventKind, SessionId};
use conman_registry::{Ending, Phases, RecordState, RegistryError, Release, SessionRecord};
use conman_runtime::ContainerKey;
use futures_util::{StreamExt as _, stream};
use jiff::{SignedDuration, Timestamp};
use tokio::time::{Instant, timeout_at};

use super::{Finding, QUESTIONS, key};
use crate::context::Context;
use crate::drain::signalled::DrainSignal;
use crate::error::NodeStartError;
use crate::events::end_event;

/// Bound on the shim's answers about dead containers.
const FENCED_PATIENCE: Duration = Duration::from_secs(10);

/// What became of the sessions whose init is proven dead.
#[derive(Debug, Default)]
pub(super) struct DeadSessions {
    pub(super) released: HashMap<SessionId, Ending>,
    /// Their lives release them, and retry.
    pub(super) unreleased: HashMap<SessionId, Ending>,
}

/// Releases, in one batch, the sessions whose init is proven dead. The registry may not take a release
/// yet: after it was restored from a snapshot, its record can be of an earlier generation than the dead
/// container that the shim still holds, and that one is ended first.
pub(super) async fn release_gone(
    context: &Context,
    found: &[(SessionRecord, Finding)],
    signals: &HashMap<ContainerKey, DrainSignal>,
) -> Result<DeadSessions, NodeStartError> {
    let until = Instant::now() + FENCED_PATIENCE;
    let gone = found
        .iter()
        .filter(|(_, finding)| matches!(finding, Finding::Gone))
        .map(async |(record, _)| {
            let fenced = timeout_at(until, was_fenced(context, record)).await;
            let release = Release {
                id: record.id.clone(),
                generation: record.generation,
                ending: gone_ending(
                    record,
                    *fenced.as_ref().unwrap_or(&false),
                    signals.get(&key(record)),
                ),
            };
            (release, fenced.is_ok())
        });
    let asked: Vec<(Release, bool)> = stream::iter(gone).buffered(QUESTIONS).collect().await;
    let unanswered = asked.iter().filter(|(_, answered)| !answered).count();
    if unanswered > 0 {
        tracing::warn!(
            sessions = unanswered,
            patience = ?FENCED_PATIENCE,
            "the runtimes did not report in time whether the fence killed these sessions; they are \
             recorded as having exited and are not restarted automatically"
        );
    }
    let gone: Vec<Release> = asked.into_iter().map(|(release, _)| release).collect();
    let mut sorted = DeadSessions::default();
    if gone.is_empty() {
        return Ok(sorted);
    }
    let results = context.registry.release(gone.clone()).await;
    for (release, result) in gone.into_iter().zip(results) {
        let (id, ending) = (&release.id, &release.ending);
        match result {
            Ok(()) => {}
            // Another node owns it.
            Err(RegistryError::Superseded { .. }) => {
                sorted.released.insert(release.id, release.ending);
                continue;
            }
            Err(error @ RegistryError::Unavailable { .. }) => {
                let error = conman_core::error_chain(&error);
                tracing::warn!(
                    session = %id, generation = %release.generation, error,
                    "cannot release a session that ended while conman was not running; retrying"
                );
                sorted.unreleased.insert(release.id, release.ending);
                continue;
            }
            Err(error) => return Err(NodeStartError::Release(error)),
        }
        let kind = EventKind::SessionReleased;
        context.note(end_event(
            kind,
            id,
            release.generation,
            &ending.end(),
            &ending.reason,
        ));
        sorted.released.insert(release.id, release.ending);
    }
    for (record, _) in found
        .iter()
        .filter(|(_, finding)| matches!(finding, Finding::Gone))
    {
        if !sorted.unreleased.contains_key(&record.id) {
            context.cleanup.push(record.spec.runtime, key(record));
        }
    }
    Ok(sorted)
}

/// Whether the fence, which works without a daemon, killed a session that was not to end.
async fn was_fenced(context: &Context, record: &SessionRecord) -> bool {
    let was_to_live = matches!(
        record.state,
        RecordState::Running { .. } | RecordState::Starting
    );
    match context.runtime(record.spec.runtime) {
        Some(runtime) if was_to_live && !booted_since(record) => {
            runtime.was_fenced(&key(record)).await
        }
        Some(_) | None => false,
    }
}

/// The ending of a session whose process died while no daemon ran. Its exit code is unknown.
fn gone_ending(record: &SessionRecord, fenced: bool, signal: Option<&DrainSignal>) -> Ending {
    let (failed, cause, reason) = match &record.state {
        RecordState::Running { .. } | RecordState::Starting if booted_since(record) => {
            (false, EndCause::NodeLost, rebooted())
        }
        RecordState::Running { .. } | RecordState::Starting if fenced => {
            (false, EndCause::NodeLost, FENCED.to_owned())
        }
        RecordState::Running { .. } | RecordState::Starting if let Some(signal) = signal => {
            (false, EndCause::Drained, signal.why.clone())
        }
        RecordState::Running { .. } => {
            let reason = "it ended while conman was not running".to_owned();
            (false, EndCause::Exited, reason)
        }
        RecordState::Starting => {
            let reason = "it ended before it was ready, while conman was not running".to_owned();
            (true, EndCause::StartFailed, reason)
        }
        RecordState::Stopping { reason, cause } | RecordState::Stuck { reason, cause } => {
            let cause = cause.unwrap_or(EndCause::Unknown);
            (false, cause, reason.clone())
        }
        RecordState::Ended(ending) => return ending.clone(),
    };
    let (started_at, phases) = match &record.state {
        RecordState::Running {
            started_at, phases, ..
        } => (Some(*started_at), phases.clone()),
        _ => (None, Phases::default()),
    };
    Ending {
        started_at,
        phases,
        ..Ending::now(failed, cause, reason)
    }
}

pub(super) fn rebooted() -> String {
    format!("{LOST}: its machine was rebooted")
}

/// Whether the machine has rebooted since the record was written. Without a recorded container the
/// record's age decides; if the clock was set since, a session may be restarted once too often, or not
/// automatically.
pub(super) fn booted_since(record: &SessionRecord) -> bool {
    match &record.container {
        Some(known) => conman_linux::boot_id().is_ok_and(|now| now != known.boot_id),
        None => {
            let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            let up = SignedDuration::new(up.tv_sec, 0);
            Timestamp::now().duration_since(record.created_at) > up
        }
    }
}
