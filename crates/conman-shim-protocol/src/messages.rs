//! The messages between the shim and its clients.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use conman_linux::{Ended, FORMAT, Features};

use crate::spec::{ExecSpec, LaunchSpec, SpecError, TerminalSize};

/// Version of this protocol, the state file and the handover. It grows when another version would
/// misunderstand; new fields with defaults and new requests leave it.
pub const VERSION: u32 = FORMAT;

/// Longest message in either direction: below the kernel's default socket buffer (208 KiB), above any
/// spec that execve would take with an environment of a usual size.
pub const MAX_MESSAGE_BYTES: usize = 128 * 1_024;

/// Containers or names in one message.
pub const PAGE: usize = 256;

/// Kept commands with their labels in one message.
pub const COMMANDS_PAGE: usize = 16;

/// A request with the caller's number for its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Call {
    pub id: u64,
    pub request: Request,
}

/// Requests to the shim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Must come first; any other request before it is refused.
    Hello {
        version: u32,
    },
    /// Starts a container. The answer carries a pidfd of its init.
    Launch(Box<LaunchSpec>),
    /// Runs a command in a container, with the same answer. It is listed, reported and acknowledged like a
    /// container, and killed alone.
    Exec(Box<ExecSpec>),
    /// Containers by name, after the one given, at most [`PAGE`].
    List {
        after: Option<String>,
    },
    /// One container or command, and whether one of that name is about to begin.
    Find {
        name: String,
    },
    /// A pidfd of a container that has not ended.
    Hold {
        name: String,
    },
    /// Forgets ends; unknown names are ignored, living ones are refused.
    Acknowledge {
        names: Vec<String>,
    },
    /// SIGKILL to the container's init, which kills all its other processes. If its start is under way, as
    /// soon as there is a process; a start that was not sent to the launcher fails. With an armed fence an
    /// unknown name never begins.
    Kill {
        name: String,
    },
    /// Any other signal to its init.
    Signal {
        name: String,
        signal: i32,
    },
    /// Orders a container to freeze and reports whether it has; repeat until it has.
    Freeze {
        name: String,
    },
    Thaw {
        name: String,
    },
    /// The fence's deadline on CLOCK_BOOTTIME. It never moves back; the first one arms the fence.
    ExtendDeadline {
        until_boottime_ns: u64,
    },
    /// How long the fence waits for proof that everything is frozen before it kills the rest, from now on,
    /// also after a replacement of the program. [`Reply::Hello`] reports it.
    FreezePatience {
        freeze_ms: u64,
    },
    /// Closes the fence as if the deadline had passed.
    FreezeAll,
    /// Thaws what the fence froze: these, or all that are not being killed. They run until the deadline,
    /// which must be later than any before; without one the fence is unarmed again. More names than fit into
    /// one message are sent in several, each with a later deadline.
    Unfence {
        until_boottime_ns: Option<u64>,
        names: Option<Vec<String>>,
    },
    /// Puts a container that another program is about to start under the fence, by a cgroup above all of it,
    /// whose first part begins with `conman`. Refused when the fence is closed; the start may be ordered only
    /// afterwards. The container is listed, reported, frozen, killed and acknowledged like the shim's own.
    Guard {
        name: String,
        cgroup: String,
    },
    /// It has started. Sent with a pidfd of its first process.
    Appeared {
        name: String,
        pid: i32,
    },
    /// It has not started, and cannot any more. Refused while its cgroup holds a process.
    NotStarted {
        name: String,
    },
    /// What the fence is doing.
    Fence,
    /// The kept commands of a container by name, after the one given, at most [`COMMANDS_PAGE`].
    Commands {
        container: String,
        after: Option<String>,
    },
    /// Watches and uses the terminal of a container, or the streams of a kept command. The answer carries a
    /// socket ([`crate::StreamEvent`], [`crate::StreamInput`]).
    Attach {
        name: String,
        /// A terminal's; unchanged when absent.
        size: Option<TerminalSize>,
        /// The offset in the output to begin with. When absent: what is kept, of a terminal as a screen.
        after: Option<u64>,
        /// Do not ask the program to redraw.
        quiet: bool,
    },
    /// Executes this program, an absolute path; without one the shim's own again. The process, its children
    /// and its connections stay. If the new program cannot take over, the old one stays too.
    Replace {
        program: Option<PathBuf>,
    },
    /// From now on every end is reported, first those that have not been acknowledged.
    Subscribe,
}

/// The shim's messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    Reply {
        id: u64,
        reply: Reply,
    },
    /// A container has ended; only to subscribers.
    Ended {
        container: ContainerView,
    },
    /// The fence has changed its state; only to subscribers.
    Fence {
        state: FenceState,
    },
}

/// Answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Hello {
        pid: i32,
        features: Option<Features>,
        /// How long the fence waits before it kills what is not frozen.
        freeze_ms: u64,
    },
    /// Comes with a socket.
    Attached,
    Launched {
        pid: i32,
        phases: Phases,
    },
    Containers {
        containers: Vec<ContainerView>,
        more: bool,
    },
    Commands {
        commands: Vec<CommandView>,
        more: bool,
    },
    Found {
        container: Option<ContainerView>,
        /// A start of this name was accepted and has neither begun nor failed.
        starting: bool,
        /// Of a command that is kept.
        command: Option<CommandView>,
    },
    Held {
        pid: i32,
    },
    Frozen {
        verified: bool,
    },
    Fence {
        state: FenceState,
    },
    Done,
    Failed {
        error: CallError,
    },
}

/// One container as the shim knows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContainerView {
    pub name: String,
    /// Its init in the shim's PID namespace.
    pub pid: i32,
    pub state: ContainerState,
    /// The container it is a command in.
    pub exec_in: Option<String>,
    /// Another program started it.
    pub foreign: bool,
    /// The fence kills it, or has killed it, without an order: it was not proven frozen in time, or frozen
    /// for too long.
    pub fenced: bool,
}

/// One kept command as the shim knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandView {
    pub name: String,
    pub state: ContainerState,
    /// Of its first process, in the container's PID namespace; `None` if it died before that was read.
    pub inner_pid: Option<i32>,
    /// It was killed because its time was over.
    pub timed_out: bool,
    /// Bytes that it has written so far; `None` when an earlier shim had its streams.
    pub output_bytes: Option<u64>,
    pub label: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContainerState {
    /// Its program has not begun.
    Launching,
    Running,
    /// No process of it is left.
    Exited {
        code: i32,
    },
    Signalled {
        signal: i32,
    },
    /// No process of it is left; its exit status is unknown, since it ended while there was no shim.
    Lost,
}

impl ContainerState {
    /// Whether a process of it may be left.
    #[must_use]
    pub fn is_alive(self) -> bool {
        match self {
            Self::Launching | Self::Running => true,
            Self::Exited { .. } | Self::Signalled { .. } | Self::Lost => false,
        }
    }
}

impl From<Ended> for ContainerState {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Exited(code) => Self::Exited { code },
            Ended::Signalled(signal) => Self::Signalled { signal },
        }
    }
}

/// The dead-man fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FenceState {
    Unarmed,
    Armed {
        until_boottime_ns: u64,
    },
    /// The deadline has passed; not everything is proven frozen yet.
    Freezing {
        since_boottime_ns: u64,
    },
    /// Everything is frozen or killed.
    Fenced {
        since_boottime_ns: u64,
    },
}

/// How long the consecutive parts of a start took, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Phases {
    /// Cgroups made and limited.
    pub cgroup_us: u64,
    /// Directories and log made.
    pub files_us: u64,
    /// Process and namespaces made, but for the network's.
    pub clone_us: u64,
    /// Ids mapped, layers mapped, overlay made.
    pub root_us: u64,
    /// Of the child: from the order to continue to the program's exec.
    pub setup_us: u64,
    /// The container was made ahead: only what was left of its start was measured.
    #[serde(default)]
    pub ahead: bool,
}

/// Why a start failed. Nothing of the container is left then, unless stated otherwise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchError {
    #[error(transparent)]
    Spec { error: SpecError },
    #[error("`{command}` does not exist in the container")]
    CommandNotFound { command: String },
    #[error("`{command}` cannot be executed: {reason}")]
    NotExecutable { command: String, reason: String },
    #[error("cannot {step}: {reason}")]
    Step {
        step: String,
        /// 0 if it was not a system call that failed.
        errno: i32,
        reason: String,
    },
    #[error("the container was not set up within {after_ms} ms")]
    TimedOut { after_ms: u64 },
    #[error("its first process ended while it was set up")]
    EndedEarly,
    /// The launcher died; what it has made may remain and is named by the spec.
    #[error("the launcher died")]
    LauncherDied,
}

impl LaunchError {
    /// `ENOTSUPP` of linux/errno.h: the kernel cannot compile a filter, because the memory for compiled
    /// filters is used up (`net.core.bpf_jit_limit`).
    pub const NO_FILTER_MEMORY: i32 = 524;

    /// How the step begins that enters the working directory; its path follows.
    pub const WORKDIR_STEP: &str = "enter the working directory";

    /// The failure of one step of a start.
    #[must_use]
    pub fn step(step: &str, error: &std::io::Error) -> Self {
        Self::Step {
            step: step.to_owned(),
            errno: error.raw_os_error().unwrap_or(0),
            reason: error.to_string(),
        }
    }

    /// The exit code that a shell would report, if there is one.
    #[must_use]
    pub fn exit_code(&self) -> Option<i32> {
        match self {
            Self::CommandNotFound { .. } => Some(127),
            Self::NotExecutable { .. } => Some(126),
            Self::Spec { .. }
            | Self::Step { .. }
            | Self::TimedOut { .. }
            | Self::EndedEarly
            | Self::LauncherDied => None,
        }
    }
}

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallError {
    #[error(
        "the running shim uses version {ours} of its protocol, and this conman version {theirs}; end \
         its sessions with the conman that started them, and restart the shim"
    )]
    Version { ours: u32, theirs: u32 },
    #[error("the client has not sent its hello")]
    NoHello,
    #[error("there is no container `{name}`")]
    NoSuchContainer { name: String },
    #[error("a container `{name}` exists already")]
    Exists { name: String },
    #[error("container `{name}` has not ended")]
    StillAlive { name: String },
    #[error("container `{name}` has ended")]
    Ended { name: String },
    /// More starts at a time, or containers, than the shim takes.
    #[error("the shim has no room for more: {what}")]
    Full { what: String },
    /// The deadline has passed; nothing starts before it is moved and the fence lifted.
    #[error("the fence is closed")]
    Fenced,
    #[error(transparent)]
    Launch { error: LaunchError },
    /// Nothing has changed.
    #[error("cannot replace the shim's program by {program}: {reason}")]
    NotReplaced { program: String, reason: String },
    #[error("cannot {action} `{name}`: {reason}")]
    Host {
        action: String,
        name: String,
        reason: String,
    },
}

impl CallError {
    /// There is no room for one more of these.
    #[must_use]
    pub fn full(what: &str) -> Self {
        Self::Full {
            what: what.to_owned(),
        }
    }

    /// The failure of an action on a container.
    pub fn host(action: &str, name: &str) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let (action, name) = (action.to_owned(), name.to_owned());
        move |error| Self::Host {
            action,
            name,
            reason: error.to_string(),
        }
    }
}

impl From<SpecError> for CallError {
    fn from(error: SpecError) -> Self {
        Self::Launch {
            error: LaunchError::Spec { error },
        }
    }
}

/// Why bytes are not a message.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("a message of {bytes} bytes; at most {MAX_MESSAGE_BYTES} are allowed")]
    TooLong { bytes: usize },
    #[error("the message is malformed")]
    Malformed(#[source] serde_json::Error),
}

/// Reads a message of this or a later minor form: unknown fields are ignored.
pub fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(DecodeError::TooLong { bytes: bytes.len() });
    }
    serde_json::from_slice(bytes).map_err(DecodeError::Malformed)
}

/// Writes a message. One that is too long is an error here, not at the peer.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, DecodeError> {
    let bytes = serde_json::to_vec(message).map_err(DecodeError::Malformed)?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(DecodeError::TooLong { bytes: bytes.len() });
    }
    Ok(bytes)
}
