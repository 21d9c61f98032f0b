//! `conman forward`: carries the connections of a local port to a port of a session.
//!
//! Each connection has a task and a WebSocket. All end with the command, which an interrupt ends.

use std::net::Ipv4Addr;
use std::sync::Arc;

use bytes::BytesMut;
use conman_proto::{PORT_PROTOCOL, Session};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::protocol::Message;

use super::Context;
use crate::args::ForwardArgs;
use crate::client::Socket;
use crate::failure::{Exit, Failure};

/// Most bytes of a message; the daemon accepts larger ones.
const CHUNK_BYTES: usize = 64 * 1024;

pub(super) async fn run(context: &Context, args: &ForwardArgs) -> Result<Exit, Failure> {
    let (id, port) = (&args.id, args.ports.port);
    let session: Session = context.client.get(&format!("/v1/sessions/{id}")).await?;
    let ports = &session.spec.ports;
    if session.port != Some(port)
        && !ports
            .iter()
            .any(|range| (range.first..=range.last).contains(&port))
    {
        return Err(Failure::new(
            Exit::Refused,
            "no-such-port",
            "The session does not have that port",
            format!("{id} does not serve port {port}"),
        )
        .next(format!(
            "`conman port {id}` lists its ports; --port or --ports of `conman run` adds one"
        )));
    }
    let path: Arc<str> = format!("/v1/sessions/{id}/ports/{port}/connect").into();
    let cannot_listen = |error: std::io::Error| {
        Failure::usage(format!(
            "cannot listen on local port {}: {error}",
            args.ports.local
        ))
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.ports.local))
        .await
        .map_err(cannot_listen)?;
    let local = listener.local_addr().map_err(cannot_listen)?;
    context
        .output
        .line(&format!("{local} is port {port} of {id}"))?;
    let mut connections = JoinSet::new();
    loop {
        // Cancel safe: an accepted connection or a finished task is the result.
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted.map_err(cannot_listen)?;
                match context.client.upgrade(&path, PORT_PROTOCOL).await {
                    Ok(socket) => {
                        connections.spawn(carry(stream, socket));
                    }
                    // The next connection may succeed; this one is closed.
                    Err(error) => context.output.failure(&Failure::from(error).about(id.as_str())),
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Carries bytes until the session ends its direction, or the connection breaks.
async fn carry(stream: TcpStream, socket: Socket) {
    let (mut to_daemon, mut from_daemon) = socket.split();
    let (mut from_program, mut to_program) = stream.into_split();
    let up = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(CHUNK_BYTES);
            let read = from_program.read_buf(&mut buffer).await.unwrap_or(0);
            let message = Message::Binary(buffer.split().freeze());
            if to_daemon.send(message).await.is_err() || read == 0 {
                break;
            }
        }
        // An empty message has ended this direction; the other one ends the connection.
        std::future::pending::<()>().await;
    };
    let down = async {
        while let Some(Ok(message)) = from_daemon.next().await {
            let Message::Binary(bytes) = message else {
                continue;
            };
            if bytes.is_empty() || to_program.write_all(&bytes).await.is_err() {
                break;
            }
        }
        // A program that has closed its end needs no more.
        let _ = to_program.shutdown().await;
    };
    // Cancel safe: nothing is sent any more once the session has ended its direction.
    tokio::select! {
        () = up => {}
        () = down => {}
    }
}
