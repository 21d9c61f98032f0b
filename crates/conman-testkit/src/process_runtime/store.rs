//! The containers' directories: a container's data besides its processes, so that a new daemon
//! finds it.
//!
//! ```text
//! <state_dir>/<container name>/
//!   plan.json       what was created; its presence makes the container exist
//!   begun           made before the first process, so that a container starts once
//!   stdout, stderr  its log
//!   trouble         what kept it from being set up
//!   exit            its exit code, written by its supervisor, which outlives the daemon
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use conman_core::naming::{self, Instance};
use conman_proto::{Generation, ResolvedSpec};
use serde::{Deserialize, Serialize};

use conman_runtime::shared::container_files::host_error;
use conman_runtime::shared::stored_plan;
use conman_runtime::{BindPlan, ContainerKey, ContainerPlan, RuntimeError};

const BEGUN: &str = "begun";

/// What a container was created from, as it is stored.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredPlan {
    pub(super) spec: ResolvedSpec,
    pub(super) files_dir: PathBuf,
    pub(super) binds: Vec<BindPlan>,
}

/// Every container of one instance.
#[derive(Debug)]
pub(super) struct Store {
    dir: PathBuf,
    instance: Instance,
}

/// One container's directory.
#[derive(Debug, Clone)]
pub(super) struct ContainerDir {
    path: PathBuf,
}

impl Store {
    pub(super) fn open(dir: &Path, instance: Instance) -> Result<Self, RuntimeError> {
        fs::create_dir_all(dir).map_err(|source| host_error("make", dir, source))?;
        Ok(Self {
            dir: dir.to_owned(),
            instance,
        })
    }

    pub(super) fn container(&self, key: &ContainerKey) -> ContainerDir {
        let name = naming::container_name(&self.instance, &key.session, key.generation);
        ContainerDir {
            path: self.dir.join(name),
        }
    }

    /// The containers of this instance, without those of other instances.
    pub(super) fn keys(&self) -> Result<Vec<ContainerKey>, RuntimeError> {
        let error = |source| host_error("list", &self.dir, source);
        let mut keys = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(error)? {
            let entry = entry.map_err(error)?;
            let key = entry.file_name().to_str().and_then(|name| self.key(name));
            keys.extend(key.filter(|_| stored_plan::exists(&entry.path())));
        }
        keys.sort_unstable();
        Ok(keys)
    }

    /// The container of this instance that has this name.
    fn key(&self, name: &str) -> Option<ContainerKey> {
        let rest = name.strip_prefix(&format!("conman-{}-", self.instance))?;
        let (session, generation) = rest.rsplit_once('-')?;
        let generation = Generation::new(generation.parse().ok()?)?;
        Some(ContainerKey::new(session.parse().ok()?, generation))
    }
}

impl ContainerDir {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn create(&self, plan: &ContainerPlan) -> Result<(), RuntimeError> {
        match fs::create_dir(&self.path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(RuntimeError::Exists {
                    subject: plan.key.to_string(),
                });
            }
            Err(source) => return Err(host_error("make", &self.path, source)),
        }
        let stored = StoredPlan {
            spec: plan.spec.clone(),
            files_dir: plan.files_dir.clone(),
            binds: plan.binds.clone(),
        };
        stored_plan::write(&self.path, &stored)
    }

    /// `None` when there is no such container.
    pub(super) fn plan(&self) -> Result<Option<StoredPlan>, RuntimeError> {
        stored_plan::read(&self.path)
    }

    /// Claims the container's only start; false when it was claimed before.
    pub(super) fn begin(&self) -> Result<bool, RuntimeError> {
        let path = self.path.join(BEGUN);
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(source) => Err(host_error("make", &path, source)),
        }
    }

    pub(super) fn exists(&self) -> bool {
        stored_plan::exists(&self.path)
    }

    pub(super) fn exit_code(&self) -> Option<i32> {
        fs::read_to_string(self.path.join("exit"))
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    pub(super) fn stdout(&self) -> PathBuf {
        self.path.join("stdout")
    }

    pub(super) fn stderr(&self) -> PathBuf {
        self.path.join("stderr")
    }

    /// The file with the error that kept the container from being set up.
    pub(super) fn trouble(&self) -> PathBuf {
        self.path.join("trouble")
    }

    /// Opens a log file for appending; creates it if it is missing.
    pub(super) fn append_to(path: &Path) -> Result<File, RuntimeError> {
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .map_err(|source| host_error("open", path, source))
    }

    /// Removes the directory; a missing one is fine. The plan is removed last, so that an
    /// interrupted removal is found and repeated.
    pub(super) fn remove(&self) -> Result<(), RuntimeError> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(host_error("list", &self.path, source)),
        };
        let plan = stored_plan::path(&self.path);
        let others = entries.flatten().map(|entry| entry.path());
        for path in others.filter(|path| *path != plan) {
            fs::remove_file(&path).map_err(|source| host_error("remove", &path, source))?;
        }
        loop {
            match fs::remove_dir_all(&self.path) {
                // The end of a program is being written down.
                Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(host_error("remove", &self.path, error));
                }
                _ => return Ok(()),
            }
        }
    }
}
