//! A connection to a session, counted and limited.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::traffic::{Flow, Traffic};

/// A connection whose other end is in a session: what is written goes to the session, what is read comes from it.
#[derive(Debug)]
pub struct MeteredStream<S> {
    stream: S,
    traffic: Arc<Traffic>,
    reading: Turn,
    writing: Turn,
}

/// A place in the queue of a limit.
#[derive(Debug, Default)]
enum Turn {
    #[default]
    None,
    /// Reserved bytes, which may not pass yet.
    Waits(usize, Pin<Box<Sleep>>),
    /// Reserved bytes, which may pass.
    Has(usize),
}

impl<S> MeteredStream<S> {
    pub fn new(stream: S, traffic: Arc<Traffic>) -> Self {
        Self {
            stream,
            traffic,
            reading: Turn::None,
            writing: Turn::None,
        }
    }

    /// The connection itself. What passes through it is not counted.
    #[must_use]
    pub fn get_ref(&self) -> &S {
        &self.stream
    }
}

impl Turn {
    /// Ready with the bytes that may pass; `None` without a limit.
    fn poll(&mut self, flow: &Flow, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        let Some(bucket) = &flow.bucket else {
            return Poll::Ready(None);
        };
        if let Self::None = self {
            let bytes = bucket.turn_bytes();
            let wait = bucket.reserve(bytes);
            *self = match wait.is_zero() {
                true => Self::Has(bytes),
                false => Self::Waits(bytes, Box::pin(sleep(wait))),
            };
        }
        if let Self::Waits(bytes, wait) = self {
            ready!(wait.as_mut().poll(cx));
            *self = Self::Has(*bytes);
        }
        match self {
            Self::Has(bytes) => Poll::Ready(Some(*bytes)),
            Self::None | Self::Waits(..) => Poll::Pending,
        }
    }

    /// Ends the turn: so many bytes have passed.
    fn end(&mut self, flow: &Flow, passed: usize) {
        flow.count(passed);
        if let (Some(bucket), Self::Has(bytes) | Self::Waits(bytes, _)) =
            (&flow.bucket, std::mem::take(self))
        {
            bucket.refund(bytes.saturating_sub(passed));
        }
    }
}

impl<S> Drop for MeteredStream<S> {
    fn drop(&mut self) {
        self.reading.end(&self.traffic.outward, 0);
        self.writing.end(&self.traffic.inward, 0);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for MeteredStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flow = &this.traffic.outward;
        let stream = Pin::new(&mut this.stream);
        let before = buffer.filled().len();
        let polled = match ready!(this.reading.poll(flow, cx)) {
            None => stream.poll_read(cx, buffer),
            Some(bytes) => {
                let bytes = bytes.min(buffer.remaining());
                let mut part = ReadBuf::new(buffer.initialize_unfilled_to(bytes));
                let polled = stream.poll_read(cx, &mut part);
                let read = part.filled().len();
                buffer.advance(read);
                polled
            }
        };
        // Without bytes, too: an idle connection keeps no place.
        this.reading.end(flow, buffer.filled().len() - before);
        polled
    }
}

impl<S: AsyncWrite + Unpin> MeteredStream<S> {
    /// Writes by `write`, which gets the number of bytes that may pass, if there is a limit.
    fn poll_written(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>, Option<usize>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let flow = &self.traffic.inward;
        let allowed = ready!(self.writing.poll(flow, cx));
        let polled = write(Pin::new(&mut self.stream), cx, allowed);
        let written = match &polled {
            Poll::Ready(Ok(written)) => *written,
            Poll::Ready(Err(_)) | Poll::Pending => 0,
        };
        self.writing.end(flow, written);
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MeteredStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_written(cx, |stream, cx, allowed| {
            let length = allowed.map_or(bytes.len(), |allowed| allowed.min(bytes.len()));
            stream.poll_write(cx, &bytes[..length])
        })
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut()
            .poll_written(cx, |stream, cx, allowed| match allowed {
                None => stream.poll_write_vectored(cx, parts),
                Some(allowed) => {
                    let first = parts.iter().find(|part| !part.is_empty());
                    let first = first.map_or(&[][..], |part| &**part);
                    stream.poll_write(cx, &first[..allowed.min(first.len())])
                }
            })
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use conman_proto::Bandwidth;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::time::Instant;

    use super::*;

    const BYTES: usize = 2_000_000;

    fn traffic(inward: Option<&str>, outward: Option<&str>) -> Arc<Traffic> {
        let rate = |text: &str| text.parse().expect("a rate");
        Arc::new(Traffic::new(&Bandwidth {
            inward: inward.map(rate),
            outward: outward.map(rate),
        }))
    }

    fn connection(traffic: &Arc<Traffic>) -> (MeteredStream<DuplexStream>, DuplexStream) {
        let (stream, session) = duplex(64 << 10);
        (MeteredStream::new(stream, Arc::clone(traffic)), session)
    }

    /// Sends `BYTES` from the session, and returns how long that took.
    async fn receive(traffic: &Arc<Traffic>) -> Duration {
        let (mut stream, mut session) = connection(traffic);
        let begun = Instant::now();
        let sending = async move { session.write_all(&vec![7; BYTES]).await };
        let mut received = Vec::new();
        let (sent, read) = tokio::join!(sending, stream.read_to_end(&mut received));
        sent.expect("it is read");
        assert_eq!(read.expect("no error"), BYTES);
        begun.elapsed()
    }

    async fn send(traffic: &Arc<Traffic>) -> Duration {
        let (mut stream, mut session) = connection(traffic);
        let begun = Instant::now();
        let sending = async move {
            stream.write_all(&vec![7; BYTES]).await.expect("it is read");
        };
        let mut received = Vec::new();
        let ((), read) = tokio::join!(sending, session.read_to_end(&mut received));
        assert_eq!(read.expect("no error"), BYTES);
        begun.elapsed()
    }

    fn assert_about(took: Duration, seconds: f64) {
        let ratio = took.as_secs_f64() / seconds;
        assert!((0.85..=1.05).contains(&ratio), "{took:?} for {seconds} s");
    }

    #[tokio::test(start_paused = true)]
    async fn each_direction_has_its_rate() {
        let traffic = traffic(Some("16mbit"), Some("8mbit"));
        assert_about(send(&traffic).await, 1.0);
        assert_about(receive(&traffic).await, 2.0);
        assert_eq!(traffic.carried(), (BYTES as u64, BYTES as u64));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_bytes_are_counted_and_not_delayed() {
        let traffic = traffic(None, Some("8mbit"));
        assert_eq!(send(&traffic).await, Duration::ZERO);
        assert_eq!(traffic.carried(), (BYTES as u64, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_share_a_limit_and_take_turns() {
        let traffic = traffic(None, Some("8mbit"));
        // Idle ones take nothing from it.
        let mut idle: Vec<_> = (0..100).map(|_| connection(&traffic)).collect();
        for (stream, _) in &mut idle {
            let mut cx = Context::from_waker(std::task::Waker::noop());
            let polled = Pin::new(stream).poll_read(&mut cx, &mut ReadBuf::new(&mut [0]));
            assert!(polled.is_pending());
        }
        let (one, other) = tokio::join!(receive(&traffic), receive(&traffic));
        assert_about(one, 4.0);
        assert_about(other, 4.0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_ends_while_it_waits_gives_its_place_back() {
        let traffic = traffic(None, Some("128kbit"));
        let (mut stream, mut session) = connection(&traffic);
        session.write_all(&[7; 32 << 10]).await.expect("room");
        let read = async {
            let mut buffer = vec![0; 32 << 10];
            while stream.read(&mut buffer).await.is_ok() {}
        };
        let waited = tokio::time::timeout(Duration::from_millis(100), read).await;
        waited.expect_err("the burst has passed");
        let bucket = traffic.outward.bucket.as_ref().expect("a limit");
        let before = bucket.reserve(0);
        drop(stream);
        assert!(bucket.reserve(0) < before);
    }
}
