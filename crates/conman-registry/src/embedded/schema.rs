//! Content of `registry.redb`, and the migration of older formats.
//!
//! Format 1: `meta` (name to number: `format`, `reserved_through`, `commits`), `session` (id to the
//! record without its spec, as JSON) and `spec` (id to the spec, as JSON). The spec is separate
//! because it is much larger and is written once a start, while the rest changes several times; a
//! release of hundreds of sessions then writes hundreds of small values.
//!
//! Format 0 had no `meta` and held whole records in `sessions`.

use std::collections::BTreeMap;
use std::sync::Arc;

use conman_proto::{Generation, ResolvedSpec, SessionId};
use jiff::Timestamp;
use redb::{
    Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition, TableError,
    TableHandle, WriteTransaction,
};
use serde::{Deserialize, Serialize};

use crate::{ContainerIdentity, RecordState, SessionRecord};

pub(super) const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
pub(super) const SESSIONS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("session");
pub(super) const SPECS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("spec");
/// Format 0 only.
pub(super) const SESSIONS_V0: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("sessions");

const FORMAT_KEY: &str = "format";
/// Every generation up to it may have been used; a copy of the `generations` file.
const RESERVED_KEY: &str = "reserved_through";
/// How many commits changed the file; the lock file holds the number of the last acknowledged one.
const COMMITS_KEY: &str = "commits";
/// The format that this version writes.
pub(super) const FORMAT: u32 = 1;

pub(super) type Records = BTreeMap<SessionId, Arc<SessionRecord>>;

/// Why the content could not be read or migrated.
#[derive(Debug)]
pub(super) enum SchemaError {
    TooNew(u32),
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

/// Numbers that only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// 0 when nothing has been reserved.
    pub(super) reserved_through: u64,
    pub(super) commits: u64,
}

/// Everything that a file holds.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) records: Records,
    pub(super) counters: Counters,
}

/// Fills a new file.
pub(super) fn fill(transaction: &WriteTransaction, counters: Counters) -> Result<(), redb::Error> {
    transaction.open_table(SESSIONS)?;
    transaction.open_table(SPECS)?;
    transaction
        .open_table(META)?
        .insert(FORMAT_KEY, u64::from(FORMAT))?;
    write_counters(transaction, counters)
}

pub(super) fn write_counters(
    transaction: &WriteTransaction,
    counters: Counters,
) -> Result<(), redb::Error> {
    let mut meta = transaction.open_table(META)?;
    meta.insert(RESERVED_KEY, counters.reserved_through)?;
    meta.insert(COMMITS_KEY, counters.commits)?;
    Ok(())
}

/// One step from a format to the next, within one transaction.
type Migration = fn(&WriteTransaction) -> Result<(), SchemaError>;

/// The step at index N leads from format N to N + 1.
const MIGRATIONS: [Migration; FORMAT as usize] = [keep_specs_apart];

/// Migrates an opened file to the current format: all steps in one transaction, so that a crash
/// leaves either the old format or the new one.
pub(super) fn migrate(database: &Database) -> Result<(), SchemaError> {
    let found = format_of(database)?;
    if found > FORMAT {
        return Err(SchemaError::TooNew(found));
    }
    if found == FORMAT {
        return Ok(());
    }
    let transaction = database.begin_write()?;
    for step in MIGRATIONS.iter().skip(found as usize) {
        step(&transaction)?;
    }
    transaction
        .open_table(META)?
        .insert(FORMAT_KEY, u64::from(FORMAT))?;
    transaction.commit()?;
    tracing::info!(from = found, to = FORMAT, "migrated the registry file");
    Ok(())
}

fn format_of(database: &Database) -> Result<u32, SchemaError> {
    let transaction = database.begin_read()?;
    let meta = match transaction.open_table(META) {
        Ok(meta) => meta,
        Err(TableError::TableDoesNotExist(_)) => {
            let known = transaction
                .list_tables()?
                .any(|table| table.name() == SESSIONS_V0.name());
            return if known {
                Ok(0)
            } else {
                Err(SchemaError::Inconsistent(
                    "it is not a registry file".to_owned(),
                ))
            };
        }
        Err(error) => return Err(error.into()),
    };
    let format = meta.get(FORMAT_KEY)?.map(|value| value.value());
    match format {
        None => Err(SchemaError::Inconsistent(
            "it has no format number".to_owned(),
        )),
        Some(format) => Ok(u32::try_from(format).unwrap_or(u32::MAX)),
    }
}

fn keep_specs_apart(transaction: &WriteTransaction) -> Result<(), SchemaError> {
    let mut greatest = 0;
    {
        let old = transaction.open_table(SESSIONS_V0)?;
        let mut sessions = transaction.open_table(SESSIONS)?;
        let mut specs = transaction.open_table(SPECS)?;
        for entry in old.iter()? {
            let (key, value) = entry?;
            let record: SessionRecord =
                serde_json::from_slice(value.value()).map_err(|source| {
                    SchemaError::Unreadable {
                        id: key.value().to_owned(),
                        source,
                    }
                })?;
            greatest = greatest.max(record.generation.get());
            let (session, spec) = encode_session(&record)
                .and_then(|session| Ok((session, encode_spec(&record.spec)?)))
                .map_err(|source| SchemaError::Unreadable {
                    id: key.value().to_owned(),
                    source,
                })?;
            sessions.insert(key.value(), session.as_slice())?;
            specs.insert(key.value(), spec.as_slice())?;
        }
    }
    transaction.delete_table(SESSIONS_V0)?;
    Ok(write_counters(
        transaction,
        Counters {
            reserved_through: greatest,
            commits: 0,
        },
    )?)
}

/// Reads everything.
pub(super) fn load(database: &Database) -> Result<Content, SchemaError> {
    let transaction = database.begin_read()?;
    let sessions = transaction.open_table(SESSIONS)?;
    let specs = transaction.open_table(SPECS)?;
    let meta = transaction.open_table(META)?;
    let number = |key| Ok::<_, redb::Error>(meta.get(key)?.map_or(0, |value| value.value()));
    let mut counters = Counters {
        reserved_through: number(RESERVED_KEY)?,
        commits: number(COMMITS_KEY)?,
    };
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
        counters.reserved_through = counters.reserved_through.max(record.generation.get());
        records.insert(record.id.clone(), Arc::new(record));
    }
    if specs.len()? != sessions.len()? {
        return Err(SchemaError::Inconsistent(
            "a spec belongs to no session".to_owned(),
        ));
    }
    Ok(Content { records, counters })
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
