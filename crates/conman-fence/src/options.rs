//! The shim's configuration.

use std::path::PathBuf;
use std::time::Duration;

use conman_linux::{CgroupPart, Interface};
use conman_shim_protocol::IdPool;

/// The shim's configuration.
#[derive(Debug, Clone)]
pub struct ShimOptions {
    /// Where it listens. Users other than the shim's own and root are refused.
    pub socket: PathBuf,
    /// Host directories that contain all layers, scratch directories and logs.
    pub roots: Vec<PathBuf>,
    /// The cgroup above everything that the fence freezes, in every hierarchy.
    pub fence_cgroup: String,
    /// Where systemd puts containers that Docker starts instead. Its parts come under the fence as they are
    /// reported; a shim that has lost its state searches here.
    pub fence_slice: String,
    /// Where the state for a later shim is kept: containers, their ids, the fence's deadline. In memory
    /// (below /run), since a write to a disk may block.
    pub state_file: PathBuf,
    /// User and group ids for containers. Running containers keep theirs.
    pub ids: IdPool,
    /// Where all shims of the host lock the ids that they use.
    pub ids_file: PathBuf,
    /// Processor time of all containers together, in thousandths of a processor; `None` is no limit.
    pub total_cpu_millis: Option<u64>,
    /// Newer kernel interfaces that are not used even if the kernel has them.
    pub do_without: Vec<Interface>,
    /// The cgroup hierarchies to use.
    pub cgroups: CgroupPart,
    /// Most containers that the kernel is prepared for, in the background and as their number grows, which makes
    /// later starts cheaper. 0 disables it.
    pub prepare_for: u32,
    /// Where all shims of the host record how many superblocks it has been prepared for since the boot: the kernel
    /// stays prepared, whichever shim did it.
    pub prepared_file: PathBuf,
    /// If another shim runs already, wait for its end and succeed it, instead of failing.
    pub standby: bool,
    /// How long the fence waits for proof that everything is frozen before it kills the rest.
    pub freeze_patience: Duration,
    /// The fence kills what it has held frozen for this long.
    pub frozen_max: Duration,
}
