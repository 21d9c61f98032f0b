//! Data that a thread reads and a request sends, piece by piece.

use std::io::{self, BufWriter, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use tokio::sync::mpsc;

use crate::human::bytes;
use crate::progress::Progress;

/// Bytes read at once.
const CHUNK_BYTES: usize = 128 * 1024;

/// Pieces read ahead of a slower connection.
const PIECES_AHEAD: usize = 4;

/// Pieces between two updates of the progress line: 2 MiB.
const PIECES_PER_UPDATE: u64 = 16;

/// Why reading ended early.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unread(Arc<Mutex<Option<io::Error>>>);

impl Unread {
    pub(crate) fn take(&self) -> Option<io::Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Reads in a separate thread: standard input may block for ever, and a disk for a while.
pub(crate) fn produce(
    unread: Unread,
    work: impl FnOnce(&mut Pieces) -> io::Result<()> + Send + 'static,
) -> io::Result<mpsc::Receiver<io::Result<Bytes>>> {
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    let work = move || {
        let mut pieces = Pieces {
            sender,
            taken: true,
        };
        let outcome = work(&mut pieces);
        // The receiver is dropped once the daemon has answered.
        if let Err(error) = outcome
            && pieces.taken
        {
            let kind = error.kind();
            *unread.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            let _ = pieces.sender.blocking_send(Err(kind.into()));
        }
    };
    std::thread::Builder::new()
        .name("pieces".to_owned())
        .spawn(work)?;
    Ok(receiver)
}

/// The reading thread's end.
pub(crate) struct Pieces {
    sender: mpsc::Sender<io::Result<Bytes>>,
    /// The receiver still exists.
    taken: bool,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = Bytes::copy_from_slice(bytes);
        self.taken = self.sender.blocking_send(Ok(piece)).is_ok();
        if !self.taken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// For many small writes.
pub(crate) fn buffered(to: &mut Pieces) -> BufWriter<&mut Pieces> {
    BufWriter::with_capacity(CHUNK_BYTES, to)
}

pub(crate) fn copy(from: &mut dyn Read, to: &mut Pieces) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => to.write_all(&buffer[..length])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The pieces; updates the progress line, which lasts as long as the request.
pub(crate) fn with_progress(
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    progress: Progress,
    length: Option<u64>,
) -> impl Stream<Item = io::Result<Bytes>> + Send {
    let total = length.map_or_else(String::new, |length| format!(" of {}", bytes(length)));
    let state = (pieces, progress, 0_u64, 0_u64);
    stream::unfold(state, move |(mut pieces, progress, mut count, mut sent)| {
        let total = total.clone();
        async move {
            let piece = pieces.recv().await;
            match &piece {
                Some(Ok(piece)) => {
                    count += 1;
                    sent += piece.len() as u64;
                    if count % PIECES_PER_UPDATE == 0 {
                        progress.set(format!("sending: {}{total}", bytes(sent)));
                    }
                }
                Some(Err(_)) => {}
                None => progress.set(format!("sent {}; waiting for the answer", bytes(sent))),
            }
            // Kept for as long as the request lasts, so that the line above stays.
            match piece {
                Some(piece) => Some((piece, (pieces, progress, count, sent))),
                None => std::future::ready(None).await,
            }
        }
    })
    .fuse()
}
