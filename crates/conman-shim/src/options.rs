use std::path::PathBuf;
use std::time::Duration;

/// What the shim is told at its start.
#[derive(Debug, Clone)]
pub struct ShimOptions {
    /// Where it listens. Whoever is not the shim's own user is refused there.
    pub socket: PathBuf,
    /// Host directories that contain all layers, scratch directories and logs.
    pub roots: Vec<PathBuf>,
    /// The cgroup above everything that the fence freezes, in every hierarchy.
    pub fence_cgroup: String,
    /// Where the fence's deadline is kept for a later shim. In memory (below /run), since a write
    /// to a disk may wait.
    pub deadline_file: PathBuf,
    /// How long the fence waits for proof that everything is frozen before it kills the rest.
    pub freeze_patience: Duration,
}
