//! Attaches to the terminal of a container's program, which dockerd keeps.
//!
//! dockerd keeps no screen. The last output of a terminal is the end of the container's log,
//! which has only whole lines. And dockerd slows the program, and so all clients, for a client
//! that does not read. So all output is read here at once, and a slow client gets a replay, as
//! from the shim.
//!
//! One task for each client; it ends with the program or when the client detaches.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bollard::query_parameters::ResizeContainerTTYOptionsBuilder;
use bytes::{Bytes, BytesMut};
use conman_proto::{ExecId, ExecStatus, KeptExec, RuntimeKind, TerminalSize};
use futures_util::stream::{BoxStream, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::daemon::Lane;
use super::failure::Failure;
use super::hijack::{self, Hijacked};
use super::{DockerRuntime, Shared};
use crate::attached_channels::{AttachedEnds, attached_channels};
use crate::shared::exec_channels::{OUTPUT_CHUNK_BYTES, exited, latest_size};
use crate::shared::exec_streams::carry_input;
use crate::{
    AttachOptions, AttachedIo, AttachedOutput, ContainerKey, ExecPlan, KeptStreams, OutputStream,
    RuntimeError,
};

const ACTION: &str = "attach to";

/// How much past output a new client gets: as much as the native runtime keeps.
const SCROLLBACK_BYTES: usize = 64 * 1_024;

/// Log lines that are requested for that.
const SCROLLBACK_LINES: u32 = 2_000;

/// dockerd detaches on a sequence of keys, and that cannot be switched off. This one, eight times
/// Ctrl-^, is never typed. Detaching by keys is up to the client.
const DETACH_KEYS: &str = "ctrl-%5E,ctrl-%5E,ctrl-%5E,ctrl-%5E,ctrl-%5E,ctrl-%5E,ctrl-%5E,ctrl-%5E";

/// How long dockerd may take to notice a program's end after its terminal was closed.
const EXIT_PATIENCE: Duration = Duration::from_secs(15);

#[async_trait]
impl KeptStreams for DockerRuntime {
    async fn attach(
        &self,
        key: &ContainerKey,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Result<AttachedIo, RuntimeError> {
        match exec {
            Some(_) => Err(unsupported("attach to a command in", key)),
            None => attach(&self.shared, key, options).await,
        }
    }

    async fn keep_exec(
        &self,
        key: &ContainerKey,
        _plan: ExecPlan,
    ) -> Result<KeptExec, RuntimeError> {
        Err(unsupported("keep a command in", key))
    }
}

fn unsupported(action: &'static str, key: &ContainerKey) -> RuntimeError {
    RuntimeError::Unsupported {
        runtime: RuntimeKind::Docker,
        action,
        subject: key.to_string(),
        reason: "Docker keeps no streams of a command once no client is connected to it; use the native runtime"
            .to_owned(),
    }
}

async fn attach(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    options: AttachOptions,
) -> Result<AttachedIo, RuntimeError> {
    let subject = key.to_string();
    let place = shared.daemon.stream_place();
    let place = place.ok_or_else(|| RuntimeError::TooMany {
        subject: subject.clone(),
        what: "commands, logs and terminals at a time".to_owned(),
        remedy: "close some",
    })?;
    let container = shared.existing(key, ACTION).await?;
    if !container.tty {
        return Err(RuntimeError::NoTerminal {
            subject,
            reason: "it was started without one".to_owned(),
        });
    }
    let id = container.container_id;
    let shown = if options.after.is_none() {
        shared.last_shown(&id).await
    } else {
        Bytes::new()
    };
    let attached = shared
        .daemon
        .call(Lane::Calls, shared.timeouts.exec, |facts| async move {
            let version = facts.client.client_version();
            let path = format!(
                "/v{version}/containers/{id}/attach?stream=1&stdin=1&stdout=1&stderr=1\
                 &detachKeys={DETACH_KEYS}"
            );
            Ok(hijack::attach(shared.daemon.socket(), &path).await)
        });
    let connection = attached
        .await
        .and_then(|answer| answer)
        .map_err(|failure| failure.about(ACTION, &subject))?;
    let (io, ends) = attached_channels();
    let watching = Watching {
        shared: Arc::clone(shared),
        key: key.clone(),
        _place: place,
    };
    tokio::spawn(watching.run(connection, Recent::of(&shown), options, ends));
    Ok(io)
}

impl Shared {
    /// The end of a container's log; empty if it cannot be read in time.
    async fn last_shown(&self, id: &str) -> Bytes {
        let query = format!("stdout=1&stderr=1&tail={SCROLLBACK_LINES}");
        let reading = async {
            let mut log = self.raw_log(id, &query).await.ok()?;
            let mut recent = Recent::of(b"");
            while let Some(Ok(bytes)) = log.next().await {
                recent.push(&bytes);
            }
            Some(recent.bytes())
        };
        let read = tokio::time::timeout(self.timeouts.inspect, reading).await;
        read.ok().flatten().unwrap_or_default()
    }

    /// The log of a container; without a terminal it has frames.
    pub(super) async fn raw_log(
        &self,
        id: &str,
        query: &str,
    ) -> Result<BoxStream<'static, Result<Bytes, Failure>>, Failure> {
        let started = self
            .daemon
            .call(Lane::Calls, self.timeouts.inspect, |facts| async move {
                let version = facts.client.client_version();
                let path = format!("/v{version}/containers/{id}/logs?{query}");
                Ok(hijack::get_stream(self.daemon.socket(), &path).await)
            });
        started.await?
    }

    /// Sets a terminal's size; a program that has just ended has none.
    pub(super) async fn resize_terminal(&self, name: &str, size: TerminalSize) {
        let options = ResizeContainerTTYOptionsBuilder::new()
            .h(size.rows.into())
            .w(size.columns.into())
            .build();
        let resized = self
            .daemon
            .call(Lane::Calls, self.timeouts.exec, |facts| async move {
                facts.client.resize_container_tty(name, options).await
            });
        if let Err(failure) = resized.await {
            tracing::debug!(container = name, ?failure, "cannot resize the terminal");
        }
    }
}

/// An attached client.
struct Watching {
    shared: Arc<Shared>,
    key: ContainerKey,
    /// Holds a place among the streams.
    _place: OwnedSemaphorePermit,
}

impl Watching {
    async fn run(
        self,
        connection: Hijacked,
        recent: Recent,
        options: AttachOptions,
        ends: AttachedEnds,
    ) {
        let AttachedEnds {
            mut input,
            output: to,
            mut resize,
            mut status,
        } = ends;
        let name = self.shared.container_name(&self.key);
        let (reader, writer) = tokio::io::split(connection);
        {
            let output = pin!(carry_output(reader, recent, options.after.is_none(), &to));
            let typed = async {
                let mut writer = writer;
                // Its end is not sent: dockerd takes that for the end of the output as well.
                carry_input(&mut input, &mut writer).await;
                std::future::pending::<()>().await;
            };
            let resizes = pin!(async {
                if let Some(size) = options.size {
                    // For an unchanged size the kernel sends no signal.
                    let rows = size.rows.checked_add(1).unwrap_or(u16::MAX - 1);
                    let other = TerminalSize { rows, ..size };
                    self.shared.resize_terminal(&name, other).await;
                    self.shared.resize_terminal(&name, size).await;
                }
                while let Some(size) = latest_size(&mut resize).await {
                    self.shared.resize_terminal(&name, size).await;
                }
                std::future::pending::<()>().await;
            });
            tokio::select! {
                // The terminal was closed, or the connection to dockerd.
                () = output => {}
                // These never end; cancelled when the output ends.
                () = typed => {}
                () = resizes => {}
                // The client detached: the connection ends, the program continues.
                () = to.closed() => return,
            }
        }
        drop(to);
        let code = tokio::select! {
            code = tokio::time::timeout(EXIT_PATIENCE, self.shared.noticed_exit_code(&self.key)) => {
                code.ok().flatten()
            }
            // There is no waiter any more.
            () = status.closed() => return,
        };
        let ended = match code {
            Some(code) => exited(code),
            None => ExecStatus {
                exit_code: None,
                error: Some(format!(
                    "{} does not report how the program ended; it may still run",
                    RuntimeKind::Docker
                )),
                ..ExecStatus::default()
            },
        };
        // The caller may have stopped waiting.
        let _ = status.send(ended);
    }
}

/// The last bytes that a terminal showed.
#[derive(Debug)]
struct Recent(BytesMut);

impl Recent {
    fn of(bytes: &[u8]) -> Self {
        let mut recent = Self(BytesMut::new());
        recent.push(bytes);
        recent
    }

    fn push(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(SCROLLBACK_BYTES)..];
        let over = (self.0.len() + bytes.len()).saturating_sub(SCROLLBACK_BYTES);
        let _ = self.0.split_to(over);
        self.0.extend_from_slice(bytes);
    }

    fn bytes(&self) -> Bytes {
        Bytes::copy_from_slice(&self.0)
    }
}

/// Reads all output at once, until its end or until the client detaches.
async fn carry_output<R: AsyncRead + Unpin>(
    mut from: R,
    mut recent: Recent,
    replay_first: bool,
    to: &mpsc::Sender<AttachedOutput>,
) {
    let mut buffer = BytesMut::new();
    // A replay is due: at first, and after output was dropped.
    let mut behind = replay_first;
    loop {
        buffer.reserve(OUTPUT_CHUNK_BYTES);
        let mut some = (&mut from).take(OUTPUT_CHUNK_BYTES as u64);
        tokio::select! {
            // Cancel safe: it has read nothing, or is done.
            read = some.read_buf(&mut buffer) => match read {
                Ok(0) | Err(_) => break,
                Ok(_) => {
                    let bytes = buffer.split().freeze();
                    recent.push(&bytes);
                    if !behind {
                        match to.try_send(AttachedOutput::Output(OutputStream::Stdout, bytes)) {
                            Ok(()) => {}
                            Err(TrySendError::Full(_)) => behind = true,
                            Err(TrySendError::Closed(_)) => return,
                        }
                    }
                }
            },
            // Cancel safe: an unused place is given back.
            place = to.reserve(), if behind => match place {
                Ok(place) => {
                    place.send(AttachedOutput::Screen(recent.bytes()));
                    behind = false;
                }
                Err(_) => return,
            },
        }
    }
    if behind {
        // The client may have detached.
        let _ = to.send(AttachedOutput::Screen(recent.bytes())).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[test]
    fn what_was_shown_last_is_kept_and_no_more() {
        let mut recent = Recent::of(b"first");
        assert_eq!(&recent.bytes()[..], b"first");
        recent.push(&vec![b'x'; SCROLLBACK_BYTES - 3]);
        assert_eq!(recent.bytes().len(), SCROLLBACK_BYTES);
        assert!(recent.bytes().starts_with(b"rstx"));
        recent.push(&vec![b'y'; 2 * SCROLLBACK_BYTES]);
        assert_eq!(recent.bytes(), vec![b'y'; SCROLLBACK_BYTES]);
    }

    #[tokio::test]
    async fn who_does_not_read_is_told_anew_and_the_program_is_read_all_the_same() {
        let (mut program, terminal) = tokio::io::duplex(1_024);
        let (to, mut reader) = mpsc::channel(2);
        let carrying = tokio::spawn(async move {
            carry_output(terminal, Recent::of(b"before "), true, &to).await;
        });
        let mut shown = Vec::new();
        for number in 0..10_000 {
            let line = format!("line {number}\n");
            shown.extend_from_slice(line.as_bytes());
            program
                .write_all(line.as_bytes())
                .await
                .expect("it is read");
        }
        drop(program);
        let mut seen = Vec::new();
        let mut replays = 0;
        while let Some(piece) = reader.recv().await {
            match piece {
                AttachedOutput::Screen(bytes) => {
                    replays += 1;
                    seen = bytes.to_vec();
                }
                AttachedOutput::Output(_, bytes) => seen.extend_from_slice(&bytes),
                AttachedOutput::Position(_) => panic!("dockerd's output is not counted"),
            }
        }
        carrying.await.expect("it ends");
        assert_eq!(replays, 2, "at first and at last");
        // The last output may come separately, after the replay.
        assert!(seen.len() >= SCROLLBACK_BYTES && shown.ends_with(&seen));
    }
}
