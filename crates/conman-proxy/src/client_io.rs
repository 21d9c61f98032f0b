//! A client's connection as hyper sees it: bounded in time, and closed so that the last answer arrives.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use conman_listen::{Begun, EndOfInput};
use http::Version;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::ProxyOptions;
use conman_peer::{Stream, Watchdog};

/// How long a connection is read, and its data dropped, after an answer that may have preceded the
/// end of the request: closing it with unread bytes would reset it, and the client might lose the
/// answer.
const LINGER: Duration = Duration::from_secs(2);

/// Bytes dropped in one read while lingering.
const LINGER_READ_BYTES: usize = 4 * 1024;

/// State shared by the service and the connection below it. Both run on one worker; the atomics
/// only satisfy the compiler.
#[derive(Debug, Default)]
pub(crate) struct Exchanges {
    /// Requests that hyper has passed to the service.
    begun: AtomicU64,
    /// Exchanges whose answer has not ended.
    open: AtomicU64,
    /// An answer that ends with the connection was cut: reset the connection instead of closing it.
    cut: AtomicBool,
}

impl Exchanges {
    /// Begins the exchange that hyper passed on.
    pub(crate) fn begin(self: &Arc<Self>, version: Version) -> Ticket {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        Ticket {
            exchanges: Arc::clone(self),
            close_is_end: version == Version::HTTP_10,
        }
    }
}

/// One exchange; dropping it is its end.
#[derive(Debug)]
pub(crate) struct Ticket {
    exchanges: Arc<Exchanges>,
    /// The client takes the connection's end for the answer's.
    close_is_end: bool,
}

impl Ticket {
    /// The answer stops before its end.
    pub(crate) fn cut(&self) {
        if self.close_is_end {
            self.exchanges.cut.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.exchanges.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A client's connection as hyper sees it, bounded in time.
///
/// While no exchange is open, it waits for a head: `idle_timeout`, at most twice that, for the first
/// byte, and `head_timeout` for the rest. While one is open, only writing is bounded here; the request's
/// body has its own bound.
#[derive(Debug)]
pub(crate) struct ClientIo {
    socket: Socket,
    exchanges: Arc<Exchanges>,
    /// Exchanges that had begun when `waiting` was last updated.
    begun: u64,
    limits: Limits,
    read_watch: Watchdog,
    waiting: Waiting,
    write_watch: Watchdog,
    end_of_input: EndOfInput,
    /// Set once the write side is shut down: how long the rest is read and dropped.
    lingers_until: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Limits {
    head: Duration,
    idle: Duration,
    write_stall: Duration,
}

/// What a read waits for, and its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    /// The first byte of a head.
    Idle { until: Instant },
    /// The rest of a head.
    Head { until: Instant },
    /// The client, during an exchange.
    Nothing,
}

impl ClientIo {
    pub(crate) fn new(
        stream: Begun<Stream>,
        exchanges: Arc<Exchanges>,
        options: &ProxyOptions,
    ) -> Self {
        let limits = Limits {
            head: options.head_timeout,
            idle: options.idle_timeout,
            write_stall: options.write_stall_timeout,
        };
        Self {
            socket: Socket {
                stream: Some(stream),
                exchanges: Arc::clone(&exchanges),
            },
            exchanges,
            begun: 0,
            limits,
            read_watch: Watchdog::default(),
            // The first head has arrived.
            waiting: Waiting::Head {
                until: Instant::now() + limits.head,
            },
            write_watch: Watchdog::default(),
            end_of_input: EndOfInput::default(),
            lingers_until: None,
        }
    }

    /// The socket, for a tunnel, and the bytes that were read from it and not used yet.
    pub(crate) fn into_parts(mut self) -> (Stream, Vec<u8>) {
        let stream = self.socket.stream.take();
        stream.expect(Socket::TAKEN_LAST).into_parts()
    }

    /// `received`: some bytes, rather than none yet.
    fn update_waiting(&mut self, received: bool) {
        let begun = self.exchanges.begun.load(Ordering::Relaxed);
        let open = self.exchanges.open.load(Ordering::Relaxed) > 0;
        if open || begun != self.begun {
            self.begun = begun;
            self.waiting = Waiting::Nothing;
        }
        let after = |limit| Instant::now() + limit;
        self.waiting = match (self.waiting, received) {
            _ if open => Waiting::Nothing,
            (Waiting::Nothing | Waiting::Idle { .. }, true) => Waiting::Head {
                until: after(self.limits.head),
            },
            (Waiting::Nothing, false) => Waiting::Idle {
                until: after(self.limits.idle),
            },
            (waiting @ (Waiting::Idle { .. } | Waiting::Head { .. }), _) => waiting,
        };
    }

    fn poll_read_timeout(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.update_waiting(false);
        let until = match self.waiting {
            Waiting::Nothing => {
                // hyper need not read again at the end of the exchange, so look then.
                let later = Instant::now() + self.limits.idle;
                let _ = self.read_watch.poll_until(cx, later);
                return Poll::Pending;
            }
            Waiting::Idle { until } | Waiting::Head { until } => until,
        };
        ready!(self.read_watch.poll_until(cx, until));
        if matches!(self.waiting, Waiting::Head { .. }) {
            // Nothing else is being written, since no exchange is open. A client that does not even
            // accept this line gets none.
            if let Some(socket) = self.socket.stream().get_ref().tcp() {
                let _ = socket.try_write(
                    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\
                      content-length: 0\r\n\r\n",
                );
            }
        }
        Poll::Ready(io::ErrorKind::TimedOut.into())
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut Begun<Stream>>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match write(self.socket.pinned(), cx) {
            Poll::Ready(result) => {
                self.write_watch.calm();
                self.end_of_input.client_reads();
                Poll::Ready(result)
            }
            Poll::Pending => {
                ready!(self.write_watch.poll(cx, self.limits.write_stall));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        match this.socket.pinned().poll_read(cx, buf) {
            Poll::Ready(result) => {
                if buf.filled().len() > before {
                    this.update_waiting(true);
                } else if result.is_ok() && buf.remaining() > 0 {
                    // Only clients end their input and wait; another node that does so has given up.
                    let open = this.socket.stream().get_ref().tcp().is_some()
                        && this.exchanges.open.load(Ordering::Relaxed) > 0;
                    ready!(this.end_of_input.poll(cx, open));
                }
                Poll::Ready(result)
            }
            Poll::Pending => {
                let error = ready!(this.poll_read_timeout(cx));
                Poll::Ready(Err(error))
            }
        }
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream, cx| stream.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream, cx| stream.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.pinned().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let until = match this.lingers_until {
            Some(until) => until,
            None => {
                ready!(this.socket.pinned().poll_shutdown(cx))?;
                if matches!(this.waiting, Waiting::Idle { .. }) {
                    return Poll::Ready(Ok(()));
                }
                let until = Instant::now() + LINGER;
                this.lingers_until = Some(until);
                until
            }
        };
        loop {
            let mut bytes = [0; LINGER_READ_BYTES];
            let mut rest = ReadBuf::new(&mut bytes);
            match this.socket.pinned().poll_read(cx, &mut rest) {
                Poll::Ready(Ok(())) if !rest.filled().is_empty() => {
                    if Instant::now() >= until {
                        return Poll::Ready(Ok(()));
                    }
                }
                Poll::Ready(Ok(()) | Err(_)) => return Poll::Ready(Ok(())),
                Poll::Pending => return this.read_watch.poll_until(cx, until).map(Ok),
            }
        }
    }
}

/// The socket, which is reset instead of closed if an answer on it was cut.
#[derive(Debug)]
struct Socket {
    /// `None` only after it was taken by value.
    stream: Option<Begun<Stream>>,
    exchanges: Arc<Exchanges>,
}

impl Socket {
    const TAKEN_LAST: &str = "the stream is taken by value only when nothing else can follow";

    fn stream(&mut self) -> &mut Begun<Stream> {
        self.stream.as_mut().expect(Self::TAKEN_LAST)
    }

    fn pinned(&mut self) -> Pin<&mut Begun<Stream>> {
        Pin::new(self.stream())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // With TLS, the reader can distinguish an end from a cut.
        if let Some(stream) = self
            .stream
            .as_ref()
            .and_then(|stream| stream.get_ref().tcp())
            && self.exchanges.cut.load(Ordering::Relaxed)
        {
            let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
        }
    }
}
