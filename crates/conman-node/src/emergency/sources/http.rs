//! Requests to a cloud's metadata server: plain HTTP on the machine's own link, small answers, all of it bounded.

use std::time::Duration;

use http::header::HOST;
use http::{HeaderMap, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Largest body of an answer. A list of Azure's events has some hundred bytes for each.
const MAX_BODY_BYTES: usize = 64 * 1024;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A metadata server's `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint(String);

impl std::str::FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "must be http://HOST or http://HOST:PORT".to_owned();
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let is_bare = uri.scheme_str() == Some("http")
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none();
        let host = uri.host().filter(|host| !host.is_empty() && is_bare);
        let port = uri.port_u16().unwrap_or(80);
        host.map(|host| Self(format!("{host}:{port}")))
            .ok_or_else(wrong)
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a request to a metadata server failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum MetadataError {
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    #[error("the exchange failed")]
    Exchange(#[source] BoxError),
    #[error("no answer in time")]
    TimedOut,
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error("{0}")]
    Wrong(&'static str),
    #[error("its answer is not the documented one")]
    Json(#[from] serde_json::Error),
}

#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
}

impl Answer {
    /// The body of a success.
    pub(super) fn success(self) -> Result<String, MetadataError> {
        match self.status {
            StatusCode::OK => Ok(self.body),
            status => Err(MetadataError::Status(status)),
        }
    }
}

impl Endpoint {
    /// Sends a request on a new connection, and bounds the whole exchange.
    pub(super) async fn send(
        &self,
        request: http::request::Builder,
        body: String,
        bound: Duration,
    ) -> Result<Answer, MetadataError> {
        timeout(bound, self.exchange(request, body))
            .await
            .map_err(|_| MetadataError::TimedOut)?
    }

    async fn exchange(
        &self,
        request: http::request::Builder,
        body: String,
    ) -> Result<Answer, MetadataError> {
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(self.0.as_str()))
            .await
            .map_err(|_| MetadataError::TimedOut)?
            .map_err(MetadataError::Connect)?;
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(16 * 1024)
            .handshake::<_, Full<Bytes>>(TokioIo::new(stream))
            .await
            .map_err(failed)?;
        // Ends when the sender and the body are dropped. The exchange reports its failure.
        tokio::spawn(connection);
        let request = request
            .header(HOST, self.0.as_str())
            .body(Full::from(body))
            .map_err(failed)?;
        let response = sender.send_request(request).await.map_err(failed)?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, MAX_BODY_BYTES);
        let bytes = body.collect().await.map_err(failed)?.to_bytes();
        Ok(Answer {
            status: parts.status,
            headers: parts.headers,
            body: String::from_utf8_lossy(&bytes).trim().to_owned(),
        })
    }
}

fn failed(error: impl Into<BoxError>) -> MetadataError {
    MetadataError::Exchange(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_scheme_a_host_and_perhaps_a_port() {
        let endpoint = |text: &str| text.parse::<Endpoint>().map(|endpoint| endpoint.0);
        for (text, address) in [
            (
                "http://metadata.google.internal",
                "metadata.google.internal:80",
            ),
            ("http://127.0.0.1:8080/", "127.0.0.1:8080"),
            ("http://[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(endpoint(text).as_deref(), Ok(address));
        }
        for bad in [
            "https://metadata.google.internal",
            "metadata",
            "http://h/computeMetadata",
            "",
        ] {
            assert!(endpoint(bad).is_err(), "{bad}");
        }
    }
}
