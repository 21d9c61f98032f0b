//! Idle connections to other nodes.
//!
//! A connection is returned once its answer has been read to the end, so it never carries two
//! requests at a time. An upgraded connection, or one whose answer was not read to the end, is
//! never returned.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use conman_proxy::PeerRefusal;
use http::header::{HOST, HeaderValue};
use http::{Request, Response, Uri};
use http_body::Body;
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use tokio::time::Instant;

use crate::PeerAddress;
use crate::client::{RefusedBy, RequestError};
use crate::dial::{DialError, Dialer};

/// Maximum size of an answer's head.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Maximum number of fields in an answer's head.
const MAX_HEADERS: usize = 200;

/// Maximum number of idle connections to one node, and to all: each uses one of the connections
/// that the other node's listener accepts.
const MAX_A_NODE: usize = 64;
const MAX_IDLE: usize = 1_024;
/// Less than the other node's listener keeps an idle connection.
const MAX_IDLE_FOR: Duration = Duration::from_secs(30);
/// Maximum age, however often it is used, so that a replaced certificate or CA of the other node
/// takes effect soon.
const MAX_AGE: Duration = Duration::from_secs(60);
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A connection that requests can be sent on, one after the other.
#[derive(Debug)]
pub(crate) struct Wire {
    sender: SendRequest<UnsyncBoxBody<Bytes, BoxError>>,
    opened: Instant,
    /// When its latest answer was read.
    idle_since: Instant,
    /// This node's certificates when it was opened.
    certificates: Option<Arc<ClientConfig>>,
}

impl Wire {
    /// Opens a new connection. Cancelling closes what was opened.
    pub(crate) async fn open(dialer: &Dialer, to: &PeerAddress) -> Result<Self, RequestError> {
        let opened = Instant::now();
        let certificates = dialer.certificates();
        let stream = dialer.dial(to).await.map_err(|error| match error {
            DialError::Foreign { .. } => {
                tracing::debug!(node = to.node, %error, "cannot connect to a node");
                RequestError::Refused(refused(dialer, to))
            }
            error => RequestError::Dial(error),
        })?;
        let (sender, connection) = Builder::new()
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|source| unanswered(dialer, to, source))?;
        // Ends when the other half and the answer's body are dropped, or when the upgrade of the
        // connection has ended.
        tokio::spawn(async move {
            let ended = connection.with_upgrades().await;
            tracing::trace!(error = ?ended.err(), "a connection to another node ended");
        });
        Ok(Self {
            sender,
            opened,
            idle_since: opened,
            certificates,
        })
    }

    /// Sends a request, and returns the answer once its head has arrived, without a timeout.
    /// Cancelling closes the connection.
    pub(crate) async fn send<B>(
        &mut self,
        dialer: &Dialer,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<Incoming>, RequestError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (mut parts, body) = request.into_parts();
        let target = parts.uri.path_and_query().cloned();
        parts.uri = match target {
            Some(target) => Uri::from(target),
            None => Uri::from_static("/"),
        };
        let host =
            HeaderValue::from_str(&to.to_string()).map_err(|error| RequestError::Invalid {
                node: to.node.clone(),
                source: error.into(),
            })?;
        parts.headers.insert(HOST, host);
        let body = body.map_err(Into::into).boxed_unsync();
        self.sender
            .send_request(Request::from_parts(parts, body))
            .await
            .map_err(|source| unanswered(dialer, to, source))
    }

    /// Whether it may take another request: it must use this node's current certificates.
    fn is_fit(&self, certificates: Option<&Arc<ClientConfig>>) -> bool {
        self.certificates.as_ref().map(Arc::as_ptr) == certificates.map(Arc::as_ptr)
            && !self.sender.is_closed()
            && self.opened.elapsed() < MAX_AGE
            && self.idle_since.elapsed() < MAX_IDLE_FOR
    }
}

fn unanswered(dialer: &Dialer, to: &PeerAddress, source: hyper::Error) -> RequestError {
    match PeerRefusal::by(&source) {
        Some(_) => RequestError::Refused(refused(dialer, to)),
        None => RequestError::Unanswered {
            node: to.node.clone(),
            source,
        },
    }
}

fn refused(dialer: &Dialer, to: &PeerAddress) -> RefusedBy {
    RefusedBy {
        me: dialer.me().to_owned(),
        node: to.node.clone(),
    }
}

/// Idle connections to all nodes. The most recently used one of a node is last.
#[derive(Debug, Default)]
pub(crate) struct Idle(Mutex<HashMap<PeerAddress, Vec<Wire>>>);

impl Idle {
    /// A connection to the node that can take a request now.
    pub(crate) fn take(&self, dialer: &Dialer, to: &PeerAddress) -> Option<Wire> {
        let certificates = dialer.certificates();
        let mut by_node = self.lock();
        let wires = by_node.get_mut(to)?;
        wires.retain(|wire| wire.is_fit(certificates.as_ref()));
        wires.pop()
    }

    /// Returns a connection to the pool once its answer has been read to the end; closes it if it
    /// is not, or if the client is gone.
    pub(crate) fn keep_when_read(self: &Arc<Self>, to: &PeerAddress, mut wire: Wire) {
        let (idle, to) = (Arc::downgrade(self), to.clone());
        tokio::spawn(async move {
            if wire.sender.ready().await.is_ok()
                && let Some(idle) = idle.upgrade()
            {
                idle.put(to, wire);
            }
        });
    }

    fn put(&self, to: PeerAddress, mut wire: Wire) {
        wire.idle_since = Instant::now();
        let mut by_node = self.lock();
        let count = |by_node: &HashMap<_, Vec<_>>| by_node.values().map(Vec::len).sum::<usize>();
        if count(&by_node) >= MAX_IDLE {
            // The other nodes close connections that stay idle.
            by_node.retain(|_, wires| {
                wires.retain(|wire| !wire.sender.is_closed());
                !wires.is_empty()
            });
        }
        if count(&by_node) >= MAX_IDLE {
            return;
        }
        let wires = by_node.entry(to).or_default();
        if wires.len() < MAX_A_NODE {
            wires.push(wire);
        }
    }

    /// Closes all connections to a node, because one of them has failed.
    pub(crate) fn forget(&self, to: &PeerAddress) {
        let closed = self.lock().remove(to);
        drop(closed);
    }

    /// The map is consistent after every step, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, HashMap<PeerAddress, Vec<Wire>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
