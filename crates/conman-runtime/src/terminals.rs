use async_trait::async_trait;
use bytes::Bytes;
use conman_proto::{ExecId, ExecStatus, KeptExec, TerminalSize};
use tokio::sync::{mpsc, oneshot};

use crate::{ContainerKey, ExecPlan, RuntimeError};

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

/// Terminals that outlive their clients and this process.
#[async_trait]
pub trait Terminals: Send + Sync + 'static {
    /// Attaches to the terminal of a container (its spec has `tty`), or of a kept command in it.
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
}
