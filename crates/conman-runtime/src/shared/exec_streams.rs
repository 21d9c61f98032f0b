//! A command's streams, and copying bytes between its descriptors and its channels.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use crate::OutputStream;
use crate::shared::exec_channels::OUTPUT_CHUNK_BYTES;

/// The near ends of a command's streams.
#[derive(Debug)]
pub struct Streams<R, W> {
    pub stdin: Option<W>,
    pub stdout: R,
    pub stderr: R,
}

/// Pipes. Only for a trusted program: a program that holds the lock of a pipe delays every reader of it, even one
/// whose descriptor does not block.
pub type Pipes = Streams<pipe::Receiver, pipe::Sender>;

/// Sockets, for a relay that has the pipes.
pub type Sockets = Streams<UnixStream, UnixStream>;

impl Sockets {
    /// Also returns the far ends. Without `stdin`, the command reads end of file.
    pub fn open(stdin: bool) -> io::Result<(Self, [OwnedFd; 3])> {
        let (stdin, far_stdin) = if stdin {
            let (near, far) = sockets()?;
            (Some(near), far)
        } else {
            (None, File::open("/dev/null")?.into())
        };
        let (stdout, far_stdout) = sockets()?;
        let (stderr, far_stderr) = sockets()?;
        let near = Self {
            stdin,
            stdout,
            stderr,
        };
        Ok((near, [far_stdin, far_stdout, far_stderr]))
    }
}

/// A socket that does not block, and its other end, which does.
fn sockets() -> io::Result<(UnixStream, OwnedFd)> {
    let (near, far) = StdStream::pair()?;
    near.set_nonblocking(true)?;
    Ok((UnixStream::from_std(near)?, far.into()))
}

impl Pipes {
    /// Also returns the far ends. Without `stdin`, the command reads end of file.
    pub fn open(stdin: bool) -> io::Result<(Self, [OwnedFd; 3])> {
        let (stdin, far_stdin) = if stdin {
            let (far, near) = io::pipe()?;
            (Some(pipe::Sender::from_owned_fd(near.into())?), far.into())
        } else {
            (None, File::open("/dev/null")?.into())
        };
        let (stdout, far_stdout) = io::pipe()?;
        let (stderr, far_stderr) = io::pipe()?;
        let near = Self {
            stdin,
            stdout: pipe::Receiver::from_owned_fd(stdout.into())?,
            stderr: pipe::Receiver::from_owned_fd(stderr.into())?,
        };
        Ok((near, [far_stdin, far_stdout.into(), far_stderr.into()]))
    }
}

/// Ends with the stream, or when there is no reader any more.
pub async fn carry_output<R: AsyncRead + Unpin>(
    from: Option<R>,
    stream: OutputStream,
    to: &mpsc::Sender<(OutputStream, Bytes)>,
) {
    carry_chunks(from, stream, to, OUTPUT_CHUNK_BYTES).await;
}

/// Likewise, in pieces of at most `chunk` bytes.
pub async fn carry_chunks<R: AsyncRead + Unpin>(
    from: Option<R>,
    stream: OutputStream,
    to: &mpsc::Sender<(OutputStream, Bytes)>,
    chunk: usize,
) {
    let Some(mut from) = from else { return };
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(chunk);
        match (&mut from).take(chunk as u64).read_buf(&mut buffer).await {
            // A terminal reports the closing of its far end as an error.
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if to.send((stream, buffer.split().freeze())).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Ends when the input ends or the command stops reading; dropping `to` is the end of its input.
pub async fn carry_input<W: AsyncWrite + Unpin>(from: &mut mpsc::Receiver<Bytes>, to: Option<W>) {
    let Some(mut to) = to else {
        from.close();
        return;
    };
    while let Some(bytes) = from.recv().await {
        if to.write_all(&bytes).await.is_err() {
            from.close();
            return;
        }
    }
}
