//! Connects to a session's program through a node.

use std::net::SocketAddr;

use anyhow::{Context as _, Error, Result, anyhow, bail};
use futures_util::StreamExt as _;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{WebSocketStream, client_async};

use super::Line;

/// Connects to a witness through a node's sessions' listener: the WebSocket, and who greeted on it.
///
/// # Errors
/// It was not opened, or the greeting is not one.
pub async fn visit(through: SocketAddr, id: &str) -> Result<(WebSocketStream<TcpStream>, Line)> {
    let stream = TcpStream::connect(through).await?;
    stream.set_nodelay(true)?;
    let opened = client_async(format!("ws://{through}/s/{id}/"), stream).await;
    let (mut socket, _) = opened.map_err(refusal)?;
    match socket.next().await.context("closed without a greeting")?? {
        Message::Text(text) => {
            let line = serde_json::from_str(text.as_str()).context("a strange greeting")?;
            Ok((socket, line))
        }
        Message::Close(frame) => bail!(ClosedEarly {
            code: frame.map_or(WITHOUT_CODE, |frame| frame.code.into()),
        }),
        other => bail!("a strange greeting: {other:?}"),
    }
}

/// Says how the handshake was refused, and by which program.
fn refusal(error: tungstenite::Error) -> Error {
    let tungstenite::Error::Http(answer) = error else {
        return error.into();
    };
    let header = |name: &str| answer.headers().get(name)?.to_str().ok();
    // A problem of conman's, or a page of the load balancer's.
    let form = header("content-type").unwrap_or("no content");
    let status = answer.status().as_u16();
    match header("retry-after") {
        Some(pause) => anyhow!("{status} ({form}) with Retry-After: {pause}"),
        None => anyhow!("{status} ({form})"),
    }
}

/// The code of a close that has none.
pub const WITHOUT_CODE: u16 = 1005;

/// The connection was opened, and closed before the session greeted: it moves at this moment.
#[derive(Debug, thiserror::Error)]
#[error("closed with {code} before the greeting")]
pub struct ClosedEarly {
    pub code: u16,
}
