use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::{TcpStream, UnixStream};

/// Bound on an answer's body.
const MAX_BODY_BYTES: usize = 64 << 20;
/// Bound on one exchange; the slowest is a preemption's report.
const PATIENCE: Duration = Duration::from_secs(180);

/// One request on a connection of its own over TCP, answered with JSON.
pub(crate) async fn json_over_tcp<T: DeserializeOwned>(
    address: &str,
    method: Method,
    path: &str,
    body: Option<&serde_json::Value>,
) -> Result<T> {
    let stream = TcpStream::connect(address)
        .await
        .with_context(|| format!("connecting to {address}"))?;
    stream
        .set_nodelay(true)
        .context("switching off Nagle's algorithm")?;
    exchange(TokioIo::new(stream), method, path, body).await
}

/// One GET on a connection of its own over a Unix socket, answered with JSON.
pub(crate) async fn json_over_unix<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T> {
    let stream = UnixStream::connect(socket)
        .await
        .with_context(|| format!("connecting to {}", socket.display()))?;
    exchange(TokioIo::new(stream), Method::GET, path, None).await
}

async fn exchange<T, S>(
    stream: S,
    method: Method,
    path: &str,
    body: Option<&serde_json::Value>,
) -> Result<T>
where
    T: DeserializeOwned,
    S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let sent = format!("{method} {path}");
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream)
        .await
        .with_context(|| format!("opening a connection for {sent}"))?;
    let connection = tokio::spawn(connection);
    let payload = body
        .map(serde_json::to_vec)
        .transpose()
        .context("writing a body")?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(payload.unwrap_or_default())))
        .with_context(|| format!("building {sent}"))?;
    let answered = tokio::time::timeout(PATIENCE, async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_BODY_BYTES)
            .collect()
            .await;
        anyhow::Ok((
            status,
            body.map_err(|error| anyhow::anyhow!(error))?.to_bytes(),
        ))
    });
    let (status, body) = answered
        .await
        .with_context(|| format!("{sent}: no answer within {} s", PATIENCE.as_secs()))?
        .with_context(|| sent.clone())?;
    connection.abort();
    if !status.is_success() {
        bail!(
            "{sent} was answered {status}: {}",
            String::from_utf8_lossy(&body)
        );
    }
    serde_json::from_slice(&body).with_context(|| format!("reading the answer to {sent}"))
}
