//! Attaching to terminals and kept commands.

use async_trait::async_trait;
use bytes::Bytes;
use conman_linux::SignalNumber;
use conman_proto::{ExecId, ExecStatus, KeptExec, OutputPosition, TerminalSize};
use tokio::sync::{mpsc, oneshot};

use crate::{ContainerKey, ExecPlan, OutputStream, RuntimeError};

/// How to attach to a terminal or a kept command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttachOptions {
    /// Sets a terminal to this size for all clients; `None` leaves it.
    pub size: Option<TerminalSize>,
    /// The offset in the output to begin with, [`AttachOptions::NOW`] for later output only. `None`: all
    /// that is kept, of a terminal as a screen.
    pub after: Option<u64>,
}

impl AttachOptions {
    /// An offset that no output has reached.
    pub const NOW: u64 = u64::MAX;
}

/// Output for an attached client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachedOutput {
    /// The output continues here. Comes first, and after output was dropped. A runtime that does not count
    /// its output sends none.
    Position(OutputPosition),
    /// Only of a terminal: clear the screen and show these bytes, which are not counted.
    Screen(Bytes),
    /// The program wrote this. A terminal has only standard output.
    Output(OutputStream, Bytes),
}

/// A client's attachment to a terminal or a kept command, which other clients may share. Dropping it only
/// detaches.
#[derive(Debug)]
pub struct AttachedIo {
    /// Input; an empty piece is its end, except for a terminal. Bounded: it waits while the program does not
    /// read.
    pub input: mpsc::Sender<Bytes>,
    /// The program's output, until its end. Bounded: a slow reader slows neither the program nor other
    /// clients; it learns how much it missed.
    pub output: mpsc::Receiver<AttachedOutput>,
    /// A terminal's size. Latest wins, among all clients.
    pub resize: mpsc::Sender<TerminalSize>,
    /// How the program ended; arrives after the last output.
    pub status: oneshot::Receiver<ExecStatus>,
}

/// Terminals and commands that outlive their clients and this process.
#[async_trait]
pub trait KeptStreams: Send + Sync + 'static {
    /// Attaches to the terminal of a container (its spec has `tty`), or to a kept command in it.
    async fn attach(
        &self,
        key: &ContainerKey,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Result<AttachedIo, RuntimeError>;

    /// Runs a command whose streams are kept. It runs until it ends, is killed, its `plan.timeout` is over,
    /// or its container dies. How it ended stays known until its place among the container's kept commands
    /// is needed.
    async fn keep_exec(&self, key: &ContainerKey, plan: ExecPlan)
    -> Result<KeptExec, RuntimeError>;

    /// The kept commands of a container, the oldest first.
    async fn kept_execs(&self, _key: &ContainerKey) -> Result<Vec<KeptExec>, RuntimeError> {
        // A runtime without kept commands.
        Ok(Vec::new())
    }

    /// One of them.
    async fn kept_exec(&self, key: &ContainerKey, exec: ExecId) -> Result<KeptExec, RuntimeError> {
        Err(no_such_exec(key, exec))
    }

    /// Sends a signal to the first process of a kept command. Returns whether it has not ended.
    async fn signal_exec(
        &self,
        key: &ContainerKey,
        exec: ExecId,
        _signal: SignalNumber,
    ) -> Result<bool, RuntimeError> {
        Err(no_such_exec(key, exec))
    }

    /// Kills a kept command, if it has not ended, with all its processes, and forgets it.
    async fn end_exec(&self, key: &ContainerKey, exec: ExecId) -> Result<(), RuntimeError> {
        Err(no_such_exec(key, exec))
    }
}

pub(crate) fn no_such_exec(key: &ContainerKey, exec: ExecId) -> RuntimeError {
    let subject = key.to_string();
    RuntimeError::NoSuchExec { subject, exec }
}
