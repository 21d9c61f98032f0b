//! How the Docker runtime reaches its daemon, and its limits.

use std::path::PathBuf;
use std::time::Duration;

use conman_core::naming::Instance;
use conman_linux::IoLimits;

use super::DockerFence;
use crate::{ContainerNetwork, KeptLogLimits};

/// How a [`DockerRuntime`](super::DockerRuntime) reaches its daemon, and its limits.
#[derive(Debug, Clone)]
pub struct DockerOptions {
    /// The daemon's Unix socket.
    pub socket: PathBuf,
    pub instance: Instance,
    /// Most concurrent calls, not counting removals and streams.
    pub max_calls: usize,
    /// Most concurrent removals. Separate from calls, so that clean-up never delays a start.
    pub max_removals: usize,
    /// Most commands and logs open at a time; each holds a connection.
    pub max_streams: usize,
    pub timeouts: DockerTimeouts,
    /// Most processors of a container: Docker refuses a limit beyond the host's.
    pub max_cpus: f64,
    /// Limits of each container's I/O, and the disk's node in `/dev`.
    pub io: Option<(PathBuf, IoLimits)>,
    /// The shim whose dead-man fence the containers are under; `None` for no fence.
    pub fence: Option<DockerFence>,
    /// Where the ends of removed containers' logs are kept, and how much of them; `None` keeps none.
    pub kept_logs: Option<(PathBuf, KeptLogLimits)>,
    pub network: ContainerNetwork,
    /// Where it is stored which container has which link.
    pub links: Option<PathBuf>,
}

#[expect(clippy::cast_precision_loss, reason = "no host has 2^52 processors")]
fn host_cpus() -> f64 {
    std::thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64)
}

impl DockerOptions {
    /// Defaults: dockerd does not get faster with more than a few dozen concurrent calls, or more
    /// than a few concurrent removals.
    #[must_use]
    pub fn new(socket: PathBuf, instance: Instance) -> Self {
        Self {
            socket,
            instance,
            max_calls: 32,
            max_removals: 8,
            max_streams: 512,
            timeouts: DockerTimeouts::default(),
            max_cpus: host_cpus(),
            io: None,
            fence: None,
            kept_logs: None,
            network: ContainerNetwork::default(),
            links: None,
        }
    }
}

/// Bounds on the daemon's answers, including the wait for a place.
#[derive(Debug, Clone, Copy)]
pub struct DockerTimeouts {
    pub info: Duration,
    pub create: Duration,
    /// The start and the check of its result.
    pub start: Duration,
    /// Reading how a command ended, or the beginning of a log.
    pub inspect: Duration,
    pub list: Duration,
    /// A batch of removals: none starts later, and each one is bounded likewise.
    pub remove: Duration,
    /// Until a command runs.
    pub exec: Duration,
}

impl Default for DockerTimeouts {
    fn default() -> Self {
        Self {
            info: Duration::from_secs(5),
            create: Duration::from_secs(30),
            start: Duration::from_secs(30),
            inspect: Duration::from_secs(10),
            list: Duration::from_secs(10),
            remove: Duration::from_secs(60),
            exec: Duration::from_secs(10),
        }
    }
}
