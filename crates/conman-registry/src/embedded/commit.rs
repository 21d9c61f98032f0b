//! Changes that one transaction makes to the registry file.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use conman_proto::SessionId;
use redb::{Database, WriteTransaction};

use super::schema::{self, Records};
use crate::{RegistryError, SessionRecord};

/// Rows to write, one entry a session.
pub(super) type Writes = BTreeMap<SessionId, Write>;

/// What a transaction does to one session's rows.
#[derive(Debug)]
pub(super) enum Write {
    Put {
        session: Vec<u8>,
        spec: Option<Vec<u8>>,
    },
    Remove,
}

impl Write {
    /// Writes all of a record.
    pub(super) fn all_of(record: &SessionRecord) -> Result<Self, RegistryError> {
        let unreadable = |source| unreadable(&record.id, source);
        Ok(Self::Put {
            session: schema::encode_session(record).map_err(unreadable)?,
            spec: Some(schema::encode_spec(&record.spec).map_err(unreadable)?),
        })
    }
}

/// The error for values that JSON cannot hold.
pub(super) fn unreadable(id: &SessionId, source: serde_json::Error) -> RegistryError {
    RegistryError::Corrupt {
        id: id.to_string(),
        source: Arc::new(source),
    }
}

/// Commits one durable transaction. A panic inside redb counts as a failed commit: the file is
/// reopened and checked before it is used again.
pub(super) fn commit(
    database: &Database,
    writes: &Writes,
    reserved_through: u64,
) -> Result<(), redb::Error> {
    let written = catch_unwind(AssertUnwindSafe(|| {
        let transaction = database.begin_write()?;
        apply(&transaction, writes)?;
        schema::write_reserved(&transaction, reserved_through)?;
        Ok(transaction.commit()?)
    }));
    written.unwrap_or_else(|_| Err(redb::Error::Corrupted("a commit panicked".to_owned())))
}

pub(super) fn apply(transaction: &WriteTransaction, writes: &Writes) -> Result<(), redb::Error> {
    let mut sessions = transaction.open_table(schema::SESSIONS)?;
    let mut specs = transaction.open_table(schema::SPECS)?;
    for (id, write) in writes {
        match write {
            Write::Put { session, spec } => {
                sessions.insert(id.as_str(), session.as_slice())?;
                if let Some(spec) = spec {
                    specs.insert(id.as_str(), spec.as_slice())?;
                }
            }
            Write::Remove => {
                sessions.remove(id.as_str())?;
                specs.remove(id.as_str())?;
            }
        }
    }
    Ok(())
}

/// The changes that make `found` equal to `wanted`.
pub(super) fn difference(found: &Records, wanted: &Records) -> Result<Writes, RegistryError> {
    let mut writes = Writes::new();
    for id in found.keys().filter(|id| !wanted.contains_key(*id)) {
        writes.insert(id.clone(), Write::Remove);
    }
    for (id, record) in wanted {
        if found.get(id) != Some(record) {
            writes.insert(id.clone(), Write::all_of(record)?);
        }
    }
    Ok(writes)
}
