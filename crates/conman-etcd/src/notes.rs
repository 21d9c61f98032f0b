//! Changes of a session's record that do not affect its ownership, and the deletion of a record.

use std::time::Duration;

use conman_core::ownership::{Answer, Key, OwnedState, Value, collect};
use conman_proto::{Generation, SessionId};
use tokio::time::{Instant, sleep};

use super::codec::{self, SessionDetails};
use super::records::OwnRecord;
use super::shared::{Shared, name};
use super::store::{Additions, ReadError};
use super::talk_names;
use super::wire::{self, TxnRequest};
use conman_registry::RegistryError;
use conman_registry::rules::{self, Change, Effect};

/// How long a change is tried while etcd does not answer or the record is changed concurrently.
const PATIENCE: Duration = Duration::from_secs(4);

const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Makes a change that acts for `generation`.
pub(super) async fn change(
    shared: &Shared,
    id: &SessionId,
    generation: Generation,
    change: &Change,
) -> Result<(), RegistryError> {
    let deadline = Instant::now() + PATIENCE;
    let mut known = shared.mine(id);
    loop {
        let (was_known, since) = (known.is_some(), shared.since());
        let mine = match known.take() {
            Some(mine) => Some(mine),
            None => match read(shared, id).await {
                Ok(mine) => mine,
                Err(error) => {
                    retry(shared, deadline, &error.to_string()).await?;
                    continue;
                }
            },
        };
        let record = mine.as_ref().map(|mine| &mine.details.record);
        let record = match rules::apply(id, generation, record, change)? {
            Effect::Put(record) => *record,
            Effect::Keep | Effect::Remove => {
                // Possibly by a write whose answer was lost, and which the cache has missed.
                mine.into_iter().for_each(|mine| shared.note_changed(mine));
                return Ok(());
            }
        };
        let Some(mine) = mine else {
            continue;
        };
        let Some(revision) = mine.mod_revision else {
            known = None;
            shared.not_mine(id, generation);
            continue;
        };
        let keys = &shared.store.keys;
        let names = talk_names::changes(keys, &mine.details.record, &record);
        let details = SessionDetails {
            record,
            ..mine.details
        };
        let key = keys.details(id.as_str());
        let request = TxnRequest {
            compare: vec![
                shared.is_mine(&details),
                wire::unchanged_since(key.clone(), revision),
            ],
            success: [wire::put(key, codec::text(&details))]
                .into_iter()
                .chain(names)
                .collect(),
        };
        let written = shared.store.transact_queued(request).await;
        if written.answer == Answer::Committed {
            let mine = OwnRecord {
                details,
                mod_revision: Some(written.revision),
            };
            if was_known {
                shared.note_changed(mine);
            } else {
                shared.note_read(mine, since);
            }
            return Ok(());
        }
        shared.not_mine(id, generation);
        let why = written.trouble.unwrap_or_default();
        retry(shared, deadline, &why).await?;
    }
}

/// The record of a session, whichever node owns it.
pub(super) async fn read(shared: &Shared, id: &SessionId) -> Result<Option<OwnRecord>, ReadError> {
    let key = shared.store.keys.details(id.as_str());
    let (entries, _) = shared.store.get_queued(&[key]).await?;
    let Some((name, bytes, revision)) = entries.into_iter().flatten().next() else {
        return Ok(None);
    };
    let details = codec::parse(&name, &bytes)?;
    Ok(Some(OwnRecord {
        details,
        mod_revision: Some(revision),
    }))
}

/// Deletes the record of a session that has ended, whichever node owned it, and keeps its
/// generation used up.
pub(super) async fn forget(
    shared: &Shared,
    id: &SessionId,
    generation: Generation,
) -> Result<(), RegistryError> {
    let deadline = Instant::now() + PATIENCE;
    let mut sent = false;
    loop {
        let keys = &shared.store.keys;
        let (own, floor) = (Key::Session(name(id)), Key::Floor);
        let read = async {
            let details = keys.details(id.as_str());
            let (details, answer) = shared
                .store
                .get_with(details, vec![own.clone(), floor])
                .await?;
            let details =
                details.map(|(name, bytes, _)| codec::parse::<SessionDetails>(&name, &bytes));
            Ok::<_, ReadError>((details.transpose()?, answer))
        };
        let (details, answer) = match read.await {
            Ok(read) => read,
            Err(error) => {
                retry(shared, deadline, &error.to_string()).await?;
                continue;
            }
        };
        if details.is_none() && sent {
            // An earlier attempt succeeded, but its answer was lost.
            return Ok(());
        }
        let record = details
            .as_ref()
            .map(|details: &SessionDetails| &details.record);
        rules::apply(id, generation, record, &Change::Forget)?;
        let current = match answer.value(&own) {
            Some(Value::Session(ownership)) => ownership.clone(),
            _ => return Err(superseded(id, generation, None)),
        };
        if current.generation != generation.get() {
            let current = Generation::new(current.generation);
            return Err(superseded(id, generation, current));
        }
        if current.state != OwnedState::Released {
            let id = id.clone();
            return Err(RegistryError::Owned { id, generation });
        }
        let floor = match answer.value(&Key::Floor) {
            Some(Value::Floor(floor)) => Some(*floor),
            _ => None,
        };
        let additions = Additions {
            compare: Vec::new(),
            write: vec![wire::delete(shared.store.keys.details(id.as_str()))],
        };
        let collected = collect(&name(id), &current, floor);
        let written = shared.store.commit(&collected, additions).await;
        match written.answer {
            Answer::Committed => {
                shared.note_location(id, None);
                return Ok(());
            }
            Answer::Ambiguous => sent = true,
            _ => {}
        }
        let why = written.trouble.unwrap_or_default();
        retry(shared, deadline, &why).await?;
    }
}

fn superseded(
    id: &SessionId,
    generation: Generation,
    current: Option<Generation>,
) -> RegistryError {
    RegistryError::Superseded {
        id: id.clone(),
        generation,
        current,
    }
}

pub(super) fn unavailable(why: &str) -> RegistryError {
    RegistryError::Unavailable {
        reason: why.to_owned(),
    }
}

/// The registry's error for a failed read.
pub(super) fn not_read(error: ReadError) -> RegistryError {
    match error {
        ReadError::Value(error) => RegistryError::Unreadable {
            reason: error.to_string(),
        },
        error => unavailable(&error.to_string()),
    }
}

async fn retry(shared: &Shared, deadline: Instant, why: &str) -> Result<(), RegistryError> {
    if Instant::now() >= deadline {
        return Err(match why.is_empty() {
            true => shared.unavailable(),
            false => unavailable(why),
        });
    }
    sleep(RETRY_PAUSE).await;
    Ok(())
}
