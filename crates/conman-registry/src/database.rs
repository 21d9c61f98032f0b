//! Opens a redb file that is whole and verified, or refuses it.
//!
//! Every commit is durable (`Durability::Immediate`, redb's default) and has one phase: changed
//! pages are written to new places, then the inactive commit slot and the byte that makes it
//! current, and one sync covers all of them before the answer. A crash in between leaves a slot or
//! pages with wrong checksums, and recovery uses the other slot: the previous commit, which is the
//! last acknowledged one.
//!
//! What the alternatives would add, and why they are off:
//! - Two phases sync twice, so that a slot becomes current only after its pages are durable. Then
//!   recovery never mistakes a *damaged* newest commit for an interrupted one. A commit takes 0.41
//!   ms instead of 0.27 ms on a fast disk and twice as long where the sync dominates, for every
//!   claim and every release. With one phase, a crash that coincides with disk damage may restore
//!   the previous commit; generations are safe in their separate file.
//! - Quick repair writes the allocator's state with every commit, which avoids a scan of the file
//!   after a crash. The scan takes milliseconds for the few MiB of a registry.
//! - `Durability::None` answers before anything is on the disk.
//!
//! An orderly close makes redb commit in two phases with quick repair, so that the next open
//! accepts exactly that state or refuses.

#[cfg(test)]
pub(crate) mod tests;

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use conman_linux::{remove_if_present, sync_parent, with_suffix};
use redb::{Builder, Database, WriteTransaction};

use crate::files::open_options;

/// Upper bound of redb's page cache, which is allocated as the file grows. It fits the records of
/// some thousands of sessions. With less, every commit of a larger registry reads pages; with more,
/// the daemon would exceed its 150 MB at ten thousand sessions. redb's default of 1 GiB is too
/// large for a daemon.
const CACHE_BYTES: usize = 16 << 20;

/// Why a file could not be opened.
#[derive(Debug)]
pub(crate) enum OpenFailure {
    Missing,
    InUse,
    /// Its content cannot be trusted.
    Damaged(String),
    Failed(redb::Error),
}

impl From<redb::Error> for OpenFailure {
    fn from(error: redb::Error) -> Self {
        use redb::Error;
        match error {
            Error::DatabaseAlreadyOpen => Self::InUse,
            Error::Io(error) if error.kind() == io::ErrorKind::NotFound => Self::Missing,
            // redb reports a wrong magic number and an impossible layout as invalid data, and reads
            // beyond the end of a truncated file as an unexpected end.
            Error::Io(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::InvalidData
                        | io::ErrorKind::UnexpectedEof
                        | io::ErrorKind::InvalidInput
                ) =>
            {
                Self::Damaged(error.to_string())
            }
            error @ (Error::Corrupted(_)
            | Error::RepairAborted
            | Error::UpgradeRequired(_)
            | Error::TableTypeMismatch { .. }
            | Error::TableIsMultimap(_)
            | Error::TableIsNotMultimap(_)
            | Error::TypeDefinitionChanged { .. }
            | Error::TableDoesNotExist(_)) => Self::Damaged(error.to_string()),
            error => Self::Failed(error),
        }
    }
}

/// Opens an existing file and verifies every page's checksum.
pub(crate) fn open(path: &Path) -> Result<Database, OpenFailure> {
    let file = open_options()
        .open(path)
        .map_err(|error| OpenFailure::from(redb::Error::Io(error)))?;
    let length = file
        .metadata()
        .map_err(|error| OpenFailure::Failed(error.into()))?
        .len();
    if length == 0 {
        // redb would initialize it as a new file. Ours are never empty under this name.
        return Err(OpenFailure::Damaged("it is empty".to_owned()));
    }
    // redb panics on some damage that its checks miss (for example a flipped block of a branch
    // page); treat that as damage too. Only the closure touches this state.
    let opened = catch_unwind(AssertUnwindSafe(|| -> Result<_, redb::Error> {
        let mut database = build(file, path)?;
        let intact = database.check_integrity()?;
        Ok((database, intact))
    }));
    match opened {
        Ok(Ok((database, true))) => Ok(database),
        // After redb's recovery from a crash nothing is left to repair.
        Ok(Ok((_, false))) => Err(OpenFailure::Damaged(
            "it fails its integrity check".to_owned(),
        )),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(OpenFailure::Damaged(
            "its structure makes no sense".to_owned(),
        )),
    }
}

/// Creates a file with its first content. It gets its name only once it is complete and durable, so
/// that a crash leaves no partial file.
pub(crate) fn create(
    path: &Path,
    fill: impl FnOnce(&WriteTransaction) -> Result<(), redb::Error>,
) -> Result<Database, redb::Error> {
    let temporary = with_suffix(path, ".new");
    remove_if_present(&temporary)?;
    let file = open_options().create_new(true).open(&temporary)?;
    let database = build(file, path)?;
    let transaction = database.begin_write()?;
    fill(&transaction)?;
    transaction.commit()?;
    std::fs::rename(&temporary, path)?;
    sync_parent(path)?;
    Ok(database)
}

/// `path` is the name that the file has or will have.
fn build(file: File, path: &Path) -> Result<Database, redb::Error> {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    #[cfg(test)]
    if let Some(backend) = tests::faults::backend(&file, path) {
        return Ok(builder.create_with_backend(backend)?);
    }
    #[cfg(not(test))]
    let _ = path;
    Ok(builder.create_file(file)?)
}
