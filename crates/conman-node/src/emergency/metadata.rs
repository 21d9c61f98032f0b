//! A client for Google Compute Engine's metadata server: reads one value at a time with a long poll.
//!
//! <https://cloud.google.com/compute/docs/metadata/querying-metadata>

use std::time::Duration;

use http::header::{ETAG, HOST};
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Header that names the server, in requests and responses. A response without it is from another server.
const FLAVOR: &str = "metadata-flavor";
const FLAVOR_VALUE: &str = "Google";

/// Largest response body. The values have some thirty bytes.
const MAX_BODY_BYTES: usize = 4 * 1024;

/// Largest ETag that is kept; the server's have 16 bytes.
const MAX_ETAG_BYTES: usize = 256;

/// How long the server may keep a request open before it answers without a change.
pub(super) const HANG_S: u64 = 60;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Bound on a whole exchange, with a margin for a server that ends its wait late.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(HANG_S + 30);

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

/// A value and the ETag of its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) text: String,
    pub(super) etag: Option<String>,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a value could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum MetadataError {
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    #[error("the exchange failed")]
    Exchange(#[source] BoxError),
    #[error("no answer in time")]
    TimedOut,
    #[error("the response lacks `Metadata-Flavor: Google`, so this is not a metadata server")]
    NotMetadataServer,
    #[error("it answered {0}")]
    Status(StatusCode),
}

impl Endpoint {
    /// Reads the value of `key` below `instance/`: at once without an ETag, otherwise when the value no
    /// longer has this ETag, or after [`HANG_S`] seconds.
    pub(super) async fn read(&self, key: &str, etag: Option<&str>) -> Result<Value, MetadataError> {
        timeout(EXCHANGE_TIMEOUT, self.exchange(key, etag))
            .await
            .map_err(|_| MetadataError::TimedOut)?
    }

    async fn exchange(&self, key: &str, etag: Option<&str>) -> Result<Value, MetadataError> {
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(self.0.as_str()))
            .await
            .map_err(|_| MetadataError::TimedOut)?
            .map_err(MetadataError::Connect)?;
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(16 * 1024)
            .handshake::<_, Empty<Bytes>>(TokioIo::new(stream))
            .await
            .map_err(failed)?;
        // Ends when the sender and the body are dropped. The exchange reports its failure.
        tokio::spawn(connection);
        let mut target = format!("/computeMetadata/v1/instance/{key}");
        if let Some(etag) = etag {
            let etag = escaped(etag);
            target += &format!("?wait_for_change=true&timeout_sec={HANG_S}&last_etag={etag}");
        }
        let request = Request::get(target)
            .header(HOST, self.0.as_str())
            .header(FLAVOR, FLAVOR_VALUE)
            .body(Empty::new())
            .map_err(failed)?;
        let response = sender.send_request(request).await.map_err(failed)?;
        let (parts, body) = response.into_parts();
        // Check this before the status: another server's answer says nothing about this machine.
        if !is_metadata_server(&parts.headers) {
            return Err(MetadataError::NotMetadataServer);
        }
        if parts.status != StatusCode::OK {
            return Err(MetadataError::Status(parts.status));
        }
        let body = Limited::new(body, MAX_BODY_BYTES);
        let bytes = body.collect().await.map_err(failed)?.to_bytes();
        Ok(Value {
            text: String::from_utf8_lossy(&bytes).trim().to_owned(),
            etag: etag_of(&parts.headers),
        })
    }
}

fn failed(error: impl Into<BoxError>) -> MetadataError {
    MetadataError::Exchange(error.into())
}

fn is_metadata_server(headers: &HeaderMap) -> bool {
    headers
        .get(FLAVOR)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"google"))
}

fn etag_of(headers: &HeaderMap) -> Option<String> {
    let etag = headers.get(ETAG)?.to_str().ok()?.trim();
    (!etag.is_empty() && etag.len() <= MAX_ETAG_BYTES).then(|| etag.to_owned())
}

/// An ETag is opaque: it may have characters that are not allowed in a query.
fn escaped(etag: &str) -> PercentEncode<'_> {
    utf8_percent_encode(etag, NON_ALPHANUMERIC)
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

    #[test]
    fn an_etag_stays_one_query_value() {
        assert_eq!(escaped("a1&b=\"2\"").to_string(), "a1%26b%3D%222%22");
    }
}
