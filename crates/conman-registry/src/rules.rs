//! The effect of each change on a record. Pure, and the same for every registry of this crate.

use conman_core::EndCause;
use conman_proto::{Generation, ResolvedSpec, SessionId};

use crate::{ContainerIdentity, Ending, RecordState, RegistryError, SessionRecord};

/// Effect of an accepted change.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// The record already has this value.
    Keep,
    Put(Box<SessionRecord>),
    Remove,
}

/// A change of one generation's record.
#[derive(Debug, Clone)]
pub enum Change {
    SetContainer(ContainerIdentity),
    SetState(RecordState),
    SetSpec(Box<ResolvedSpec>),
    Release(Ending),
    Forget,
}

/// Whether the session may be claimed, given the record that was `read`.
pub fn may_claim(
    id: &SessionId,
    current: Option<&SessionRecord>,
    read: Option<&SessionRecord>,
) -> Result<(), RegistryError> {
    if read.is_some() && read != current {
        return Err(RegistryError::Changed { id: id.clone() });
    }
    match current {
        Some(record) if !record.state.is_ended() => Err(RegistryError::Owned {
            id: id.clone(),
            generation: record.generation,
        }),
        Some(_) | None => Ok(()),
    }
}

/// Applies a change that acts for `generation` to the current record.
pub fn apply(
    id: &SessionId,
    generation: Generation,
    current: Option<&SessionRecord>,
    change: &Change,
) -> Result<Effect, RegistryError> {
    let record = match current {
        Some(record) if record.generation == generation => record,
        other => {
            let current = other.map(|record| record.generation);
            return Err(RegistryError::Superseded {
                id: id.clone(),
                generation,
                current,
            });
        }
    };
    match change {
        Change::SetContainer(container) => {
            refuse_ended(record)?;
            let changed = SessionRecord {
                container: Some(container.clone()),
                ..record.clone()
            };
            Ok(keep_or_put(record, changed))
        }
        Change::SetState(state) => {
            refuse_not_notable(id, state)?;
            refuse_ended(record)?;
            Ok(with_state(record, state))
        }
        Change::SetSpec(spec) => {
            refuse_ended(record)?;
            let changed = SessionRecord {
                spec: (**spec).clone(),
                ..record.clone()
            };
            Ok(keep_or_put(record, changed))
        }
        // The first ending stays: a second release has no newer information.
        Change::Release(_) if record.state.is_ended() => Ok(Effect::Keep),
        Change::Release(ending) => {
            let mut ending = ending.clone();
            keep_deleted(record, &mut ending.cause);
            let state = RecordState::Ended(ending);
            Ok(Effect::Put(Box::new(SessionRecord {
                state,
                ..record.clone()
            })))
        }
        Change::Forget if record.state.is_ended() => Ok(Effect::Remove),
        Change::Forget => Err(RegistryError::Owned {
            id: id.clone(),
            generation,
        }),
    }
}

/// The effect of an accepted note of a state.
fn with_state(record: &SessionRecord, state: &RecordState) -> Effect {
    // A late note does not undo an order to end it.
    if matches!(state, RecordState::Running { .. }) && record.state.end_cause().is_some() {
        return Effect::Keep;
    }
    let mut state = state.clone();
    if let RecordState::Stopping { cause, .. } | RecordState::Stuck { cause, .. } = &mut state {
        keep_deleted(record, cause);
    }
    let changed = SessionRecord {
        state,
        ..record.clone()
    };
    keep_or_put(record, changed)
}

/// A deleted session stays deleted, whatever is recorded later.
pub fn keep_deleted(record: &SessionRecord, cause: &mut Option<EndCause>) {
    if record.state.end_cause() == Some(EndCause::Deleted) {
        *cause = Some(EndCause::Deleted);
    }
}

fn keep_or_put(before: &SessionRecord, after: SessionRecord) -> Effect {
    if *before == after {
        Effect::Keep
    } else {
        Effect::Put(Box::new(after))
    }
}

fn refuse_ended(record: &SessionRecord) -> Result<(), RegistryError> {
    if record.state.is_ended() {
        let (id, generation) = (record.id.clone(), record.generation);
        return Err(RegistryError::Ended { id, generation });
    }
    Ok(())
}

fn refuse_not_notable(id: &SessionId, state: &RecordState) -> Result<(), RegistryError> {
    let (state, by) = match state {
        RecordState::Starting => ("starting", "claim"),
        RecordState::Ended(_) => ("ended", "release"),
        RecordState::Running { .. } | RecordState::Stopping { .. } | RecordState::Stuck { .. } => {
            return Ok(());
        }
    };
    Err(RegistryError::NotNotable {
        id: id.clone(),
        state,
        by,
    })
}
