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
    /// Where what a later shim must know is kept: containers, their ids, the fence's deadline. In
    /// memory (below /run), since a write to a disk may wait.
    pub state_file: PathBuf,
    /// Gives layers to overlays by path even where the kernel takes descriptors, as it does from
    /// about 6.13 on; to try the one where there is the other.
    pub layers_by_path: bool,
    /// How long the fence waits for proof that everything is frozen before it kills the rest.
    pub freeze_patience: Duration,
}
