use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use conman_core::RateLimitedLog;
use conman_proxy::X_CONMAN_MISDIRECTED;
use http::header::UPGRADE;
use http::{Method, Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use thiserror::Error;

use crate::PeerAddress;
use crate::dial::{DialError, Dialer};
use crate::idle::{Idle, Wire};
use crate::liveness::{Liveness, Unresponsive};

/// The reason of a node that is full.
const NO_ROOM: &str = "no-room";

/// Minimum interval between warnings that the same node refuses this one.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Sends requests to other nodes: repeatable ones on an idle connection if there is one, all others
/// on a new one, because the other node may close an idle connection at the moment it is used.
#[derive(Debug, Clone)]
pub struct PeerClient {
    dialer: Dialer,
    idle: Arc<Idle>,
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
            idle: Arc::default(),
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
    /// is alive. Cancelling closes the connection.
    ///
    /// # Errors
    /// There is no connection, or it broke before the answer; the node does not answer, or refuses
    /// this one's requests.
    pub async fn request<B>(
        &self,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<Incoming>, RequestError>
    where
        B: Body<Data = Bytes> + Clone + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.liveness
            .check(to)
            .await
            .map_err(RequestError::NotSent)?;
        if may_be_repeated(&request)
            && let Some(wire) = self.idle.take(&self.dialer, to)
        {
            match self.request_on(wire, to, request.clone()).await {
                // Closed meanwhile, or the node has restarted: a new connection shows which.
                Err(RequestError::Unanswered { .. } | RequestError::Refused(_)) => {
                    self.idle.forget(to)
                }
                Err(RequestError::Unresponsive(silent)) => {
                    self.idle.forget(to);
                    return Err(RequestError::NotSent(silent));
                }
                answer => return answer,
            }
        }
        self.request_on_new(to, request).await
    }

    /// Likewise on a new connection, for a body that can be sent only once.
    ///
    /// # Errors
    /// As [`PeerClient::request`].
    pub async fn request_once<B>(
        &self,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<Incoming>, RequestError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.liveness
            .check(to)
            .await
            .map_err(RequestError::NotSent)?;
        self.request_on_new(to, request).await
    }

    async fn request_on_new<B>(
        &self,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<Incoming>, RequestError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let opened = self.liveness.while_it_answers(to, async {
            let mut wire = Wire::open(&self.dialer, to).await?;
            let response = wire.send(&self.dialer, to, request).await?;
            Ok((response, wire))
        });
        let answer = opened.await?.and_then(|answer| self.judged(to, answer));
        match answer {
            Err(RequestError::Refused(_)) => Err(self.refused_by(&to.node).into()),
            answer => answer,
        }
    }

    async fn request_on<B>(
        &self,
        mut wire: Wire,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<Incoming>, RequestError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let sent = wire.send(&self.dialer, to, request);
        let response = self.liveness.while_it_answers(to, sent).await??;
        self.judged(to, (response, wire))
    }

    /// Returns the answer, unless the node has no room for this one; its connection may be used again
    /// once it was read.
    fn judged(
        &self,
        to: &PeerAddress,
        (response, wire): (Response<Incoming>, Wire),
    ) -> Result<Response<Incoming>, RequestError> {
        let misdirected = response.headers().get(&X_CONMAN_MISDIRECTED);
        if misdirected.is_some_and(|why| why == NO_ROOM) {
            return Err(RequestError::NoRoom {
                node: to.node.clone(),
            });
        }
        self.idle.keep_when_read(to, wire);
        Ok(response)
    }
}

/// Whether executing it twice has the same effect as once. A request that becomes a stream has an
/// effect, whatever its method.
fn may_be_repeated<B>(request: &Request<B>) -> bool {
    let method = request.method();
    (method.is_safe() || method == Method::PUT) && !request.headers().contains_key(UPGRADE)
}
