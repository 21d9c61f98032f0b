//! Opens a state directory and repairs what is missing in it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use conman_proto::SessionId;
use redb::Database;

use super::schema::{self, Content, Records, SchemaError};
use super::{EmbeddedOptions, commit, store_error};
use crate::database::{self, OpenFailure};
use crate::files::{ensure_dir, keep_as_damaged};
use crate::high_water::{Found, HighWater};
use crate::state_lock::StateLock;
use crate::{GREATEST_GENERATION, RegistryError, fleet_mark};

const REGISTRY_FILE: &str = "registry.redb";
const GENERATIONS_FILE: &str = "generations";

/// A state directory that is whole, locked and ready.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) lock: StateLock,
    pub(super) database: Database,
    pub(super) content: Content,
    pub(super) high_water: HighWater,
    pub(super) registry_path: PathBuf,
    pub(super) generations_path: PathBuf,
}

/// Opens the directory.
///
/// Both files record how far generations may have been used. One of them suffices; a missing file
/// is created again, above everything that the other one covers. A registry file that exists but is
/// damaged is never replaced: an operator may need its data about running containers.
///
/// The directory of a fleet's node needs a floor: no file here records which generations the fleet
/// has used, and the fleet's sessions on this node are ended.
pub(super) fn open(dir: &Path, options: &EmbeddedOptions) -> Result<Opened, RegistryError> {
    ensure_dir(dir).map_err(io_error("make the state directory", dir))?;
    let mut lock = StateLock::acquire(dir)?;
    let registry_path = dir.join(REGISTRY_FILE);
    let generations_path = dir.join(GENERATIONS_FILE);

    let found =
        HighWater::inspect(&generations_path).map_err(io_error("read", &generations_path))?;
    if let Found::OtherFormat { format, through } = found {
        return Err(other_format(&generations_path, format, through));
    }
    let opened = open_existing(&registry_path)?;
    let asked = options.generation_floor.map(conman_proto::Generation::get);
    let in_fleet =
        fleet_mark::in_fleet(dir).map_err(io_error("look for what a fleet left in", dir))?;
    if let (Some(path), None) = (&in_fleet, asked) {
        return Err(RegistryError::OfFleet { path: path.clone() });
    }
    let known = known_floor(&lock, &found, opened.as_ref().map(|(_, content)| content))
        .or(asked)
        .ok_or_else(|| RegistryError::FloorUnknown {
            path: generations_path.clone(),
        })?;
    let floor = known.max(asked.unwrap_or(0)).min(GREATEST_GENERATION.get());

    let high_water = HighWater::open(&generations_path, found, floor)
        .map_err(io_error("write", &generations_path))?;
    let (database, content) = match opened {
        Some(opened) => opened,
        None => create(&registry_path, floor)?,
    };
    lock.mark_used()?;
    if let Some(path) = in_fleet {
        fleet_mark::leave_fleet(dir).map_err(io_error("set aside", &path))?;
        tracing::warn!(
            floor,
            "this node has left its fleet; the fleet's sessions on this node are ended"
        );
    }
    Ok(Opened {
        lock,
        database,
        content,
        high_water,
        registry_path,
        generations_path,
    })
}

/// Opens the registry file; `None` without one.
fn open_existing(path: &Path) -> Result<Option<(Database, Content)>, RegistryError> {
    match open_database(path) {
        Ok(opened) => Ok(Some(opened)),
        Err(DatabaseFailure::Missing) => Ok(None),
        Err(DatabaseFailure::Damaged(what)) => Err(RegistryError::Damaged {
            path: path.to_owned(),
            what,
        }),
        Err(DatabaseFailure::Refused(error)) => Err(error),
    }
}

/// Makes a registry file without records, for generations above `floor`.
fn create(path: &Path, floor: u64) -> Result<(Database, Content), RegistryError> {
    if floor > 0 {
        tracing::warn!(
            path = %path.display(), floor,
            "the registry file is missing; starting without records, above all used generations"
        );
    }
    let database = database::create(path, |transaction| schema::fill(transaction, floor))
        .map_err(|error| store_error("make the tables", path, error))?;
    let content = Content {
        records: Records::new(),
        reserved_through: floor,
    };
    Ok((database, content))
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> RegistryError {
    let path = path.to_owned();
    move |source| RegistryError::Io {
        action,
        path,
        source: Arc::new(source),
    }
}

/// What a node without a fleet has left in the directory, now used by a fleet's node.
#[derive(Debug, Default)]
pub struct LeftAlone {
    /// Every generation up to this one may have been used.
    pub through: u64,
    /// The sessions that had not ended.
    pub going: Vec<SessionId>,
}

/// Reads it, and changes nothing. One of the two files suffices, as for
/// opening it; sessions are only in the registry file.
pub fn left_alone(dir: &Path, lock: &StateLock) -> Result<LeftAlone, RegistryError> {
    let path = dir.join(GENERATIONS_FILE);
    let found = HighWater::inspect(&path).map_err(io_error("read", &path))?;
    if let Found::OtherFormat { format, through } = found {
        return Err(other_format(&path, format, through));
    }
    let content = match open_database(&dir.join(REGISTRY_FILE)) {
        Ok((_, content)) => Some(content),
        Err(DatabaseFailure::Missing) => None,
        Err(failure) => {
            tracing::warn!(
                ?failure,
                "cannot read the registry file from before this node joined its fleet"
            );
            None
        }
    };
    let through = known_floor(lock, &found, content.as_ref());
    let through = through.ok_or(RegistryError::FloorUnknown { path })?;
    let records = content.into_iter().flat_map(|content| content.records);
    let going = records.filter(|(_, record)| !record.state.is_ended());
    Ok(LeftAlone {
        through: through.min(GREATEST_GENERATION.get()),
        going: going.map(|(id, _)| id).collect(),
    })
}

/// The greatest generation that may have been used; `None` when it is unknown.
fn known_floor(lock: &StateLock, found: &Found, content: Option<&Content>) -> Option<u64> {
    let stored = content.map(|content| content.reserved_through);
    match (found, stored) {
        (Found::Through(through), stored) => Some((*through).max(stored.unwrap_or(0))),
        (_, Some(stored)) => {
            tracing::warn!(
                floor = stored,
                "the generations file is missing or damaged; recreated from the registry file"
            );
            Some(stored)
        }
        // An unused directory.
        (Found::Missing, None) if !lock.was_used() => Some(0),
        (_, None) => None,
    }
}

/// The greatest generation that a state directory of any format may have used, if it can be read.
#[must_use]
pub fn used_through(dir: &Path) -> Option<u64> {
    match HighWater::inspect(&dir.join(GENERATIONS_FILE)).ok()? {
        Found::Through(through) | Found::OtherFormat { through, .. } => Some(through),
        Found::Missing | Found::Damaged => None,
    }
}

fn other_format(path: &Path, found: u32, through: u64) -> RegistryError {
    // The directory's other file may cover more.
    let other = path.parent().and_then(used_through);
    RegistryError::OtherFormat {
        path: path.to_owned(),
        found,
        floor: other.max(Some(through)),
    }
}

/// Why [`open_database`] failed.
#[derive(Debug)]
pub(super) enum DatabaseFailure {
    Missing,
    Damaged(String),
    Refused(RegistryError),
}

/// Opens the registry file and reads it.
pub(super) fn open_database(path: &Path) -> Result<(Database, Content), DatabaseFailure> {
    let database = database::open(path).map_err(|failure| open_failure(path, failure))?;
    let content = schema::load(&database).map_err(|error| match error {
        SchemaError::OtherFormat { format, through } => {
            DatabaseFailure::Refused(other_format(path, format, through))
        }
        SchemaError::Unreadable { id, source } => {
            let source = Arc::new(source);
            DatabaseFailure::Refused(RegistryError::Corrupt { id, source })
        }
        SchemaError::Inconsistent(what) => DatabaseFailure::Damaged(what),
        SchemaError::Store(error) => open_failure(path, error.into()),
    })?;
    Ok((database, content))
}

fn open_failure(path: &Path, failure: OpenFailure) -> DatabaseFailure {
    match failure {
        OpenFailure::Missing => DatabaseFailure::Missing,
        OpenFailure::Damaged(what) => DatabaseFailure::Damaged(what),
        OpenFailure::InUse => {
            let path = path.to_owned();
            DatabaseFailure::Refused(RegistryError::InUse { path, holder: None })
        }
        OpenFailure::Failed(error) => {
            DatabaseFailure::Refused(store_error("open the tables", path, error))
        }
    }
}

/// Rewrites the registry file while the daemon runs. The old file, if any, is kept under another
/// name, and keeps its name until the new one is durable.
pub(super) fn rebuild(
    path: &Path,
    records: &Records,
    reserved_through: u64,
) -> Result<Database, RegistryError> {
    let aside = keep_as_damaged(path)
        .map_err(io_error("keep a copy of the damaged registry file", path))?;
    let writes = commit::difference(&Records::new(), records)?;
    let database = database::create(path, |transaction| {
        schema::fill(transaction, reserved_through)?;
        commit::apply(transaction, &writes)
    })
    .map_err(|error| store_error("rewrite the tables", path, error))?;
    tracing::error!(
        path = %path.display(), aside = ?aside, records = records.len(),
        "the registry file was not trustworthy and was rewritten"
    );
    Ok(database)
}
