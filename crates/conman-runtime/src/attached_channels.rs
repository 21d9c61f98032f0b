//! The bounded channels between an attached client and the task that carries its bytes.

use bytes::Bytes;
use conman_proto::{ExecStatus, TerminalSize};
use tokio::sync::{mpsc, oneshot};

use crate::{AttachedIo, AttachedOutput};

/// A terminal's size until a client sets another one.
pub const TERMINAL_SIZE: TerminalSize = TerminalSize {
    columns: 80,
    rows: 24,
};

/// Pieces of output that wait for a slow reader, each of at most a screen. More stays where the output is
/// kept, which drops the excess.
const OUTPUT_QUEUE: usize = 4;

/// Pieces of input that wait for a program that does not read; the sender chooses their size.
const INPUT_QUEUE: usize = 4;

/// Resizes are made by hand, and only the latest counts.
const RESIZE_QUEUE: usize = 4;

/// The program's ends of the channels.
pub(crate) struct AttachedEnds {
    pub(crate) input: mpsc::Receiver<Bytes>,
    pub(crate) output: mpsc::Sender<AttachedOutput>,
    pub(crate) resize: mpsc::Receiver<TerminalSize>,
    pub(crate) status: oneshot::Sender<ExecStatus>,
}

/// The channels of one attached client.
pub(crate) fn attached_channels() -> (AttachedIo, AttachedEnds) {
    let (input_sender, input) = mpsc::channel(INPUT_QUEUE);
    let (output, output_receiver) = mpsc::channel(OUTPUT_QUEUE);
    let (resize_sender, resize) = mpsc::channel(RESIZE_QUEUE);
    let (status, status_receiver) = oneshot::channel();
    let io = AttachedIo {
        input: input_sender,
        output: output_receiver,
        resize: resize_sender,
        status: status_receiver,
    };
    (
        io,
        AttachedEnds {
            input,
            output,
            resize,
            status,
        },
    )
}
