//! Requests to other nodes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use conman_core::RateLimitedLog;
use http::header::{HOST, HeaderValue, UPGRADE};
use http::{HeaderMap, Method, Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use thiserror::Error;

use crate::dial::{DialError, Dialer};
use crate::liveness::{Liveness, Unresponsive};
use crate::pool::{Destination, KeepLimits, Lease, Pool, SendError};
use crate::{Connection, ConnectionLimits, PeerAddress, PeerRefusal};

/// Bounds of answers. A node that leaves a request unread for so long does not serve it.
const LIMITS: ConnectionLimits = ConnectionLimits {
    max_head_bytes: 64 * 1024,
    max_headers: 200,
    head_timeout: Duration::from_secs(15),
    write_stall_timeout: Duration::from_secs(60),
};

/// Idle connections to one node: each uses one of the connections that the other node's listener
/// accepts. The maximum age makes a replaced certificate or CA of the other node take effect soon.
const KEPT: KeepLimits = KeepLimits {
    most: 64,
    max_age: Duration::from_secs(60),
};
/// Less than the other node's listener keeps an idle connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type BoxBody = UnsyncBoxBody<Bytes, BoxError>;

/// Minimum interval between warnings that the same node refuses this one.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Sends requests to other nodes: repeatable ones on an idle connection if there is one, all others
/// on a new one, because the other node may close an idle connection at the moment it is used.
#[derive(Debug, Clone)]
pub struct PeerClient {
    dialer: Dialer,
    pool: Arc<Pool<PeerAddress, BoxBody>>,
    liveness: Liveness,
    began: Instant,
    warnings: Arc<RateLimitedLog>,
}

/// A node that does not accept this one as a member of its fleet, or that this one does not accept.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "node `{me}` and node `{node}` do not accept each other as members of one fleet: their \
     `fleet.secret_file` differs, only one has `fleet.tls`, or the certificate in `fleet.tls.cert` of \
     `{me}` or of `{node}` has expired or was not signed by `fleet.tls.ca` of the other; give both \
     the same secret or certificates of one CA (both are read again on SIGHUP), and see the log of \
     node `{node}` for the reason"
)]
pub struct RefusedBy {
    pub me: String,
    pub node: String,
}

/// Why a node has not answered.
#[derive(Debug, Error)]
pub enum RequestError {
    /// Nothing of the request was sent.
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("cannot build the request to node `{node}`")]
    Invalid {
        node: String,
        #[source]
        source: http::Error,
    },
    /// It may have been executed.
    #[error("node `{node}` closed the connection before it answered")]
    Unanswered {
        node: String,
        #[source]
        source: hyper::Error,
    },
    /// Nothing was done: the node cannot be used by this one.
    #[error(transparent)]
    Refused(#[from] RefusedBy),
    /// Nothing of the request was sent.
    #[error(transparent)]
    NotSent(Unresponsive),
    /// It may have been executed.
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
    /// Nothing was done.
    #[error("node `{node}` has reached its limit of peer connections; try again shortly")]
    NoRoom { node: String },
}

impl PeerClient {
    #[must_use]
    pub fn new(dialer: Dialer) -> Self {
        let liveness = Liveness::new(dialer.clone());
        Self {
            dialer,
            pool: Arc::new(Pool::new(IDLE_TIMEOUT, |_| KEPT)),
            liveness,
            began: Instant::now(),
            warnings: Arc::new(RateLimitedLog::new(WARN_EVERY)),
        }
    }

    /// The node that sends the requests.
    #[must_use]
    pub fn me(&self) -> &str {
        self.dialer.me()
    }

    /// Which nodes do not answer.
    #[must_use]
    pub fn liveness(&self) -> &Liveness {
        &self.liveness
    }

    /// Returns that a node refuses this one, and logs it with a rate limit.
    #[must_use]
    pub fn refused_by(&self, node: &str) -> RefusedBy {
        let refused = RefusedBy {
            me: self.me().to_owned(),
            node: node.to_owned(),
        };
        if let Some(withheld) = self.warnings.allow(node, self.began.elapsed()) {
            tracing::warn!(withheld, "{refused}");
        }
        refused
    }

    /// Sends a request and returns the answer once its head has arrived; the bodies of both may
    /// stream without a time limit. The answer may be an upgrade, and may take as long as the node
    /// is alive. A request that may be repeated is sent a second time, on a new connection, if the first one
    /// ends without an answer. Cancelling closes the connection.
    ///
    /// # Errors
    /// There is no connection, or it broke before the answer; the node does not answer, or refuses
    /// this one's requests.
    pub async fn request<B>(
        &self,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<PeerBody>, RequestError>
    where
        B: Body<Data = Bytes> + Clone + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if !may_be_repeated(request.method(), request.headers()) {
            return self.request_once(to, request).await;
        }
        let (error, was_idle) = match self.send(to, request.clone(), true).await {
            Ok(answer) => return Ok(answer),
            Err(failed) => failed,
        };
        match error {
            RequestError::Unanswered { .. } => {}
            // The node may have restarted.
            RequestError::Refused(_) if was_idle => {}
            error => return Err(error),
        }
        self.pool.forget(to);
        self.request_once(to, request).await
    }

    /// Sends a request once, on a new connection.
    ///
    /// # Errors
    /// As [`PeerClient::request`].
    pub async fn request_once<B>(
        &self,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<PeerBody>, RequestError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let sent = self.send(to, request, false).await;
        sent.map_err(|(error, _)| error)
    }

    /// The error says whether the request was sent on a connection that had been idle.
    async fn send<B>(
        &self,
        to: &PeerAddress,
        request: Request<B>,
        may_reuse: bool,
    ) -> Result<Response<PeerBody>, (RequestError, bool)>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let unsent = |error| (error, false);
        let checked = self.liveness.check(to).await;
        checked.map_err(|silent| unsent(RequestError::NotSent(silent)))?;
        let destination = Destination {
            key: to.clone(),
            version: (0, self.dialer.certificates()),
        };
        let sent = self.pool.send(
            &destination,
            may_reuse,
            || connect(&self.dialer, to),
            self.liveness.becomes_unresponsive(to),
            addressed(to, request).map_err(unsent)?,
        );
        let no_answer = |source| match PeerRefusal::by(&source) {
            Some(_) => RequestError::Refused(self.refused_by(&to.node)),
            None => unanswered(to, source),
        };
        let (response, lease) = sent.await.map_err(|error| match error {
            SendError::NotConnected(RequestError::Refused(_)) => {
                unsent(RequestError::Refused(self.refused_by(&to.node)))
            }
            SendError::NotConnected(error) => unsent(error),
            SendError::NotSent(source) => unsent(no_answer(source)),
            SendError::Unanswered { source, was_idle } => (no_answer(source), was_idle),
            SendError::GivenUp(silent) => (RequestError::Unresponsive(silent), false),
        })?;
        if let Some(PeerRefusal::Unreachable(_)) = PeerRefusal::of(response.headers()) {
            return Err(unsent(RequestError::NoRoom {
                node: to.node.clone(),
            }));
        }
        Ok(response.map(|body| PeerBody::new(body, lease)))
    }
}

/// Whether executing it twice has the same effect as once. A request that becomes a stream has an
/// effect, whatever its method.
#[must_use]
pub fn may_be_repeated(method: &Method, headers: &HeaderMap) -> bool {
    (method.is_safe() || method == Method::PUT) && !headers.contains_key(UPGRADE)
}

/// Opens a new connection to a node.
pub(crate) async fn connect<B>(
    dialer: &Dialer,
    to: &PeerAddress,
) -> Result<Connection<B>, RequestError>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let stream = dialer.dial(to).await.map_err(|error| match error {
        DialError::Foreign { .. } => {
            tracing::debug!(node = to.node, %error, "cannot connect to a node");
            RequestError::Refused(refused(dialer, to))
        }
        error => RequestError::Dial(error),
    })?;
    let started = Connection::start(stream, &LIMITS).await;
    started.map_err(|source| unanswered(to, source))
}

/// The request with the node's address, and a body of any kind.
pub(crate) fn addressed<B>(
    to: &PeerAddress,
    request: Request<B>,
) -> Result<Request<BoxBody>, RequestError>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let (mut parts, body) = request.into_parts();
    let target = parts.uri.path_and_query().cloned();
    parts.uri = target.map_or_else(|| Uri::from_static("/"), Uri::from);
    let host = HeaderValue::from_str(&to.to_string()).map_err(|error| RequestError::Invalid {
        node: to.node.clone(),
        source: error.into(),
    })?;
    parts.headers.insert(HOST, host);
    let body = body.map_err(Into::into).boxed_unsync();
    Ok(Request::from_parts(parts, body))
}

pub(crate) fn unanswered(to: &PeerAddress, source: hyper::Error) -> RequestError {
    RequestError::Unanswered {
        node: to.node.clone(),
        source,
    }
}

fn refused(dialer: &Dialer, to: &PeerAddress) -> RefusedBy {
    RefusedBy {
        me: dialer.me().to_owned(),
        node: to.node.clone(),
    }
}

/// The body of a node's answer. Its connection may be used again once it has been read to the end.
pub struct PeerBody {
    incoming: Incoming,
    lease: Option<Lease<PeerAddress, BoxBody>>,
}

impl PeerBody {
    fn new(incoming: Incoming, lease: Lease<PeerAddress, BoxBody>) -> Self {
        let lease = Some(lease);
        let mut body = Self { incoming, lease };
        body.give_back_at_end();
        body
    }

    fn give_back_at_end(&mut self) {
        if self.incoming.is_end_stream()
            && let Some(lease) = self.lease.take()
        {
            lease.give_back();
        }
    }
}

impl std::fmt::Debug for PeerBody {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("PeerBody").finish_non_exhaustive()
    }
}

impl Body for PeerBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.incoming).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Err(_))) => self.lease = None,
            Poll::Ready(None) => {
                if let Some(lease) = self.lease.take() {
                    lease.give_back();
                }
            }
            Poll::Ready(Some(Ok(_))) => self.give_back_at_end(),
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
