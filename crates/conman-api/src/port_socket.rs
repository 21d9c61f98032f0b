//! One of a session's ports over a WebSocket (subprotocol [`PORT_PROTOCOL`](conman_proto::PORT_PROTOCOL)).
//!
//! Two loops run within one task, one for each direction, and each holds one message. A client that ends its
//! direction still gets what the session sends; the end of the session's direction ends the connection.

use axum::extract::ws::{Message, WebSocket};
use bytes::{Bytes, BytesMut};
use conman_core::ActivityGuard;
use futures_util::StreamExt as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use crate::web_socket::{Receiver, Sender, SocketEnd, close, pings, receive, send};

/// Most bytes of a message to the client.
const CHUNK_BYTES: usize = 64 * 1024;

/// Connects `socket` with a session's port until the session or the client closes. `activity` keeps the
/// session from counting as idle.
pub(crate) async fn carry(
    socket: WebSocket,
    stream: impl AsyncRead + AsyncWrite,
    activity: ActivityGuard,
    shutdown: CancellationToken,
) {
    let (mut sender, mut receiver) = socket.split();
    let (from_session, to_session) = tokio::io::split(stream);
    let end = tokio::select! {
        // Cancel safe: it ends only with the connection, so nothing that it holds is needed.
        end = to_port(&mut receiver, to_session) => end,
        // As in a conversation with a command.
        end = from_port(&mut sender, from_session) => end,
        // Cancel safe: it holds nothing.
        () = shutdown.cancelled() => SocketEnd::ShuttingDown,
    };
    drop(activity);
    close(sender, receiver, &end).await;
}

async fn to_port(receiver: &mut Receiver, mut session: impl AsyncWrite + Unpin) -> SocketEnd {
    loop {
        // A session that has closed its direction is noticed by the other loop.
        let _ = match receive(receiver).await {
            Ok(bytes) if bytes.is_empty() => session.shutdown().await,
            Ok(bytes) => session.write_all(&bytes).await,
            Err(end) => return end,
        };
    }
}

async fn from_port(sender: &mut Sender, mut session: impl AsyncRead + Unpin) -> SocketEnd {
    let mut pings = pings();
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(CHUNK_BYTES);
        let message = tokio::select! {
            // Cancel safe: `read_buf` loses nothing.
            read = session.read_buf(&mut buffer) => match read {
                Ok(0) | Err(_) => break,
                Ok(_) => Message::Binary(buffer.split().freeze()),
            },
            // Cancel safe: a missed tick comes with the next call.
            _ = pings.tick() => Message::Ping(Bytes::new()),
        };
        if let Err(end) = send(sender, message).await {
            return end;
        }
    }
    match send(sender, Message::Binary(Bytes::new())).await {
        Ok(()) => SocketEnd::Finished,
        Err(end) => end,
    }
}
