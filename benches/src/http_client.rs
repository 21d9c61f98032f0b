//! A client of the HTTP API.

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

/// Sends one request on a new connection, and reads a JSON answer.
pub(crate) async fn request_json<T: DeserializeOwned>(
    address: &str,
    method: Method,
    path: &str,
    body: Option<&serde_json::Value>,
) -> Result<T> {
    let mut connection = Connection::open(address).await?;
    connection.json(method, path, body).await
}

/// A connection for many requests.
pub(crate) struct Connection {
    sender: hyper::client::conn::http1::SendRequest<Full<Bytes>>,
    driver: tokio::task::JoinHandle<Result<(), hyper::Error>>,
}

impl Connection {
    /// Connects to `HOST:PORT` or `unix:PATH`.
    pub(crate) async fn open(address: &str) -> Result<Self> {
        if let Some(path) = address.strip_prefix("unix:") {
            let stream = UnixStream::connect(path).await;
            let stream = stream.with_context(|| format!("connecting to {path}"))?;
            return Self::over(TokioIo::new(stream)).await;
        }
        let stream = TcpStream::connect(address)
            .await
            .with_context(|| format!("connecting to {address}"))?;
        stream
            .set_nodelay(true)
            .context("switching off Nagle's algorithm")?;
        Self::over(TokioIo::new(stream)).await
    }

    async fn over<S>(stream: S) -> Result<Self>
    where
        S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let (sender, connection) = hyper::client::conn::http1::handshake(stream)
            .await
            .context("opening an HTTP connection")?;
        let driver = tokio::spawn(connection);
        Ok(Self { sender, driver })
    }

    /// Sends one request, and reads a JSON answer.
    pub(crate) async fn json<T: DeserializeOwned>(
        &mut self,
        method: Method,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<T> {
        let payload = body
            .map(serde_json::to_vec)
            .transpose()
            .context("writing a body")?;
        let body = self
            .exchange(&method, path, Bytes::from(payload.unwrap_or_default()))
            .await?;
        serde_json::from_slice(&body)
            .with_context(|| format!("reading the answer to {method} {path}"))
    }

    /// A page, as text.
    pub(crate) async fn text(&mut self, path: &str) -> Result<String> {
        let body = self.exchange(&Method::GET, path, Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// A request whose answer has no body.
    pub(crate) async fn done(&mut self, method: Method, path: &str) -> Result<()> {
        self.exchange(&method, path, Bytes::new()).await.map(drop)
    }

    async fn exchange(&mut self, method: &Method, path: &str, payload: Bytes) -> Result<Bytes> {
        let sent = format!("{method} {path}");
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(payload))
            .with_context(|| format!("building {sent}"))?;
        let sender = &mut self.sender;
        let answered = tokio::time::timeout(PATIENCE, async {
            sender.ready().await?;
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
        if !status.is_success() {
            bail!(
                "{sent} was answered {status}: {}",
                String::from_utf8_lossy(&body)
            );
        }
        Ok(body)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
