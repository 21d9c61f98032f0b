//! Opening a redb file so that it is either whole and checked, or refused.
//!
//! Every commit is durable (`Durability::Immediate`, redb's default) and in one phase: changed
//! pages go to new places, the inactive commit slot and the byte that makes it current are
//! written, and one sync covers them all; the answer follows it. A crash in between leaves slot
//! or pages whose checksums fail, and recovery takes the other slot: the commit before, which is
//! the last acknowledged one.
//!
//! What the alternatives would add, and why they are off:
//! - Two phases sync once more, so that a slot is current only after its pages are durable. Then
//!   recovery never mistakes a *damaged* newest commit for an interrupted one. It costs half as
//!   much again on a fast disk (0.41 ms instead of 0.27 ms) and twice as much where the sync is
//!   all that counts, on every claim and every release. One phase can serve the commit before
//!   after a crash that coincides with damage to the disk; the registry notices that by the count
//!   in its lock file, and generations are safe by the file of their own.
//! - Quick repair writes the allocator's state with every commit, to spare a walk through the
//!   file after a crash. With the few MiB of a registry that walk takes milliseconds.
//! - `Durability::None` answers before anything is on the disk.
//!
//! An orderly close makes redb commit in two phases with quick repair, so that the next opening
//! accepts that very state or refuses.

#[cfg(test)]
pub(crate) mod faults;

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use redb::{Builder, Database, WriteTransaction};

use crate::files::{open_options, remove_if_present, sync_parent, with_suffix};

/// Most of redb's page cache, taken as the file grows. It holds what the records of some thousands
/// of sessions need; with less, every commit of a larger registry reads pages, with more the daemon
/// would outgrow its 150 MB at ten thousand. redb's default of 1 GiB is no size for a daemon.
const CACHE_BYTES: usize = 16 << 20;

/// Why a file could not be opened.
#[derive(Debug)]
pub(crate) enum OpenFailure {
    Missing,
    InUse,
    /// What it holds cannot be trusted.
    Damaged(String),
    Failed(redb::Error),
}

impl From<redb::Error> for OpenFailure {
    fn from(error: redb::Error) -> Self {
        use redb::Error;
        match error {
            Error::DatabaseAlreadyOpen => Self::InUse,
            Error::Io(error) if error.kind() == io::ErrorKind::NotFound => Self::Missing,
            // redb reports a wrong magic number and an impossible layout as invalid data, and
            // reads beyond the end of a file that was cut as an unexpected end.
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
        // redb would take it for a file to be made. Ours are never empty under this name.
        return Err(OpenFailure::Damaged("it is empty".to_owned()));
    }
    // Damage that redb's own checks do not foresee ends in a panic inside it (a flipped block of
    // a branch page does); that is a refusal too. Nothing outside the closure is touched by it.
    let opened = catch_unwind(AssertUnwindSafe(|| -> Result<_, redb::Error> {
        let mut database = build(file, path)?;
        let intact = database.check_integrity()?;
        Ok((database, intact))
    }));
    match opened {
        Ok(Ok((database, true))) => Ok(database),
        // After redb's own recovery from a crash there is nothing left to repair.
        Ok(Ok((_, false))) => Err(OpenFailure::Damaged(
            "it fails its integrity check".to_owned(),
        )),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(OpenFailure::Damaged(
            "its structure makes no sense".to_owned(),
        )),
    }
}

/// Makes a file with its first content. It bears its name only once it is whole and durable, so
/// that a crash in between leaves no half-made file behind.
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
    if let Some(backend) = faults::backend(&file, path) {
        return Ok(builder.create_with_backend(backend)?);
    }
    #[cfg(not(test))]
    let _ = path;
    Ok(builder.create_file(file)?)
}
