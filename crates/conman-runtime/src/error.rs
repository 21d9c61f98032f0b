//! Errors of a runtime.

use std::path::PathBuf;

use conman_proto::{ExecId, RuntimeKind};

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
    /// Nothing was sent, because the runtime does not answer.
    #[error("did not send {runtime} the request to {action}: {reason}")]
    NotSent {
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
    /// The user or group that a command is to run as does not exist in the container.
    #[error("no command runs in {subject} as this user: {reason}")]
    NoSuchUser { subject: String, reason: String },
    /// The working directory of a command cannot be entered.
    #[error("no command runs in {subject}: {reason}")]
    NoSuchWorkdir { subject: String, reason: String },
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
    #[error("{subject} has no kept command {exec}: it is gone, or never began")]
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
            Self::NotSent { .. }
            | Self::NoSuchImage { .. }
            | Self::Refused { .. }
            | Self::Fenced { .. }
            | Self::EndedAtOnce { .. }
            | Self::NoSuchCommand { .. }
            | Self::NoSuchUser { .. }
            | Self::NoSuchWorkdir { .. }
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
