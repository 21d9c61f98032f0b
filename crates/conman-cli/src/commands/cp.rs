//! `conman cp`: files and directories into and out of sessions.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use conman_archive::{SpecialBits, Unpacked, pack, unpack};
use conman_proto::{ProblemKind, SessionId, UnpackReport};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::mpsc;

use super::Context;
use crate::args::{CopyEnd, CpArgs};
use crate::client::{ClientError, IMPORT, encode};
use crate::failure::{Exit, Failure};
use crate::human::{count, printable};
use crate::pieces::{self, Unread};
use crate::progress::Progress;

/// Pieces of an archive that wait to be unpacked.
const PIECES_AHEAD: usize = 16;

pub(super) async fn run(context: &Context, args: CpArgs) -> Result<Exit, Failure> {
    let CpArgs { user, from, to, .. } = args;
    let user = user.as_deref();
    match (from, to) {
        (CopyEnd::Session(..), CopyEnd::Session(..)) => Err(Failure::usage(
            "both are in sessions; copy out of the one, then into the other: \
             conman cp A:PATH - | conman cp - B:PATH",
        )),
        (CopyEnd::Session(id, path), to) => {
            let remote = Remote { id, path, user };
            download(context, &remote, to).await
        }
        (from, CopyEnd::Session(id, path)) => {
            let remote = Remote { id, path, user };
            upload(context, from, remote).await
        }
        _ => Err(Failure::usage(
            "neither is in a session; write ID:PATH for a path in a session",
        )),
    }
}

/// A path in a session.
struct Remote<'a> {
    id: SessionId,
    path: String,
    user: Option<&'a str>,
}

impl Remote<'_> {
    fn request(&self, parameters: &str) -> String {
        let user = self.user.map(|user| format!("&user={}", encode(user)));
        format!(
            "/v1/sessions/{}/files?path={}{parameters}{}",
            self.id,
            encode(&self.path),
            user.unwrap_or_default()
        )
    }

    /// Whether a directory is there. What cannot be looked at is reported by the copy.
    async fn is_directory(&self, context: &Context) -> Result<bool, ClientError> {
        if self.path.ends_with('/') {
            return Ok(true);
        }
        let status = context.client.head(&self.request("")).await?;
        Ok(status == StatusCode::CONFLICT)
    }
}

/// Something local to send.
enum Source {
    Bytes(Box<dyn Read + Send>),
    Tree(PathBuf),
}

async fn upload(context: &Context, from: CopyEnd, mut to: Remote<'_>) -> Result<Exit, Failure> {
    let into_directory = to.is_directory(context).await?;
    let (source, parameters, length, shown) = match from {
        CopyEnd::Local(path) => {
            if into_directory {
                let name = path.file_name().map(|name| name.to_string_lossy());
                let name = name.ok_or_else(|| Failure::usage("the source has no name"))?;
                to.path = format!("{}/{name}", to.path.trim_end_matches('/'));
            }
            let failed = |error: io::Error| local(&path, &error);
            let metadata = std::fs::metadata(&path).map_err(failed)?;
            let mode = metadata.permissions().mode() & 0o777;
            if metadata.is_dir() {
                let parameters = "&archive=tar&parents=true".to_owned();
                (Source::Tree(path.clone()), parameters, None, path)
            } else {
                let file = File::open(&path).map_err(failed)?;
                let length = metadata.is_file().then_some(metadata.len());
                let parameters = format!("&mode={mode:o}");
                (Source::Bytes(Box::new(file)), parameters, length, path)
            }
        }
        _ => {
            let parameters = if into_directory { "&archive=tar" } else { "" };
            let source = Source::Bytes(Box::new(io::stdin()));
            (source, parameters.to_owned(), None, PathBuf::from("-"))
        }
    };
    let unread = Unread::default();
    let pieces = pieces::produce(unread.clone(), move |to| match source {
        Source::Bytes(mut bytes) => pieces::copy(&mut *bytes, to),
        Source::Tree(directory) => pack(&File::open(directory)?.into(), pieces::buffered(to)),
    });
    let pieces = pieces.map_err(|error| local(&shown, &error))?;
    let progress = Progress::start(&context.output, "sending".to_owned());
    let sent = context
        .client
        .send_pieces(
            Method::PUT,
            &to.request(&parameters),
            pieces::with_progress(pieces, progress, length),
            length,
            IMPORT,
        )
        .await;
    // An error of reading is reported as such, not as the broken connection that it caused.
    if let Some(error) = unread.take() {
        return Err(local(&shown, &error));
    }
    // The answer to a single file is empty.
    if let Ok(report) = serde_json::from_slice::<UnpackReport>(&sent?) {
        warn_of_skipped(context, report.skipped);
    }
    Ok(Exit::Done)
}

async fn download(context: &Context, from: &Remote<'_>, to: CopyEnd) -> Result<Exit, Failure> {
    let client = &context.client;
    let file = from.request("");
    let (response, is_tree) = match client.stream(&file, "application/octet-stream").await {
        Ok(response) => (response, false),
        Err(ClientError::Refused(problem)) if problem.slug() == ProblemKind::IS_DIRECTORY.slug => {
            let tree = from.request("&archive=tar");
            (client.stream(&tree, "application/x-tar").await?, true)
        }
        Err(error) => return Err(error.into()),
    };
    let body = response.into_body();
    let CopyEnd::Local(mut path) = to else {
        let mut stdout = io::stdout().lock();
        each_piece(context, body, |piece| Ok(stdout.write_all(&piece)?)).await?;
        stdout.flush()?;
        return Ok(Exit::Done);
    };
    if path.is_dir() {
        let name = Path::new(&from.path).file_name();
        path.extend(name);
        // An earlier copy may have made it, and a session chooses where its links lead.
        if name.is_some() && path.is_symlink() {
            let reason = io::Error::other("is a symbolic link; remove it, or name another target");
            return Err(local(&path, &reason));
        }
    }
    let _progress = Progress::start(&context.output, "receiving".to_owned());
    let received = match is_tree {
        true => receive_tree(context, body, &path).await,
        false => receive_file(context, body, &path).await,
    };
    received.map(|()| Exit::Done)
}

async fn receive_file(context: &Context, body: Incoming, path: &Path) -> Result<(), Failure> {
    let mut file = File::create(path).map_err(|error| local(path, &error))?;
    let received = each_piece(context, body, |piece| {
        file.write_all(&piece).map_err(|error| local(path, &error))
    })
    .await;
    if received.is_err() {
        // A part of a file looks like a file.
        let _ = std::fs::remove_file(path);
    }
    received
}

async fn receive_tree(context: &Context, body: Incoming, path: &Path) -> Result<(), Failure> {
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    let directory = path.to_owned();
    let unpacking = tokio::task::spawn_blocking(move || {
        std::fs::create_dir_all(&directory)?;
        let reader = Received {
            receiver,
            piece: Bytes::new(),
        };
        // The session must not place programs here that run with the operator's rights.
        let unpacked = unpack(File::open(&directory)?.into(), reader, SpecialBits::Drop);
        unpacked.map_err(io::Error::other)
    });
    let mut body = body;
    let received = loop {
        let piece = match next_piece(context, &mut body).await {
            Ok(Some(piece)) => piece,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        };
        // Unpacking has failed, which it reports.
        if sender.send(piece).await.is_err() {
            break Ok(());
        }
    };
    drop(sender);
    let unpacked = unpacking
        .await
        .unwrap_or_else(|error| Err(io::Error::other(error)));
    received?;
    let Unpacked {
        skipped,
        not_packed,
        ..
    } = unpacked.map_err(|error| local(path, &error))?;
    warn_of_skipped(context, skipped.saturating_add(not_packed));
    Ok(())
}

fn warn_of_skipped(context: &Context, skipped: u64) {
    if skipped > 0 {
        context.output.warning(&format!(
            "{} not copied: sockets, FIFOs, devices or files of /proc",
            count(skipped, "file")
        ));
    }
}

/// The pieces that arrive, for a thread.
struct Received {
    receiver: mpsc::Receiver<Bytes>,
    piece: Bytes,
}

impl Read for Received {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.receiver.blocking_recv() {
                Some(piece) => self.piece = piece,
                None => return Ok(0),
            }
        }
        let piece = self.piece.split_to(self.piece.len().min(buffer.len()));
        buffer[..piece.len()].copy_from_slice(&piece);
        Ok(piece.len())
    }
}

async fn each_piece(
    context: &Context,
    mut body: Incoming,
    mut take: impl FnMut(Bytes) -> Result<(), Failure>,
) -> Result<(), Failure> {
    while let Some(piece) = next_piece(context, &mut body).await? {
        take(piece)?;
    }
    Ok(())
}

async fn next_piece(context: &Context, body: &mut Incoming) -> Result<Option<Bytes>, Failure> {
    match body.frame().await {
        Some(Ok(frame)) => Ok(Some(frame.into_data().unwrap_or_default())),
        Some(Err(error)) => Err(Failure::from(context.client.broken(error))
            .next("the copy is incomplete: `conman logs` and `conman why` tell more")),
        None => Ok(None),
    }
}

fn local(path: &Path, error: &io::Error) -> Failure {
    let path = path.display().to_string();
    Failure::new(
        Exit::Failed,
        "local-file",
        "A local file cannot be copied",
        format!("{}: {error}", printable(&path)),
    )
}
