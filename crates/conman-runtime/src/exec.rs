//! Commands in containers.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use conman_proto::{ExecStatus, RuntimeKind, TerminalSize};
use conman_shim_protocol::FilesOrder;
use futures_util::stream::BoxStream;
use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot};

use crate::shared::exec_kill::ExecKill;
use crate::{ContainerKey, RuntimeError};

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
    /// Bound on the run time of a kept command.
    pub timeout: Option<Duration>,
}

/// One of a command's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    Stdout,
    Stderr,
}

/// A running command. It ends when its first process does, whatever that has left behind. Dropping this before
/// its end ends the command, too: a terminal hangs up on its programs; without a terminal it is killed like by
/// [`ExecKill::kill`].
#[derive(Debug)]
pub struct ExecIo {
    /// Bytes for its standard input; dropping the sender is end of input. Bounded.
    pub stdin: mpsc::Sender<Bytes>,
    /// Its output until both streams end or the command does. Bounded: a slow reader slows the command.
    pub output: mpsc::Receiver<(OutputStream, Bytes)>,
    /// Latest wins; ignored without a terminal.
    pub resize: mpsc::Sender<TerminalSize>,
    /// How it ended; arrives after the last output.
    pub status: oneshot::Receiver<ExecStatus>,
    /// Kills the command.
    pub kill: ExecKill,
}

/// A part of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// Continue with later output, until the container ends.
    pub follow: bool,
    /// Only this many lines from the end.
    pub tail: Option<u32>,
    /// Only lines that were written at this time or later, as far as that is known.
    pub since: Option<Timestamp>,
    pub timestamps: bool,
    /// The log of the session's container before this one, if it is kept.
    pub previous: bool,
}

/// A piece of a container's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogChunk {
    pub stream: OutputStream,
    pub bytes: Bytes,
    /// Bytes of this output before these that were discarded before they could be read.
    pub dropped: u64,
}

impl LogChunk {
    /// A piece that follows the one before it.
    #[must_use]
    pub fn new(stream: OutputStream, bytes: Bytes) -> Self {
        Self {
            stream,
            bytes,
            dropped: 0,
        }
    }
}

/// Runs commands in containers, and reads the output of their programs.
#[async_trait]
pub trait Exec: Send + Sync + 'static {
    /// Runs a command in a running container.
    async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Result<ExecIo, RuntimeError>;

    /// Carries out an order about a running container's files, as `user`, by default its program's. The
    /// streams are for [`crate::files_streams`].
    async fn files(
        &self,
        key: &ContainerKey,
        _order: FilesOrder,
        _user: Option<String>,
    ) -> Result<ExecIo, RuntimeError> {
        Err(RuntimeError::Unsupported {
            runtime: RuntimeKind::Docker,
            action: "reach the files of",
            subject: key.to_string(),
            reason: "use `docker cp` on its node, or the native runtime".to_owned(),
        })
    }

    /// The container's log. For one with a terminal: the terminal's last output.
    async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError>;
}
