//! Content of `registry.redb`.
//!
//! `meta` (name to number: `format`, `reserved_through`), `session` (id to the
//! record without its spec, as JSON) and `spec` (id to the spec, as JSON). The spec is separate
//! because it is much larger and seldom changes after a start, while the rest changes several times; a
//! release of hundreds of sessions then writes hundreds of small values. Fields that a later conman adds to the JSON are ignored.

use std::collections::BTreeMap;
use std::sync::Arc;

use conman_linux::FORMAT;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use jiff::Timestamp;
use redb::{
    Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition, TableError,
    WriteTransaction,
};
use serde::{Deserialize, Serialize};

use crate::{ContainerIdentity, RecordState, SessionRecord};

pub(super) const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
pub(super) const SESSIONS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("session");
pub(super) const SPECS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("spec");

const FORMAT_KEY: &str = "format";
/// Every generation up to it may have been used; a copy of the `generations` file.
const RESERVED_KEY: &str = "reserved_through";

pub(super) type Records = BTreeMap<SessionId, Arc<SessionRecord>>;

/// Why the content could not be read.
#[derive(Debug)]
pub(super) enum SchemaError {
    /// `through`: every generation up to it may have been used.
    OtherFormat {
        format: u32,
        through: u64,
    },
    Unreadable {
        id: String,
        source: serde_json::Error,
    },
    Inconsistent(String),
    Store(redb::Error),
}

impl<E: Into<redb::Error>> From<E> for SchemaError {
    fn from(error: E) -> Self {
        Self::Store(error.into())
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredSession {
    generation: Generation,
    state: RecordState,
    container: Option<ContainerIdentity>,
    created_at: Timestamp,
}

/// Everything that a file holds.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) records: Records,
    /// Every generation up to it may have been used; 0 when nothing has been reserved.
    pub(super) reserved_through: u64,
}

/// Fills a new file.
pub(super) fn fill(
    transaction: &WriteTransaction,
    reserved_through: u64,
) -> Result<(), redb::Error> {
    transaction.open_table(SESSIONS)?;
    transaction.open_table(SPECS)?;
    transaction
        .open_table(META)?
        .insert(FORMAT_KEY, u64::from(FORMAT))?;
    write_reserved(transaction, reserved_through)
}

pub(super) fn write_reserved(
    transaction: &WriteTransaction,
    reserved_through: u64,
) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    meta.insert(RESERVED_KEY, reserved_through)?;
    Ok(())
}

/// Reads everything.
pub(super) fn load(database: &Database) -> Result<Content, SchemaError> {
    let inconsistent = |what: &str| SchemaError::Inconsistent(what.to_owned());
    let transaction = database.begin_read()?;
    let meta = match transaction.open_table(META) {
        Err(TableError::TableDoesNotExist(_)) => {
            return Err(inconsistent("it is not a registry file"));
        }
        meta => meta?,
    };
    let number = |key| Ok::<_, redb::Error>(meta.get(key)?.map(|value| value.value()));
    let format = number(FORMAT_KEY)?.ok_or_else(|| inconsistent("it has no format number"))?;
    let mut reserved_through = number(RESERVED_KEY)?.unwrap_or(0);
    if format != u64::from(FORMAT) {
        let format = u32::try_from(format).unwrap_or(u32::MAX);
        return Err(SchemaError::OtherFormat {
            format,
            through: reserved_through,
        });
    }
    let sessions = transaction.open_table(SESSIONS)?;
    let specs = transaction.open_table(SPECS)?;
    let mut records = BTreeMap::new();
    for entry in sessions.iter()? {
        let (key, value) = entry?;
        let spec = specs.get(key.value())?;
        let spec = spec.ok_or_else(|| {
            SchemaError::Inconsistent(format!("session {} has no spec", key.value()))
        })?;
        let record = decode(key.value(), value.value(), spec.value()).map_err(|source| {
            SchemaError::Unreadable {
                id: key.value().to_owned(),
                source,
            }
        })?;
        reserved_through = reserved_through.max(record.generation.get());
        records.insert(record.id.clone(), Arc::new(record));
    }
    if specs.len()? != sessions.len()? {
        return Err(inconsistent("a spec belongs to no session"));
    }
    Ok(Content {
        records,
        reserved_through,
    })
}

/// Encodes a record without its spec, and verifies that it can be read back. JSON has no NaN, for
/// example, and a record that prevents the next start must not be acknowledged.
pub(super) fn encode_session(record: &SessionRecord) -> Result<Vec<u8>, serde_json::Error> {
    let bytes = serde_json::to_vec(&StoredSession {
        generation: record.generation,
        state: record.state.clone(),
        container: record.container.clone(),
        created_at: record.created_at,
    })?;
    serde_json::from_slice::<StoredSession>(&bytes)?;
    Ok(bytes)
}

/// Encodes a spec, with the same check.
pub(super) fn encode_spec(spec: &ResolvedSpec) -> Result<Vec<u8>, serde_json::Error> {
    let bytes = serde_json::to_vec(spec)?;
    serde_json::from_slice::<ResolvedSpec>(&bytes)?;
    Ok(bytes)
}

fn decode(id: &str, session: &[u8], spec: &[u8]) -> Result<SessionRecord, serde_json::Error> {
    let id: SessionId = id.parse().map_err(serde::de::Error::custom)?;
    let StoredSession {
        generation,
        state,
        container,
        created_at,
    } = serde_json::from_slice(session)?;
    Ok(SessionRecord {
        id,
        generation,
        state,
        spec: serde_json::from_slice(spec)?,
        container,
        created_at,
    })
}
