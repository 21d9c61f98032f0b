use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use conman_linux::{CpuLimit, DiskUsage};
use conman_proto::{
    ExecId, ExecStatus, Generation, KeptExec, ResolvedSpec, RuntimeKind, SessionId, TerminalSize,
};
use futures_util::stream::BoxStream;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::shared::exec_kill::ExecKill;

/// Identifies a container. Its name, cgroup parent and labels are functions of this key and the
/// instance, so that it can be found if the answer to its creation was lost.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerKey {
    pub session: SessionId,
    pub generation: Generation,
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

/// A started container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    pub container_id: String,
    /// Its init in the host's PID namespace. Unverified: the caller opens a pidfd and then
    /// checks with [`Runtime::owns_pid`] that the process belongs to this container.
    pub pid: i32,
    /// Durations of the start's consecutive steps, if the runtime knows them. Names begin with
    /// `start.`.
    pub steps: Vec<(&'static str, Duration)>,
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

/// A command to run in a container.
#[derive(Debug, Clone, Default)]
pub struct ExecPlan {
    pub command: Vec<String>,
    pub env: Vec<(String, String)>,
    pub workdir: Option<String>,
    pub user: Option<String>,
    /// A terminal of this size from the start. Docker before 23.0 sets the size a moment after the
    /// command has started.
    pub tty: Option<TerminalSize>,
    /// Whether standard input is connected.
    pub stdin: bool,
}

/// One of a command's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    Stdout,
    Stderr,
}

/// A running command. Dropping it ends the connection to the command, not the command.
#[derive(Debug)]
pub struct ExecIo {
    /// Bytes for its standard input; dropping the sender is end of input. Bounded.
    pub stdin: mpsc::Sender<Bytes>,
    /// Its output until both streams end. Bounded: a slow reader slows the command.
    pub output: mpsc::Receiver<(OutputStream, Bytes)>,
    /// Latest wins; ignored without a terminal.
    pub resize: mpsc::Sender<TerminalSize>,
    /// How it ended; arrives after the last output.
    pub status: oneshot::Receiver<ExecStatus>,
    /// Kills the command.
    pub kill: ExecKill,
}

/// How to attach to a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachOptions {
    /// Sets the terminal to this size for all clients; `None` leaves it.
    pub size: Option<TerminalSize>,
    /// Whether to begin with the last output of the terminal.
    pub scrollback: bool,
}

/// Output of a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalOutput {
    /// Clear the screen and show these bytes: the last output of the terminal.
    Replay(Bytes),
    /// The program wrote this.
    Output(Bytes),
}

/// A client's attachment to a terminal, which other clients may share. Dropping it only detaches.
#[derive(Debug)]
pub struct TerminalIo {
    /// What is typed. Bounded: it waits while the program does not read.
    pub input: mpsc::Sender<Bytes>,
    /// The program's output, until its end. Bounded: a slow reader slows neither the program nor
    /// other clients; it gets a replay of what it missed.
    pub output: mpsc::Receiver<TerminalOutput>,
    /// Latest wins, among all clients.
    pub resize: mpsc::Sender<TerminalSize>,
    /// How the program ended; arrives after the last output.
    pub status: oneshot::Receiver<ExecStatus>,
}

/// A part of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// Continue with later output, until the container ends.
    pub follow: bool,
    /// Only this many lines from the end.
    pub tail: Option<u32>,
    pub timestamps: bool,
}

/// A piece of a container's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogChunk {
    pub stream: OutputStream,
    pub bytes: Bytes,
}

/// A program that makes containers. Cheap to share; implementations bound the time of every call.
#[async_trait]
pub trait Runtime: Send + Sync + std::fmt::Debug + 'static {
    /// The kind of this runtime.
    fn kind(&self) -> RuntimeKind;

    /// Checks that it answers, and returns its description.
    async fn info(&self) -> Result<RuntimeInfo, RuntimeError>;

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

    /// The container's limit of processor time, from the kernel; `None` if it has none.
    fn cpu_limit(&self, _key: &ContainerKey) -> Option<CpuLimit> {
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

    /// The disk usage of a container's files and log, without binds, if it exceeds `limits`: below
    /// them only a part may be measured. `None` also if the file system enforces the limits.
    async fn excess_disk_usage(
        &self,
        _key: &ContainerKey,
        _limits: DiskUsage,
    ) -> Result<Option<DiskUsage>, RuntimeError> {
        Ok(None)
    }

    /// Removes dead or never started containers with everything that they left (cgroups, files), as
    /// one bounded batch. Removing a container that does not exist succeeds. The results are in the
    /// order of `keys`. Refuses a container that still has processes.
    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>>;

    /// Runs a command in a running container.
    async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Result<ExecIo, RuntimeError>;

    /// Attaches to the terminal of a container ([`ResolvedSpec::tty`]), or of a kept command in it.
    /// The terminal outlives its clients and this process.
    async fn attach(
        &self,
        key: &ContainerKey,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Result<TerminalIo, RuntimeError>;

    /// Runs a command in a terminal that is kept; `plan.tty` is its size. It runs until it ends, is
    /// killed, or its container dies. How it ended stays known until its place among the container's
    /// kept commands is needed.
    async fn keep_exec(&self, key: &ContainerKey, plan: ExecPlan)
    -> Result<KeptExec, RuntimeError>;

    /// The kept commands of a container, the oldest first.
    async fn kept_execs(&self, _key: &ContainerKey) -> Result<Vec<KeptExec>, RuntimeError> {
        // A runtime without kept commands.
        Ok(Vec::new())
    }

    /// Kills a kept command, if it has not ended, with all its processes, and forgets it.
    async fn end_exec(&self, key: &ContainerKey, exec: ExecId) -> Result<(), RuntimeError> {
        let subject = key.to_string();
        Err(RuntimeError::NoSuchExec { subject, exec })
    }

    /// The container's log. For one with a terminal: the terminal's last output.
    async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError>;
}

/// Why a runtime failed.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The runtime does not answer: not installed, stopped, hung.
    #[error("{runtime} does not answer while asked to {action}: {reason}")]
    Unavailable {
        runtime: RuntimeKind,
        action: &'static str,
        reason: String,
    },
    /// There was no answer in time; the request may still take effect.
    #[error("{runtime} did not {action} {subject} within {after_ms} ms")]
    TimedOut {
        runtime: RuntimeKind,
        action: &'static str,
        subject: String,
        after_ms: u64,
    },
    #[error("image `{image}` is not on this node; {remedy}")]
    NoSuchImage { image: String, remedy: String },
    /// The image or the spec cannot be started: for example no such command.
    #[error("{runtime} cannot {action} {subject}: {reason}")]
    Refused {
        runtime: RuntimeKind,
        action: &'static str,
        subject: String,
        reason: String,
    },
    /// No container may run on this node at present.
    #[error(
        "{runtime} does not {action} {subject}: this node has lost touch with the others, and \
         everything of it is frozen until it is back"
    )]
    Fenced {
        runtime: RuntimeKind,
        action: &'static str,
        subject: String,
    },
    /// It started, and its program ended before a pidfd was opened. Whether a short program is
    /// reported by this error or by its exit depends only on timing.
    #[error("{subject} {reason}")]
    EndedAtOnce { subject: String, reason: String },
    /// The command to run does not exist in the container; `exit_code` is 126 or 127.
    #[error("`{command}` cannot be run in {subject}: {reason}")]
    NoSuchCommand {
        command: String,
        subject: String,
        reason: String,
        exit_code: i32,
    },
    #[error("there is no container of {subject}")]
    NoSuchContainer { subject: String },
    /// A container of this name exists already.
    #[error("a container of {subject} exists already")]
    Exists { subject: String },
    #[error("{subject} still has processes: {pids:?}")]
    StillAlive { subject: String, pids: Vec<i32> },
    /// This runtime does not support it.
    #[error("{runtime} cannot {action} {subject}: {reason}")]
    Unsupported {
        runtime: RuntimeKind,
        action: &'static str,
        subject: String,
        reason: String,
    },
    #[error("{subject} has no terminal: {reason}")]
    NoTerminal { subject: String, reason: String },
    #[error(
        "{subject} has no kept command {exec}: it is gone, or never began; `conman attach --list` \
         shows those that there are"
    )]
    NoSuchExec { subject: String, exec: ExecId },
    /// A bounded resource is full; `remedy` says what makes room.
    #[error("{subject}: there is no room for more {what}; {remedy}")]
    TooMany {
        subject: String,
        what: String,
        remedy: &'static str,
    },
    /// An error of the host (files, cgroups), not of the runtime's daemon.
    #[error("cannot {action} {path}")]
    Host {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

impl RuntimeError {
    /// Whether the requested action may have happened, or may still happen.
    #[must_use]
    pub fn is_ambiguous(&self) -> bool {
        match self {
            Self::Unavailable { .. } | Self::TimedOut { .. } => true,
            Self::NoSuchImage { .. }
            | Self::Refused { .. }
            | Self::Fenced { .. }
            | Self::EndedAtOnce { .. }
            | Self::NoSuchCommand { .. }
            | Self::NoSuchContainer { .. }
            | Self::Exists { .. }
            | Self::StillAlive { .. }
            | Self::Unsupported { .. }
            | Self::NoTerminal { .. }
            | Self::NoSuchExec { .. }
            | Self::TooMany { .. }
            | Self::Host { .. } => false,
        }
    }
}
