//! Stores which commands of a container are kept: those whose terminals the shim keeps.
//!
//! ```text
//! <container>/kept/<id>.json   one command, written before it starts
//! ```
//! A new daemon finds them there, and they are removed with the container. The shim knows whether
//! a command runs and how it ended, and forgets it only when ordered to.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use conman_proto::{ExecId, KeptExec};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::RuntimeError;
use crate::shared::container_files::host_error;

/// Most kept commands of one container, including those that have ended; each may hold a
/// scrollback in the shim.
pub(super) const MAX_KEPT: usize = 16;

const DIRECTORY: &str = "kept";
const SUFFIX: &str = ".json";
const MODE: u32 = 0o700;

/// No container's name contains it.
const PREFIX: &str = "kept_";

/// A command as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StoredExec {
    pub(super) id: ExecId,
    pub(super) command: Vec<String>,
    pub(super) user: Option<String>,
    pub(super) started_at: Timestamp,
}

impl StoredExec {
    pub(super) fn into_view(self, running: bool, exit_code: Option<i32>) -> KeptExec {
        KeptExec {
            id: self.id,
            command: self.command,
            user: self.user,
            started_at: self.started_at,
            running,
            exit_code,
        }
    }
}

/// The shim's name of the command.
pub(super) fn name(id: ExecId) -> String {
    format!("{PREFIX}{id}")
}

/// Whether `name` is a kept command's.
pub(super) fn is_kept(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// The commands of a container, the oldest first. Unreadable files are skipped: a file that a
/// full disk has truncated belongs to a command that never started.
pub(super) fn all(container: &Path) -> Result<Vec<StoredExec>, RuntimeError> {
    let directory = container.join(DIRECTORY);
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(host_error("list", &directory, source)),
    };
    let mut found: Vec<StoredExec> = entries
        .flatten()
        .filter_map(|entry| serde_json::from_slice(&fs::read(entry.path()).ok()?).ok())
        .collect();
    found.sort_by_key(|one| (one.started_at, one.id));
    Ok(found)
}

/// Whether the container has this one.
pub(super) fn exists(container: &Path, id: ExecId) -> bool {
    path(container, id).exists()
}

/// Adds a command; false when there are [`MAX_KEPT`]. Callers must not run concurrently.
pub(super) fn add(container: &Path, stored: &StoredExec) -> Result<bool, RuntimeError> {
    if all(container)?.len() >= MAX_KEPT {
        return Ok(false);
    }
    let directory = container.join(DIRECTORY);
    match DirBuilder::new().mode(MODE).create(&directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(host_error("make", &directory, error));
        }
        _ => {}
    }
    let path = path(container, stored.id);
    let written = serde_json::to_vec(stored)
        .map_err(io::Error::from)
        .and_then(|json| File::create_new(&path)?.write_all(&json));
    if let Err(source) = written {
        // It does not count, so the limit would not bound it.
        let _ = fs::remove_file(&path);
        return Err(host_error("write", &path, source));
    }
    Ok(true)
}

/// Removes a command. One that does not exist is fine.
pub(super) fn remove(container: &Path, id: ExecId) -> Result<(), RuntimeError> {
    let path = path(container, id);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(host_error("remove", &path, error))
        }
        _ => Ok(()),
    }
}

fn path(container: &Path, id: ExecId) -> PathBuf {
    container.join(DIRECTORY).join(format!("{id}{SUFFIX}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(number: u64) -> StoredExec {
        StoredExec {
            id: ExecId::new(number),
            command: vec!["vi".to_owned(), "notes".to_owned()],
            user: None,
            started_at: Timestamp::from_second(i64::try_from(number).expect("small"))
                .expect("a time"),
        }
    }

    #[test]
    fn commands_are_found_again_in_their_order_and_are_so_many_at_most() {
        let container = tempfile::tempdir().expect("a directory");
        let container = container.path();
        for number in (0..MAX_KEPT as u64).rev() {
            assert!(add(container, &stored(number)).expect("added"));
        }
        assert!(!add(container, &stored(99)).expect("refused"));
        remove(container, ExecId::new(3)).expect("removed");
        remove(container, ExecId::new(3)).expect("gone already");
        assert!(add(container, &stored(99)).expect("there is room"));
        fs::write(path(container, ExecId::new(5)), "{").expect("cut short");
        let numbers: Vec<_> = all(container)
            .expect("read")
            .iter()
            .map(|one| one.started_at.as_second())
            .collect();
        assert_eq!(
            numbers,
            [0, 1, 2, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 99]
        );
        assert!(exists(container, ExecId::new(99)) && !exists(container, ExecId::new(3)));
    }

    #[test]
    fn the_shims_names_of_commands_are_no_containers() {
        assert!(is_kept(&name(ExecId::new(7))));
        assert!(!is_kept("kept.7") && !is_kept("exec.1.2"));
    }
}
