//! A container's `/`: what a client orders, and the checks of it.

use std::path::{Component, PathBuf};

use serde::{Deserialize, Serialize};

use crate::spec::{SpecError, check_host_path, has_nul};

/// Layers of a root: an image's 128, and one of conman's. The kernel's bound on an overlay is 500.
pub const MAX_LAYERS: usize = 129;

/// How a container's root is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RootKind {
    /// An overlay of the layers and of the container's own directory: a superblock, which the launcher makes.
    #[default]
    Overlay,
    /// A snapshot of the image's subvolume, which the client makes. A detached mount of it comes with the message,
    /// after the binds; the owners of its files are those that they have inside.
    Snapshot,
}

/// The container's `/`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootSpec {
    #[serde(default)]
    pub kind: RootKind,
    /// Host directory above all layers.
    pub store: PathBuf,
    /// Directories below `store`, the topmost first. At least one.
    pub layers: Vec<PathBuf>,
    /// Host directory for what the container writes into an overlay. It must not exist, its parent must, for a
    /// snapshot as well.
    pub scratch: PathBuf,
    pub read_only: bool,
    /// What its programs synchronize is on the disk afterwards.
    #[serde(default)]
    pub durable: bool,
    /// The layers' files belong to the range of ids that begins with [`crate::SHARED_IDS`], and so does the
    /// container, with all others of this kind: for kernels that cannot map the owners of layers. Otherwise
    /// the files have the owners that they have inside, and the container has its own range.
    pub shared_ids: bool,
}

impl RootSpec {
    pub(crate) fn check(&self) -> Result<(), SpecError> {
        check_host_path("root.store", &self.store)?;
        check_host_path("root.scratch", &self.scratch)?;
        if self.kind == RootKind::Snapshot && self.shared_ids {
            let reason = "a snapshot, on a kernel that cannot map the owners of its files";
            return Err(SpecError::new("root.kind", reason));
        }
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Err(SpecError::new("root.layers", "no layer or too many"));
        }
        let plain = |path: &PathBuf| {
            !path.as_os_str().is_empty()
                && path
                    .components()
                    .all(|part| matches!(part, Component::Normal(_)))
                && !has_nul(path)
        };
        if !self.layers.iter().all(plain) {
            return Err(SpecError::new("root.layers", "a path that is not plain"));
        }
        Ok(())
    }
}
