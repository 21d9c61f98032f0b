//! A WebSocket echo server, the program in the benchmarks' sessions.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use futures_util::{SinkExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};

/// A WebSocket echo server: the program inside the benchmarks' sessions.
///
/// # Errors
/// When the address cannot be listened on or accepting fails.
pub(crate) async fn serve_echo(listen: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("listening on {listen}"))?;
    loop {
        let (stream, _) = listener.accept().await.context("accepting a connection")?;
        tokio::spawn(echo(stream));
    }
}

/// An error affects only this connection: the client notices and reports it.
pub(crate) async fn echo(stream: TcpStream) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let Ok(socket) = tokio_tungstenite::accept_async(stream).await else {
        return;
    };
    let (mut sink, mut source) = socket.split();
    while let Some(Ok(message)) = source.next().await {
        if (message.is_binary() || message.is_text()) && sink.send(message).await.is_err() {
            return;
        }
    }
}
