use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use conman_core::Sparing;
use conman_proxy::Turned;
use http::header::{HOST, HeaderName, HeaderValue};
use http::{Request, Response, StatusCode, Uri};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::http1::Builder;
use hyper_util::rt::TokioIo;
use thiserror::Error;

use crate::PeerAddress;
use crate::dial::{DialError, Dialed, Dialer};
use crate::pulse::{Pulse, Silent};

/// Bytes of an answer's head.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Fields of an answer's head.
const MAX_HEADERS: usize = 200;

/// Why a node did not take a request, as its listener for nodes says it.
const X_CONMAN_TURNED: HeaderName = HeaderName::from_static("x-conman-turned");
const REFUSED: &str = "refused";
const NO_ROOM: &str = "no-room";

/// Between two warnings that one and the same node refuses this one.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Asks other nodes, each request on a connection of its own: what is asked this way comes now and
/// then, and may last.
#[derive(Debug, Clone)]
pub struct PeerClient {
    dialer: Dialer,
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
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.pulse.check(to).await.map_err(AskError::Stopped)?;
        let asked = exchange(&self.dialer, to, request);
        let response = match self.pulse.while_it_answers(to, asked).await? {
            Err(AskError::Refused(_)) => return Err(self.refused_by(&to.node).into()),
            answer => answer?,
        };
        let turned = response.headers().get(X_CONMAN_TURNED);
        // Callers are judged by the node that they have asked: whoever is unknown here is the node.
        if response.status() == StatusCode::UNAUTHORIZED || turned.is_some_and(|why| why == REFUSED)
        {
            return Err(self.refused_by(&to.node).into());
        }
        if turned.is_some_and(|why| why == NO_ROOM) {
            let node = to.node.clone();
            return Err(AskError::NoRoom { node });
        }
        Ok(response)
    }
}

/// Sends a request on a connection of its own, and gives the answer once its head is there,
/// whenever that is. Cancelling closes the connection.
pub(crate) async fn exchange<B>(
    dialer: &Dialer,
    to: &PeerAddress,
    request: Request<B>,
) -> Result<Response<Incoming>, AskError>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let Dialed { stream, sealer } = dialer.dial(to).await?;
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
    let unanswered = |source| match Turned::by(&source) {
        Some(_) => AskError::Refused(RefusedBy {
            me: dialer.me().to_owned(),
            node: node(),
        }),
        None => AskError::Unanswered {
            node: node(),
            source,
        },
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

impl Warnings {
    fn say(&self, node: &str) -> Option<u64> {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut sparing = self.sparing.lock().unwrap_or_else(PoisonError::into_inner);
        sparing.say(node, now_ms)
    }
}
