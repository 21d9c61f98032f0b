//! `conman image import`: an archive from a file or from standard input, or an OCI image layout's
//! directory.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use conman_proto::Image;
use futures_util::{Stream, StreamExt as _, stream};
use tokio::sync::mpsc;

use super::super::Context;
use super::layout;
use crate::args::ImageImportArgs;
use crate::client::{IMPORT, encode};
use crate::failure::{Exit, Failure};
use crate::human::{bytes, printable};
use crate::progress::Progress;

/// Bytes read at once.
const CHUNK_BYTES: usize = 128 * 1024;

/// Pieces read ahead of a slower connection.
const PIECES_AHEAD: usize = 4;

/// Pieces between two updates of the progress line: 2 MiB.
const PIECES_TOLD: u64 = 16;

pub(super) async fn run(context: &Context, args: &ImageImportArgs) -> Result<Exit, Failure> {
    let (source, length) = open(&args.file)?;
    let unread: Unread = Arc::default();
    let pieces = read(source, unread.clone()).map_err(|error| cannot_read(&args.file, &error))?;
    let progress = Progress::start(&context.output, "sending".to_owned());
    let path = format!("/v1/images?name={}", encode(&args.name));
    let answer = context
        .client
        .upload::<Image>(&path, told(pieces, progress, length), length, IMPORT)
        .await;
    // An error of reading is reported as such, not as the broken connection that it caused.
    if let Some(error) = take(&unread) {
        return Err(cannot_read(&args.file, &error));
    }
    super::arrived(context, &args.name, &answer?)
}

enum Source {
    Archive(Box<dyn Read + Send>),
    Layout(PathBuf),
}

/// The data to send, and its length if known.
fn open(path: &Path) -> Result<(Source, Option<u64>), Failure> {
    if path == Path::new("-") {
        return Ok((Source::Archive(Box::new(io::stdin())), None));
    }
    let failed = |error: io::Error| cannot_read(path, &error);
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_dir() && layout::is_layout(path) {
        return Ok((Source::Layout(path.to_owned()), None));
    }
    if metadata.is_dir() {
        let shown = path.display();
        return Err(Failure::usage(format!(
            "{shown} is a directory, but not an OCI image layout"
        ))
        .next(format!(
            "tar -C {shown} -c . | conman image import - NAME:TAG"
        )));
    }
    // Pipes and devices have no length, and kernel files report 0.
    let length = (metadata.is_file() && metadata.len() > 0).then_some(metadata.len());
    Ok((Source::Archive(Box::new(file)), length))
}

/// Why reading ended early.
type Unread = Arc<Mutex<Option<io::Error>>>;

fn take(unread: &Unread) -> Option<io::Error> {
    unread.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Reads in a separate thread: standard input may block for ever, and a disk for a while.
fn read(source: Source, unread: Unread) -> io::Result<mpsc::Receiver<io::Result<Bytes>>> {
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    let work = move || {
        let mut pieces = Pieces {
            sender,
            taken: true,
        };
        let outcome = match source {
            Source::Archive(mut archive) => copy(&mut *archive, &mut pieces),
            Source::Layout(directory) => layout::pack(
                &directory,
                BufWriter::with_capacity(CHUNK_BYTES, &mut pieces),
            ),
        };
        // The receiver is dropped once the daemon has answered.
        if let Err(error) = outcome
            && pieces.taken
        {
            let kind = error.kind();
            *unread.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            let _ = pieces.sender.blocking_send(Err(kind.into()));
        }
    };
    std::thread::Builder::new()
        .name("archive".to_owned())
        .spawn(work)?;
    Ok(receiver)
}

/// The reading thread's end.
struct Pieces {
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

fn copy(from: &mut dyn Read, to: &mut Pieces) -> io::Result<()> {
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
fn told(
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
                    if count % PIECES_TOLD == 0 {
                        progress.set(format!("sending: {}{total}", bytes(sent)));
                    }
                }
                Some(Err(_)) => {}
                None => progress.set(format!("unpacking {}", bytes(sent))),
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

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    let path = path.display().to_string();
    Failure::new(
        Exit::Failed,
        "archive-unreadable",
        "The archive cannot be read",
        format!("{}: {error}", printable(&path)),
    )
}
