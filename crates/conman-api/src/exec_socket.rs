//! A command over a WebSocket: an interactive one (subprotocol
//! [`EXEC_PROTOCOL`](conman_proto::EXEC_PROTOCOL)), or a client of a terminal or a kept command
//! ([`ATTACH_PROTOCOL`](conman_proto::ATTACH_PROTOCOL)).
//!
//! Two loops run within one task: one carries the client's messages to the command, the other the
//! command's output to the client. Neither holds more than one message, so a slow client slows
//! the command and a command that does not read slows the client. The first loop to end ends the
//! connection; dropping the [`ExecIo`] then disconnects from the command. What is attached to is not slowed: a
//! slow client learns what it missed.

use std::time::Duration;

use axum::extract::ws::{Message, WebSocket};
use bytes::{BufMut as _, Bytes, BytesMut};
use conman_node::Attached;
use conman_proto::{ExecChannel, ExecStatus, TerminalSize};
use conman_runtime::{AttachedIo, AttachedOutput, ExecIo, ExecKill, OutputStream};
use futures_util::StreamExt as _;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::exec_collect::kill_late;
use crate::web_socket::{Receiver, Sender, SocketEnd, close, pings, receive, send};

/// Connects `socket` with a running command until either ends; a command that takes longer than `limit` is
/// killed.
pub(crate) async fn converse(
    socket: WebSocket,
    io: ExecIo,
    limit: Option<Duration>,
    shutdown: CancellationToken,
) {
    let to_command = ToCommand {
        input: io.stdin,
        resize: io.resize,
    };
    let message = |(stream, bytes): (OutputStream, Bytes)| output_message(stream, &bytes);
    // Held as long as the connection.
    let (status, _kill) = match limit {
        Some(limit) => (limited(io.status, io.kill, limit), None),
        None => (io.status, Some(io.kill)),
    };
    let from_command = (io.output, status);
    connect(socket, to_command, from_command, message, shutdown).await;
}

/// The status of a command that is killed if it takes longer than `limit` while somebody waits for it.
fn limited(
    mut status: oneshot::Receiver<ExecStatus>,
    kill: ExecKill,
    limit: Duration,
) -> oneshot::Receiver<ExecStatus> {
    let (mut tell, told) = oneshot::channel();
    tokio::spawn(async move {
        let ended = tokio::select! {
            ended = &mut status => ended.ok(),
            () = tokio::time::sleep(limit) => {
                let late = kill_late(kill, limit, &mut status).await;
                Some(ExecStatus { error: Some(late), ..ExecStatus::default() })
            }
            () = tell.closed() => None,
        };
        if let Some(ended) = ended {
            // The client may have gone.
            let _ = tell.send(ended);
        }
    });
    told
}

/// Connects `socket` with a terminal or a kept command until the client detaches, by closing, or the program
/// ends.
pub(crate) async fn watch(socket: WebSocket, attached: Attached, shutdown: CancellationToken) {
    let Attached { io, presence } = attached;
    let AttachedIo {
        input,
        output,
        resize,
        status,
    } = io;
    let message = |piece: AttachedOutput| match piece {
        AttachedOutput::Output(stream, bytes) => output_message(stream, &bytes),
        AttachedOutput::Screen(bytes) => framed(ExecChannel::Replay, &bytes),
        AttachedOutput::Position(position) => framed(ExecChannel::Position, &json(&position)),
    };
    let to_command = ToCommand { input, resize };
    connect(socket, to_command, (output, status), message, shutdown).await;
    drop(presence);
}

fn output_message(stream: OutputStream, bytes: &[u8]) -> Message {
    match stream {
        OutputStream::Stdout => framed(ExecChannel::Stdout, bytes),
        OutputStream::Stderr => framed(ExecChannel::Stderr, bytes),
    }
}

/// The direction to a command.
struct ToCommand {
    input: mpsc::Sender<Bytes>,
    resize: mpsc::Sender<TerminalSize>,
}

async fn connect<T>(
    socket: WebSocket,
    to_command: ToCommand,
    from_command: (mpsc::Receiver<T>, oneshot::Receiver<ExecStatus>),
    message: impl Fn(T) -> Message,
    shutdown: CancellationToken,
) {
    let (mut sender, mut receiver) = socket.split();
    let end = tokio::select! {
        // Cancel safe: it ends only with the connection, so nothing that it holds is needed.
        end = carry_input(&mut receiver, to_command) => end,
        // A half-written message is not continued: `Gone` writes nothing, and a violation's close
        // frame queues behind it in the socket's buffer.
        end = carry_output(&mut sender, from_command, message) => end,
        // Cancel safe: it holds nothing.
        () = shutdown.cancelled() => SocketEnd::ShuttingDown,
    };
    close(sender, receiver, &end).await;
}

/// Reports to the client, as the last message, that there is no command.
pub(crate) async fn report(socket: WebSocket, status: ExecStatus) {
    let (mut sender, receiver) = socket.split();
    let end = match send(&mut sender, framed(ExecChannel::Status, &json(&status))).await {
        Ok(()) => SocketEnd::Finished,
        Err(end) => end,
    };
    close(sender, receiver, &end).await;
}

async fn carry_input(receiver: &mut Receiver, to_command: ToCommand) -> SocketEnd {
    let ToCommand { input, resize } = to_command;
    let mut input = Some(input);
    loop {
        let payload = match receive(receiver).await {
            Ok(payload) => payload,
            Err(end) => return end,
        };
        let Some(channel) = payload.first() else {
            return SocketEnd::Violation("a message begins with its channel");
        };
        let data = payload.slice(1..);
        match ExecChannel::try_from(*channel) {
            Ok(ExecChannel::Stdin) => {
                let is_end = data.is_empty();
                // It fails when the command has closed its input.
                if let Some(open) = &input
                    && (open.send(data).await.is_err() || is_end)
                {
                    input = None;
                }
            }
            Ok(ExecChannel::Resize) => {
                let size = serde_json::from_slice::<TerminalSize>(&data).ok();
                let Some(size) = size.filter(|size| size.columns > 0 && size.rows > 0) else {
                    return SocketEnd::Violation(
                        "a resize carries columns and rows, not 0, as JSON",
                    );
                };
                // If the queue is full, the next resize corrects the size.
                let _ = resize.try_send(size);
            }
            Ok(
                ExecChannel::Stdout
                | ExecChannel::Stderr
                | ExecChannel::Status
                | ExecChannel::Replay
                | ExecChannel::Position,
            )
            | Err(_) => {
                return SocketEnd::Violation("only stdin (0) and resize (4) come from a client");
            }
        }
    }
}

async fn carry_output<T>(
    sender: &mut Sender,
    (mut output, mut status): (mpsc::Receiver<T>, oneshot::Receiver<ExecStatus>),
    as_message: impl Fn(T) -> Message,
) -> SocketEnd {
    let mut pings = pings();
    loop {
        let message = tokio::select! {
            // Cancel safe: `recv` loses nothing.
            chunk = output.recv() => match chunk {
                Some(piece) => as_message(piece),
                None => break,
            },
            // Cancel safe: a missed tick comes with the next call.
            _ = pings.tick() => Message::Ping(Bytes::new()),
        };
        if let Err(end) = send(sender, message).await {
            return end;
        }
    }
    let status = loop {
        tokio::select! {
            // Cancel safe: a status that arrives meanwhile stays in the channel.
            status = &mut status => break status.unwrap_or_else(|_| ExecStatus {
                exit_code: None,
                error: Some("the connection to the command was lost".to_owned()), ..ExecStatus::default() }),
            // As above.
            _ = pings.tick() => if let Err(end) = send(sender, Message::Ping(Bytes::new())).await {
                return end;
            },
        }
    };
    match send(sender, framed(ExecChannel::Status, &json(&status))).await {
        Ok(()) => SocketEnd::Finished,
        Err(end) => end,
    }
}

fn framed(channel: ExecChannel, payload: &[u8]) -> Message {
    let mut bytes = BytesMut::with_capacity(1 + payload.len());
    bytes.put_u8(channel as u8);
    bytes.put_slice(payload);
    Message::Binary(bytes.freeze())
}

fn json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::Router;
    use axum::extract::ws::WebSocketUpgrade;
    use axum::routing::any;
    use futures_util::SinkExt as _;
    use hyper::server::conn::http1;
    use hyper_util::rt::TokioIo;
    use hyper_util::service::TowerToHyperService;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    use super::*;

    /// The command's ends of an [`ExecIo`].
    struct Command {
        input: mpsc::Receiver<Bytes>,
        _output: mpsc::Sender<(OutputStream, Bytes)>,
        _status: oneshot::Sender<ExecStatus>,
    }

    /// A conversation with a command, over memory instead of a network.
    fn stage() -> (DuplexStream, Command) {
        let (stdin, input) = mpsc::channel(1);
        let (printed, output) = mpsc::channel(1);
        let (ended, status) = oneshot::channel();
        let (resize, _) = mpsc::channel(1);
        let io = ExecIo {
            stdin,
            output,
            resize,
            status,
            kill: conman_runtime::ExecKill::new().0,
        };
        let io = std::sync::Arc::new(std::sync::Mutex::new(Some(io)));
        let handler = move |upgrade: WebSocketUpgrade| async move {
            let io = io.lock().expect("no panic").take().expect("one client");
            upgrade.on_upgrade(|socket| converse(socket, io, None, CancellationToken::new()))
        };
        let router = Router::new().route("/", any(handler));
        let (client, server) = tokio::io::duplex(64 * 1024);
        let service = TowerToHyperService::new(router);
        let serving = http1::Builder::new()
            .serve_connection(TokioIo::new(server), service)
            .with_upgrades();
        tokio::spawn(serving);
        let command = Command {
            input,
            _output: printed,
            _status: ended,
        };
        (client, command)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_answers_no_ping_is_let_go_with_its_command() {
        let (mut client, mut command) = stage();
        let handshake = "GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n\
            upgrade: websocket\r\nsec-websocket-version: 13\r\n\
            sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        client.write_all(handshake.as_bytes()).await.expect("sent");
        let mut said = Vec::new();
        client.read_to_end(&mut said).await.expect("closed");
        let pings = said
            .windows(2)
            .filter(|frame| *frame == [0x89, 0x00])
            .count();
        assert!(pings >= 2, "{pings}");
        assert!(command.input.recv().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_answers_pings_may_be_silent_for_hours() {
        let (client, mut command) = stage();
        let (mut socket, _) = tokio_tungstenite::client_async("ws://x/", client)
            .await
            .expect("upgraded");
        let hours = tokio::time::sleep(Duration::from_secs(3 * 3_600));
        tokio::pin!(hours);
        loop {
            tokio::select! {
                // Reading answers the pings; an interrupted message is read again.
                message = socket.next() => {
                    message.expect("it stays open").expect("it stays open");
                }
                // Time is up.
                () = &mut hours => break,
            }
        }
        let typed = vec![ExecChannel::Stdin as u8, b'x'];
        let typed = tokio_tungstenite::tungstenite::Message::Binary(typed.into());
        socket.send(typed).await.expect("sent");
        assert_eq!(command.input.recv().await.as_deref(), Some(&b"x"[..]));
    }
}
