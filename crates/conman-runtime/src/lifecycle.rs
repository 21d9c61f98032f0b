//! The part of a runtime that creates, starts, kills and removes containers.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::runtime_traits;
use conman_linux::{
    CpuLimit, DiskUsage, ExitScan, NetnsSockets, PidFd, ResourceUsage, SignalNumber,
};
use conman_net::egress::EgressSockets;
use conman_proto::{Generation, Network, ResolvedSpec, RuntimeKind, SessionId};
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;

use crate::RuntimeError;
use crate::shared::connect;
use crate::shared::container_files::host_error;

/// Identifies a container. Its name, cgroup parent and labels are functions of this key and the
/// instance, so that it can be found if the answer to its creation was lost.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerKey {
    pub session: SessionId,
    pub generation: Generation,
}

impl ContainerKey {
    #[must_use]
    pub fn new(session: SessionId, generation: Generation) -> Self {
        Self {
            session,
            generation,
        }
    }
}

impl std::fmt::Display for ContainerKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{} (generation {})",
            self.session, self.generation
        )
    }
}

/// How a container exceeds its limits of disk space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskExcess {
    Measured(DiskUsage),
    /// Its processes have more open files and mappings than are searched for files without a name.
    Unmeasurable,
    /// No more than the limits were found, while directories changed: a file that was moved may be missing.
    Unsteady,
}

/// What pauses a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PausedBy {
    /// An order, which only another one undoes unless the template lets connections do it.
    Operator,
    /// The idle timeout, until something begins in the session.
    IdleTimeout,
}

/// A running container whose use of resources is read.
#[derive(Debug, Clone)]
pub struct RunningContainer {
    pub key: ContainerKey,
    /// The pid of its init on the host.
    pub init: i32,
    /// Whether its specification limits processor time. Without a limit nothing throttles it.
    pub has_cpu_limit: bool,
    /// Its processes that were killed because memory ran out, if that is known.
    pub oom_kills: Option<u64>,
}

/// What to create.
#[derive(Debug, Clone)]
pub struct ContainerPlan {
    pub key: ContainerKey,
    pub spec: ResolvedSpec,
    /// Host directory of the container's small files (`hosts`, `resolv.conf`, `generation`); the
    /// runtime fills it at `create` and removes it at `remove`.
    pub files_dir: PathBuf,
    /// Checked and expanded binds.
    pub binds: Vec<BindPlan>,
}

/// A file or directory of the host that is visible in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindPlan {
    /// A directory that the operator chose; symbolic links on the way to it are followed.
    pub root: PathBuf,
    /// Path below it, on which no symbolic link is followed; empty for `root` itself.
    pub below: PathBuf,
    /// Path in the container.
    pub target: String,
    pub read_only: bool,
}

impl BindPlan {
    /// The path on the host.
    #[must_use]
    pub fn source(&self) -> PathBuf {
        if self.below.as_os_str().is_empty() {
            return self.root.clone();
        }
        self.root.join(&self.below)
    }
}

/// What was left of the start of a container made ahead.
pub const MADE_AHEAD: &str = "start.ahead";

/// A started container.
#[derive(Debug)]
pub struct Started {
    pub container_id: String,
    /// Its init in the host's PID namespace. Unverified: the caller opens a pidfd and then
    /// checks with [`Lifecycle::owns_pid`] that the process belongs to this container.
    pub pid: i32,
    /// Durations of the start's consecutive steps, if the runtime knows them. Names begin with
    /// `start.`; [`MADE_AHEAD`] is the only one of a container made ahead.
    pub steps: Vec<(&'static str, Duration)>,
    /// The sockets of its egress proxy or resolver, if the runtime opened them before the program ran.
    pub egress: Option<EgressSockets>,
}

/// A container with this instance's label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundContainer {
    pub key: ContainerKey,
    pub container_id: String,
    /// `Some` while it runs.
    pub pid: Option<i32>,
    /// Its program's exit code once the runtime has noticed its end.
    pub exit_code: Option<i32>,
}

/// A runtime's description of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeInfo {
    pub version: String,
    /// Conditions that make sessions less safe, each with its remedy (for Docker: live-restore
    /// switched off).
    pub warnings: Vec<String>,
}

/// Sends a signal to a process of the host. `false` if it has ended.
pub(crate) fn signal_process(process: &PidFd, signal: SignalNumber) -> Result<bool, RuntimeError> {
    let sent = process.signal(signal);
    sent.map_err(|error| host_error("signal", Path::new("/proc"), io::Error::other(error)))
}

/// Creates, starts, finds and removes containers, and reports what the kernel knows of them.
#[async_trait]
pub trait Lifecycle: Send + Sync + std::fmt::Debug + 'static {
    /// The kind of this runtime.
    fn kind(&self) -> RuntimeKind;

    /// Checks that it answers, and returns its description.
    async fn info(&self) -> Result<RuntimeInfo, RuntimeError>;

    /// Checks that it answers, however busy it is.
    async fn ping(&self) -> Result<(), RuntimeError> {
        self.info().await.map(drop)
    }

    /// Whether its program has just been started and has not answered yet, for a bounded time.
    fn is_starting(&self) -> bool {
        false
    }

    /// Ends containers that were made ahead; the next starts decide what is made ahead again. Does not wait.
    fn drop_pool(&self) {}

    /// Containers made ahead that wait for a start.
    fn made_ahead(&self) -> usize {
        0
    }

    /// Returns an error if the runtime knows at once, before a container is created, that it lacks
    /// the image; `None` also if it does not know.
    async fn lacks_image(&self, _image: &str) -> Option<RuntimeError> {
        None
    }

    /// Makes the container without starting it. No process exists afterwards.
    async fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError>;

    /// Starts a created container. Each is started once: after its end, only a later generation
    /// may run, and not every runtime refuses a second start. After an error with
    /// [`RuntimeError::is_ambiguous`] it may run or may still start.
    async fn start(&self, key: &ContainerKey) -> Result<Started, RuntimeError>;

    /// The container of `key`, in any state.
    async fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError>;

    /// The addresses by which sessions on all nodes reach a created container. Does not block.
    fn fabric_addresses(&self, _key: &ContainerKey) -> Vec<IpAddr> {
        Vec::new()
    }

    /// Every container of this instance, in any state.
    async fn list(&self) -> Result<Vec<FoundContainer>, RuntimeError>;

    /// Whether process `pid` belongs to the container of `key`, according to the kernel (its cgroup),
    /// not to the runtime's daemon. Never blocks on the daemon. `false` proves no death: it is also
    /// returned for a process that cannot be read.
    fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool;

    /// Every process of the container of `key` according to the kernel (its cgroups), for a start
    /// whose answer was lost. Never blocks on the daemon. An empty list is proof: unreadable cgroups
    /// are an error.
    fn pids(&self, key: &ContainerKey) -> std::io::Result<Vec<i32>>;

    /// Processor time in microseconds that the container's processes have used, from the kernel; `None` if that is
    /// unknown. Reads a file.
    fn cpu_us(&self, _key: &ContainerKey) -> Option<u64> {
        None
    }

    /// The container's limit of processor time, from the kernel; `None` if it has none.
    fn cpu_limit(&self, _key: &ContainerKey) -> Option<CpuLimit> {
        None
    }

    /// Processes of the container that the kernel has killed because memory ran out, from its cgroups; `None` if
    /// that is not counted, or they are removed. Never blocks on the daemon.
    fn oom_kills(&self, _key: &ContainerKey) -> Option<u64> {
        None
    }

    /// Whether memory ran out in a container whose init is dead.
    async fn out_of_memory(&self, key: &ContainerKey) -> bool {
        self.oom_kills(key).is_some_and(|kills| kills > 0)
    }

    /// The signal by which the container's image wants to be stopped, if it says so.
    async fn stop_signal(&self, _key: &ContainerKey) -> Option<String> {
        None
    }

    /// Sends a signal to the program of a running container, whose init is `process`. `false` if it has ended.
    async fn signal(
        &self,
        _key: &ContainerKey,
        process: &Arc<PidFd>,
        signal: SignalNumber,
    ) -> Result<bool, RuntimeError> {
        signal_process(process, signal)
    }

    /// Whether the first process of a container is its program, so that a signal to that needs nobody's help.
    fn runs_programs_itself(&self) -> bool {
        runtime_traits(self.kind()).runs_programs_itself
    }

    /// What can prove that nothing of a killed container runs before its PID namespace is empty; `None` if
    /// the runtime has no such proof. May block.
    fn exit_scan(&self, _key: &ContainerKey) -> Option<ExitScan> {
        None
    }

    /// What the processes of each container use, from the kernel. Reads some files of each; never blocks on
    /// the daemon.
    fn usages(&self, containers: &[RunningContainer]) -> Vec<ResourceUsage> {
        vec![ResourceUsage::default(); containers.len()]
    }

    /// Connects to a port of a running container, whose init is `process`. Bounded by the caller; cancelling
    /// closes what was opened.
    async fn connect(
        &self,
        sockets: &NetnsSockets,
        process: &Arc<PidFd>,
        network: &Network,
        port: u16,
    ) -> io::Result<TcpStream> {
        connect::on_loopback(sockets, process, network, port).await
    }

    /// Keeps the processes of a running container from running until [`Lifecycle::resume`], and lets the
    /// kernel take back its memory. Ending the container does not need a resume.
    ///
    /// A paused container stays paused; `by` is reported to the next daemon.
    async fn pause(&self, key: &ContainerKey, _by: PausedBy) -> Result<(), RuntimeError> {
        Err(RuntimeError::Unsupported {
            runtime: self.kind(),
            action: "pause",
            subject: key.to_string(),
            reason: "only native sessions can be paused".to_owned(),
        })
    }

    /// Undoes [`Lifecycle::pause`]; does nothing to a container that is not paused.
    async fn resume(&self, _key: &ContainerKey) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// What an earlier daemon has paused the container for, if it has. `None` also if that is unknown.
    async fn paused_by(&self, _key: &ContainerKey) -> Option<PausedBy> {
        None
    }

    /// The exit code of a container whose init is dead, waiting at most `patience` for the runtime
    /// to notice; `None` if it does not report the code in time.
    async fn exit_code(&self, key: &ContainerKey, patience: Duration) -> Option<i32>;

    /// Whether this node's fence killed a container whose init is dead, without an order: it had not
    /// frozen in time, or was frozen for too long. `false` also if that is unknown. Never waits for
    /// the runtime's daemon.
    async fn was_fenced(&self, _key: &ContainerKey) -> bool {
        // A runtime without a fence.
        false
    }

    /// Whether a container's files and log, without binds, exceed `limits`: below them only a part may be
    /// measured. `None` also if the file system enforces the limits. `freeze`: it is frozen meanwhile, where that
    /// is possible, so that it is steady; some milliseconds for each thousand files.
    async fn excess_disk_usage(
        &self,
        _key: &ContainerKey,
        _limits: DiskUsage,
        _freeze: bool,
    ) -> Result<Option<DiskExcess>, RuntimeError> {
        Ok(None)
    }

    /// Removes dead or never started containers with everything that they left (cgroups, files), as
    /// one bounded batch. Removing a container that does not exist succeeds. The results are in the
    /// order of `keys`. Refuses a container that still has processes.
    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>>;
}
