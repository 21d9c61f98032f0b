//! HTTP: tunnels by CONNECT, and requests that name their target as an absolute URL.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_TYPE, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::task::JoinSet;

use conman_core::error_chain;
use conman_listen::{AnswerBody, HalfCloseable, OpenRequests};

use super::buffers::Sockets;
use super::dial::{DialError, dial};
use super::session::{Client, Session};
use super::shared_stream::SharedStream;
use super::tunnel;

/// Bound on the arrival of a request's head, and on the pause before the next request.
const HEAD: Duration = Duration::from_secs(30);
/// Maximum size of a head, and of what is buffered of a body.
const HEAD_BYTES: usize = 64 << 10;

type Body = BoxBody<Bytes, hyper::Error>;

/// What a client's connection leaves to its task.
struct Connection {
    sockets: Arc<Sockets>,
    /// A tunnel that begins after the answer to CONNECT.
    tunnel: Mutex<Option<(OnUpgrade, SharedStream)>>,
    /// The tasks of connections to targets.
    targets: Mutex<JoinSet<()>>,
}

pub(super) async fn serve(session: &Arc<Session>, client: Client) {
    let Client { stream, sockets } = client;
    let connection = Arc::new(Connection {
        sockets,
        tunnel: Mutex::default(),
        targets: Mutex::default(),
    });
    let requests = OpenRequests::default();
    // A client may end its sending side after the request.
    let stream = HalfCloseable::new(session.metered(stream), requests.clone());
    let service = service_fn(|request| {
        let (session, connection) = (Arc::clone(session), Arc::clone(&connection));
        let open = Some(requests.begin());
        async move {
            let response = respond(&session, &connection, request).await;
            Ok::<_, Infallible>(response.map(|body| AnswerBody::new(body, open)))
        }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
    let tunnel = connection
        .tunnel
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    if let (Ok(()), Some((upgrade, target))) = (served, tunnel)
        && let Ok(client) = upgrade.await
    {
        tunnel::run(TokioIo::new(client), target).await;
    }
}

async fn respond(
    session: &Session,
    connection: &Connection,
    mut request: Request<Incoming>,
) -> Response<Body> {
    if request.method() == Method::CONNECT {
        let Some(authority) = request.uri().authority().cloned() else {
            return bad_request(session, "CONNECT needs HOST:PORT");
        };
        let Some(port) = authority.port_u16().filter(|port| *port > 0) else {
            return bad_request(session, "CONNECT needs HOST:PORT");
        };
        return match dial(session, &connection.sockets, authority.host(), port).await {
            Ok(target) => {
                let upgrade = hyper::upgrade::on(&mut request);
                *connection
                    .tunnel
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = Some((upgrade, target));
                Response::new(Empty::new().map_err(|never| match never {}).boxed())
            }
            Err(error) => failure(authority.as_str(), &error),
        };
    }
    let uri = request.uri().clone();
    let (Some(scheme), Some(authority)) = (uri.scheme(), uri.authority()) else {
        let why = "this is a proxy: name the target as an absolute URL, or use CONNECT";
        return bad_request(session, why);
    };
    if *scheme != Scheme::HTTP {
        return bad_request(session, "only http:// URLs; use CONNECT for others");
    }
    let port = authority.port_u16().unwrap_or(80);
    match dial(session, &connection.sockets, authority.host(), port).await {
        Ok(target) => forward(connection, target, request, authority).await,
        Err(error) => failure(authority.as_str(), &error),
    }
}

/// Sends a request to its target, on a connection that is used once.
async fn forward(
    connection: &Connection,
    target: SharedStream,
    mut request: Request<Incoming>,
    authority: &Authority,
) -> Response<Body> {
    let path = request.uri().path_and_query().cloned();
    *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    *request.version_mut() = Version::HTTP_11;
    remove_hop_headers(request.headers_mut());
    let host = without_user(authority);
    let Ok(host) = HeaderValue::from_str(host) else {
        return problem(
            StatusCode::BAD_REQUEST,
            "the target's name is not a header value",
        );
    };
    request.headers_mut().insert(HOST, host);
    let close = HeaderValue::from_static("close");
    request.headers_mut().insert(CONNECTION, close);
    let sent = async {
        let (mut sender, driver) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(HEAD_BYTES)
            .handshake(TokioIo::new(target))
            .await?;
        {
            let mut targets = connection
                .targets
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            while targets.try_join_next().is_some() {}
            targets.spawn(async move {
                // Its error is the answer's, too.
                let _ = driver.await;
            });
        }
        sender.send_request(request).await
    };
    match sent.await {
        Ok(mut response) => {
            remove_hop_headers(response.headers_mut());
            response.map(BodyExt::boxed)
        }
        Err(error) => {
            let why = format!("{authority} has not answered the request: {error}");
            problem(StatusCode::BAD_GATEWAY, &why)
        }
    }
}

/// The host and port of an authority.
fn without_user(authority: &Authority) -> &str {
    let text = authority.as_str();
    text.rsplit_once('@').map_or(text, |(_, host)| host)
}

/// Removes the headers that are for this hop only (RFC 9110, section 7.6.1).
fn remove_hop_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in [
        CONNECTION,
        HeaderName::from_static("proxy-connection"),
        HeaderName::from_static("keep-alive"),
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRANSFER_ENCODING,
        UPGRADE,
    ] {
        headers.remove(name);
    }
}

fn failure(target: &str, error: &DialError) -> Response<Body> {
    let status = match error {
        DialError::Refused(_) => StatusCode::FORBIDDEN,
        DialError::Host(_) => StatusCode::BAD_REQUEST,
        DialError::Lookup(_) | DialError::Connect { .. } => StatusCode::BAD_GATEWAY,
        DialError::TimedOut { .. } => StatusCode::GATEWAY_TIMEOUT,
    };
    problem(
        status,
        &format!("conman cannot connect to {target}: {}", error_chain(error)),
    )
}

fn bad_request(session: &Session, why: &str) -> Response<Body> {
    session.refused("bad_request", "HTTP", why);
    problem(StatusCode::BAD_REQUEST, why)
}

fn problem(status: StatusCode, why: &str) -> Response<Body> {
    let text = Full::from(format!("{why}\n"));
    let mut response = Response::new(text.map_err(|never| match never {}).boxed());
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, plain);
    response
}
