//! Serves the router on a TCP or a Unix listener, with bounds that `axum::serve` lacks: time and
//! size of headers (which also bounds idle keep-alive connections), number of connections,
//! detection of dead peers.
//!
//! One task accepts. Every connection has a tracked task, so that shutdown can stop accepting,
//! let requests finish for a bounded time, and then close the rest.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use conman_linux::bound_tcp_buffers;
use conman_listen::{AnswerBody, Begun, HalfCloseable, OpenRequests, Place, Places};
use conman_watchdog::TaskProgress;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

/// Limits for clients' connections.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Most connections at a time. For one more, the oldest without a completed request is closed;
    /// if there is none, the new one waits.
    pub max_connections: usize,
    /// Time for a whole request head, and the longest idle time between two requests.
    pub header_timeout: Duration,
    /// Most header fields in a request; 431 above.
    pub max_headers: usize,
    /// Most bytes of a request's head; 431 above.
    pub max_header_bytes: usize,
    /// Time for open requests to finish after shutdown began.
    pub patience: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            max_connections: 1_024,
            header_timeout: Duration::from_secs(15),
            max_headers: 100,
            // The query of an interactive command contains it percent-encoded.
            max_header_bytes: 64 * 1024,
            patience: Duration::from_secs(5),
        }
    }
}

/// The peer of a connection; an extension of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A client on the network.
    Tcp(SocketAddr),
    /// A process of this host, with credentials from the kernel.
    Unix {
        /// Its effective user at the time it connected.
        uid: u32,
        /// Its effective group at the time it connected.
        gid: u32,
        /// Its process id, for the log; the process may have ended and the id be reused.
        pid: Option<i32>,
    },
    /// Another node, which the listener for nodes has authenticated.
    Node,
}

impl Peer {
    /// The peer's address; this host's if it does not come over the network.
    fn address(&self) -> IpAddr {
        match self {
            Self::Tcp(address) => address.ip(),
            Self::Unix { .. } | Self::Node => Ipv4Addr::LOCALHOST.into(),
        }
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => write!(formatter, "{address}"),
            Self::Unix {
                uid,
                pid: Some(pid),
                ..
            } => write!(formatter, "uid {uid} pid {pid}"),
            Self::Unix { uid, pid: None, .. } => write!(formatter, "uid {uid}"),
            Self::Node => formatter.write_str("another node"),
        }
    }
}

/// Serves `router` on a TCP listener until `shutdown`, then at most `options.patience` longer.
/// Its heartbeat shows that it accepts.
pub async fn serve_tcp(
    listener: TcpListener,
    router: Router,
    options: ServeOptions,
    shutdown: CancellationToken,
    progress: TaskProgress,
) {
    serve("api", listener, router, options, shutdown, progress).await;
}

/// Serves `router` on a Unix listener; [`Peer::Unix`] identifies the client.
pub async fn serve_unix(
    listener: UnixListener,
    router: Router,
    options: ServeOptions,
    shutdown: CancellationToken,
    progress: TaskProgress,
) {
    serve("admin", listener, router, options, shutdown, progress).await;
}

/// Serves `router` on one connection of another node, until the connection or the daemon ends.
pub async fn serve_node<S>(
    stream: S,
    router: Router,
    options: ServeOptions,
    shutdown: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let http = Http::new(options);
    serve_connection(&http, stream, Peer::Node, None, router, shutdown).await;
}

/// Time after which a silent peer is probed, and between two probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(45);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Longest time that sent bytes or probes may stay unacknowledged, or a peer may refuse to read. With it the
/// kernel does not count probes (tcp(7)).
const USER_TIMEOUT: Duration = Duration::from_secs(120);

/// Bound on what the kernel buffers for each direction of a connection, for example of files and logs for a client
/// that does not read.
const SOCKET_BUFFER_BYTES: u32 = 1 << 20;

/// Pause after a failed accept: without descriptors, an immediate retry only wastes processor
/// time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Read buffer of a connection: large enough for the largest head; bodies pass through it.
const MAX_BUFFER_BYTES: usize = 96 * 1024;

/// A listener of either family.
trait Listen: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    fn next(&self) -> impl Future<Output = io::Result<(Self::Stream, Peer)>> + Send;
}

impl Listen for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<(TcpStream, Peer)> {
        let (stream, address) = self.accept().await?;
        let socket = SockRef::from(&stream);
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL);
        socket.set_tcp_keepalive(&keepalive)?;
        socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
        socket.set_tcp_nodelay(true)?;
        bound_tcp_buffers(&stream, SOCKET_BUFFER_BYTES)?;
        Ok((stream, Peer::Tcp(address)))
    }
}

impl Listen for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<(UnixStream, Peer)> {
        let (stream, _) = self.accept().await?;
        let credentials = stream.peer_cred()?;
        let peer = Peer::Unix {
            uid: credentials.uid(),
            gid: credentials.gid(),
            pid: credentials.pid(),
        };
        Ok((stream, peer))
    }
}

async fn serve<L: Listen>(
    name: &'static str,
    listener: L,
    router: Router,
    options: ServeOptions,
    shutdown: CancellationToken,
    progress: TaskProgress,
) {
    let places = Places::new(name, options.max_connections);
    let patience = options.patience;
    let connections = TaskTracker::new();
    let abort = CancellationToken::new();
    let http = Arc::new(Http::new(options));
    // Cancel safe: at shutdown, at most a connection that was never served is lost.
    let next = || shutdown.run_until_cancelled(accept(&listener, &places));
    while let Some(accepted) = progress.idle(next()).await {
        match accepted {
            Ok((stream, peer, place)) => {
                let (http, router) = (Arc::clone(&http), router.clone());
                let (shutdown, abort) = (shutdown.clone(), abort.clone());
                connections.spawn(async move {
                    let evicted = place.evicted();
                    let place = Some(Arc::new(place));
                    let serving = serve_connection(&http, stream, peer, place, router, shutdown);
                    tokio::select! {
                        // First, so that a request that has arrived is read, which keeps the
                        // connection if its caller is known.
                        biased;
                        () = serving => {}
                        // Both close the connection, as intended.
                        () = evicted => {}
                        () = abort.cancelled() => {}
                    }
                });
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    connections.close();
    let served = tokio::time::timeout(patience, connections.wait());
    if progress.wait(patience, served).await.is_err() {
        tracing::info!(connections = connections.len(), "closing connections");
        abort.cancel();
        connections.wait().await;
    }
}

async fn accept<L: Listen>(
    listener: &L,
    places: &Arc<Places>,
) -> io::Result<(L::Stream, Peer, Place)> {
    let (stream, peer) = listener.next().await?;
    let place = places.wait(peer.address()).await;
    Ok((stream, peer, place))
}

/// How connections are served.
struct Http {
    options: ServeOptions,
    builder: http1::Builder,
}

impl Http {
    fn new(options: ServeOptions) -> Self {
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(options.header_timeout)
            .max_headers(options.max_headers)
            .max_header_size(options.max_header_bytes)
            .max_buf_size(MAX_BUFFER_BYTES);
        Self { options, builder }
    }
}

/// `place`: the connection's place, if it has one.
async fn serve_connection<S>(
    http: &Http,
    stream: S,
    peer: Peer,
    place: Option<Arc<Place>>,
    router: Router,
    shutdown: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let options = &http.options;
    let (most, patience) = (options.max_header_bytes, options.header_timeout);
    match conman_listen::begin(stream, most, patience, shutdown.cancelled()).await {
        Ok(Some(begun)) => {
            // On the heap, so that an idle connection needs no room for it.
            Box::pin(serve_http(http, begun, peer, place, router, shutdown)).await;
        }
        Ok(None) => {}
        Err(error) => {
            tracing::debug!(%peer, error = &error as &dyn std::error::Error, "no request came");
        }
    }
}

async fn serve_http<S>(
    http: &Http,
    begun: Begun<S>,
    peer: Peer,
    place: Option<Arc<Place>>,
    router: Router,
    shutdown: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let requests = OpenRequests::default();
    let connection = HalfCloseable::new(begun, requests.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        // A node whose client has left closes its connection, and waits for no answer.
        let open = (!matches!(peer, Peer::Node)).then(|| requests.begin());
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(peer);
        if let Some(place) = &place {
            request.extensions_mut().insert(Arc::clone(place));
        }
        let (router, place) = (router.clone(), place.clone());
        async move {
            let response = router.oneshot(request).await;
            if let Some(place) = place {
                place.answered();
            }
            response.map(|response| response.map(|body| AnswerBody::new(body, open)))
        }
    });
    let connection = http
        .builder
        .serve_connection(TokioIo::new(connection), service)
        .with_upgrades();
    let mut connection = Box::pin(connection);
    // The connection is only borrowed here: after a shutdown it is served below.
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%peer, error = &error as &dyn std::error::Error, "connection ended");
    }
}

#[cfg(test)]
mod tests;
