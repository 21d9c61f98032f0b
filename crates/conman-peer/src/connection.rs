//! HTTP/1.1 on one connection to a session or to another node. Writing is bounded in time, and so is a
//! head that has begun.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::Stream;
use crate::answer_heads::{AnswerHeads, Awaited, HeadFault};
use crate::watchdog::Watchdog;

/// The limits of one connection.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// Most bytes of an answer's head; at least 8,192.
    pub max_head_bytes: usize,
    /// Most fields of an answer's head.
    pub max_headers: usize,
    /// Time for an answer's whole head, from its first byte.
    pub head_timeout: Duration,
    /// Longest time without progress while bytes wait to be written.
    pub write_stall_timeout: Duration,
}

/// A connection that requests can be sent on, one after the other.
pub struct Connection<B> {
    sender: SendRequest<B>,
    awaited: Awaited,
    opened: Instant,
}

impl<B> Connection<B>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// Starts HTTP on a stream. An answer keeps the spelling of its fields' names, in its extensions:
    /// an HTTP/1.1 client of a session may depend on it.
    ///
    /// # Errors
    /// As hyper returns them.
    pub async fn start(stream: Stream, limits: &ConnectionLimits) -> Result<Self, hyper::Error> {
        let awaited = Awaited::default();
        let heads = AnswerHeads::new(awaited.clone(), limits.head_timeout);
        let io = ConnectionIo::new(stream, heads, limits.write_stall_timeout);
        let (sender, connection) = Builder::new()
            .max_buf_size(limits.max_head_bytes)
            .max_headers(limits.max_headers)
            .preserve_header_case(true)
            .handshake(TokioIo::new(io))
            .await?;
        // The task ends with the connection: when the other end closes it, or the sender and the last
        // body on it are dropped.
        tokio::spawn(async move {
            let ended = connection.with_upgrades().await;
            tracing::trace!(error = ?ended.err(), "connection ended");
        });
        Ok(Self {
            sender,
            awaited,
            opened: Instant::now(),
        })
    }

    /// Sends a request, and returns the answer once its head has arrived. The error has the request if
    /// not a byte of it was sent. Cancelling closes the connection.
    pub fn send(
        &mut self,
        request: Request<B>,
    ) -> impl Future<Output = Result<Response<Incoming>, TrySendError<Request<B>>>> + use<B> {
        self.awaited.begin();
        self.sender.try_send_request(request)
    }
}

impl<B> Connection<B> {
    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Whether it can take a request at once.
    pub(crate) fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    pub(crate) fn age(&self) -> Duration {
        self.opened.elapsed()
    }
}

impl<B> std::fmt::Debug for Connection<B> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Connection").finish_non_exhaustive()
    }
}

/// A connection as hyper sees it: writing is bounded, and so is the time for a head that has begun.
/// Otherwise the other end may be silent for any time.
///
/// Many programs refuse an upload without reading it, answer, and close, which resets the
/// connection. hyper would give up at the first failed write, with the answer unread. So bytes
/// that cannot be written any more are dropped: reading then finds the answer, or the
/// connection's end.
#[derive(Debug)]
pub struct ConnectionIo {
    stream: Stream,
    /// The other end reads no more.
    is_write_closed: bool,
    heads: AnswerHeads,
    read_watch: Watchdog,
    write_watch: Watchdog,
    write_stall: Duration,
}

impl ConnectionIo {
    fn new(stream: Stream, heads: AnswerHeads, write_stall: Duration) -> Self {
        Self {
            stream,
            is_write_closed: false,
            heads,
            read_watch: Watchdog::default(),
            write_watch: Watchdog::default(),
            write_stall,
        }
    }

    /// The socket, for a tunnel.
    #[must_use]
    pub fn into_stream(self) -> Stream {
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
            self.is_write_closed = true;
            return Poll::Ready(Ok(offered));
        }
        written
    }
}

impl AsyncRead for ConnectionIo {
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

impl AsyncWrite for ConnectionIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_write_closed {
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
        if self.is_write_closed {
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
