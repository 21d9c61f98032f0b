use http::header::{HOST, HeaderValue};
use http::{Request, Response, Uri};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::http1::Builder;
use hyper_util::rt::TokioIo;
use thiserror::Error;

use crate::PeerAddress;
use crate::dial::{DialError, Dialed, Dialer};

/// Bytes of an answer's head.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Fields of an answer's head.
const MAX_HEADERS: usize = 200;

/// Asks other nodes, each request on a connection of its own: what is asked this way comes now and
/// then, and may last.
#[derive(Debug, Clone)]
pub struct PeerClient {
    dialer: Dialer,
}

/// Why a node has not answered.
#[derive(Debug, Error)]
pub enum AskError {
    /// Nothing of the request has gone out.
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("the request to node `{node}` is not one that can be sent")]
    Request {
        node: String,
        #[source]
        source: http::Error,
    },
    /// It may have been carried out.
    #[error("node `{node}` closed the connection before it answered")]
    Unanswered {
        node: String,
        #[source]
        source: hyper::Error,
    },
}

impl PeerClient {
    #[must_use]
    pub fn new(dialer: Dialer) -> Self {
        Self { dialer }
    }

    /// The node that asks.
    #[must_use]
    pub fn me(&self) -> &str {
        self.dialer.me()
    }

    /// Sends a request and returns the answer once its head is there; the bodies of both may
    /// stream for as long as they like. An answer may be an upgrade. Cancelling closes the
    /// connection.
    ///
    /// # Errors
    /// No connection, or none that lasted until the answer.
    pub async fn ask<B>(
        &self,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<Incoming>, AskError>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let Dialed { stream, sealer } = self.dialer.dial(to).await?;
        let node = || to.node.clone();
        let (mut parts, body) = request.into_parts();
        let target = parts.uri.path_and_query().cloned();
        parts.uri = match target {
            Some(target) => Uri::from(target),
            None => Uri::from_static("/"),
        };
        let host = HeaderValue::from_str(&to.to_string()).map_err(|error| AskError::Request {
            node: node(),
            source: error.into(),
        })?;
        parts.headers.insert(HOST, host);
        sealer.seal(&mut parts);
        let unanswered = |source| AskError::Unanswered {
            node: node(),
            source,
        };
        let (mut sender, connection) = Builder::new()
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(unanswered)?;
        // Ends with the answer's body, or once what the answer has become is upgraded.
        tokio::spawn(async move {
            let ended = connection.with_upgrades().await;
            tracing::trace!(error = ?ended.err(), "a connection to another node ended");
        });
        sender
            .send_request(Request::from_parts(parts, body))
            .await
            .map_err(unanswered)
    }
}
