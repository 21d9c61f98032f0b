use std::fmt;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_core::{Activity, Closing};
use conman_proto::{Generation, Problem, SessionId};
use http::HeaderValue;
use http::request::Parts;
use tokio::sync::watch;

use crate::{Link, Turned};

/// Knows which session is served where.
#[async_trait]
pub trait Directory: Send + Sync + 'static {
    /// Where requests for `id` go, once it can take them: waits while the session starts, and
    /// starts it where `may_start` and its template allow that.
    ///
    /// The future is dropped as soon as the client is seen to be gone or the proxy's own bound on
    /// holding is over, so it must be safe to cancel at every await.
    ///
    /// # Errors
    /// The answer for the client when the session cannot be reached.
    async fn route(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal>;

    /// Where a request goes that the node of `from` has turned away, for the `times`th time now
    /// that a node did: looks the session up anew, and waits for as long as it takes until there
    /// is somebody who may take it. The future is dropped as that of [`Directory::route`].
    ///
    /// # Errors
    /// The answer for the client when the session cannot be reached.
    async fn route_anew(
        &self,
        from: &Route,
        why: &Turned,
        times: u32,
        may_start: bool,
    ) -> Result<Route, Refusal> {
        let _ = (why, times);
        self.route(&from.session, may_start).await
    }
}

/// Opens connections to one generation of one session.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// A fresh connection to the session's port, or to who leads there, registered with the runtime of the calling task.
    ///
    /// Safe to cancel; the proxy puts a bound on its time.
    ///
    /// # Errors
    /// As `connect(2)` gives them; `ConnectionRefused` means that nothing listens on the port.
    async fn connect(&self) -> io::Result<Link>;

    /// Of a session: whether it takes no connections any more because it is about to go, so that
    /// another place is to be found for a request. Asked before each request; safe to cancel.
    async fn has_closed(&self) -> bool {
        false
    }

    /// Of a node: whether it answered nothing when it was last asked, so that connections that are
    /// left over from before are of no use.
    fn was_silent(&self) -> bool {
        false
    }

    /// Of a node, of which an answer is expected from now on: returns once it answers nothing any
    /// more, with why in words. Safe to cancel.
    async fn falls_silent(&self) -> String {
        std::future::pending().await
    }
}

/// A session that can take requests at this moment.
#[derive(Clone)]
pub struct Route {
    /// The session; stands in `X-Conman-Session`.
    pub session: SessionId,
    /// Its fencing token; stands in `X-Conman-Generation` and keeps pooled connections apart.
    pub generation: Generation,
    /// Counts what is open to the session.
    pub activity: Arc<Activity>,
    /// Becomes `Some` once this generation goes away: its tunnels are closed as it says, and its
    /// pooled connections dropped. A dropped sender counts as gone without a reason.
    pub closing: watch::Receiver<Option<Closing>>,
    /// What the connection leads to.
    pub way: Way,
    /// How to connect.
    pub backend: Arc<dyn Backend>,
}

/// What a connection leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// The session's own port.
    Session,
    /// The peers' listener of another node.
    Peer {
        node: Arc<str>,
        /// Keeps the connections of one daemon apart from those of the next.
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

/// Why a session cannot be reached, as the client is told.
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

/// Decides who may connect to which session.
pub trait Gate: Send + Sync + 'static {
    /// Judges a request for `id` and takes the caller's credentials out of `parts`, so that the
    /// session never sees them.
    ///
    /// `parts.uri` is in origin form and already without `prefix`, as the session will see it;
    /// `prefix` is `/s/{id}`, or empty when the session is addressed by host name. `parts.headers`
    /// are the client's, with exactly one `Host`, or none from a client of HTTP/1.0. A location to
    /// redirect to must begin with `prefix`.
    fn admit(&self, parts: &mut Parts, id: &SessionId, prefix: &str) -> Verdict;
}

/// What a [`Gate`] decided.
#[derive(Debug)]
pub enum Verdict {
    /// The request goes on to the session.
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

/// Put into `parts.extensions` by a [`Gate`] that took a credential out of
/// `Sec-WebSocket-Protocol`: the subprotocol to answer with when the session selects none.
///
/// Browsers give a WebSocket up when they offered subprotocols and none was selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubprotocolAnswer(pub HeaderValue);
