//! Sends a request to the session's present node, and to the next one if that node refuses it.

use std::sync::Arc;

use conman_core::ActivityGuard;
use conman_peer::{Connection, PeerRefusal, SendError};
use conman_proto::SessionId;
use http::header::{EXPECT, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::answer::{SessionFault, Unforwarded};
use crate::body::{Fault, RequestBody, ResponseBody};
use crate::deferred_body::DeferredBody;
use crate::destination::Lease;
use crate::forward::{self, session_response};
use crate::outgoing::{self, Outgoing};
use crate::peers::{EXPECT_OF_NODE, X_CONMAN_EXPECT};
use crate::upgrade::{self, Offer};
use crate::worker::ClientConnection;
use crate::{Directory, Route, Way, backend, destination, hold};

/// How often one request may be misdirected before it is answered with an error: each time the
/// session has moved, or its node was lost, and was looked up again.
const MAX_REFUSALS: u32 = 16;

const DECLARED_DEAD: &str = "it has been declared dead";

/// Result of an attempt with another node.
pub(crate) enum Tried {
    Answered(Box<Response<ResponseBody>>),
    /// Nothing of the body was taken.
    Refused(PeerRefusal),
}

/// Sends a request to the session or its present node; after it has moved, to the next one.
pub(crate) async fn forward(
    client: &Arc<ClientConnection>,
    mut route: Route,
    outgoing: Outgoing,
    mut offer: Option<Offer>,
    wait: Wait<'_>,
) -> Result<Response<ResponseBody>, Unforwarded> {
    let worker = &client.worker;
    let Outgoing {
        parts: mut head,
        body,
        fault,
    } = outgoing;
    let mut times = 0;
    // An idempotent request may be sent again (RFC 9110, section 9.2.2): nothing of an answer has
    // been passed on, and there is no body. A node that restarts may fail it more than once.
    let may_repeat = head.method.is_safe() && body.deferred().is_none();
    loop {
        outgoing::readdress(&mut head, &route);
        let tried = match (&route.way, &offer) {
            (_, Some(_)) => upgrade::forward(client, &route, head.clone(), &mut offer).await,
            (Way::Peer { .. }, None) => send(client, &route, &head, body.deferred(), &fault).await,
            // The session has moved to this node meanwhile.
            (Way::Session | Way::Api, None) => {
                let parts = head;
                let outgoing = Outgoing { parts, body, fault };
                return forward::forward(client, &route, outgoing).await;
            }
        };
        let refusal = match tried {
            Ok(Tried::Answered(response)) => return Ok(*response),
            Ok(Tried::Refused(refusal)) => refusal,
            // The last failure is more precise than that there were too many.
            Err(failed)
                if may_repeat && times + 1 < MAX_REFUSALS && Instant::now() < wait.until =>
            {
                refusal_of(&route, &failed).await.ok_or(failed)?
            }
            Err(failed) => return Err(failed),
        };
        if matches!(route.way, Way::Peer { .. }) {
            worker.meters.peer_refusal(&refusal);
        }
        times += 1;
        tracing::debug!(session = %route.session, %refusal, times, "the node refused the request");
        if times >= MAX_REFUSALS {
            return Err(exhausted(&route.session, &refusal));
        }
        let lookup = wait
            .directory
            .route_again(&route, &refusal, times, wait.may_start);
        let found = hold::wait(worker, lookup, &route.session, wait.until).await?;
        route = found.at(route.port)?;
    }
}

/// Why a request that may be sent twice is sent along another route after this failure: its session has ended
/// meanwhile or is about to, or its node is gone. `None` if it is not.
pub(crate) async fn refusal_of(route: &Route, failed: &Unforwarded) -> Option<PeerRefusal> {
    match (&route.way, failed) {
        (Way::Peer { .. }, Unforwarded::Session(SessionFault::Unanswered { source, .. })) => {
            Some(PeerRefusal::Unreachable(source.to_string()))
        }
        (
            Way::Session,
            Unforwarded::Session(
                SessionFault::Unanswered { .. }
                | SessionFault::ConnectRefused { .. }
                | SessionFault::ConnectFailed { .. },
            ),
        ) if route.is_ending().await => Some(PeerRefusal::NotReady),
        _ => None,
    }
}

/// How a request may wait for its session.
#[derive(Clone, Copy)]
pub(crate) struct Wait<'request> {
    pub(crate) directory: &'request dyn Directory,
    pub(crate) until: Instant,
    pub(crate) may_start: bool,
}

impl Tried {
    /// The answer if the request cannot be sent elsewhere.
    pub(crate) fn answered(self, route: &Route) -> Result<Response<ResponseBody>, Unforwarded> {
        match self {
            Self::Answered(response) => Ok(*response),
            Self::Refused(refusal) => Err(exhausted(&route.session, &refusal)),
        }
    }
}

fn exhausted(session: &SessionId, refusal: &PeerRefusal) -> Unforwarded {
    Unforwarded::Misdirected {
        session: session.clone(),
        why: refusal.clone(),
    }
}

/// Sends an ordinary request to the node, on an idle connection if there is one.
async fn send(
    client: &Arc<ClientConnection>,
    route: &Route,
    head: &Parts,
    deferred: Option<&Arc<DeferredBody>>,
    fault: &Arc<Fault>,
) -> Result<Tried, Unforwarded> {
    let activity = route.activity.begin();
    let Some((request, claimed)) = claim(head, deferred, client, fault) else {
        return Err(exhausted(&route.session, &PeerRefusal::NotOwner));
    };
    // For a node that was silent, a new connection shows whether it still is, before anything
    // is sent.
    let may_reuse = !route.backend.was_unresponsive();
    match to_node(client, route, may_reuse, request, fault).await? {
        Ok(sent) => arrived(client, route, head, sent, activity, claimed),
        Err(refusal) => Ok(Tried::Refused(refusal)),
    }
}

/// Sends a request to the node; the inner error is its refusal, of which nothing was done.
pub(crate) async fn to_node(
    client: &ClientConnection,
    route: &Route,
    may_reuse: bool,
    request: Request<RequestBody>,
    fault: &Fault,
) -> Result<Result<(Response<Incoming>, Lease), PeerRefusal>, Unforwarded> {
    let (to, connect) = (destination::of(route), || connect(client, route));
    let pool = &client.worker.pool;
    let sent = pool.send(&to, may_reuse, connect, becomes_silent(route), request);
    let error = match sent.await {
        Ok(sent) => return Ok(Ok(sent)),
        Err(error) => error,
    };
    match error {
        SendError::NotConnected(refusal) => Ok(Err(refusal)),
        SendError::GivenUp(why) => Err(Unforwarded::NodeSilent {
            session: route.session.clone(),
            why,
        }),
        SendError::NotSent(source) => Ok(Err(PeerRefusal::by(&source)
            .unwrap_or_else(|| PeerRefusal::Unreachable("it closes new connections".to_owned())))),
        SendError::Unanswered { source, .. } => match PeerRefusal::by(&source) {
            Some(refusal) => Ok(Err(refusal)),
            None => Err(forward::unanswered(route, source, fault)),
        },
    }
}

/// Returns once a node whose answer is awaited is gone or answers nothing: long polls may take long.
async fn becomes_silent(route: &Route) -> String {
    let mut closing = route.closing.clone();
    tokio::select! {
        // Watch channels keep their value. A dropped sender is the end of this daemon, which the request may
        // outlast.
        Ok(_) = closing.wait_for(Option::is_some) => DECLARED_DEAD.to_owned(),
        // It only checks.
        why = route.backend.becomes_unresponsive() => why,
    }
}

/// The deferred body of an attempt and the number of its claim, if there is a body.
type Claimed<'body> = Option<(&'body Arc<DeferredBody>, u64)>;

/// A request with a claim of the body; `None` if the body was given to a node already.
fn claim<'body>(
    head: &Parts,
    deferred: Option<&'body Arc<DeferredBody>>,
    client: &ClientConnection,
    fault: &Arc<Fault>,
) -> Option<(Request<RequestBody>, Claimed<'body>)> {
    let Some(deferred) = deferred else {
        return Some((
            Request::from_parts(head.clone(), RequestBody::empty()),
            None,
        ));
    };
    let claim = deferred.claim()?;
    let number = claim.number;
    let body = RequestBody::claimed(claim, &client.worker.options, Arc::clone(fault));
    let mut request = Request::from_parts(head.clone(), body);
    let headers = request.headers_mut();
    if headers
        .insert(EXPECT, HeaderValue::from_static("100-continue"))
        .is_none()
    {
        headers.insert(&X_CONMAN_EXPECT, EXPECT_OF_NODE);
    }
    let requested = Arc::clone(deferred);
    hyper::ext::on_informational(&mut request, move |informational| {
        if informational.status() == http::StatusCode::CONTINUE {
            requested.grant(number);
        }
    });
    Some((request, Some((deferred, number))))
}

fn arrived(
    client: &Arc<ClientConnection>,
    route: &Route,
    head: &Parts,
    (response, lease): (Response<Incoming>, Lease),
    activity: ActivityGuard,
    claimed: Claimed<'_>,
) -> Result<Tried, Unforwarded> {
    if let Some(refusal) = PeerRefusal::of(response.headers()) {
        // With a claimed body, the connection's end is undecided, so it is not reused.
        if claimed.is_none() && http_body::Body::is_end_stream(response.body()) {
            lease.give_back();
        }
        return Ok(Tried::Refused(refusal));
    }
    if let Some((deferred, number)) = claimed {
        // Answered without requesting the body. Whether it is still wanted shows in whether the
        // connection is closed.
        deferred.grant(number);
    }
    let head_only = head.method == Method::HEAD;
    session_response(client, route, head_only, response, Some(lease), activity)
        .map(|response| Tried::Answered(Box::new(response)))
}

/// A new connection to the node, which is given up once the node has been declared dead.
async fn connect(
    client: &ClientConnection,
    route: &Route,
) -> Result<Connection<RequestBody>, PeerRefusal> {
    let mut closing = route.closing.clone();
    tokio::select! {
        biased;
        // Dropped if the node is given up, which closes the connection.
        opened = connected(client, route) => opened,
        // Watch channels keep their value. A dropped sender is the end of this daemon.
        Ok(_) = closing.wait_for(Option::is_some) => Err(PeerRefusal::Unreachable(DECLARED_DEAD.to_owned())),
    }
}

async fn connected(
    client: &ClientConnection,
    route: &Route,
) -> Result<Connection<RequestBody>, PeerRefusal> {
    let unreachable = |error: &dyn std::error::Error| PeerRefusal::Unreachable(error.to_string());
    let stream = match backend::connect(route).await {
        Ok(stream) => stream,
        Err(SessionFault::ConnectFailed { source, .. }) if PeerRefusal::is(&source) => {
            return Err(PeerRefusal::Refused);
        }
        Err(SessionFault::ConnectFailed { source, .. }) => return Err(unreachable(&source)),
        Err(other) => return Err(unreachable(&other)),
    };
    let started = backend::start(stream, &route.way, &client.worker.options).await;
    started.map_err(|error| unreachable(&error))
}
