use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use conman_core::ActivityGuard;
use conman_proto::SessionId;
use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderValue, TE, TRANSFER_ENCODING};
use http::request::Parts;
use http::{Extensions, Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;

use crate::address::{self, Address};
use crate::answer::Unforwarded;
use crate::body::{Fault, FaultKind, RequestBody, ResponseBody, SessionBody};
use crate::client_io::{BodyWatch, Ticket};
use crate::headers::{Provenance, accepts_trailers, strip_forged, strip_hop_by_hop};
use crate::pool::Lease;
use crate::upgrade::{self, Offer};
use crate::worker::ClientConnection;
use crate::{Route, Verdict, backend};

/// Host told to a session by a client of HTTP/1.0 that named none.
const NO_HOST: HeaderValue = HeaderValue::from_static("localhost");

/// Answers one request of a client: hyper's service.
pub(crate) async fn serve(
    client: Arc<ClientConnection>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let (ticket, approved) = client.exchanges.begin(request.version());
    let outcome = if approved {
        exchange(&client, &ticket, request).await
    } else {
        Err(Unforwarded::Ambiguous)
    };
    let response = outcome.unwrap_or_else(|unforwarded| {
        tracing::debug!(reason = %unforwarded, "request not forwarded");
        unforwarded.into_response()
    });
    client.worker.meters.answered(response.status());
    response.map(|body| body.with_ticket(ticket))
}

async fn exchange(
    client: &Arc<ClientConnection>,
    ticket: &Ticket,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Unforwarded> {
    let worker = &client.worker;
    let (mut parts, body) = request.into_parts();
    let host = read_host(&mut parts)?;
    let domain = worker.options.domain.as_deref();
    let (id, prefix) = match address::read(&parts.uri, host.to_str().unwrap_or("\u{7f}"), domain) {
        Ok(Address::Session { id, prefix, target }) => {
            parts.uri = Uri::from(target);
            (id, prefix)
        }
        Ok(Address::AddSlash { location }) => return Err(Unforwarded::AddSlash { location }),
        Err(error) => return Err(Unforwarded::Address(error)),
    };
    let may_start = match worker.gate.admit(&mut parts, &id, &prefix) {
        Verdict::Admit { may_start } => may_start,
        Verdict::Redirect {
            location,
            set_cookie,
        } => {
            return Err(Unforwarded::TokenExchanged {
                location,
                set_cookie,
            });
        }
        Verdict::Deny(problem) => return Err(Unforwarded::Denied(Box::new(problem))),
    };
    let offer = Offer::of(&mut parts, !body.is_end_stream());
    let directory = &*worker.directory;
    let route = worker
        .hold
        .route(directory, &id, may_start, &worker.options, &worker.meters)
        .await?;
    let arrived = Arrived {
        parts,
        body,
        watch: ticket.body_watch(),
        host: &host,
        prefix: &prefix,
    };
    let outgoing = Outgoing::new(client, &route, arrived);
    match offer {
        Some(offer) => upgrade::forward(client, route, outgoing.parts, offer).await,
        None => forward(client, &route, outgoing).await,
    }
}

/// The host that is asked for, empty where a client of HTTP/1.0 names none. What the target says
/// counts more than the field (RFC 9112, section 3.2.2), and replaces it.
fn read_host(parts: &mut Parts) -> Result<HeaderValue, Unforwarded> {
    let count = parts.headers.get_all(HOST).iter().count();
    if count > 1 || (count == 0 && parts.version != Version::HTTP_10) {
        return Err(Unforwarded::Hosts(count));
    }
    if parts.uri.scheme().is_some()
        && let Some(authority) = parts.uri.authority()
    {
        let host = HeaderValue::from_str(authority.as_str())
            .map_err(|_| Unforwarded::Address(address::AddressError::Host))?;
        parts.headers.insert(HOST, host);
    }
    Ok(parts
        .headers
        .get(HOST)
        .cloned()
        .unwrap_or_else(|| HeaderValue::from_static("")))
}

/// A request as it came, admitted.
struct Arrived<'request> {
    parts: Parts,
    body: Incoming,
    watch: BodyWatch,
    host: &'request HeaderValue,
    prefix: &'request str,
}

/// A request as the session gets it.
struct Outgoing {
    parts: Parts,
    body: RequestBody,
    fault: Arc<Fault>,
}

impl Outgoing {
    fn new(client: &ClientConnection, route: &Route, arrived: Arrived<'_>) -> Self {
        let Arrived {
            mut parts,
            body,
            watch,
            host,
            prefix,
        } = arrived;
        let options = &client.worker.options;
        let has_body = !body.is_end_stream();
        let length_known = body.size_hint().exact().is_some();
        let awaits_continue = has_body
            && parts.version == Version::HTTP_11
            && parts
                .headers
                .get(EXPECT)
                .is_some_and(|expect| expect.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let takes_trailers = accepts_trailers(&parts.headers);

        let headers = &mut parts.headers;
        strip_hop_by_hop(headers);
        strip_forged(headers, options.trust_forwarded);
        let host = if host.is_empty() { &NO_HOST } else { host };
        headers.entry(HOST).or_insert_with(|| host.clone());
        let session = &route.session;
        let generation = route.generation;
        Provenance {
            peer: &client.peer,
            host,
            prefix,
            session,
            generation,
        }
        .apply(headers);
        if takes_trailers {
            headers.insert(TE, HeaderValue::from_static("trailers"));
            headers.insert(CONNECTION, HeaderValue::from_static("te"));
        }
        if !awaits_continue {
            headers.remove(EXPECT);
        }
        if has_body && !length_known {
            // Said outright, because hyper takes a GET of unknown length for one without a body.
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        parts.version = Version::HTTP_11;

        let fault = Arc::new(Fault::default());
        let mut body = RequestBody::new(
            body,
            watch,
            options.body_stall_timeout,
            options.trust_forwarded,
            Arc::clone(&fault),
        );
        let continued = awaits_continue.then(|| Mutex::new(Some(body.await_continue())));
        let extensions = std::mem::replace(&mut parts.extensions, Extensions::new());
        if let Some(answer) = extensions.get::<crate::SubprotocolAnswer>() {
            parts.extensions.insert(answer.clone());
        }
        let mut outgoing = Self { parts, body, fault };
        if let Some(continued) = continued {
            outgoing.on_continue(continued);
        }
        outgoing
    }

    /// Lets the body go once the session says `100 Continue`, which then reaches the client,
    /// because hyper asks for a body as soon as it is read.
    fn on_continue(&mut self, signal: Mutex<Option<tokio::sync::oneshot::Sender<()>>>) {
        let mut carrier = Request::new(());
        hyper::ext::on_informational(&mut carrier, move |informational| {
            if informational.status() == StatusCode::CONTINUE
                && let Some(signal) = signal.lock().unwrap_or_else(PoisonError::into_inner).take()
            {
                // Nobody waits any more once the time for it is over.
                let _ = signal.send(());
            }
        });
        self.parts
            .extensions
            .extend(std::mem::take(carrier.extensions_mut()));
    }
}

/// Forwards an ordinary request, on an idle connection where there is one.
async fn forward(
    client: &Arc<ClientConnection>,
    route: &Route,
    outgoing: Outgoing,
) -> Result<Response<ResponseBody>, Unforwarded> {
    let worker = &client.worker;
    let activity = route.activity.begin();
    let Outgoing { parts, body, fault } = outgoing;
    let head_only = parts.method == Method::HEAD;
    let mut request = Request::from_parts(parts, body);
    let (response, sender) = loop {
        let pooled = worker.pool.take(&route.session, route.generation);
        let reused = pooled.is_some();
        let mut sender = match pooled {
            Some(sender) => sender,
            None => {
                let stream = backend::connect(route, &worker.options).await?;
                let handshake = backend::handshake(stream, &worker.options, false).await;
                handshake.map_err(|error| unanswered(route, error, &fault))?
            }
        };
        let sent = sender.try_send_request(request);
        match client.within_response_timeout(&route.session, sent).await? {
            Ok(response) => break (response, sender),
            Err(mut error) => match error.take_message() {
                // The session closed an idle connection at this moment: not a byte of the
                // request went out on it. Anything else is never sent twice.
                Some(unsent) if reused => request = unsent,
                _ => return Err(unanswered(route, error.into_error(), &fault)),
            },
        }
    };
    let lease = Lease::new(Arc::clone(&worker.pool), route, sender, true);
    session_response(client, route, head_only, response, lease, activity)
}

fn unanswered(route: &Route, error: hyper::Error, fault: &Fault) -> Unforwarded {
    let session = route.session.clone();
    match fault.kind() {
        Some(FaultKind::Stalled(waited)) => return Unforwarded::BodyStalled { waited },
        Some(FaultKind::Broken) => return Unforwarded::BodyBroken,
        None => {}
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

/// Turns a session's answer into the client's.
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
        return bad("a change of protocol that nobody asked for");
    }
    let mut codings = parts.headers.get_all(TRANSFER_ENCODING).iter();
    let chunked = match (codings.next(), codings.next()) {
        (None, _) => false,
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => true,
        _ => return bad("a transfer coding other than `chunked`"),
    };
    let bodiless = head_only || parts.status == StatusCode::NOT_MODIFIED;
    if !bodiless || chunked || !has_one_length(&parts) {
        // hyper says the length of what it knows the length of.
        parts.headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(&mut parts.headers);
    strip_forged(&mut parts.headers, false);
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

/// Whether the length is one number, as the answer to a HEAD must have it if at all.
fn has_one_length(parts: &http::response::Parts) -> bool {
    let mut lengths = parts.headers.get_all(CONTENT_LENGTH).iter();
    let number = lengths.next().is_some_and(|length| {
        !length.is_empty() && length.as_bytes().iter().all(u8::is_ascii_digit)
    });
    number && lengths.next().is_none()
}

impl ClientConnection {
    /// Puts the bound on the time for an answer around waiting for it.
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
