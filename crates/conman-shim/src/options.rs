use std::path::PathBuf;
use std::time::Duration;

use conman_linux::{CgroupPart, Interface};

use crate::ids::IdPool;

/// What the shim is told at its start.
#[derive(Debug, Clone)]
pub struct ShimOptions {
    /// Where it listens. Whoever is not the shim's own user is refused there.
    pub socket: PathBuf,
    /// Host directories that contain all layers, scratch directories and logs.
    pub roots: Vec<PathBuf>,
    /// The cgroup above everything that the fence freezes, in every hierarchy.
    pub fence_cgroup: String,
    /// Where systemd has Docker put what it starts instead. Its parts come under the fence as they
    /// are told of; a shim that has lost what it was told looks for them here.
    pub fence_slice: String,
    /// Where what a later shim must know is kept: containers, their ids, the fence's deadline. In
    /// memory (below /run), since a write to a disk may wait.
    pub state_file: PathBuf,
    /// User and group ids that containers get. Those that run keep what they have.
    pub ids: IdPool,
    /// Processor time of all containers together, in thousandths of a processor; `None` is no limit.
    pub total_cpu_millis: Option<u64>,
    /// Newer kernel interfaces to do without although the kernel has them.
    pub do_without: Vec<Interface>,
    /// The cgroup hierarchies to use.
    pub cgroups: CgroupPart,
    /// Containers that the host is to hold; the kernel is prepared for them at the beginning, which
    /// takes it some seconds in the background and makes later starts cheaper. 0 leaves it as it
    /// is.
    pub prepare_for: u32,
    /// Where all shims of the host note for how many it has been prepared since the boot: the
    /// kernel stays so, whoever asked for it.
    pub prepared_file: PathBuf,
    /// Where another shim runs already: to wait for its end and to succeed it, in place of giving up.
    pub standby: bool,
    /// How long the fence waits for proof that everything is frozen before it kills the rest.
    pub freeze_patience: Duration,
    /// What the fence has held frozen for so long is killed.
    pub frozen_max: Duration,
}
