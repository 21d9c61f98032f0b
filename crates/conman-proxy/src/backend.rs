//! Connects to a session's port, or to another node.

use std::io;
use std::time::Duration;

use conman_linux::bound_tcp_buffers;
use conman_peer::{Connection, ConnectionLimits, Stream};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

use crate::answer::SessionFault;
use crate::body::RequestBody;
use crate::{ADDED_HEAD_BYTES, ADDED_HEADERS, ProxyOptions, Route, Way};

/// Time to connect to the session's port.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// TCP keepalive on both sides, which detects dead peers: silence before the first probe, time between
/// probes, and unanswered probes after which the peer counts as dead.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 4;

/// Bound on what the kernel buffers for each direction of a connection. No session pays for this memory; without a
/// bound it grows to several MB for a receiver that stops reading, until the stall time-out ends the connection.
const BUFFER_BYTES: u32 = 512 << 10;

/// A connection to the session's port.
pub(crate) async fn connect(route: &Route) -> Result<Stream, SessionFault> {
    let session = || route.session.clone();
    let waited = CONNECT_TIMEOUT;
    let stream = match tokio::time::timeout(waited, route.backend.connect()).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return Err(match error.kind() {
                io::ErrorKind::ConnectionRefused => {
                    SessionFault::ConnectRefused { session: session() }
                }
                io::ErrorKind::TimedOut => SessionFault::ConnectTimeout {
                    session: session(),
                    waited,
                },
                _ => SessionFault::ConnectFailed {
                    session: session(),
                    source: error,
                },
            });
        }
        Err(_elapsed) => {
            return Err(SessionFault::ConnectTimeout {
                session: session(),
                waited,
            });
        }
    };
    // For a node, the backend has tuned the connection.
    if route.way == Way::Session
        && let Some(socket) = stream.tcp()
    {
        tune(socket);
    }
    Ok(stream)
}

/// Starts HTTP on a connection along `way`.
pub(crate) async fn start(
    stream: Stream,
    way: &Way,
    options: &ProxyOptions,
) -> Result<Connection<RequestBody>, hyper::Error> {
    // A request that another node forwards may have grown on its way.
    let (more_bytes, more_headers) = match way {
        Way::Peer { .. } => (ADDED_HEAD_BYTES, ADDED_HEADERS),
        Way::Session | Way::Api => (0, 0),
    };
    let limits = ConnectionLimits {
        max_head_bytes: options.max_head_bytes + more_bytes,
        max_headers: options.max_headers + more_headers,
        head_timeout: options.head_timeout,
        write_stall_timeout: options.write_stall_timeout,
    };
    Connection::start(stream, &limits).await
}

/// Disables delays of small writes, and enables probes that detect a dead peer.
///
/// Best effort: a socket that is closed already shows that at its first use.
pub(crate) fn tune(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    // Probes are not sent while data is unacknowledged; this bounds that time likewise.
    let silence = KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES;
    let tuned = socket
        .set_tcp_nodelay(true)
        .and_then(|()| socket.set_tcp_keepalive(&probes))
        .and_then(|()| socket.set_tcp_user_timeout(Some(silence)))
        .and_then(|()| bound_tcp_buffers(stream, BUFFER_BYTES));
    if let Err(error) = tuned {
        tracing::debug!(%error, "cannot tune a connection");
    }
}
