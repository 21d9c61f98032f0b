//! The answers that the proxy gives instead of a session.

use std::time::Duration;

use bytes::Bytes;
use conman_peer::headers::X_CONMAN_MISDIRECTED;
use conman_peer::{NO_ROOM, PeerRefusal};
use conman_proto::{PROBLEM_CONTENT_TYPE, Problem, ProblemKind, SessionId};
use http::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, LOCATION,
    REFERRER_POLICY, RETRY_AFTER, SET_COOKIE, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::{Response, StatusCode};
use thiserror::Error;

use crate::address::AddressError;
use crate::body::ResponseBody;
use crate::error_page;
use crate::{PortRequest, Readiness, Refusal};

/// Retry-After for a client that found no place.
const RETRY_AFTER_S: u32 = 1;

/// A request that is no HTTP.
const MALFORMED: ProblemKind = ProblemKind {
    title: "The request is malformed",
    ..ProblemKind::BAD_REQUEST
};

/// A node that does not accept a request, for the client of another node.
const NOT_ACCEPTED: ProblemKind = ProblemKind {
    title: "The session's node does not accept the request",
    status: 503,
    ..ProblemKind::ELSEWHERE
};

/// Why the proxy answers a request instead of forwarding it.
#[derive(Debug, Error)]
pub(crate) enum Unforwarded {
    #[error(transparent)]
    Request(#[from] RequestFault),
    #[error("the path lacks its final slash")]
    AddSlash { location: String },
    #[error("the token in the URL is exchanged for a cookie")]
    TokenExchanged {
        location: String,
        set_cookie: HeaderValue,
    },
    #[error("a browser requested a session by its path")]
    BrowserPath {
        session: SessionId,
        /// The session's host, if it has one.
        host: Option<String>,
    },
    #[error("the caller may not connect")]
    Denied(Box<Problem>),
    #[error("the session cannot be reached")]
    Refused(Box<Refusal>),
    #[error("the node leaves and opens no connections any more")]
    Leaving,
    #[error("too many requests wait for their sessions")]
    HoldFull { session: SessionId },
    #[error("the session did not become ready in time")]
    HoldTimeout {
        session: SessionId,
        waited: Duration,
    },
    #[error(transparent)]
    Session(#[from] SessionFault),
    #[error("the session's node does not take the request: {why}")]
    Misdirected {
        session: SessionId,
        why: PeerRefusal,
    },
    #[error("the session's node answers nothing: {why}")]
    NodeSilent { session: SessionId, why: String },
    #[error("misdirected to this node: {0}")]
    NotHere(PeerRefusal),
}

/// A mistake in the request itself.
#[derive(Debug, Error)]
pub(crate) enum RequestFault {
    #[error("the request's head can be read in more than one way")]
    Ambiguous,
    #[error("the request has {0} `Host` fields")]
    Hosts(usize),
    #[error("the request's target or host cannot be read")]
    Address(AddressError),
    #[error("no more of the request's body arrived")]
    BodyStalled { waited: Duration },
    #[error("the request's body is malformed or was cut short")]
    BodyBroken,
}

/// Why the session gives no answer that can be passed on.
#[derive(Debug, Error)]
pub(crate) enum SessionFault {
    #[error("the session does not have this port")]
    NoPort {
        session: SessionId,
        request: PortRequest,
    },
    #[error("nothing listens on the session's port")]
    ConnectRefused { session: SessionId },
    #[error("the session's port did not take a connection in time")]
    ConnectTimeout {
        session: SessionId,
        waited: Duration,
    },
    #[error("the session's port cannot be reached")]
    ConnectFailed {
        session: SessionId,
        source: std::io::Error,
    },
    #[error("the session closed the connection before it answered")]
    Unanswered {
        session: SessionId,
        source: hyper::Error,
    },
    #[error("the session's answer is not well-formed HTTP")]
    BadAnswer {
        session: SessionId,
        why: &'static str,
    },
}

impl Unforwarded {
    /// Whether the session is paused until it is resumed. Only the session's own node knows.
    pub(crate) fn is_paused(&self) -> bool {
        let paused = ProblemKind::PAUSED.slug;
        matches!(self, Self::Refused(refusal) if refusal.problem.slug() == paused)
    }

    /// The answer to the client; `as_page`: a person reads it in a browser.
    pub(crate) fn into_response(self, as_page: bool) -> Response<ResponseBody> {
        match self {
            Self::AddSlash { location } => redirect(StatusCode::PERMANENT_REDIRECT, &location),
            Self::TokenExchanged {
                location,
                set_cookie,
            } => {
                let mut response = redirect(StatusCode::SEE_OTHER, &location);
                let headers = response.headers_mut();
                headers.insert(SET_COOKIE, set_cookie);
                headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
                headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
                response
            }
            Self::NotHere(refusal) => not_here(&refusal),
            other => {
                let closes = other.closes_connection();
                let (problem, retry_after_s) = other.into_problem();
                let mut response = problem_response(&problem, retry_after_s, as_page);
                if closes {
                    let close = HeaderValue::from_static("close");
                    response.headers_mut().insert(CONNECTION, close);
                }
                response
            }
        }
    }

    /// Whether later bytes on the connection can no longer be trusted to be a request.
    fn closes_connection(&self) -> bool {
        matches!(
            self,
            Self::Request(
                RequestFault::Ambiguous
                    | RequestFault::Hosts(_)
                    | RequestFault::Address(AddressError::Target | AddressError::Host)
                    | RequestFault::BodyStalled { .. }
                    | RequestFault::BodyBroken
            )
        )
    }

    /// Problem details and `Retry-After`. Redirects are not problems; they become one only if a
    /// caller asks for it.
    fn into_problem(self) -> (Problem, Option<u32>) {
        let (kind, detail) = match self {
            Self::Refused(refusal) => return (refusal.problem, refusal.retry_after_s),
            Self::Denied(problem) => return (*problem, None),
            Self::Request(fault) => fault.kind_and_detail(),
            Self::Session(fault) => fault.kind_and_detail(),
            Self::AddSlash { .. } | Self::TokenExchanged { .. } => {
                (ProblemKind::REDIRECT, "a redirect".to_owned())
            }
            Self::Misdirected {
                session,
                why: why @ PeerRefusal::Refused,
            } => (
                ProblemKind::NODE_REFUSES,
                format!("session `{session}` is on another node of the fleet: {why}"),
            ),
            Self::Misdirected { session, why } => (
                NOT_ACCEPTED,
                format!(
                    "session `{session}` is on another node of the fleet, which did not accept \
                     the request: {why}. Try again; `conman nodes` shows the nodes"
                ),
            ),
            Self::NodeSilent { session, why } => (
                ProblemKind::NODE_SILENT,
                format!(
                    "session `{session}` is on another node of the fleet: {why}; the request \
                     may have been carried out. `conman nodes` shows the nodes"
                ),
            ),
            Self::NotHere(refusal) => (ProblemKind::NOT_HERE, refusal.to_string()),
            Self::BrowserPath { session, host } => {
                (ProblemKind::BROWSER_PATH, browser_path(&session, host))
            }
            Self::Leaving => (
                ProblemKind::NODE_LEAVES,
                "this node leaves, and closes the connections that pass through it: connect again, to another \
                 node if this one answers again"
                    .to_owned(),
            ),
            Self::HoldFull { session } => (
                ProblemKind::TOO_MANY_HELD,
                format!(
                    "too many requests already wait for their sessions, so this one for \
                     `{session}` was not held: try again shortly"
                ),
            ),
            Self::HoldTimeout { session, waited } => (
                ProblemKind::SESSION_NOT_READY,
                format!(
                    "session `{session}` could not take the request within {} s: see what \
                     it waits for in its timeline, or try again",
                    waited.as_secs()
                ),
            ),
        };
        // Nothing listens on the port: only a change within the session helps.
        let waits = kind.retryable && kind != ProblemKind::CONNECTION_REFUSED;
        (*kind.problem(detail), waits.then_some(RETRY_AFTER_S))
    }
}

impl RequestFault {
    fn kind_and_detail(self) -> (ProblemKind, String) {
        match self {
            Self::Ambiguous => (
                MALFORMED,
                "the request's head can be read in more than one way: send one `Content-Length` \
                 or `Transfer-Encoding: chunked`"
                    .to_owned(),
            ),
            Self::Hosts(count) => (
                MALFORMED,
                format!("the request has {count} `Host` fields: HTTP/1.1 requires exactly one"),
            ),
            Self::Address(AddressError::Target) => (
                MALFORMED,
                "the request's target is neither a path nor an http URL: the sessions listener \
                 serves sessions and is not a forward proxy"
                    .to_owned(),
            ),
            Self::Address(AddressError::Host) => (
                MALFORMED,
                "the request's host is not a host name with an optional port".to_owned(),
            ),
            Self::Address(AddressError::Unknown) => (
                ProblemKind::UNKNOWN_ADDRESS,
                "neither the host nor the path names a session: use `/s/{id}/…`, or \
                 `{id}.` before the sessions domain"
                    .to_owned(),
            ),
            Self::BodyStalled { waited } => (
                ProblemKind::BODY_TIMEOUT,
                format!(
                    "no byte of the request's body arrived for {} s",
                    waited.as_secs()
                ),
            ),
            Self::BodyBroken => (
                MALFORMED,
                "the request's body ended early or is not well-formed chunked coding".to_owned(),
            ),
        }
    }
}

impl SessionFault {
    fn kind_and_detail(self) -> (ProblemKind, String) {
        match self {
            Self::NoPort {
                session,
                request:
                    PortRequest {
                        port,
                        public_only: true,
                    },
            } => (
                ProblemKind::UNAUTHENTICATED,
                port_needs_token(&session, port),
            ),
            Self::NoPort { session, request } => (
                ProblemKind::NO_SUCH_PORT,
                format!(
                    "session `{session}` does not have port {}: add it to `ports` of its template \
                     or spec",
                    request.port
                ),
            ),
            Self::ConnectRefused { session } => (
                ProblemKind::CONNECTION_REFUSED,
                format!(
                    "session `{session}` runs, but nothing in it accepts connections on its \
                     port: check in its logs whether its program still serves"
                ),
            ),
            Self::ConnectTimeout { session, waited } => (
                ProblemKind::CONNECT_TIMEOUT,
                format!(
                    "the port of session `{session}` accepted no connection within {} s: its \
                     program may be stopped or overloaded; see its logs",
                    waited.as_secs()
                ),
            ),
            Self::ConnectFailed { session, source } => (
                ProblemKind::CONNECT_FAILED,
                format!(
                    "no connection to session `{session}`: {source}; check its state, it may \
                     just have ended"
                ),
            ),
            Self::Unanswered { session, .. } => (
                ProblemKind::NO_ANSWER,
                format!(
                    "session `{session}` closed the connection before it answered; the \
                     request may have been carried out. See its logs"
                ),
            ),
            Self::BadAnswer { session, why } => (
                ProblemKind::BAD_ANSWER,
                format!("session `{session}` answered with {why}: correct its program"),
            ),
        }
    }
}

fn port_needs_token(session: &SessionId, port: u16) -> String {
    format!("port {port} of session `{session}` is not public: connect with a token")
}

fn browser_path(session: &SessionId, host: Option<String>) -> String {
    let own = host.map_or_else(
        || "set `listen.domain`, and open it at its own host".to_owned(),
        |host| format!("open it at `{host}` instead"),
    );
    format!(
        "a browser requested session `{session}` by its path. All sessions share one origin there, \
         so a page of one could read another's: {own}. Programs send no `Origin`, `Sec-Fetch-*`, \
         `Upgrade-Insecure-Requests` or conman's cookie; `listen.browser_paths = true` allows \
         browsers"
    )
}

/// The answer to a load balancer. 404 makes those that distinguish it (HAProxy's `disable-on-404`) send
/// no new clients and keep the present ones.
pub(crate) fn readiness_response(readiness: Readiness) -> Response<ResponseBody> {
    let body = Bytes::from(format!("{}\n", readiness.as_str()));
    let mut response = Response::new(ResponseBody::own(body));
    *response.status_mut() = match readiness {
        Readiness::Ready | Readiness::Lapsed => StatusCode::OK,
        Readiness::CutOff
        | Readiness::Cordoned
        | Readiness::Draining
        | Readiness::Preempted
        | Readiness::Stopping => StatusCode::NOT_FOUND,
        Readiness::Down => StatusCode::SERVICE_UNAVAILABLE,
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn problem_response(
    problem: &Problem,
    retry_after_s: Option<u32>,
    as_page: bool,
) -> Response<ResponseBody> {
    let (content_type, body) = if as_page {
        let page = error_page::render(problem, retry_after_s);
        (error_page::CONTENT_TYPE, page)
    } else {
        let json = serde_json::to_vec(problem).unwrap_or_default();
        (HeaderValue::from_static(PROBLEM_CONTENT_TYPE), json.into())
    };
    let mut response = Response::new(ResponseBody::own(body));
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::BAD_GATEWAY);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type);
    if as_page {
        headers.insert(CONTENT_SECURITY_POLICY, error_page::POLICY);
    }
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(seconds) = retry_after_s {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// The answer to a node whose request is misdirected. It has no body, so that the connection can
/// be reused at once.
fn not_here(refusal: &PeerRefusal) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::own(Bytes::new()));
    *response.status_mut() = match refusal {
        PeerRefusal::NotReady => StatusCode::SERVICE_UNAVAILABLE,
        PeerRefusal::NotOwner | PeerRefusal::Unreachable(_) | PeerRefusal::Refused => {
            StatusCode::MISDIRECTED_REQUEST
        }
    };
    response
        .headers_mut()
        .insert(&X_CONMAN_MISDIRECTED, refusal.header());
    response
}

fn redirect(status: StatusCode, location: &str) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::own(Bytes::new()));
    // Bytes of a request's target are valid in a field; anything else would be the gate's error.
    match HeaderValue::from_str(location) {
        Ok(location) => {
            *response.status_mut() = status;
            response.headers_mut().insert(LOCATION, location);
        }
        Err(_) => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
    }
    response
}

/// The bytes for a connection above the limit, ready to be written without an HTTP server. They
/// inform a node that nothing of its request was taken.
pub(crate) fn no_room(to_nodes: bool) -> Bytes {
    let problem = ProblemKind::TOO_MANY_CONNECTIONS
        .problem("the listener serves as many connections as it may: try again shortly");
    let body = serde_json::to_string(&problem).unwrap_or_default();
    let refusal = if to_nodes {
        format!("{X_CONMAN_MISDIRECTED}: {NO_ROOM}\r\n")
    } else {
        String::new()
    };
    Bytes::from(format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: {PROBLEM_CONTENT_TYPE}\r\n\
         cache-control: no-store\r\nretry-after: {RETRY_AFTER_S}\r\nconnection: close\r\n{refusal}\
         content-length: {}\r\n\r\n{body}",
        body.len()
    ))
}
