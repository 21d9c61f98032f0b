use std::future::Future;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use bytes::Bytes;
use conman_core::ActivityGuard;
use conman_proto::{Generation, SessionId};
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderValue, TE, TRANSFER_ENCODING,
};
use http::request::Parts;
use http::{Extensions, Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::address::{self, Address, AddressError};
use crate::answer::{Unforwarded, readiness_response};
use crate::answer_heads::HeadFault;
use crate::body::{Fault, FaultKind, RequestBody, ResponseBody, SessionBody};
use crate::client_io::Ticket;
use crate::confine::{confine, is_browsers};
use crate::deferred_body::DeferredBody;
use crate::headers::{
    Provenance, X_FORWARDED_PREFIX, accepts_trailers, name_port, name_session, restore_prefix,
    strip_forged, strip_hop_by_hop,
};
use crate::hop::{self, Wait};
use crate::peers::{LIVENESS, PeerTarget, X_CONMAN_EXPECT};
use crate::pool::Lease;
use crate::upgrade::{self, Offer};
use crate::worker::{ClientConnection, Front, Stage};
use crate::{
    Directory, Gate, PeerFront, PeerRefusal, PortRequest, ProxyOptions, Route, Verdict, Way,
    backend,
};

/// How often a session that closed its port before it ended is looked up again.
const MAX_CLOSED: u32 = 4;

/// Status of a denial that a token would lift.
const UNAUTHENTICATED: u16 = 401;

/// Host for the session if a client of HTTP/1.0 sends none.
const NO_HOST: HeaderValue = HeaderValue::from_static("localhost");

/// Answers one request of a client: hyper's service.
pub(crate) async fn serve(
    client: Arc<ClientConnection>,
    ticket: Ticket,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let coded = request.headers().contains_key(TRANSFER_ENCODING);
    let outcome = exchange(&client, request).await;
    let mut response = outcome.unwrap_or_else(|unforwarded| {
        tracing::debug!(reason = %unforwarded, "request not forwarded");
        unforwarded.into_response()
    });
    client.worker.meters.answered(response.status());
    client.admission.place.answered();
    // hyper drops a `Content-Length` next to it silently. Another reader may have used that, and
    // disagrees about where the next request begins (RFC 9112, section 6.1).
    let ambiguous = coded && matches!(&*client.worker.front, Front::Clients { .. });
    // An upgraded connection is not one for further requests.
    let upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let leaves = !upgraded && *client.worker.stage.borrow() >= Stage::Announced;
    if ambiguous || leaves {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    response.map(|body| body.with_ticket(ticket))
}

async fn exchange(
    client: &Arc<ClientConnection>,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Unforwarded> {
    if !has_plain_coding(request.headers()) {
        return Err(Unforwarded::Ambiguous);
    }
    match &*client.worker.front {
        Front::Clients { directory, gate } => {
            from_client(client, request, (&**directory, &**gate)).await
        }
        Front::Peers(front) => from_peer(client, request, front).await,
    }
}

/// Whether the body is not coded, or `chunked` and nothing else. hyper accepts other codings before
/// a final `chunked`.
fn has_plain_coding(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let chunked = codings
        .next()
        .is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
    chunked && codings.next().is_none()
}

async fn from_client(
    client: &Arc<ClientConnection>,
    request: Request<Incoming>,
    (directory, gate): (&dyn Directory, &dyn Gate),
) -> Result<Response<ResponseBody>, Unforwarded> {
    let worker = &client.worker;
    let (mut parts, body) = request.into_parts();
    let host = read_host(&mut parts)?;
    let domain = worker.options.domain.as_deref();
    let (id, port, prefix) =
        match address::read(&parts.uri, host.to_str().unwrap_or("\u{7f}"), domain) {
            Ok(Address::Session {
                id,
                port,
                prefix,
                target,
            }) => {
                parts.uri = Uri::from(target);
                (id, port, prefix)
            }
            Ok(Address::AddSlash { location }) => return Err(Unforwarded::AddSlash { location }),
            Err(AddressError::Unknown) if is_readiness_probe(&parts) => {
                return Ok(readiness_response(directory.readiness()));
            }
            Err(error) => return Err(Unforwarded::Address(error)),
        };
    let options = &worker.options;
    if !prefix.is_empty() && !options.browser_paths && is_browsers(&parts.headers) {
        let label = address::host_label(&id, port);
        let host = domain
            .zip(label)
            .map(|(domain, label)| format!("{label}.{domain}{}", port_of(&host)));
        return Err(Unforwarded::BrowserPath { session: id, host });
    }
    let scope = scope(&parts, &prefix, options);
    let mut denied = None;
    let may_start = match gate.admit(&mut parts, &id, &prefix) {
        Verdict::Admit { may_start } => may_start,
        Verdict::Deny(problem) => match port {
            Some(port)
                if problem.status == UNAUTHENTICATED
                    && directory.may_be_public(&id, port).await =>
            {
                denied = Some(problem);
                false
            }
            _ => return Err(Unforwarded::Denied(Box::new(problem))),
        },
        Verdict::Redirect {
            location,
            set_cookie,
        } => {
            return Err(Unforwarded::TokenExchanged {
                location,
                set_cookie,
            });
        }
    };
    let asked = port.map(|port| PortRequest {
        port,
        public_only: denied.is_some(),
    });
    if denied.is_none() {
        client.admission.place.known();
    }
    let mut offer = Offer::of(&mut parts, !body.is_end_stream());
    let wait = Wait {
        directory,
        until: Instant::now() + worker.options.hold_timeout,
        may_start,
    };
    let lookup = directory.route(&id, may_start);
    let route = worker
        .hold
        .wait(lookup, &id, wait.until, &worker.options, &worker.meters)
        .await;
    // A caller without a token learns nothing about the session.
    let route = match (route, denied) {
        (Err(_), Some(problem)) => return Err(Unforwarded::Denied(Box::new(problem))),
        (route, _) => route?,
    };
    let route = open_route(client, route, wait).await?.at(asked)?;
    let arrived = Arrived {
        parts,
        body,
        origin: TrustedOrigin::Client {
            host: &host,
            prefix: &prefix,
        },
    };
    let outgoing = Outgoing::new(client, &route, arrived);
    let answered = match (&route.way, offer.is_some()) {
        (Way::Peer { .. }, _) => hop::forward(client, route, outgoing, offer, wait).await,
        (Way::Session | Way::Api, true) => {
            let tried = upgrade::forward(client, &route, outgoing.parts, &mut offer).await?;
            tried.answered(&route)
        }
        (Way::Session | Way::Api, false) => forward(client, &route, outgoing).await,
    };
    let mut response = answered?;
    confine(response.headers_mut(), &scope);
    Ok(response)
}

/// Whether a load balancer asks for the state of the node.
fn is_readiness_probe(parts: &Parts) -> bool {
    matches!(parts.method, Method::GET | Method::HEAD) && parts.uri.path() == "/readyz"
}

/// The session's path in the browser, with the prefix that a trusted proxy removed.
fn scope(parts: &Parts, prefix: &str, options: &ProxyOptions) -> Vec<u8> {
    let outer = parts.headers.get(&X_FORWARDED_PREFIX);
    match outer.filter(|_| options.trust_forwarded && !prefix.is_empty()) {
        Some(outer) => [outer.as_bytes(), prefix.as_bytes()].concat(),
        None => prefix.as_bytes().to_vec(),
    }
}

/// The port in a `Host` field with its colon; empty if there is none.
fn port_of(host: &HeaderValue) -> &str {
    let host = host.to_str().unwrap_or_default();
    let port = host.rfind(':').map_or("", |colon| &host[colon..]);
    if port.bytes().skip(1).all(|byte| byte.is_ascii_digit()) {
        port
    } else {
        ""
    }
}

/// The same route, or another one if the session is about to end and takes no connections any
/// more.
async fn open_route(
    client: &ClientConnection,
    mut route: Route,
    wait: Wait<'_>,
) -> Result<Route, Unforwarded> {
    let worker = &client.worker;
    let mut times = 0;
    while times < MAX_CLOSED && route.backend.has_closed().await {
        times += 1;
        let (id, refusal) = (route.session.clone(), PeerRefusal::NotReady);
        let lookup = wait
            .directory
            .route_again(&route, &refusal, times, wait.may_start);
        route = worker
            .hold
            .wait(lookup, &id, wait.until, &worker.options, &worker.meters)
            .await?;
    }
    Ok(route)
}

/// A forwarded request from another node: it is served here, or refused at once as misdirected.
async fn from_peer(
    client: &Arc<ClientConnection>,
    request: Request<Incoming>,
    front: &PeerFront,
) -> Result<Response<ResponseBody>, Unforwarded> {
    let (mut parts, body) = request.into_parts();
    client.admission.place.known();
    let target = PeerTarget::of(&parts.headers);
    // A session may have a page at this path too.
    if matches!(target, Some(PeerTarget::Api))
        && parts.method == Method::GET
        && parts.uri.path() == LIVENESS
    {
        let mut response = Response::new(ResponseBody::own(Bytes::new()));
        *response.status_mut() = StatusCode::NO_CONTENT;
        return Ok(response);
    }
    let target = target.ok_or(Unforwarded::Ambiguous)?;
    let mut offer = Offer::of(&mut parts, !body.is_end_stream());
    let (route, origin) = match target {
        PeerTarget::Session(id, generation, port) => {
            let route = front.sessions.own(&id, generation);
            let route = route.map_err(Unforwarded::NotHere)?;
            if route.backend.has_closed().await {
                return Err(Unforwarded::NotHere(PeerRefusal::NotReady));
            }
            (route.at(port)?, TrustedOrigin::Peer)
        }
        PeerTarget::Api => (api_route(front), TrustedOrigin::PeerToApi),
    };
    let arrived = Arrived {
        parts,
        body,
        origin,
    };
    let outgoing = Outgoing::new(client, &route, arrived);
    if offer.is_some() {
        let tried = upgrade::forward(client, &route, outgoing.parts, &mut offer).await?;
        return tried.answered(&route);
    }
    forward(client, &route, outgoing).await
}

/// The route to this node's API.
fn api_route(front: &PeerFront) -> Route {
    static NAME: LazyLock<SessionId> =
        LazyLock::new(|| "api".parse().expect("three letters are a session's name"));
    Route {
        session: NAME.clone(),
        generation: Generation::FIRST,
        activity: Arc::default(),
        closing: watch::channel(None).1,
        port: None,
        strip_prefix: true,
        way: Way::Api,
        backend: Arc::clone(&front.api),
    }
}

/// The requested host; empty if a client of HTTP/1.0 sends none. The target's host overrides the
/// field (RFC 9112, section 3.2.2), and replaces it.
fn read_host(parts: &mut Parts) -> Result<HeaderValue, Unforwarded> {
    let count = parts.headers.get_all(HOST).iter().count();
    if count > 1 || (count == 0 && parts.version != Version::HTTP_10) {
        return Err(Unforwarded::Hosts(count));
    }
    if parts.uri.scheme().is_some()
        && let Some(authority) = parts.uri.authority()
    {
        let host = HeaderValue::from_str(authority.as_str())
            .map_err(|_| Unforwarded::Address(AddressError::Host))?;
        parts.headers.insert(HOST, host);
    }
    Ok(parts
        .headers
        .get(HOST)
        .cloned()
        .unwrap_or_else(|| HeaderValue::from_static("")))
}

/// A request as it arrived, admitted.
struct Arrived<'request> {
    parts: Parts,
    body: Incoming,
    origin: TrustedOrigin<'request>,
}

/// The statements about a request's origin that are trusted.
#[derive(Debug, Clone, Copy)]
enum TrustedOrigin<'request> {
    /// None, except for those of trusted proxies.
    Client {
        host: &'request HeaderValue,
        prefix: &'request str,
    },
    /// All: the node that the client has reached made them.
    Peer,
    /// Likewise, including the caller, which only the API uses.
    PeerToApi,
}

/// A request for the session.
pub(crate) struct Outgoing {
    pub(crate) parts: Parts,
    pub(crate) body: BodySource,
    pub(crate) fault: Arc<Fault>,
}

/// The source of a request's body.
pub(crate) enum BodySource {
    /// The receiver is decided.
    Own(RequestBody),
    /// For the node that requests it.
    Deferred(Arc<DeferredBody>),
}

impl Outgoing {
    fn new(client: &ClientConnection, route: &Route, arrived: Arrived<'_>) -> Self {
        let Arrived {
            mut parts,
            body,
            origin,
        } = arrived;
        let options = &client.worker.options;
        let has_body = !body.is_end_stream();
        let length_known = body.size_hint().exact().is_some();
        let headers = &mut parts.headers;
        if headers.remove(&X_CONMAN_EXPECT).is_some()
            && !matches!(origin, TrustedOrigin::Client { .. })
        {
            headers.remove(EXPECT);
        }
        let awaits_continue = has_body
            && parts.version == Version::HTTP_11
            && headers
                .get(EXPECT)
                .is_some_and(|expect| expect.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let takes_trailers = accepts_trailers(headers);

        strip_hop_by_hop(headers);
        let (session, generation) = (&route.session, route.generation);
        match origin {
            TrustedOrigin::Client { host, prefix } => {
                strip_forged(headers, options.trust_forwarded);
                let host = if host.is_empty() { &NO_HOST } else { host };
                headers.entry(HOST).or_insert_with(|| host.clone());
                Provenance {
                    peer: &client.peer,
                    host,
                    prefix,
                    session,
                    generation,
                }
                .apply(headers);
            }
            TrustedOrigin::Peer => {
                strip_forged(headers, true);
                name_session(headers, session, generation);
            }
            TrustedOrigin::PeerToApi => {}
        }
        address_port(&mut parts, route);
        let headers = &mut parts.headers;
        if takes_trailers {
            headers.insert(TE, HeaderValue::from_static("trailers"));
            headers.insert(CONNECTION, HeaderValue::from_static("te"));
        }
        if !awaits_continue {
            headers.remove(EXPECT);
        }
        if has_body && !length_known {
            // Set explicitly, because hyper takes a GET of unknown length for one without a body.
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        parts.version = Version::HTTP_11;
        let extensions = std::mem::replace(&mut parts.extensions, Extensions::new());
        if let Some(answer) = extensions.get::<crate::SubprotocolAnswer>() {
            parts.extensions.insert(answer.clone());
        }

        let fault = Arc::new(Fault::default());
        if has_body && matches!(route.way, Way::Peer { .. }) {
            let body = BodySource::Deferred(DeferredBody::new(body));
            return Self { parts, body, fault };
        }
        let mut body = RequestBody::new(
            body,
            options.body_stall_timeout,
            options.trust_forwarded,
            Arc::clone(&fault),
        );
        let continued = awaits_continue.then(|| Mutex::new(Some(body.await_continue())));
        let body = BodySource::Own(body);
        let mut outgoing = Self { parts, body, fault };
        if let Some(continued) = continued {
            outgoing.on_continue(continued);
        }
        outgoing
    }

    /// Releases the body once the session sends `100 Continue`. That then reaches the client, because
    /// hyper requests a body as soon as it is read.
    fn on_continue(&mut self, signal: Mutex<Option<tokio::sync::oneshot::Sender<()>>>) {
        let mut carrier = Request::new(());
        hyper::ext::on_informational(&mut carrier, move |informational| {
            if informational.status() == StatusCode::CONTINUE
                && let Some(signal) = signal.lock().unwrap_or_else(PoisonError::into_inner).take()
            {
                // There is no receiver any more once the time for it is over.
                let _ = signal.send(());
            }
        });
        self.parts
            .extensions
            .extend(std::mem::take(carrier.extensions_mut()));
    }
}

impl BodySource {
    /// The body; for a deferred one, which no node can request any more.
    fn into_body(self, options: &ProxyOptions, fault: &Arc<Fault>) -> RequestBody {
        match self {
            Self::Own(body) => body,
            Self::Deferred(deferred) => match deferred.claim() {
                Some(claim) => {
                    deferred.grant(claim.number());
                    RequestBody::claimed(claim, options, Arc::clone(fault))
                }
                None => RequestBody::empty(),
            },
        }
    }

    /// The deferred body that nodes may request, if there is a body.
    pub(crate) fn deferred(&self) -> Option<&Arc<DeferredBody>> {
        match self {
            Self::Own(_) => None,
            Self::Deferred(deferred) => Some(deferred),
        }
    }
}

/// Sets the generation of a request again, because its session has moved.
pub(crate) fn readdress(parts: &mut Parts, route: &Route) {
    name_session(&mut parts.headers, &route.session, route.generation);
    address_port(parts, route);
}

/// Addresses the request to the route's port: by a field for another node, by its path for a session that
/// keeps its prefix.
fn address_port(parts: &mut Parts, route: &Route) {
    match route.way {
        Way::Peer { .. } => name_port(&mut parts.headers, route.port),
        Way::Session => {
            name_port(&mut parts.headers, None);
            if !route.strip_prefix {
                let port = route.port.map(|request| request.port);
                restore_prefix(parts, &address::path_prefix(&route.session, port));
            }
        }
        Way::Api => {}
    }
}

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
    let mut request = Request::from_parts(parts, body);
    let (response, wire) = loop {
        let pooled = worker.pool.take(route);
        let reused = pooled.is_some();
        let mut wire = match pooled {
            Some(wire) => wire,
            None => {
                let options = &worker.options;
                let stream = backend::connect(route, options).await?;
                let handshake = backend::handshake(stream, &route.way, options, false).await;
                handshake.map_err(|error| unanswered(route, error, &fault))?
            }
        };
        wire.awaited.begin();
        let sent = wire.sender.try_send_request(request);
        match client.within_response_timeout(&route.session, sent).await? {
            Ok(response) => break (response, wire),
            Err(mut error) => match error.take_message() {
                // The session closed an idle connection at this moment: not a byte of the request
                // was sent on it. Anything else is never sent twice.
                Some(unsent) if reused => request = unsent,
                _ => return Err(unanswered(route, error.into_error(), &fault)),
            },
        }
    };
    let lease = Lease::new(Arc::clone(&worker.pool), route, wire, true);
    session_response(client, route, head_only, response, lease, activity)
}

pub(crate) fn unanswered(route: &Route, error: hyper::Error, fault: &Fault) -> Unforwarded {
    let session = route.session.clone();
    match fault.kind() {
        Some(FaultKind::Stalled(waited)) => return Unforwarded::BodyStalled { waited },
        Some(FaultKind::Broken) => return Unforwarded::BodyBroken,
        None => {}
    }
    if let Some(fault) = HeadFault::of(&error) {
        return Unforwarded::BadAnswer {
            session,
            why: match fault {
                HeadFault::Slow => "a head that was not complete in time",
                HeadFault::Endless => "too many interim answers (1xx)",
            },
        };
    }
    if error.is_parse_too_large() {
        return Unforwarded::BadAnswer {
            session,
            why: "a head beyond the bounds on heads",
        };
    }
    if error.is_parse() {
        return Unforwarded::BadAnswer {
            session,
            why: "something that is not HTTP/1.1",
        };
    }
    Unforwarded::Unanswered {
        session,
        source: error,
    }
}

/// Converts a session's answer to the client's.
pub(crate) fn session_response(
    client: &ClientConnection,
    route: &Route,
    head_only: bool,
    response: Response<Incoming>,
    lease: Lease,
    activity: ActivityGuard,
) -> Result<Response<ResponseBody>, Unforwarded> {
    let bad = |why| {
        Err(Unforwarded::BadAnswer {
            session: route.session.clone(),
            why,
        })
    };
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
    let reason = parts.extensions.remove::<ReasonPhrase>();
    parts.extensions = Extensions::new();
    if let Some(reason) = reason {
        parts.extensions.insert(reason);
    }
    let delimited = chunked || body.size_hint().exact().is_some();
    let body = SessionBody {
        inner: body,
        lease: Some(lease),
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

impl ClientConnection {
    /// Bounds the wait for an answer.
    pub(crate) async fn within_response_timeout<T>(
        &self,
        session: &SessionId,
        answer: impl Future<Output = T>,
    ) -> Result<T, Unforwarded> {
        match self.worker.options.response_timeout {
            None => Ok(answer.await),
            Some(waited) => tokio::time::timeout(waited, answer)
                .await
                .map_err(|_elapsed| Unforwarded::AnswerTimeout {
                    session: session.clone(),
                    waited,
                }),
        }
    }
}
