//! A client for Google Compute Engine's metadata server: reads one value at a time with a long poll.
//!
//! <https://cloud.google.com/compute/docs/metadata/querying-metadata>

use std::time::Duration;

use http::header::{ETAG, HOST};
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
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

/// A metadata server's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    host: String,
    port: u16,
}

impl std::str::FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "must be http://HOST or http://HOST:PORT".to_owned();
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none();
        match uri.host().filter(|host| !host.is_empty()) {
            Some(host) if is_bare && uri.scheme_str() == Some("http") => Ok(Self {
                host: host.trim_matches(['[', ']']).to_owned(),
                port: uri.port_u16().unwrap_or(80),
            }),
            _ => Err(wrong()),
        }
    }
}

/// A value and the ETag of its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) text: String,
    pub(super) etag: Option<String>,
}

/// Why a value could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum MetadataError {
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    #[error("the exchange failed")]
    Exchange(#[source] hyper::Error),
    #[error("no answer in time")]
    TimedOut,
    #[error("the response lacks `Metadata-Flavor: Google`, so this is not a metadata server")]
    NotMetadataServer,
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error("the response is too long or incomplete")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the response is not text")]
    NotText,
    #[error("the request cannot be made")]
    Request(#[source] http::Error),
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
        let stream = timeout(
            CONNECT_TIMEOUT,
            TcpStream::connect((self.host.as_str(), self.port)),
        )
        .await
        .map_err(|_| MetadataError::TimedOut)?
        .map_err(MetadataError::Connect)?;
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(16 * 1024)
            .handshake::<_, Empty<Bytes>>(TokioIo::new(stream))
            .await
            .map_err(MetadataError::Exchange)?;
        let exchange = async {
            let response = sender
                .send_request(self.request(key, etag)?)
                .await
                .map_err(MetadataError::Exchange)?;
            let (parts, body) = response.into_parts();
            // Check this before the status: another server's answer says nothing about this machine.
            if !is_metadata_server(&parts.headers) {
                return Err(MetadataError::NotMetadataServer);
            }
            if parts.status != StatusCode::OK {
                return Err(MetadataError::Status(parts.status));
            }
            let body = Limited::new(body, MAX_BODY_BYTES)
                .collect()
                .await
                .map_err(MetadataError::Body)?;
            let text =
                String::from_utf8(body.to_bytes().into()).map_err(|_| MetadataError::NotText)?;
            Ok(Value {
                text: text.trim().to_owned(),
                etag: etag_of(&parts.headers),
            })
        };
        tokio::pin!(connection);
        tokio::pin!(exchange);
        let mut connected = true;
        loop {
            tokio::select! {
                // Cancel safe: both are dropped together with this future, and the connection with
                // them; the server keeps no state of it.
                value = &mut exchange => return value,
                // A failure of the connection is reported by the exchange.
                _ = &mut connection, if connected => connected = false,
            }
        }
    }

    fn request(
        &self,
        key: &str,
        etag: Option<&str>,
    ) -> Result<Request<Empty<Bytes>>, MetadataError> {
        let wait = match etag {
            Some(etag) => {
                format!(
                    "?wait_for_change=true&timeout_sec={HANG_S}&last_etag={}",
                    escaped(etag)
                )
            }
            None => String::new(),
        };
        let authority = if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        };
        Request::get(format!("/computeMetadata/v1/instance/{key}{wait}"))
            .header(HOST, authority)
            .header(FLAVOR, FLAVOR_VALUE)
            .body(Empty::new())
            .map_err(MetadataError::Request)
    }
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

/// An ETag is opaque; characters that are not allowed in a query become `%XX`.
fn escaped(etag: &str) -> String {
    let mut text = String::with_capacity(etag.len());
    for byte in etag.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_scheme_a_host_and_perhaps_a_port() {
        let endpoint = |text: &str| text.parse::<Endpoint>().map(|e| (e.host, e.port));
        assert_eq!(
            endpoint("http://metadata.google.internal").expect("default"),
            ("metadata.google.internal".to_owned(), 80)
        );
        assert_eq!(
            endpoint("http://127.0.0.1:8080/").expect("loopback"),
            ("127.0.0.1".to_owned(), 8080)
        );
        assert_eq!(
            endpoint("http://[::1]:80").expect("v6"),
            ("::1".to_owned(), 80)
        );
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
        assert_eq!(escaped("a1&b=\"2\""), "a1%26b%3D%222%22");
    }
}
