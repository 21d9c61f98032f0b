//! Standard streams, which may block for ever, in separate threads.
//!
//! tokio's standard input keeps the process alive until a key is pressed, and a write to a paused
//! terminal or a full pipe would delay signals. A thread does neither: it ends with the process.
//! One thread reads and one writes, each behind a bounded channel.

use std::io::{self, Read as _};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use crate::output::Output;

/// Pieces of input read ahead: enough to read while one is sent, and few, so that little input
/// for the next program is consumed.
const INPUT_AHEAD: usize = 2;

/// Pieces of output queued for a slow reader; beyond that, the command is slowed.
const OUTPUT_AHEAD: usize = 4;

/// Bytes read at once.
const CHUNK_BYTES: usize = 32 * 1024;

/// Standard input in pieces, until its end or an error.
pub(crate) fn read_stdin() -> io::Result<mpsc::Receiver<Bytes>> {
    let (sender, receiver) = mpsc::channel(INPUT_AHEAD);
    spawn("stdin", move || {
        let mut stdin = io::stdin();
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => {
                    let piece = Bytes::copy_from_slice(&buffer[..length]);
                    if sender.blocking_send(piece).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    })?;
    Ok(receiver)
}

/// One of the two outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// Writes to standard output and standard error in the order given.
#[derive(Debug)]
pub(crate) struct StdWriter {
    sender: mpsc::Sender<(Stream, Bytes)>,
    result: oneshot::Receiver<io::Result<()>>,
}

impl StdWriter {
    pub(crate) fn start() -> io::Result<Self> {
        let (sender, mut receiver) = mpsc::channel::<(Stream, Bytes)>(OUTPUT_AHEAD);
        let (done, result) = oneshot::channel();
        spawn("stdout", move || {
            let mut result = Ok(());
            while let Some((stream, bytes)) = receiver.blocking_recv() {
                result = match stream {
                    Stream::Stdout => Output::raw_stdout(&bytes),
                    Stream::Stderr => Output::raw_stderr(&bytes),
                };
                if result.is_err() {
                    break;
                }
            }
            // The caller may have stopped waiting.
            let _ = done.send(result);
        })?;
        Ok(Self { sender, result })
    }

    /// Queues one piece; `false` if writing has failed, which [`StdWriter::finish`] reports.
    pub(crate) async fn write(&self, stream: Stream, bytes: Bytes) -> bool {
        self.sender.send((stream, bytes)).await.is_ok()
    }

    /// Waits until everything is written.
    pub(crate) async fn finish(self) -> io::Result<()> {
        drop(self.sender);
        self.result
            .await
            .unwrap_or_else(|_| Err(io::Error::other("the writer's thread died")))
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)?;
    Ok(())
}
