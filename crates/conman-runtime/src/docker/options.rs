use std::path::PathBuf;
use std::time::Duration;

use conman_core::naming::Instance;

use super::DockerFence;

/// How a [`DockerRuntime`](super::DockerRuntime) reaches its daemon and how much it asks at once.
#[derive(Debug, Clone)]
pub struct DockerOptions {
    /// The daemon's Unix socket.
    pub socket: PathBuf,
    pub instance: Instance,
    /// Calls at a time, removals and streams not counted.
    pub max_calls: usize,
    /// Removals at a time. Apart from the calls, so that clean-up never delays a start.
    pub max_removals: usize,
    /// Commands and logs being read at a time; each holds a connection for as long as it lasts.
    pub max_streams: usize,
    pub timeouts: DockerTimeouts,
    /// Processors that a container may have at most: Docker refuses a limit beyond the host's.
    pub max_cpus: f64,
    /// The shim whose dead-man fence the containers are to be under, if they are.
    pub fence: Option<DockerFence>,
}

#[expect(clippy::cast_precision_loss, reason = "no host has 2^52 processors")]
fn host_cpus() -> f64 {
    std::thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64)
}

impl DockerOptions {
    /// With the defaults: dockerd answers no faster to more than a few dozen calls at a time, and
    /// removes no faster with more than a few.
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
            fence: None,
        }
    }
}

/// Bounds on the daemon's answers, waiting for a turn included.
#[derive(Debug, Clone, Copy)]
pub struct DockerTimeouts {
    pub info: Duration,
    pub create: Duration,
    /// The start and the look at its result.
    pub start: Duration,
    /// A look at how a command ended, or at the beginning of a log.
    pub inspect: Duration,
    pub list: Duration,
    /// A batch of removals: none is begun later, and each one begun is bounded likewise.
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
