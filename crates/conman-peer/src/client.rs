use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use conman_core::Sparing;
use http::header::{HeaderName, UPGRADE};
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use hyper::body::Incoming;
use thiserror::Error;

use crate::PeerAddress;
use crate::dial::{DialError, Dialer};
use crate::idle::{Idle, Wire};
use crate::pulse::{Pulse, Silent};

/// Why a node did not take a request, as its listener for nodes says it.
const X_CONMAN_TURNED: HeaderName = HeaderName::from_static("x-conman-turned");
const REFUSED: &str = "refused";
const NO_ROOM: &str = "no-room";

/// Between two warnings that one and the same node refuses this one.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Asks other nodes: what may be repeated on an idle connection where there is one, whatever else on
/// a new one, since an idle one may be closed by the other node at the moment in which it is used.
#[derive(Debug, Clone)]
pub struct PeerClient {
    dialer: Dialer,
    idle: Arc<Idle>,
    pulse: Pulse,
    warnings: Arc<Warnings>,
}

/// Tells the log of nodes that refuse this one, now and then.
#[derive(Debug)]
struct Warnings {
    began: Instant,
    sparing: Mutex<Sparing>,
}

/// A node that does not take this one for one of its fleet.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "node `{node}` does not take node `{me}` for one of its fleet: their `fleet.secret_file` \
     differs, or the certificate in `fleet.tls.cert` of `{me}` has ended or was not signed by \
     `fleet.tls.ca` of `{node}`, or their clocks differ; give both the same secret, or `{me}` such a \
     certificate (both are read again on SIGHUP), and see the log of node `{node}` for the reason"
)]
pub struct RefusedBy {
    pub me: String,
    pub node: String,
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
    /// Nothing was done: the node cannot be used by this one.
    #[error(transparent)]
    Refused(#[from] RefusedBy),
    /// Nothing of the request has gone out.
    #[error(transparent)]
    Stopped(Silent),
    /// It may have been carried out.
    #[error(transparent)]
    Silent(#[from] Silent),
    /// Nothing was done.
    #[error("node `{node}` has as many connections of other nodes as it takes")]
    NoRoom { node: String },
}

impl PeerClient {
    #[must_use]
    pub fn new(dialer: Dialer) -> Self {
        let every_ms = u64::try_from(WARN_EVERY.as_millis()).unwrap_or(u64::MAX);
        let warnings = Arc::new(Warnings {
            began: Instant::now(),
            sparing: Mutex::new(Sparing::new(every_ms)),
        });
        let pulse = Pulse::new(dialer.clone());
        Self {
            dialer,
            idle: Arc::default(),
            pulse,
            warnings,
        }
    }

    /// The node that asks.
    #[must_use]
    pub fn me(&self) -> &str {
        self.dialer.me()
    }

    /// Which nodes have fallen silent.
    #[must_use]
    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// That a node refuses this one, which the log is told of now and then.
    #[must_use]
    pub fn refused_by(&self, node: &str) -> RefusedBy {
        let refused = RefusedBy {
            me: self.me().to_owned(),
            node: node.to_owned(),
        };
        if let Some(withheld) = self.warnings.say(node) {
            tracing::warn!(withheld, "{refused}");
        }
        refused
    }

    /// Sends a request and returns the answer once its head is there; the bodies of both may
    /// stream for as long as they like. An answer may be an upgrade, and may take as long as the
    /// node answers anything at all. Cancelling closes the connection.
    ///
    /// # Errors
    /// No connection, or none that lasted until the answer; a node that answers nothing, or does
    /// not take this one's requests at all.
    pub async fn ask<B>(
        &self,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<Incoming>, AskError>
    where
        B: Body<Data = Bytes> + Clone + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.pulse.check(to).await.map_err(AskError::Stopped)?;
        if may_be_repeated(&request)
            && let Some(wire) = self.idle.take(&self.dialer, to)
        {
            match self.ask_on(wire, to, request.clone()).await {
                // Closed meanwhile, or by a node that has begun anew: a new one shows.
                Err(AskError::Unanswered { .. } | AskError::Refused(_)) => self.idle.forget(to),
                Err(AskError::Silent(silent)) => {
                    self.idle.forget(to);
                    return Err(AskError::Stopped(silent));
                }
                answer => return answer,
            }
        }
        let opened = self.pulse.while_it_answers(to, async {
            let mut wire = Wire::open(&self.dialer, to).await?;
            let response = wire.send(&self.dialer, to, request).await?;
            Ok((response, wire))
        });
        let answer = opened.await?.and_then(|answer| self.judged(to, answer));
        match answer {
            Err(AskError::Refused(_)) => Err(self.refused_by(&to.node).into()),
            answer => answer,
        }
    }

    async fn ask_on<B>(
        &self,
        mut wire: Wire,
        to: &PeerAddress,
        request: Request<B>,
    ) -> Result<Response<Incoming>, AskError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let sent = wire.send(&self.dialer, to, request);
        let response = self.pulse.while_it_answers(to, sent).await??;
        self.judged(to, (response, wire))
    }

    /// The answer, unless the node turns this one away; its connection may be used again once it was
    /// read.
    fn judged(
        &self,
        to: &PeerAddress,
        (response, wire): (Response<Incoming>, Wire),
    ) -> Result<Response<Incoming>, AskError> {
        let turned = response.headers().get(X_CONMAN_TURNED);
        let node = to.node.clone();
        // Callers are judged by the node that they have asked: whoever is unknown here is the node.
        if response.status() == StatusCode::UNAUTHORIZED || turned.is_some_and(|why| why == REFUSED)
        {
            let me = self.me().to_owned();
            return Err(RefusedBy { me, node }.into());
        }
        if turned.is_some_and(|why| why == NO_ROOM) {
            return Err(AskError::NoRoom { node });
        }
        self.idle.keep_when_read(to, wire);
        Ok(response)
    }
}

/// Whether it comes to the same when it is carried out twice. What becomes a stream of its own does
/// something, whatever its method.
fn may_be_repeated<B>(request: &Request<B>) -> bool {
    let method = request.method();
    (method.is_safe() || method == Method::PUT) && !request.headers().contains_key(UPGRADE)
}

impl Warnings {
    fn say(&self, node: &str) -> Option<u64> {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut sparing = self.sparing.lock().unwrap_or_else(PoisonError::into_inner);
        sparing.say(node, now_ms)
    }
}
