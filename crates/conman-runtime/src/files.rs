//! An order about files that a process in a container carries out.

use std::io;

use bytes::{Buf as _, Bytes, BytesMut};
use conman_proto::ExecStatus;
use conman_shim_protocol::{FilesFailure, FilesReply};
use futures_util::{Stream, stream};
use tokio::sync::{mpsc, oneshot};

use crate::{ExecIo, OutputStream};

/// Bound on a reply's line: a file's description.
const MAX_REPLY_BYTES: usize = 64 * 1024;

/// Longest frame of input.
const MAX_FRAME_BYTES: usize = 64 * 1024;

/// The input of an order. Dropping it without [`FilesInput::finish`] is a broken input.
#[derive(Debug)]
pub struct FilesInput {
    stdin: mpsc::Sender<Bytes>,
}

/// The result of an order, and content.
#[derive(Debug)]
pub struct FilesOutput {
    output: mpsc::Receiver<(OutputStream, Bytes)>,
    status: oneshot::Receiver<ExecStatus>,
    unread: BytesMut,
}

/// The streams of an order that is being carried out.
#[must_use]
pub fn files_streams(io: ExecIo) -> (FilesInput, FilesOutput) {
    let input = FilesInput { stdin: io.stdin };
    let output = FilesOutput {
        output: io.output,
        status: io.status,
        unread: BytesMut::new(),
    };
    (input, output)
}

impl FilesInput {
    /// Sends content. `false` when it is not read any more.
    pub async fn send(&mut self, mut content: Bytes) -> bool {
        while !content.is_empty() {
            let piece = content.split_to(content.len().min(MAX_FRAME_BYTES));
            let length = u32::try_from(piece.len()).unwrap_or(0).to_be_bytes();
            let head = Bytes::copy_from_slice(&length);
            if self.stdin.send(head).await.is_err() || self.stdin.send(piece).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Declares the input complete.
    pub async fn finish(self) {
        // Without a reader the reply tells why.
        let _ = self.stdin.send(Bytes::from_static(&[0; 4])).await;
    }
}

impl FilesOutput {
    /// Waits for the result; `None` if the process has ended without one.
    pub async fn reply(&mut self) -> Option<FilesReply> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line = self.unread.split_to(end);
                self.unread.advance(1);
                let reply = serde_json::from_slice(&line);
                return Some(reply.unwrap_or_else(|error| lost(&error.to_string())));
            }
            if self.unread.len() > MAX_REPLY_BYTES {
                return Some(lost("its answer is too long"));
            }
            match self.output.recv().await? {
                (OutputStream::Stdout, bytes) => self.unread.extend_from_slice(&bytes),
                (OutputStream::Stderr, _) => {}
            }
        }
    }

    /// The content after the result. An error at its end: it is incomplete.
    pub fn content(self) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        stream::unfold(Some(self), |state| async {
            let mut state = state?;
            if !state.unread.is_empty() {
                let unread = state.unread.split().freeze();
                return Some((Ok(unread), Some(state)));
            }
            while let Some((stream, bytes)) = state.output.recv().await {
                if stream == OutputStream::Stdout {
                    return Some((Ok(bytes), Some(state)));
                }
            }
            let status = state.status.await.ok();
            match status.and_then(|status| status.exit_code) {
                Some(0) => None,
                _ => Some((Err(io::Error::other("the content is incomplete")), None)),
            }
        })
    }
}

fn lost(why: &str) -> FilesReply {
    FilesReply::Failed {
        failure: FilesFailure::Other,
        detail: format!("no result: {why}"),
    }
}
