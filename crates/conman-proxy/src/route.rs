//! What the proxy requires of the rest of conman: where a session is, who may connect, how to connect.

use std::fmt;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_core::{Activity, Closing};
use conman_peer::{PeerRefusal, Stream};
use conman_proto::{Generation, Problem, SessionId};
use http::HeaderValue;
use http::request::Parts;
use tokio::sync::watch;

use crate::answer::{SessionFault, Unforwarded};

/// Finds the node that serves a session.
#[async_trait]
pub trait Directory: Send + Sync + 'static {
    /// The route for `id`, once it can take requests: waits while the session starts, and starts it
    /// if `may_start` and its template allow that.
    ///
    /// The future is dropped as soon as the client has disconnected or the proxy's bound on holding
    /// is over, so it must be cancel safe at every await.
    ///
    /// # Errors
    /// The answer for the client if the session cannot be reached.
    async fn route(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal>;

    /// The route of a request that the node of `from` has refused, for the `times`th time in a row:
    /// looks the session up again, and waits until a node may take it. The future is dropped like
    /// that of [`Directory::route`].
    ///
    /// # Errors
    /// The answer for the client if the session cannot be reached.
    async fn route_again(
        &self,
        from: &Route,
        why: &PeerRefusal,
        times: u32,
        may_start: bool,
    ) -> Result<Route, Refusal> {
        let _ = (why, times);
        self.route(&from.session, may_start).await
    }

    /// Whether a caller without a token may ask for this port: it is a public one of a session that is here, or
    /// another node has the session and decides. Starts and resumes nothing, and waits for no session.
    async fn may_be_public(&self, _id: &SessionId, _port: u16) -> bool {
        false
    }

    /// The node's state for load balancers. Called for each of their probes.
    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

/// Whether load balancers should send clients to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// The registry does not answer, or has not for too long: clients and sessions wait. Such a node stays
    /// in the balancer, because all others may be in the same state.
    Lapsed,
    /// No new clients, because most other nodes are not reached; those present stay.
    CutOff,
    /// No new clients; those present stay.
    Cordoned,
    Draining,
    Preempted,
    Stopping,
    /// Nothing is served.
    Down,
}

impl Readiness {
    /// The state as one word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Lapsed => "lapsed",
            Self::CutOff => "cut-off",
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
            Self::Preempted => "preempted",
            Self::Stopping => "stopping",
            Self::Down => "down",
        }
    }
}

/// Opens connections to one generation of one session.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// A new connection to the session's port or its node, registered with the runtime of the calling
    /// task.
    ///
    /// Safe to cancel; the proxy puts a bound on its time.
    ///
    /// # Errors
    /// As `connect(2)` returns them; `ConnectionRefused` means that nothing listens on the port.
    async fn connect(&self) -> io::Result<Stream>;

    /// For a session: connects to another of its ports. `None` if the session does not have the port, or may
    /// not be reached at it without a token.
    fn at_port(&self, request: PortRequest) -> Option<Arc<dyn Backend>> {
        let _ = request;
        None
    }

    /// For a session: whether it takes no connections any more because it is about to end, so that a
    /// request needs another route. Called before each request; cancel safe.
    async fn has_closed(&self) -> bool {
        false
    }

    /// For a node: whether it did not answer when it was last checked, so that older connections are
    /// useless.
    fn was_unresponsive(&self) -> bool {
        false
    }

    /// For a node: how often the certificates that this node presents there were replaced. Connections from
    /// before the latest change are not used again.
    fn certificates(&self) -> u64 {
        0
    }

    /// For a node whose answer is awaited: returns once it stops answering, with the reason as text.
    /// Cancel safe.
    async fn becomes_unresponsive(&self) -> String {
        std::future::pending().await
    }
}

/// A session that can take requests at present.
#[derive(Clone)]
pub struct Route {
    /// The session; sent in `X-Conman-Session`.
    pub session: SessionId,
    /// Its fencing token; sent in `X-Conman-Generation`, and separates pooled connections.
    pub generation: Generation,
    /// Counts open connections and requests of the session.
    pub activity: Arc<Activity>,
    /// Becomes `Some` once this generation ends: its tunnels are closed accordingly, and its pooled
    /// connections dropped. A dropped sender is the end of this daemon, which drops pooled connections too.
    pub closing: watch::Receiver<Option<Closing>>,
    /// The port that the client named; `None` for the session's main one.
    pub port: Option<PortRequest>,
    /// Whether a path below `/s/{id}` reaches the session without that prefix. Only known at its node.
    pub strip_prefix: bool,
    /// The peer of the connection.
    pub way: Way,
    /// How to connect.
    pub backend: Arc<dyn Backend>,
}

/// A port that a client named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortRequest {
    pub port: u16,
    /// The caller has no token, so only a public port may answer.
    pub public_only: bool,
}

impl Route {
    /// The route to this port of the session.
    pub(crate) fn at(mut self, request: Option<PortRequest>) -> Result<Self, Unforwarded> {
        let Some(request) = request else {
            return Ok(self);
        };
        if self.way == Way::Session {
            let backend = self.backend.at_port(request);
            self.backend = backend.ok_or_else(|| SessionFault::NoPort {
                session: self.session.clone(),
                request,
            })?;
        }
        self.port = Some(request);
        Ok(self)
    }

    /// Whether this generation has ended or is about to.
    pub(crate) async fn is_ending(&self) -> bool {
        let has_ended = self.closing.has_changed().is_err() || self.closing.borrow().is_some();
        has_ended || self.backend.has_closed().await
    }
}

/// The peer of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// The session's port.
    Session,
    /// The peers' listener of another node.
    Peer {
        node: Arc<str>,
        /// Separates the connections of one daemon from those of the next.
        incarnation: u64,
    },
    /// This daemon's API, on behalf of another node.
    Api,
}

impl fmt::Debug for Route {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Route")
            .field("session", &self.session)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// Why a session cannot be reached, for the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The answer's body and status.
    pub problem: Problem,
    /// The answer's `Retry-After` in seconds.
    pub retry_after_s: Option<u32>,
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self {
            problem,
            retry_after_s: None,
        }
    }
}

/// Decides which clients may connect to which session.
pub trait Gate: Send + Sync + 'static {
    /// Judges a request for `id` and removes the caller's credentials from `parts`, so that the
    /// session never sees them.
    ///
    /// `parts.uri` is in origin form and already without `prefix`, as for the session; `prefix` is
    /// `/s/{id}`, or empty if the session is addressed by host name. `parts.headers` are the client's,
    /// with exactly one `Host`, or none from a client of HTTP/1.0. A location to redirect to must
    /// begin with `prefix`.
    fn admit(&self, parts: &mut Parts, id: &SessionId, prefix: &str) -> Verdict;
}

/// Decision of a [`Gate`].
#[derive(Debug)]
pub enum Verdict {
    /// The request is forwarded to the session.
    Admit {
        /// Whether the caller may start a session that does not run.
        may_start: bool,
    },
    /// 303 to `location`, which sets a cookie: a token in the URL is exchanged.
    Redirect {
        /// Path and query, beginning with the prefix.
        location: String,
        /// The `Set-Cookie` header.
        set_cookie: HeaderValue,
    },
    /// The request ends here.
    Deny(Problem),
}

/// Put into `parts.extensions` by a [`Gate`] that took a credential from
/// `Sec-WebSocket-Protocol`: the subprotocol to answer with if the session selects none.
///
/// Browsers close a WebSocket for which they offered subprotocols and none was selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubprotocolAnswer(pub HeaderValue);
