//! A request as it is sent to a session or another node: its headers, its body, its port.

use std::sync::{Arc, Mutex, PoisonError};

use conman_peer::headers::{accepts_trailers, strip_forged, strip_hop_by_hop};
use http::header::{CONNECTION, EXPECT, HOST, HeaderMap, HeaderValue, TE, TRANSFER_ENCODING};
use http::request::Parts;
use http::{Extensions, Request, StatusCode, Version};
use http_body::Body;
use hyper::body::Incoming;

use crate::address;
use crate::body::{Fault, RequestBody};
use crate::deferred_body::DeferredBody;
use crate::headers::{Provenance, name_port, name_session, restore_prefix};
use crate::peers::X_CONMAN_EXPECT;
use crate::worker::ClientConnection;
use crate::{ProxyOptions, Route, Way};

/// Host for the session if a client of HTTP/1.0 sends none.
const NO_HOST: HeaderValue = HeaderValue::from_static("localhost");

/// A request as it arrived, admitted.
pub(crate) struct Arrived<'request> {
    pub(crate) parts: Parts,
    pub(crate) body: Incoming,
    pub(crate) origin: TrustedOrigin<'request>,
}

/// The statements about a request's origin that are trusted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TrustedOrigin<'request> {
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

impl TrustedOrigin<'_> {
    /// Removes the statements that are not trusted, and adds those of conman.
    fn apply(self, headers: &mut HeaderMap, client: &ClientConnection, route: &Route) {
        let (session, generation) = (&route.session, route.generation);
        match self {
            Self::Client { host, prefix } => {
                strip_forged(headers, client.worker.options.trust_forwarded);
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
            Self::Peer => {
                strip_forged(headers, true);
                name_session(headers, session, generation);
            }
            Self::PeerToApi => {}
        }
    }
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
    pub(crate) fn new(client: &ClientConnection, route: &Route, arrived: Arrived<'_>) -> Self {
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
        origin.apply(headers, client, route);
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
    pub(crate) fn into_body(self, options: &ProxyOptions, fault: &Arc<Fault>) -> RequestBody {
        match self {
            Self::Own(body) => body,
            Self::Deferred(deferred) => match deferred.claim() {
                Some(claim) => {
                    deferred.grant(claim.number);
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
