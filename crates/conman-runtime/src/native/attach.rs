//! Attaches to what the shim keeps: a container's terminal, and the streams of kept commands.
//!
//! One task for each client. It carries bytes both ways over a separate socket to the shim. The
//! shim keeps the last output, and a client that is too slow for that learns what it missed. So a slow client
//! delays only itself, in bounded memory.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use conman_proto::{ExecId, ExecStatus, OutputPosition, TerminalSize};
use conman_shim_protocol::{
    CallError, MAX_INPUT_BYTES, Position, Reply, Request, StreamEvent, StreamInput, socket,
};
use futures_util::stream::{self, BoxStream, StreamExt};
use jiff::Timestamp;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::ends::ProcessEnd;
use super::failure::call_failed;
use super::{Inner, away, kept_commands, no_such_container, store};
use crate::attached_channels::{AttachedEnds, attached_channels};
use crate::kept_streams::no_such_exec;
use crate::shared::container_files::host_error;
use crate::shared::exec_channels::{exited, latest_size};
use crate::shim_link::LinkError;
use crate::{
    AttachOptions, AttachedIo, AttachedOutput, ContainerKey, LogChunk, LogOptions, OutputStream,
    RuntimeError,
};

const ACTION: &str = "attach to";

/// How long the last output may take to arrive after the program's end is known: a process that
/// it left behind may keep the terminal open.
const DRAIN_PATIENCE: Duration = Duration::from_secs(2);

/// How long to wait for a program's end after its terminal was closed.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Converts a size for the shim.
pub(super) fn shim_size(size: TerminalSize) -> conman_shim_protocol::TerminalSize {
    conman_shim_protocol::TerminalSize {
        rows: size.rows,
        cols: size.columns,
    }
}

impl Inner {
    /// Attaches to the terminal of a container, or to a kept command in it.
    pub(super) async fn attach(
        self: &Arc<Self>,
        key: &ContainerKey,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Result<AttachedIo, RuntimeError> {
        let (name, end) = match exec {
            Some(exec) => self.kept_command(key, exec).await?,
            None => {
                self.require_terminal(key).await?;
                let name = store::name(key);
                let end = self.ends.wait(&name);
                (name, end)
            }
        };
        let watcher = self.watch(key, &name, options, false).await?;
        let (io, ends) = attached_channels();
        tokio::spawn(carry(watcher, ends, end));
        Ok(io)
    }

    /// The shim's name of a kept command, and its end, which may have come.
    async fn kept_command(
        &self,
        key: &ContainerKey,
        exec: ExecId,
    ) -> Result<(String, oneshot::Receiver<ProcessEnd>), RuntimeError> {
        let name = kept_commands::name(key, exec);
        // Before it can end.
        let end = self.ends.wait(&name);
        let found = self.look_up(key, name.clone(), ACTION).await?;
        let Some(command) = found.container else {
            self.ends.forget(&name);
            return Err(no_such_exec(key, exec));
        };
        // If it has ended, `end` receives that.
        self.ends.record(&command);
        Ok((name, end))
    }

    /// Checks that a container's program has a terminal.
    async fn require_terminal(self: &Arc<Self>, key: &ContainerKey) -> Result<(), RuntimeError> {
        let (inner, key) = (Arc::clone(self), key.clone());
        away(ACTION, move || {
            let dir = inner.store.container(&key);
            let Some(plan) = dir.plan()? else {
                return Err(no_such_container(&key));
            };
            match plan.launch.terminal {
                Some(_) => Ok(()),
                None => Err(RuntimeError::NoTerminal {
                    subject: key.to_string(),
                    reason: "it was started without one".to_owned(),
                }),
            }
        })
        .await
    }

    /// Opens a socket to kept streams. `quiet`: other clients see no effect.
    async fn watch(
        &self,
        key: &ContainerKey,
        name: &str,
        options: AttachOptions,
        quiet: bool,
    ) -> Result<Watcher, RuntimeError> {
        let request = Request::Attach {
            name: name.to_owned(),
            size: options.size.map(shim_size),
            after: options.after,
            quiet,
        };
        let socket = match self.link.ask_for_fds(&request, self.timeouts.call).await {
            Ok((Reply::Attached, fds)) => fds.into_iter().next(),
            Ok(_) => None,
            // The only host error that the shim returns here.
            Err(LinkError::Refused(CallError::Host { .. })) => {
                return Err(RuntimeError::NoTerminal {
                    subject: key.to_string(),
                    reason: "the shim that kept it has gone, or its start is not over".to_owned(),
                });
            }
            Err(LinkError::Refused(CallError::Full { what })) => {
                return Err(RuntimeError::TooMany {
                    subject: key.to_string(),
                    what,
                    remedy: "detach from some",
                });
            }
            Err(error) => return Err(call_failed(ACTION, key, error)),
        };
        let socket = socket.ok_or_else(|| call_failed(ACTION, key, LinkError::Unexpected))?;
        Watcher::new(socket).map_err(|source| {
            let dir = self.store.container(key);
            host_error("use the streams of", dir.path(), source)
        })
    }

    /// What a terminal showed last as a log, and the later output if it is followed.
    pub(super) async fn terminal_log(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        let all = AttachOptions::default();
        let watcher = match self.watch(key, &store::name(key), all, true).await {
            Ok(watcher) => watcher,
            // It has shown nothing, or its output is lost.
            Err(RuntimeError::NoTerminal { .. }) => return Ok(stream::empty().boxed()),
            Err(error) => return Err(error),
        };
        let mut log = TerminalLog {
            watcher,
            tail: options.tail,
            timestamps: options.timestamps,
            at_line_start: true,
        };
        if !options.follow {
            // Read it now: a client that stops reading must not keep a place in the shim.
            let after = self.timeouts.call;
            let shown = timeout(after, log.next()).await;
            let shown = shown
                .map_err(|_| call_failed("read the log of", key, LinkError::TimedOut { after }));
            return Ok(stream::iter(shown?.map(chunk).map(Ok)).boxed());
        }
        Ok(stream::unfold(log, |mut log| async move {
            let bytes = log.next().await?;
            Some((Ok(chunk(bytes)), log))
        })
        .boxed())
    }
}

/// A socket to the shim for one program.
struct Watcher {
    /// Not a stream: messages are sent and received whole. Tokio's type only waits for readiness.
    socket: UnixStream,
    buffer: Vec<u8>,
}

impl Watcher {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = StdStream::from(socket);
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket: UnixStream::from_std(socket)?,
            buffer: Vec::new(),
        })
    }
}

/// Returns the next event; `None` at the end of the connection. Cancel safe.
async fn next_event(socket: &UnixStream, buffer: &mut Vec<u8>) -> Option<StreamEvent> {
    let receive = || socket::receive_event(socket, buffer);
    match socket.async_io(Interest::READABLE, receive).await {
        Ok(event) => event,
        Err(error) => {
            tracing::debug!(%error, "the connection to kept streams broke");
            None
        }
    }
}

/// Waits while the shim does not read, which it does not while the program does not.
async fn say(socket: &UnixStream, input: &StreamInput) -> io::Result<()> {
    let send = || socket::send_input(socket, input);
    socket.async_io(Interest::WRITABLE, send).await
}

/// Runs until the program ends or the client detaches.
async fn carry(watcher: Watcher, ends: AttachedEnds, mut end: oneshot::Receiver<ProcessEnd>) {
    let AttachedEnds {
        mut input,
        output: to,
        mut resize,
        status,
    } = ends;
    let Watcher { socket, mut buffer } = watcher;
    let told = {
        let mut outputs = pin!(carry_output(&socket, &mut buffer, &to));
        let typed = async {
            carry_input(&socket, &mut input).await;
            std::future::pending::<()>().await;
        };
        let resizes = async {
            while let Some(size) = latest_size(&mut resize).await {
                if say(&socket, &StreamInput::Resize(shim_size(size)))
                    .await
                    .is_err()
                {
                    break;
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            // The streams were closed, usually because the program has ended.
            () = &mut outputs => timeout(END_PATIENCE, &mut end).await.ok().and_then(Result::ok),
            // The program has ended; its last output is still on its way.
            told = &mut end => {
                let _ = timeout(DRAIN_PATIENCE, outputs).await;
                told.ok()
            }
            // These never end; cancelled when the attachment ends.
            () = typed => return,
            () = resizes => return,
            // The client detached: closing the socket informs the shim.
            () = to.closed() => return,
        }
    };
    drop(to);
    let ended = match told {
        Some(ProcessEnd(Some(code))) => exited(code),
        Some(ProcessEnd(None)) => unknown("how it ended is unknown: the shim that ran it has gone"),
        None => unknown("its program has closed its streams; it may still run without them"),
    };
    // The caller may have stopped waiting.
    let _ = status.send(ended);
}

fn unknown(error: &str) -> ExecStatus {
    ExecStatus {
        exit_code: None,
        error: Some(error.to_owned()),
        ..ExecStatus::default()
    }
}

async fn carry_output(
    socket: &UnixStream,
    buffer: &mut Vec<u8>,
    to: &mpsc::Sender<AttachedOutput>,
) {
    while let Some(event) = next_event(socket, buffer).await {
        let (position, piece) = match event {
            StreamEvent::Output(stream, bytes) => {
                let stream = match stream {
                    conman_shim_protocol::OutputStream::Stdout => OutputStream::Stdout,
                    conman_shim_protocol::OutputStream::Stderr => OutputStream::Stderr,
                };
                (None, Some(AttachedOutput::Output(stream, bytes.into())))
            }
            StreamEvent::Position(position) => (Some(position), None),
            StreamEvent::Screen(position, screen) => {
                (Some(position), Some(AttachedOutput::Screen(screen.into())))
            }
            StreamEvent::End => return,
        };
        let position = position.map(|Position { offset, dropped }| {
            AttachedOutput::Position(OutputPosition { offset, dropped })
        });
        for piece in position.into_iter().chain(piece) {
            if to.send(piece).await.is_err() {
                return;
            }
        }
    }
}

/// Ends when the client sends no more input, or the streams accept none.
async fn carry_input(socket: &UnixStream, from: &mut mpsc::Receiver<Bytes>) {
    while let Some(bytes) = from.recv().await {
        let end = bytes.is_empty().then_some(StreamInput::End);
        let parts = bytes.chunks(MAX_INPUT_BYTES);
        let parts = parts.map(|part| StreamInput::Bytes(part.to_vec()));
        for input in parts.chain(end) {
            if say(socket, &input).await.is_err() {
                from.close();
                return;
            }
        }
    }
}

/// Reads a terminal as a log.
struct TerminalLog {
    watcher: Watcher,
    /// Of what is kept, which comes first.
    tail: Option<u32>,
    timestamps: bool,
    at_line_start: bool,
}

impl TerminalLog {
    async fn next(&mut self) -> Option<Bytes> {
        let tail = self.tail.take();
        let Watcher { socket, buffer } = &mut self.watcher;
        let bytes: Bytes = match next_event(socket, buffer).await? {
            StreamEvent::Output(_, bytes) => bytes.into(),
            StreamEvent::Screen(_, screen) => match tail {
                Some(lines) => Bytes::copy_from_slice(last_lines(&screen, lines)),
                None => screen.into(),
            },
            // A terminal's log begins with a screen.
            StreamEvent::Position(_) | StreamEvent::End => return None,
        };
        Some(if self.timestamps {
            self.stamp(&bytes)
        } else {
            bytes
        })
    }

    /// Lines begin with the time at which they were read.
    fn stamp(&mut self, bytes: &[u8]) -> Bytes {
        let now = format!("{:.9} ", Timestamp::now());
        let mut stamped = BytesMut::with_capacity(bytes.len() + now.len());
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.at_line_start {
                stamped.extend_from_slice(now.as_bytes());
            }
            stamped.extend_from_slice(line);
            self.at_line_start = line.ends_with(b"\n");
        }
        stamped.freeze()
    }
}

fn chunk(bytes: Bytes) -> LogChunk {
    LogChunk::new(OutputStream::Stdout, bytes)
}

fn last_lines(bytes: &[u8], lines: u32) -> &[u8] {
    let lines = usize::try_from(lines).unwrap_or(usize::MAX);
    let mut from = bytes.len();
    for line in bytes
        .split_inclusive(|byte| *byte == b'\n')
        .rev()
        .take(lines)
    {
        from -= line.len();
    }
    &bytes[from..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_whole_and_the_last_one_may_be_unfinished() {
        let text = b"one\r\ntwo\r\n$ ";
        assert_eq!(last_lines(text, 0), b"");
        assert_eq!(last_lines(text, 1), b"$ ");
        assert_eq!(last_lines(text, 2), b"two\r\n$ ");
        assert_eq!(last_lines(text, 9), text);
    }
}
