//! What a container was created from, in a file whose presence makes the container exist.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::RuntimeError;
use crate::shared::container_files::{host_error, if_present};

const PLAN: &str = "plan.json";

/// The plan's file while it is incomplete.
const DRAFT: &str = "plan.new";

/// The plan's file in a container's directory.
pub fn path(directory: &Path) -> PathBuf {
    directory.join(PLAN)
}

/// Whether there is a plan, and thereby a container.
pub fn exists(directory: &Path) -> bool {
    path(directory).exists()
}

/// Writes the plan atomically: a crash leaves either the whole plan or none.
pub fn write(directory: &Path, plan: &impl Serialize) -> Result<(), RuntimeError> {
    let draft = directory.join(DRAFT);
    serde_json::to_vec(plan)
        .map_err(io::Error::from)
        .and_then(|json| fs::write(&draft, json))
        .and_then(|()| fs::rename(&draft, path(directory)))
        .map_err(|source| host_error("write", &draft, source))
}

/// `None` when there is no such container.
pub fn read<T: DeserializeOwned>(directory: &Path) -> Result<Option<T>, RuntimeError> {
    let path = path(directory);
    let failed = |source| host_error("read", &path, source);
    let json = if_present(fs::read(&path)).map_err(failed)?;
    let plan = json.map(|json| serde_json::from_slice(&json)).transpose();
    plan.map_err(|error| failed(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_was_not_written_to_its_end_is_none() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path();
        fs::write(at.join(DRAFT), "[1, 2").expect("written");
        assert!(!exists(at));
        assert_eq!(read::<Vec<u32>>(at).expect("no plan"), None);
        write(at, &[1, 2, 3]).expect("written");
        assert!(exists(at));
        assert_eq!(read::<Vec<u32>>(at).expect("a plan"), Some(vec![1, 2, 3]));
        fs::write(path(at), "[1, 2").expect("damaged");
        let error = read::<Vec<u32>>(at).expect_err("it is damaged");
        assert!(error.to_string().contains("plan.json"), "{error}");
    }
}
