//! Answers one request: which session it is for, whether its caller may reach it, and which node has it.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use conman_peer::{LIVENESS, PeerRefusal};
use conman_proto::{Generation, Problem, SessionId};
use http::header::{CONNECTION, HOST, HeaderValue, TRANSFER_ENCODING};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use hyper::body::Incoming;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::address::{self, Address, AddressError};
use crate::answer::{RequestFault, Unforwarded, readiness_response};
use crate::body::ResponseBody;
use crate::client_io::Ticket;
use crate::confine::{confine, is_browsers, strip_server_orders};
use crate::error_page;
use crate::forward::{forward, has_plain_coding};
use crate::headers::X_FORWARDED_PREFIX;
use crate::outgoing::{Arrived, Outgoing, TrustedOrigin};
use crate::peer_request::{self, Wait};
use crate::peers::PeerTarget;
use crate::upgrade::{self, Offer};
use crate::worker::{ClientConnection, Front, ProxyStage};
use crate::{Directory, Gate, PeerFront, PortRequest, ProxyOptions, Route, Verdict, Way, hold};

/// How often a session that closed its port before it ended is looked up again.
const MAX_CLOSED: u32 = 4;

/// Status of a denial that a token would lift.
const UNAUTHENTICATED: u16 = 401;

/// Answers one request of a client: hyper's service.
pub(crate) async fn serve(
    client: Arc<ClientConnection>,
    ticket: Ticket,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let coded = request.headers().contains_key(TRANSFER_ENCODING);
    let is_clients = matches!(&*client.worker.front, Front::Clients { .. });
    let as_page = is_clients && error_page::is_wanted(&request);
    let outcome = exchange(&client, request).await;
    let mut response = outcome.unwrap_or_else(|unforwarded| {
        tracing::debug!(reason = %unforwarded, "request not forwarded");
        unforwarded.into_response(as_page)
    });
    client.worker.meters.answered(response.status());
    client.admission.place.answered();
    // hyper drops a `Content-Length` next to it silently. Another reader may have used that, and
    // disagrees about where the next request begins (RFC 9112, section 6.1).
    let ambiguous = coded && is_clients;
    // An upgraded connection is not one for further requests.
    let upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let leaves = !upgraded && *client.worker.stage.borrow() >= ProxyStage::Announced;
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
        return Err(RequestFault::Ambiguous.into());
    }
    match &*client.worker.front {
        Front::Clients { directory, gate } => {
            from_client(client, request, (&**directory, &**gate)).await
        }
        Front::Peers(front) => from_peer(client, request, front).await,
    }
}

async fn from_client(
    client: &Arc<ClientConnection>,
    request: Request<Incoming>,
    (directory, gate): (&dyn Directory, &dyn Gate),
) -> Result<Response<ResponseBody>, Unforwarded> {
    let worker = &client.worker;
    let options = &worker.options;
    let (mut parts, body) = request.into_parts();
    let Some(target) = request_target(&mut parts, options)? else {
        return Ok(readiness_response(directory.readiness()));
    };
    let RequestTarget {
        id, port, prefix, ..
    } = &target;
    let scope = scope(&parts, prefix, options);
    let permission = permission(&mut parts, &target, directory, gate).await?;
    if permission.denied.is_none() {
        client.admission.place.known();
    }
    let offer = Offer::of(&mut parts, !body.is_end_stream());
    // A tunnel would be closed at once, and the client might come back each second.
    if offer.is_some() && *worker.stage.borrow() >= ProxyStage::Closing {
        return Err(Unforwarded::Leaving);
    }
    let wait = Wait {
        directory,
        until: Instant::now() + options.hold_timeout,
        may_start: permission.may_start,
    };
    let lookup = directory.route(id, wait.may_start);
    let route = hold::wait(worker, lookup, id, wait.until);
    let asked = port.map(|port| PortRequest {
        port,
        public_only: permission.denied.is_some(),
    });
    // A caller without a token learns nothing about the session, except that a public port of it is paused.
    let route = match (route.await, permission.denied) {
        (Err(error), Some(problem)) if !error.is_paused() => {
            return Err(Unforwarded::Denied(Box::new(problem)));
        }
        (route, _) => route?,
    };
    let route = open_route(client, route, wait).await?.at(asked)?;
    let arrived = Arrived {
        parts,
        body,
        origin: TrustedOrigin::Client {
            host: &target.host,
            prefix,
        },
    };
    let outgoing = Outgoing::new(client, &route, arrived);
    let answered = match (&route.way, offer.is_some()) {
        (Way::Session | Way::Api, false) => forward(client, &route, outgoing).await,
        _ => peer_request::forward(client, route, outgoing, offer, wait).await,
    };
    let mut response = answered?;
    confine(response.headers_mut(), &scope);
    strip_server_orders(response.headers_mut(), &options.trusted_headers);
    Ok(response)
}

/// The session and port that a client's request addresses.
struct RequestTarget {
    host: HeaderValue,
    id: SessionId,
    port: Option<u16>,
    /// Empty if the host names the session.
    prefix: String,
}

/// Returns the session that a request addresses, and rewrites its URI; `None` for a readiness probe.
fn request_target(
    parts: &mut Parts,
    options: &ProxyOptions,
) -> Result<Option<RequestTarget>, Unforwarded> {
    let host = read_host(parts)?;
    let domain = options.domain.as_deref();
    let text = host.to_str().unwrap_or("\u{7f}");
    let (id, port, prefix, target) = match address::read(&parts.uri, text, domain) {
        Ok(Address::Session {
            id,
            port,
            prefix,
            target,
        }) => (id, port, prefix, target),
        Ok(Address::AddSlash { location }) => return Err(Unforwarded::AddSlash { location }),
        Err(AddressError::Unknown) if is_readiness_probe(parts) => return Ok(None),
        Err(error) => return Err(RequestFault::Address(error).into()),
    };
    if !prefix.is_empty() && !options.browser_paths && is_browsers(&parts.headers) {
        let label = address::host_label(&id, port);
        let host = domain
            .zip(label)
            .map(|(domain, label)| format!("{label}.{domain}{}", port_of(&host)));
        return Err(Unforwarded::BrowserPath { session: id, host });
    }
    parts.uri = Uri::from(target);
    Ok(Some(RequestTarget {
        host,
        id,
        port,
        prefix,
    }))
}

/// The rights of a caller at a session.
struct Permission {
    may_start: bool,
    /// Set if it may only reach a public port: the answer if there is none.
    denied: Option<Problem>,
}

async fn permission(
    parts: &mut Parts,
    target: &RequestTarget,
    directory: &dyn Directory,
    gate: &dyn Gate,
) -> Result<Permission, Unforwarded> {
    let RequestTarget {
        id, port, prefix, ..
    } = target;
    let problem = match gate.admit(parts, id, prefix) {
        Verdict::Admit { may_start } => {
            return Ok(Permission {
                may_start,
                denied: None,
            });
        }
        Verdict::Redirect {
            location,
            set_cookie,
        } => {
            return Err(Unforwarded::TokenExchanged {
                location,
                set_cookie,
            });
        }
        Verdict::Deny(problem) => problem,
    };
    match *port {
        Some(port)
            if problem.status == UNAUTHENTICATED && directory.may_be_public(id, port).await =>
        {
            Ok(Permission {
                may_start: false,
                denied: Some(problem),
            })
        }
        _ => Err(Unforwarded::Denied(Box::new(problem))),
    }
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
        route = hold::wait(worker, lookup, &id, wait.until).await?;
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
    let target = target.ok_or(RequestFault::Ambiguous)?;
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
    if offer.is_none() {
        return forward(client, &route, outgoing).await;
    }
    let tried = match upgrade::forward(client, &route, outgoing.parts, &mut offer).await {
        // The other node waits for the session's next place.
        Err(failed) => match peer_request::refusal_of(&route, &failed).await {
            Some(refusal) => return Err(Unforwarded::NotHere(refusal)),
            None => return Err(failed),
        },
        Ok(tried) => tried,
    };
    tried.answered(&route)
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
        return Err(RequestFault::Hosts(count).into());
    }
    if parts.uri.scheme().is_some()
        && let Some(authority) = parts.uri.authority()
    {
        let host = HeaderValue::from_str(authority.as_str())
            .map_err(|_| RequestFault::Address(AddressError::Host))?;
        parts.headers.insert(HOST, host);
    }
    Ok(parts
        .headers
        .get(HOST)
        .cloned()
        .unwrap_or_else(|| HeaderValue::from_static("")))
}
