//! Opens a journal and repairs its files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use conman_linux::FORMAT;
use jiff::Timestamp;
use redb::Database;

use super::JournalError;
use super::tables::{self, Extent};
use crate::database::{self, OpenFailure};
use crate::files::{ensure_dir, set_aside};
use crate::high_water::{Found, HighWater};

const JOURNAL_FILE: &str = "journal.redb";
const POSITIONS_FILE: &str = "journal-positions";

/// A journal that is ready to be written.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) database: Database,
    pub(super) extent: Extent,
    pub(super) positions: HighWater,
    pub(super) path: PathBuf,
    /// Why events may be missing before the first one of this daemon.
    pub(super) lost: Option<&'static str>,
}

pub(super) fn open(dir: &Path) -> Result<Opened, JournalError> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| JournalError::Io {
            action,
            path,
            source: Arc::new(source),
        }
    };
    ensure_dir(dir).map_err(io("make the state directory", dir))?;
    let path = dir.join(JOURNAL_FILE);
    let positions_path = dir.join(POSITIONS_FILE);

    // The journal file's lock comes first: without it nothing is changed.
    let opened = open_or_set_aside(&path)?;
    let found = HighWater::inspect(&positions_path).map_err(io("read", &positions_path))?;
    let mark = match (found, &opened) {
        (Found::OtherFormat { format, .. }, _) => {
            return Err(JournalError::OtherFormat {
                path: positions_path,
                found: format,
            });
        }
        (Found::Through(through), Existing::Whole(_, extent)) => through.max(extent.last_seq),
        (Found::Through(through), Existing::None | Existing::SetAside) => through,
        (Found::Missing | Found::Damaged, Existing::Whole(_, extent)) => extent.last_seq,
        (Found::Missing, Existing::None) => 0,
        // Neither file has a position. Microseconds since 1970 exceed every position of a journal
        // that was written at less than one event a microsecond.
        (Found::Missing | Found::Damaged, Existing::None | Existing::SetAside) => {
            u64::try_from(Timestamp::now().as_microsecond()).unwrap_or(0)
        }
    };
    let lost = match &opened {
        Existing::None if mark == 0 => None,
        Existing::None => Some("the journal's file was missing"),
        Existing::SetAside => Some("the journal was damaged"),
        Existing::Whole(database, _) => {
            let closed_at = tables::closed_at(database).map_err(|error| store(&path, error))?;
            let unclosed = "the daemon before this one ended without closing its journal";
            (closed_at != Some(mark)).then_some(unclosed)
        }
    };
    let (database, extent) = whole(opened, &path, mark)?;
    let positions =
        HighWater::open(&positions_path, found, mark).map_err(io("write", &positions_path))?;
    Ok(Opened {
        database,
        extent,
        positions,
        path,
        lost,
    })
}

/// Reopens the file while the daemon runs. If it is missing or damaged, the new one begins after
/// `after`.
pub(super) fn reopen(path: &Path, after: u64) -> Result<(Database, Extent), JournalError> {
    whole(open_or_set_aside(path)?, path, after)
}

fn whole(existing: Existing, path: &Path, after: u64) -> Result<(Database, Extent), JournalError> {
    match existing {
        Existing::Whole(database, extent) => Ok((database, extent)),
        Existing::None | Existing::SetAside => {
            let database = database::create(path, |transaction| tables::fill(transaction, after))
                .map_err(|error| store(path, error))?;
            Ok((
                database,
                Extent {
                    last_seq: after,
                    dropped_through: after,
                },
            ))
        }
    }
}

enum Existing {
    None,
    Whole(Database, Extent),
    SetAside,
}

fn open_or_set_aside(path: &Path) -> Result<Existing, JournalError> {
    let damage = match database::open(path) {
        Ok(database) => match checked(&database) {
            Ok((Some(found), _)) if found != FORMAT => {
                let path = path.to_owned();
                return Err(JournalError::OtherFormat { path, found });
            }
            Ok((Some(_), extent)) => return Ok(Existing::Whole(database, extent)),
            Ok((None, _)) => "it has no format number".to_owned(),
            Err(error) => match OpenFailure::from(error) {
                OpenFailure::Damaged(what) => what,
                OpenFailure::Failed(error) => return Err(store(path, error)),
                OpenFailure::Missing | OpenFailure::InUse => "it vanished".to_owned(),
            },
        },
        Err(OpenFailure::Missing) => return Ok(Existing::None),
        Err(OpenFailure::InUse) => {
            return Err(JournalError::InUse {
                path: path.to_owned(),
            });
        }
        Err(OpenFailure::Failed(error)) => return Err(store(path, error)),
        Err(OpenFailure::Damaged(what)) => what,
    };
    let aside = set_aside(path).map_err(|source| JournalError::Io {
        action: "set aside the damaged journal",
        path: path.to_owned(),
        source: Arc::new(source),
    })?;
    tracing::warn!(
        path = %path.display(), aside = %aside.display(), damage,
        "the journal is damaged; it was set aside and a new one begins"
    );
    Ok(Existing::SetAside)
}

fn checked(database: &Database) -> Result<(Option<u32>, Extent), redb::Error> {
    Ok((tables::format(database)?, tables::extent(database)?))
}

fn store(path: &Path, error: redb::Error) -> JournalError {
    JournalError::Store {
        action: "open",
        path: path.to_owned(),
        source: Arc::new(error),
    }
}
