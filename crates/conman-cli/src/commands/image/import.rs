//! `conman image import`: an archive from a file or from standard input.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use conman_proto::Image;
use futures_util::{Stream, StreamExt as _, stream};
use tokio::sync::mpsc;

use super::super::Context;
use crate::args::ImageImportArgs;
use crate::client::{IMPORT, encode};
use crate::failure::{Exit, Failure};
use crate::human::{bytes, printable};
use crate::progress::Progress;

/// Bytes read at once.
const CHUNK_BYTES: usize = 128 * 1024;

/// Pieces read ahead of a slower connection.
const PIECES_AHEAD: usize = 4;

/// Pieces between two changes of the progress line: 2 MiB.
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
    // What breaks the request off is told as it was, not as what the connection made of it.
    if let Some(error) = take(&unread) {
        return Err(cannot_read(&args.file, &error));
    }
    super::arrived(context, &args.name, &answer?)
}

/// What is to be sent, and how much it is where that is known.
fn open(path: &Path) -> Result<(Box<dyn Read + Send>, Option<u64>), Failure> {
    if path == Path::new("-") {
        return Ok((Box::new(io::stdin()), None));
    }
    let failed = |error: io::Error| cannot_read(path, &error);
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_dir() {
        let shown = path.display();
        return Err(
            Failure::usage(format!("{shown} is a directory")).next(format!(
                "tar -C {shown} -c . | conman image import - NAME:TAG"
            )),
        );
    }
    // A pipe or a device has no length to speak of, and files of the kernel's say 0.
    let length = (metadata.is_file() && metadata.len() > 0).then_some(metadata.len());
    Ok((Box::new(file), length))
}

/// Why reading ended early.
type Unread = Arc<Mutex<Option<io::Error>>>;

fn take(unread: &Unread) -> Option<io::Error> {
    unread.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Reads on a thread of its own: standard input may block for ever, and a disk for a while.
fn read(
    mut source: Box<dyn Read + Send>,
    unread: Unread,
) -> io::Result<mpsc::Receiver<io::Result<Bytes>>> {
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    let work = move || {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let piece = match source.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => Ok(Bytes::copy_from_slice(&buffer[..length])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let failed = piece.is_err();
            let piece = piece.map_err(|error| {
                let kind = error.kind();
                *unread.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                kind.into()
            });
            // Nobody takes it any more once the daemon has answered.
            if sender.blocking_send(piece).is_err() || failed {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("archive".to_owned())
        .spawn(work)?;
    Ok(receiver)
}

/// The pieces, as the progress line tells of them; it goes with the request.
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
            // Kept for as long as the request lasts: the line above is the one that stays.
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
