//! The bounded channels between the caller of a command and the task that runs it.

use bytes::Bytes;
use conman_proto::{ExecStatus, TerminalSize};
use tokio::sync::{mpsc, oneshot};

use crate::shared::exec_kill::{ExecKill, KillReply};
use crate::{ExecIo, OutputStream};

/// Most bytes in one piece of output.
pub const OUTPUT_CHUNK_BYTES: usize = 16 * 1024;

/// Pieces of output that wait for a slow reader before the command itself is slowed: 256 KiB.
const OUTPUT_QUEUE: usize = 16;

/// Pieces of input that wait for a command that does not read; the sender chooses their size.
const STDIN_QUEUE: usize = 16;

/// Resizes are made by hand, and only the latest counts.
const RESIZE_QUEUE: usize = 4;

/// The command's ends of the channels.
#[derive(Debug)]
pub struct ExecEnds {
    pub stdin: mpsc::Receiver<Bytes>,
    pub output: mpsc::Sender<(OutputStream, Bytes)>,
    pub resize: mpsc::Receiver<TerminalSize>,
    pub status: oneshot::Sender<ExecStatus>,
    pub kill: oneshot::Receiver<KillReply>,
}

/// The channels of one command.
pub fn exec_channels() -> (ExecIo, ExecEnds) {
    let (stdin_sender, stdin) = mpsc::channel(STDIN_QUEUE);
    let (output, output_receiver) = mpsc::channel(OUTPUT_QUEUE);
    let (resize_sender, resize) = mpsc::channel(RESIZE_QUEUE);
    let (status, status_receiver) = oneshot::channel();
    let (kill, kill_order) = ExecKill::new();
    let io = ExecIo {
        stdin: stdin_sender,
        output: output_receiver,
        resize: resize_sender,
        status: status_receiver,
        kill,
    };
    (
        io,
        ExecEnds {
            stdin,
            output,
            resize,
            status,
            kill: kill_order,
        },
    )
}

/// Returns the next size to apply: the latest one queued; `None` once the sender is dropped.
pub async fn latest_size(resize: &mut mpsc::Receiver<TerminalSize>) -> Option<TerminalSize> {
    let mut size = resize.recv().await?;
    while let Ok(later) = resize.try_recv() {
        size = later;
    }
    Some(size)
}

/// The status of a command that ran.
pub fn exited(exit_code: i32) -> ExecStatus {
    ExecStatus {
        exit_code: Some(exit_code),
        error: None,
        ..ExecStatus::default()
    }
}
