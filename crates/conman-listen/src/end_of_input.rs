//! Clients that end their sending side after a request, as `printf … | nc` does, and wait for the answer.
//!
//! hyper gives a request up at the end of its connection's input. Here the end is reported only once no request is
//! open, or after a grace: a client that has disconnected looks the same, and its request must end.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// How long a request is continued after the end of its client's input while the client takes nothing.
const GRACE: Duration = Duration::from_secs(10);

/// Delays the end of a connection's input.
#[derive(Debug, Default)]
pub struct EndOfInput {
    /// Runs since the end, or since the client took something after it.
    timer: Option<Pin<Box<Sleep>>>,
}

impl EndOfInput {
    /// Called when a read has found the end. Ready once the reader must see it; `open`: while a request is.
    pub fn poll(&mut self, cx: &mut Context<'_>, open: bool) -> Poll<()> {
        if !open {
            return Poll::Ready(());
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(GRACE)));
        timer.as_mut().poll(cx)
    }

    /// The client has taken bytes of the answer.
    pub fn client_reads(&mut self) {
        if let Some(timer) = &mut self.timer {
            timer.as_mut().reset(Instant::now() + GRACE);
        }
    }
}

/// Counts the open requests of one connection.
#[derive(Debug, Clone, Default)]
pub struct OpenRequests(Arc<AtomicUsize>);

/// A request, open until this is dropped.
#[derive(Debug)]
pub struct OpenRequest(OpenRequests);

impl OpenRequests {
    #[must_use]
    pub fn begin(&self) -> OpenRequest {
        self.0.fetch_add(1, Ordering::Relaxed);
        OpenRequest(self.clone())
    }

    fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection whose requests are answered after the end of its input.
#[derive(Debug)]
pub struct HalfCloseable<S> {
    stream: S,
    open: OpenRequests,
    end: EndOfInput,
}

impl<S> HalfCloseable<S> {
    pub fn new(stream: S, open: OpenRequests) -> Self {
        Self {
            stream,
            open,
            end: EndOfInput::default(),
        }
    }

    /// The connection itself.
    pub fn into_inner(self) -> S {
        self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HalfCloseable<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        if buf.filled().len() == before && buf.remaining() > 0 {
            ready!(this.end.poll(cx, this.open.any()));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HalfCloseable<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, buf));
        self.end.client_reads();
        Poll::Ready(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs));
        self.end.client_reads();
        Poll::Ready(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_end_of_input_is_reported_when_no_request_is_open_or_after_the_grace() {
        let (mut client, server) = duplex(64);
        let open = OpenRequests::default();
        let mut server = HalfCloseable::new(server, open.clone());
        client.shutdown().await.expect("shut down");
        let began = Instant::now();
        assert_eq!(server.read(&mut [0; 8]).await.expect("the end"), 0);
        assert_eq!(began.elapsed(), Duration::ZERO);

        let request = open.begin();
        assert_eq!(server.read(&mut [0; 8]).await.expect("the end"), 0);
        assert!((GRACE..GRACE * 2).contains(&began.elapsed()));

        // While the client takes the answer, it is there.
        let (mut client, stream) = duplex(64);
        let mut server = HalfCloseable::new(stream, open.clone());
        client.shutdown().await.expect("shut down");
        let began = Instant::now();
        for _ in 0..3 {
            let read = tokio::time::timeout(GRACE / 2, server.read(&mut [0; 8])).await;
            assert!(read.is_err(), "the end is not reported yet");
            server.write_all(b"x").await.expect("room");
        }
        assert_eq!(server.read(&mut [0; 8]).await.expect("the end"), 0);
        assert!(began.elapsed() >= GRACE * 5 / 2);
        drop(request);
    }
}
