//! The containers' directories: a container's data besides its processes, so that a new daemon
//! finds it.
//!
//! ```text
//! <directory>/
//!   containers/<session>.<generation>/
//!     plan.json   what to start; its presence makes the container exist
//!     log         both outputs of its program
//!     root/       what it writes (the shim makes it, once)
//!     runtime.json what the session's OCI runtime runs, if it has one
//!   leaving/      containers that are being removed, by the same names
//!   trash/        what was removed and is being emptied
//! ```
//! A container's directory is the gate for its start: the shim makes `root` in it and fails if it
//! is missing. So a removal moves it to `leaving` before it concludes that no start is under way,
//! and back if the removal fails.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use conman_image::ImageId;
use conman_linux::{remove_if_present, spread_directories};
use conman_proto::RuntimeKind;
use conman_shim_protocol::{LaunchSpec, ProgramSpec};
use serde::{Deserialize, Serialize};

use super::trash::Trash;
use crate::shared::container_files::{host_error, if_present};
use crate::shared::container_network::StoredLink;
use crate::shared::stored_plan;
use crate::shim_link::key_of;
use crate::{ContainerKey, RuntimeError};

const CONTAINERS: &str = "containers";
const LEAVING: &str = "leaving";
const TRASH: &str = "trash";
const PAUSED: &str = "paused";
const LOG: &str = "log";
const ROOT: &str = "root";
const RUNTIME_CONFIG: &str = "runtime.json";

/// Most files that a removal waits for; few containers write as many.
const SHED_ENTRIES: usize = 4_096;

/// For root only: below are set-user-id programs that containers made.
const MODE: u32 = 0o700;

/// What a container was created from, as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StoredPlan {
    pub(super) launch: LaunchSpec,
    /// The host's sides of `launch.binds`, in their order: a trusted directory, and a path below it
    /// on which no symbolic link is followed.
    pub(super) sources: Vec<(PathBuf, PathBuf)>,
    pub(super) files_dir: PathBuf,
    pub(super) image: ImageId,
    /// If it has a link.
    #[serde(default)]
    pub(super) link: Option<StoredLink>,
    /// The session's program, if that of `launch` is an OCI runtime for it, and which one.
    #[serde(default)]
    pub(super) session_program: Option<(RuntimeKind, ProgramSpec)>,
    /// Its limit of CPU time from the moment when that program runs, in thousandths of a processor.
    #[serde(default)]
    pub(super) late_cpu_millis: Option<u64>,
}

/// Every container of one instance.
#[derive(Debug)]
pub(super) struct Store {
    containers: PathBuf,
    leaving: PathBuf,
    pub(super) trash: Trash,
}

/// One container's directory.
#[derive(Debug, Clone)]
pub(super) struct ContainerDir {
    path: PathBuf,
}

/// The name of a container: its shim's name and its directory.
pub(super) use crate::shim_link::name;

impl Store {
    /// Moves back what an earlier process was about to remove, and discards what it was about to
    /// create.
    pub(super) fn open(directory: &Path) -> Result<Self, RuntimeError> {
        let trash = directory.join(TRASH);
        let store = Self {
            containers: directory.join(CONTAINERS),
            leaving: directory.join(LEAVING),
            trash: Trash::open(trash.clone())
                .map_err(|source| host_error("make", &trash, source))?,
        };
        for path in [&store.containers, &store.leaving] {
            DirBuilder::new()
                .recursive(true)
                .mode(MODE)
                .create(path)
                .map_err(|source| host_error("make", path, source))?;
        }
        spread_directories(&store.containers);
        for name in names(&store.leaving)? {
            let (from, to) = (store.leaving.join(&name), store.containers.join(&name));
            fs::rename(&from, &to).map_err(|source| host_error("move back", &from, source))?;
        }
        for name in names(&store.containers)? {
            let path = store.containers.join(name);
            if !stored_plan::exists(&path) {
                let discarded = store.trash.discard(&path);
                discarded.map_err(|source| host_error("throw away", &path, source))?;
            }
        }
        Ok(store)
    }

    pub(super) fn container(&self, key: &ContainerKey) -> ContainerDir {
        ContainerDir {
            path: self.containers.join(name(key)),
        }
    }

    /// The containers that exist.
    pub(super) fn keys(&self) -> Result<Vec<ContainerKey>, RuntimeError> {
        let mut keys = Vec::new();
        for name in names(&self.containers)? {
            let key = name.to_str().and_then(key_of);
            keys.extend(key.filter(|_| stored_plan::exists(&self.containers.join(&name))));
        }
        keys.sort_unstable();
        Ok(keys)
    }

    /// Closes the gate for a container's start. `None` when there is no such container.
    pub(super) fn leave(&self, key: &ContainerKey) -> Result<Option<ContainerDir>, RuntimeError> {
        let name = name(key);
        let (from, to) = (self.containers.join(&name), self.leaving.join(&name));
        let moved = if_present(fs::rename(&from, &to));
        let moved = moved.map_err(|source| host_error("move", &from, source))?;
        Ok(moved.map(|()| ContainerDir { path: to }))
    }

    /// Opens the gate again. The container can be removed later, even if parts are removed already.
    pub(super) fn stay(&self, leaving: &ContainerDir) -> Result<(), RuntimeError> {
        let name = leaving.path.file_name().unwrap_or_default();
        fs::rename(&leaving.path, self.containers.join(name))
            .map_err(|source| host_error("move back", &leaving.path, source))
    }

    /// Discards a directory that is no longer needed.
    pub(super) fn discard(&self, dir: &ContainerDir) -> Result<(), RuntimeError> {
        let discarded = self.trash.discard(&dir.path);
        discarded.map_err(|source| host_error("throw away", &dir.path, source))
    }
}

fn names(directory: &Path) -> Result<Vec<OsString>, RuntimeError> {
    let listed = fs::read_dir(directory).and_then(|entries| {
        let names = entries.map(|entry| Ok(entry?.file_name()));
        names.collect::<io::Result<Vec<_>>>()
    });
    listed.map_err(|source| host_error("list", directory, source))
}

impl ContainerDir {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Exists while the container is paused.
    pub(super) fn paused(&self) -> PathBuf {
        self.path.join(PAUSED)
    }

    pub(super) fn log(&self) -> PathBuf {
        self.path.join(LOG)
    }

    /// Its standard error, if it is kept separately.
    pub(super) fn log_stderr(&self) -> PathBuf {
        conman_linux::with_suffix(&self.log(), ".stderr")
    }

    /// The configuration of a session's OCI runtime, with the session's environment.
    pub(super) fn runtime_config(&self) -> PathBuf {
        self.path.join(RUNTIME_CONFIG)
    }

    pub(super) fn root(&self) -> PathBuf {
        self.path.join(ROOT)
    }

    /// Removes the program's files as far as that is quick; the rest is removed with the directory.
    /// Only for a container that never runs again.
    pub(super) fn shed(&self) {
        let root = conman_linux::remove_tree_partly(&self.root(), SHED_ENTRIES).map(|_| ());
        let log = remove_if_present(&self.log());
        if let Err(error) = root.and(log) {
            tracing::debug!(path = %self.path.display(), %error, "removed later with its directory");
        }
    }

    pub(super) fn exists(&self) -> bool {
        stored_plan::exists(&self.path)
    }

    /// Makes the directory; false if it exists. Without [`Self::write`] there is no container.
    pub(super) fn make(&self) -> Result<bool, RuntimeError> {
        match DirBuilder::new().mode(MODE).create(&self.path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(source) => Err(host_error("make", &self.path, source)),
        }
    }

    /// Makes the container exist.
    pub(super) fn write(&self, plan: &StoredPlan) -> Result<(), RuntimeError> {
        stored_plan::write(&self.path, plan)
    }

    /// `None` when there is no such container.
    pub(super) fn plan(&self) -> Result<Option<StoredPlan>, RuntimeError> {
        stored_plan::read(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_shed_and_the_container_still_known() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().to_owned();
        let dir = ContainerDir { path };
        fs::create_dir_all(dir.root().join("upper/var")).expect("made");
        fs::write(dir.root().join("upper/var/file"), "x").expect("written");
        fs::write(dir.log(), "a line\n").expect("written");
        fs::write(stored_plan::path(dir.path()), "{}").expect("written");
        dir.shed();
        assert!(!dir.root().exists() && !dir.log().exists() && dir.exists());
        dir.shed();
        assert!(dir.exists());
    }
}
