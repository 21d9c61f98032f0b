//! Sends an ordinary request, and converts the session's answer to the client's.

use std::convert::Infallible;
use std::sync::Arc;

use conman_core::ActivityGuard;
use conman_peer::headers::{strip_forged, strip_hop_by_hop};
use conman_peer::{Connection, HeadFault, SendError};
use http::header::{CONTENT_LENGTH, HeaderMap, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;

use crate::answer::{RequestFault, SessionFault, Unforwarded};
use crate::body::{Fault, FaultKind, RequestBody, ResponseBody, SessionBody};
use crate::destination::Lease;
use crate::outgoing::Outgoing;
use crate::worker::ClientConnection;
use crate::{Route, Way, backend, destination};

/// Forwards an ordinary request, on an idle connection if there is one.
pub(crate) async fn forward(
    client: &Arc<ClientConnection>,
    route: &Route,
    outgoing: Outgoing,
) -> Result<Response<ResponseBody>, Unforwarded> {
    let worker = &client.worker;
    let activity = route.activity.begin();
    let Outgoing { parts, body, fault } = outgoing;
    let head_only = parts.method == Method::HEAD;
    let body = body.into_body(&worker.options, &fault);
    // A session closes an idle connection at any time, also while a request is on its way to it. Only a
    // request that may be carried out twice is repeated (RFC 9110, section 9.2.2).
    let repeatable = parts.method.is_safe() && body.is_end_stream();
    let again = repeatable.then(|| parts.clone());
    let sent = attempt(
        client,
        route,
        true,
        Request::from_parts(parts, body),
        &fault,
    )
    .await;
    let (response, lease) = match (sent, again) {
        (Ok(sent), _) => sent,
        (Err(failed), Some(parts)) if failed.closed_while_idle() => {
            let request = Request::from_parts(parts, RequestBody::empty());
            send(client, route, false, request, &fault).await?
        }
        (Err(failed), _) => return Err(failed.into_unforwarded(route, &fault)),
    };
    session_response(client, route, head_only, response, Some(lease), activity)
}

/// Sends a request to a session of this node or to its API.
pub(crate) async fn send(
    client: &ClientConnection,
    route: &Route,
    may_reuse: bool,
    request: Request<RequestBody>,
    fault: &Fault,
) -> Result<(Response<Incoming>, Lease), Unforwarded> {
    let sent = attempt(client, route, may_reuse, request, fault).await;
    sent.map_err(|failed| failed.into_unforwarded(route, fault))
}

/// Why one attempt has no answer.
struct FailedAttempt(SendError<Unforwarded, Infallible>);

impl FailedAttempt {
    /// The connection had been used before, and was closed before a byte of the answer.
    fn closed_while_idle(&self) -> bool {
        match &self.0 {
            SendError::Unanswered { source, was_idle } => {
                *was_idle && (source.is_incomplete_message() || is_reset(source))
            }
            SendError::NotConnected(_) | SendError::NotSent(_) | SendError::GivenUp(_) => false,
        }
    }

    fn into_unforwarded(self, route: &Route, fault: &Fault) -> Unforwarded {
        match self.0 {
            SendError::NotConnected(unforwarded) => unforwarded,
            SendError::NotSent(source) | SendError::Unanswered { source, .. } => {
                unanswered(route, source, fault)
            }
            SendError::GivenUp(why) => match why {},
        }
    }
}

fn is_reset(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error);
    let io = source.and_then(|source| source.downcast_ref::<std::io::Error>());
    io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionReset)
}

async fn attempt(
    client: &ClientConnection,
    route: &Route,
    may_reuse: bool,
    request: Request<RequestBody>,
    fault: &Fault,
) -> Result<(Response<Incoming>, Lease), FailedAttempt> {
    let worker = &client.worker;
    let (to, connect) = (destination::of(route), || connect(client, route, fault));
    let forever = std::future::pending::<Infallible>();
    let sent = worker.pool.send(&to, may_reuse, connect, forever, request);
    sent.await.map_err(FailedAttempt)
}

async fn connect(
    client: &ClientConnection,
    route: &Route,
    fault: &Fault,
) -> Result<Connection<RequestBody>, Unforwarded> {
    let stream = backend::connect(route).await?;
    let started = backend::start(stream, &route.way, &client.worker.options).await;
    started.map_err(|error| unanswered(route, error, fault))
}

/// Whether the body is not coded, or `chunked` and nothing else. hyper accepts other codings before
/// a final `chunked`.
pub(crate) fn has_plain_coding(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let chunked = codings
        .next()
        .is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
    chunked && codings.next().is_none()
}

pub(crate) fn unanswered(route: &Route, error: hyper::Error, fault: &Fault) -> Unforwarded {
    match fault.kind() {
        Some(FaultKind::Stalled(waited)) => return RequestFault::BodyStalled { waited }.into(),
        Some(FaultKind::Broken) => return RequestFault::BodyBroken.into(),
        None => {}
    }
    if let Some(fault) = HeadFault::of(&error) {
        let why = match fault {
            HeadFault::Slow => "a head that was not complete in time",
            HeadFault::Endless => "too many interim answers (1xx)",
        };
        return bad_answer(route, why);
    }
    if error.is_parse_too_large() {
        return bad_answer(route, "a head beyond the bounds on heads");
    }
    if error.is_parse() {
        return bad_answer(route, "something that is not HTTP/1.1");
    }
    SessionFault::Unanswered {
        session: route.session.clone(),
        source: error,
    }
    .into()
}

pub(crate) fn bad_answer(route: &Route, why: &'static str) -> Unforwarded {
    SessionFault::BadAnswer {
        session: route.session.clone(),
        why,
    }
    .into()
}

/// Converts a session's answer to the client's.
pub(crate) fn session_response(
    client: &ClientConnection,
    route: &Route,
    head_only: bool,
    response: Response<Incoming>,
    lease: Option<Lease>,
    activity: ActivityGuard,
) -> Result<Response<ResponseBody>, Unforwarded> {
    let bad = |why| Err(bad_answer(route, why));
    let (mut parts, body) = response.into_parts();
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        return bad("a change of protocol that was not requested");
    }
    if !has_plain_coding(&parts.headers) {
        return bad("a transfer coding other than `chunked`");
    }
    let chunked = parts.headers.contains_key(TRANSFER_ENCODING);
    let bodiless = head_only || parts.status == StatusCode::NOT_MODIFIED;
    if !bodiless || chunked || !has_one_length(&parts) {
        // hyper sets the length if it knows it.
        parts.headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(&mut parts.headers);
    if route.way != Way::Api {
        strip_forged(&mut parts.headers, false);
    }
    parts.version = Version::HTTP_11;
    // What else hyper adds are the reason phrase and the spelling of the fields' names, and both pass.
    parts.extensions.remove::<OnUpgrade>();
    let delimited = chunked || body.size_hint().exact().is_some();
    let body = SessionBody {
        inner: body,
        lease,
        _activity: activity,
        ends_with_connection: (!delimited).then(|| route.closing.clone()),
        trust_forwarded: client.worker.options.trust_forwarded,
    };
    Ok(Response::from_parts(parts, ResponseBody::session(body)))
}

/// Whether the length is one number, as required of the answer to a HEAD.
fn has_one_length(parts: &http::response::Parts) -> bool {
    let mut lengths = parts.headers.get_all(CONTENT_LENGTH).iter();
    let number = lengths.next().is_some_and(|length| {
        !length.is_empty() && length.as_bytes().iter().all(u8::is_ascii_digit)
    });
    number && lengths.next().is_none()
}
