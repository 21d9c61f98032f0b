use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::answer::SessionFault;
use crate::answer_heads::{AnswerHeads, Awaited, HeadFault};
use crate::body::RequestBody;
use crate::pool::Wire;
use crate::watchdog::Watchdog;
use crate::{HOP_HEAD_BYTES, HOP_HEADERS, ProxyOptions, Route, Stream, Way};

/// Time to connect to the session's port.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// TCP keepalive on both sides, which detects dead peers: silence before the first probe, time between
/// probes, and unanswered probes after which the peer counts as dead.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 4;

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
pub(crate) async fn handshake(
    stream: Stream,
    way: &Way,
    options: &ProxyOptions,
) -> Result<Wire, hyper::Error> {
    // A request that another node forwards may have grown on its way.
    let (more_bytes, more_headers) = match way {
        Way::Peer { .. } => (HOP_HEAD_BYTES, HOP_HEADERS),
        Way::Session | Way::Api => (0, 0),
    };
    let awaited = Awaited::default();
    let heads = AnswerHeads::new(awaited.clone(), options.head_timeout);
    let io = TokioIo::new(BackendIo::new(stream, heads, options.write_stall_timeout));
    let (sender, connection): (SendRequest<RequestBody>, _) = Builder::new()
        .max_buf_size(options.max_head_bytes + more_bytes)
        .max_headers(options.max_headers + more_headers)
        .handshake(io)
        .await?;
    // The task ends with the connection: when the session closes it, or the sender and the last
    // body on it are dropped.
    tokio::spawn(async move {
        let ended = connection.with_upgrades().await;
        tracing::trace!(error = ?ended.err(), "connection to a session ended");
    });
    Ok(Wire { sender, awaited })
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
        .and_then(|()| socket.set_tcp_user_timeout(Some(silence)));
    if let Err(error) = tuned {
        tracing::debug!(%error, "cannot tune a connection");
    }
}

/// A connection to a session as hyper sees it: writing is bounded, and so is the time for a head
/// that has begun. Otherwise a session may be silent for any time.
///
/// Many programs refuse an upload without reading it, answer, and close, which resets the
/// connection. hyper would give up at the first failed write, with the answer unread. So bytes
/// that cannot be written any more are dropped: reading then finds the answer, or the
/// connection's end.
#[derive(Debug)]
pub(crate) struct BackendIo {
    stream: Stream,
    /// The session reads no more.
    deaf: bool,
    heads: AnswerHeads,
    read_watch: Watchdog,
    write_watch: Watchdog,
    write_stall: Duration,
}

impl BackendIo {
    pub(crate) fn new(stream: Stream, heads: AnswerHeads, write_stall: Duration) -> Self {
        Self {
            stream,
            deaf: false,
            heads,
            read_watch: Watchdog::default(),
            write_watch: Watchdog::default(),
            write_stall,
        }
    }

    /// The socket, for a tunnel.
    pub(crate) fn into_stream(self) -> Stream {
        self.stream
    }

    /// The result that hyper gets for writing `offered` bytes.
    fn outcome(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        offered: usize,
    ) -> Poll<io::Result<usize>> {
        if written.is_pending() {
            ready!(self.write_watch.poll(cx, self.write_stall));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        self.write_watch.calm();
        if let Poll::Ready(Err(error)) = &written
            && matches!(
                error.kind(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
            )
        {
            self.deaf = true;
            return Poll::Ready(Ok(offered));
        }
        written
    }
}

impl AsyncRead for BackendIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        if read.is_ready() {
            let observed = this.heads.observe(&buf.filled()[before..]);
            return observed
                .map_or_else(|fault| Poll::Ready(Err(io::Error::other(fault))), |()| read);
        }
        if let Some(until) = this.heads.until() {
            ready!(this.read_watch.poll_until(cx, until));
            return Poll::Ready(Err(io::Error::other(HeadFault::Slow)));
        }
        Poll::Pending
    }
}

impl AsyncWrite for BackendIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.deaf {
            return Poll::Ready(Ok(buf.len()));
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.outcome(cx, written, buf.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let offered = bufs.iter().map(|buf| buf.len()).sum();
        if self.deaf {
            return Poll::Ready(Ok(offered));
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.outcome(cx, written, offered)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
