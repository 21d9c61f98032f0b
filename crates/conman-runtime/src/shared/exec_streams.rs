//! A command's streams, and carrying bytes between them and its channels.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use bytes::{BufMut as _, Bytes, BytesMut};
use conman_proto::TerminalSize;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::ioctl_fionread;
use rustix::net::{Shutdown, shutdown};
use rustix::pipe::fcntl_setpipe_size;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::OutputStream;
use crate::shared::exec_channels::{OUTPUT_CHUNK_BYTES, latest_size};
use crate::shared::terminal::Terminal;

/// Pieces of output that a pipe has room for.
const PIPE_CHUNKS: usize = 4;

/// The near ends of a command's streams. Tokio's pipe types serve for every kind: they wait for readiness,
/// then read or write.
#[derive(Debug)]
pub struct Streams {
    stdin: Option<pipe::Sender>,
    stdout: pipe::Receiver,
    /// A terminal has none.
    stderr: Option<pipe::Receiver>,
    terminal: Option<Terminal>,
    /// Most bytes in one piece of standard output.
    chunk: usize,
    kind: Kind,
}

/// How the outputs end at the end of a command that has left processes behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A relay has the other ends: told that the command has ended, it passes on what is readable and closes them.
    Relayed,
    /// What is readable is read.
    Pipes,
    /// The kernel hangs up.
    Terminal,
}

/// Also the far ends, for the command.
type BothEnds = (Streams, [OwnedFd; 3]);

impl Streams {
    /// Pipes. Only for a trusted program: a program that holds the lock of a pipe delays every reader of it, even
    /// one whose descriptor does not block. Without `stdin`, the command reads end of file.
    pub fn pipes(stdin: bool, chunk: usize) -> io::Result<BothEnds> {
        let (near, far) = Self::pairs(stdin, chunk, Kind::Pipes, || {
            let (reader, writer) = io::pipe()?;
            Ok((reader.into(), writer.into()))
        })?;
        // A smaller pipe is slower, and works.
        let _ = fcntl_setpipe_size(&near.stdout, PIPE_CHUNKS * chunk);
        Ok((near, far))
    }

    /// Sockets, for a relay that has the pipes. Without `stdin`, the command reads end of file.
    pub fn sockets(stdin: bool) -> io::Result<BothEnds> {
        Self::pairs(stdin, OUTPUT_CHUNK_BYTES, Kind::Relayed, || {
            let (reader, writer) = UnixStream::pair()?;
            Ok((reader.into(), writer.into()))
        })
    }

    /// A terminal.
    pub fn terminal(size: TerminalSize) -> io::Result<BothEnds> {
        let (terminal, far) = Terminal::open(size)?;
        let near = Self {
            stdin: Some(writer(terminal.near()?)?),
            stdout: reader(terminal.near()?)?,
            stderr: None,
            terminal: Some(terminal),
            chunk: OUTPUT_CHUNK_BYTES,
            kind: Kind::Terminal,
        };
        Ok((near, [far.try_clone()?, far.try_clone()?, far]))
    }

    /// `pair` makes an end to read from, and one to write to.
    fn pairs(
        stdin: bool,
        chunk: usize,
        kind: Kind,
        pair: impl Fn() -> io::Result<(OwnedFd, OwnedFd)>,
    ) -> io::Result<BothEnds> {
        let (stdin, far_stdin) = if stdin {
            let (far, near) = pair()?;
            (Some(writer(near)?), far)
        } else {
            (None, File::open("/dev/null")?.into())
        };
        let (stdout, far_stdout) = pair()?;
        let (stderr, far_stderr) = pair()?;
        let near = Self {
            stdin,
            stdout: reader(stdout)?,
            stderr: Some(reader(stderr)?),
            terminal: None,
            chunk,
            kind,
        };
        Ok((near, [far_stdin, far_stdout, far_stderr]))
    }

    /// Carries bytes both ways, and sizes, until the outputs end or there is no reader of them any more.
    ///
    /// `ended` completes when the command's first process has ended. Processes that it has left behind may have
    /// its outputs open, which end all the same. Returns the value of `ended` if it has completed, and the terminal,
    /// which hangs up when it is dropped.
    pub async fn carry<T>(
        self,
        input: &mut mpsc::Receiver<Bytes>,
        resize: &mut mpsc::Receiver<TerminalSize>,
        output: &mpsc::Sender<(OutputStream, Bytes)>,
        ended: impl Future<Output = T>,
    ) -> (Option<T>, Option<Terminal>) {
        let Self {
            stdin,
            stdout,
            stderr,
            terminal,
            chunk,
            kind,
        } = self;
        let last = CancellationToken::new();
        let carry = |from, stream, chunk| carry_output(from, stream, output, chunk, &last);
        let outputs = async {
            tokio::join!(
                carry(Some(&stdout), OutputStream::Stdout, chunk),
                carry(stderr.as_ref(), OutputStream::Stderr, OUTPUT_CHUNK_BYTES),
            );
        };
        let mut end = None;
        let ending = async {
            end = Some(ended.await);
            match kind {
                Kind::Relayed => {
                    for socket in [Some(&stdout), stderr.as_ref()].into_iter().flatten() {
                        // Fails once the relay has ended.
                        let _ = shutdown(socket, Shutdown::Write);
                    }
                }
                Kind::Pipes => last.cancel(),
                Kind::Terminal => {}
            }
            std::future::pending::<()>().await;
        };
        let inputs = async {
            match stdin {
                // Dropping it is the end of the command's input.
                Some(mut stdin) => carry_input(input, &mut stdin).await,
                None => input.close(),
            }
            std::future::pending::<()>().await;
        };
        let resizes = async {
            while let Some(size) = latest_size(resize).await {
                if let Some(terminal) = &terminal {
                    terminal.set_size(size);
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            // They ended, or a terminal's other end was closed. Input and sizes have no reader any more.
            () = outputs => {}
            // These never end; cancelled when the outputs end.
            () = ending => {}
            () = inputs => {}
            () = resizes => {}
            // The streams and undelivered output are dropped.
            () = output.closed() => {}
        }
        (end, terminal)
    }
}

fn reader(near: OwnedFd) -> io::Result<pipe::Receiver> {
    pipe::Receiver::from_owned_fd_unchecked(nonblocking(near)?)
}

fn writer(near: OwnedFd) -> io::Result<pipe::Sender> {
    pipe::Sender::from_owned_fd_unchecked(nonblocking(near)?)
}

/// Its other end may block.
fn nonblocking(near: OwnedFd) -> io::Result<OwnedFd> {
    fcntl_setfl(&near, fcntl_getfl(&near)? | OFlags::NONBLOCK)?;
    Ok(near)
}

/// Ends with the stream, when there is no reader any more, or, after `last`, with what is readable.
async fn carry_output(
    from: Option<&pipe::Receiver>,
    stream: OutputStream,
    to: &mpsc::Sender<(OutputStream, Bytes)>,
    chunk: usize,
    last: &CancellationToken,
) {
    let Some(from) = from else { return };
    let mut buffer = BytesMut::new();
    loop {
        tokio::select! {
            // Cancel safe: it only waits.
            ready = from.readable() => if ready.is_err() { return },
            () = last.cancelled() => return carry_rest(from, stream, to).await,
        }
        buffer.reserve(chunk);
        match from.try_read_buf(&mut (&mut buffer).limit(chunk)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
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

/// Carries what a pipe has. The kernel is asked, as tokio may not have noticed it yet.
async fn carry_rest(
    from: &pipe::Receiver,
    stream: OutputStream,
    to: &mpsc::Sender<(OutputStream, Bytes)>,
) {
    let left = ioctl_fionread(from).unwrap_or(0);
    let mut left = usize::try_from(left).unwrap_or(usize::MAX);
    let mut piece = vec![0; OUTPUT_CHUNK_BYTES];
    while left > 0 {
        let most = left.min(piece.len());
        let Ok(count @ 1..) = rustix::io::read(from, &mut piece[..most]) else {
            return;
        };
        left -= count;
        let bytes = Bytes::copy_from_slice(&piece[..count]);
        if to.send((stream, bytes)).await.is_err() {
            return;
        }
    }
}

/// Ends when the input ends or the command stops reading.
pub async fn carry_input<W: AsyncWrite + Unpin>(from: &mut mpsc::Receiver<Bytes>, to: &mut W) {
    while let Some(bytes) = from.recv().await {
        if to.write_all(&bytes).await.is_err() {
            from.close();
            return;
        }
    }
}
