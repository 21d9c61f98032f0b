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

use crate::exec_kill::ExecKill;

/// One container: everything else about it (name, cgroup parent, labels) is a function of this
/// and the instance, so that it can be found again when the answer to its creation was lost.
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
    /// Host directory of this container's own small files (`hosts`, `resolv.conf`,
    /// `generation`); the runtime fills it at `create` and removes it at `remove`.
    pub files_dir: PathBuf,
    /// Checked and expanded binds.
    pub binds: Vec<BindPlan>,
}

/// A file or directory of the host's that a container is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindPlan {
    /// A directory of the operator's choice, which may be reached through symbolic links.
    pub root: PathBuf,
    /// Path below it, on which none is followed; empty for `root` itself.
    pub below: PathBuf,
    /// Path in the container.
    pub target: String,
    pub read_only: bool,
}

impl BindPlan {
    /// The path of what is shown.
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
    /// What of the start took how long, one after the other, where the runtime knows it. Names
    /// begin with `start.`.
    pub steps: Vec<(&'static str, Duration)>,
}

/// A container that bears this instance's label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundContainer {
    pub key: ContainerKey,
    pub container_id: String,
    /// `Some` while it runs.
    pub pid: Option<i32>,
    /// Its program's exit code once the runtime has noticed its end.
    pub exit_code: Option<i32>,
}

/// What a runtime says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeInfo {
    pub version: String,
    /// Conditions under which sessions are less safe than they should be, in words, each with
    /// its remedy (for Docker: live-restore switched off).
    pub warnings: Vec<String>,
}

/// A command to run in a container.
#[derive(Debug, Clone, Default)]
pub struct ExecPlan {
    pub command: Vec<String>,
    pub env: Vec<(String, String)>,
    pub workdir: Option<String>,
    pub user: Option<String>,
    /// A terminal of this size from the beginning, as far as the runtime can: Docker before 23.0
    /// sets it a moment after the command has begun.
    pub tty: Option<TerminalSize>,
    /// Whether standard input is connected.
    pub stdin: bool,
}

/// Which of a command's outputs.
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
    /// How it ended; comes after the last output.
    pub status: oneshot::Receiver<ExecStatus>,
    /// Ends it before its time.
    pub kill: ExecKill,
}

/// How to attach to a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachOptions {
    /// The terminal gets this size, for all who are attached; as it is when there is none.
    pub size: Option<TerminalSize>,
    /// Whether to begin with what the terminal showed last.
    pub scrollback: bool,
}

/// What comes from a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalOutput {
    /// The screen begins anew, empty, with these bytes: what the terminal showed last.
    Replay(Bytes),
    /// The program wrote this.
    Output(Bytes),
}

/// A terminal that somebody is attached to, beside others. Dropping it detaches, and nothing else.
#[derive(Debug)]
pub struct TerminalIo {
    /// What is typed. Bounded: it waits while the program does not read.
    pub input: mpsc::Sender<Bytes>,
    /// What the program writes, until its end. Bounded: a slow reader slows nobody; what it missed
    /// comes as a replay.
    pub output: mpsc::Receiver<TerminalOutput>,
    /// Latest wins, among all who are attached.
    pub resize: mpsc::Sender<TerminalSize>,
    /// How the program ended; comes after the last output.
    pub status: oneshot::Receiver<ExecStatus>,
}

/// Which part of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// Go on with what is written from now on, until the container ends.
    pub follow: bool,
    /// Only so many lines from the end.
    pub tail: Option<u32>,
    pub timestamps: bool,
}

/// A piece of a container's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogChunk {
    pub stream: OutputStream,
    pub bytes: Bytes,
}

/// What makes containers. Cheap to share; every call is bounded in time by the implementation.
#[async_trait]
pub trait Runtime: Send + Sync + std::fmt::Debug + 'static {
    /// Which one it is.
    fn kind(&self) -> RuntimeKind;

    /// Whether it answers, and what it says of itself.
    async fn info(&self) -> Result<RuntimeInfo, RuntimeError>;

    /// That it lacks an image, where it knows that at once, before a container is made; `None` also
    /// where it does not.
    async fn lacks_image(&self, _image: &str) -> Option<RuntimeError> {
        None
    }

    /// Makes the container without starting it. No process exists afterwards.
    async fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError>;

    /// Starts a created container. Each is started once: one that has ended comes again only as a
    /// later generation, and not every runtime refuses to start it anew. After an error with [`RuntimeError::is_ambiguous`] it may run
    /// or may still come to run.
    async fn start(&self, key: &ContainerKey) -> Result<Started, RuntimeError>;

    /// The container of `key`, whatever state it is in.
    async fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError>;

    /// Every container of this instance, whatever state it is in.
    async fn list(&self) -> Result<Vec<FoundContainer>, RuntimeError>;

    /// Whether process `pid` belongs to the container of `key`, told by the kernel (its cgroup),
    /// not by the runtime's daemon. Never blocks on the daemon. `false` proves no death: also a
    /// process that cannot be looked at is nobody's.
    fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool;

    /// Every process of the container of `key` as the kernel knows it (its cgroups), for a start
    /// whose answer was lost. Never blocks on the daemon. That there is none is proof: what cannot
    /// be looked at is an error.
    fn pids(&self, key: &ContainerKey) -> std::io::Result<Vec<i32>>;

    /// The container's limit of processor time, told by the kernel; `None` where it has none.
    fn cpu_limit(&self, _key: &ContainerKey) -> Option<CpuLimit> {
        None
    }

    /// The exit code of a container whose init is dead, waiting at most `patience` for the
    /// runtime to notice; `None` when it does not tell in time.
    async fn exit_code(&self, key: &ContainerKey, patience: Duration) -> Option<i32>;

    /// Whether this node's own fence killed a container whose init is dead, without anybody's
    /// order: it had not frozen in time, or was frozen for too long. `false` also where that is not
    /// known. Never waits for the runtime's daemon.
    async fn was_fenced(&self, _key: &ContainerKey) -> bool {
        // A runtime that is under no fence.
        false
    }

    /// What the files and the log of a container take, binds left out, as far as that is more than
    /// `limits`: otherwise it may be measured in part. `None` also where the file system enforces the
    /// limits.
    async fn excess_disk_usage(
        &self,
        _key: &ContainerKey,
        _limits: DiskUsage,
    ) -> Result<Option<DiskUsage>, RuntimeError> {
        Ok(None)
    }

    /// Removes dead or never started containers with all they left (cgroups, files), as one
    /// bounded batch. Removing what is gone already succeeds. The results stand in the order of
    /// `keys`. Refuses one that still has processes.
    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>>;

    /// Runs a command in a running container.
    async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Result<ExecIo, RuntimeError>;

    /// Attaches to the terminal of a container ([`ResolvedSpec::tty`]), or of a kept command in it.
    /// It outlives whoever is attached, and this process.
    async fn attach(
        &self,
        key: &ContainerKey,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Result<TerminalIo, RuntimeError>;

    /// Runs a command in a terminal that is kept, which `plan.tty` gives the size of. It goes on
    /// until it ends, is ended, or its container dies; how it ended is known as long as there is
    /// room among the container's kept commands.
    async fn keep_exec(&self, key: &ContainerKey, plan: ExecPlan)
    -> Result<KeptExec, RuntimeError>;

    /// The kept commands of a container, the oldest first.
    async fn kept_execs(&self, _key: &ContainerKey) -> Result<Vec<KeptExec>, RuntimeError> {
        // A runtime that keeps none.
        Ok(Vec::new())
    }

    /// Kills a kept command, if it has not ended, with all that it has started, and forgets it.
    async fn end_exec(&self, key: &ContainerKey, exec: ExecId) -> Result<(), RuntimeError> {
        let subject = key.to_string();
        Err(RuntimeError::NoSuchExec { subject, exec })
    }

    /// The container's log. Of one with a terminal, what that showed last.
    async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError>;
}

/// Why a runtime failed.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// It does not answer: not installed, stopped, hung.
    #[error("{runtime} does not answer while asked to {action}: {reason}")]
    Unavailable {
        runtime: RuntimeKind,
        action: &'static str,
        reason: String,
    },
    /// It answered nothing in time; what was asked may still happen.
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
    /// Nothing is to run on this node for now.
    #[error(
        "{runtime} does not {action} {subject}: this node has lost touch with the others, and \
         everything of it is frozen until it is back"
    )]
    Fenced {
        runtime: RuntimeKind,
        action: &'static str,
        subject: String,
    },
    /// It started, and its program ended before anybody could take hold of it. Whether a program
    /// that ends soon is told so or by its exit is a matter of timing alone.
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
    /// It is nothing that this runtime has.
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
    /// Something bounded is full; `remedy` says what makes room.
    #[error("{subject}: there is no room for more {what}; {remedy}")]
    TooMany {
        subject: String,
        what: String,
        remedy: &'static str,
    },
    /// An error of the host (files, cgroups) and not of the runtime's daemon.
    #[error("cannot {action} {path}")]
    Host {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

impl RuntimeError {
    /// Whether what was asked may have happened, or may still happen.
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
