//! A connection to a session, counted and limited.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::traffic::Traffic;

/// A connection whose other end is in a session: what is written goes to the session, what is read comes from it.
///
/// A place in the queue of a limit is for bytes that are there: a connection without any delays no other.
#[derive(Debug)]
pub struct MeteredStream<S> {
    stream: S,
    traffic: Arc<Traffic>,
    /// Read from the session, and not passed on yet.
    reading: Option<Queued<Vec<u8>>>,
    /// The number of bytes that are to be written.
    writing: Option<Queued<usize>>,
}

/// What may pass when its wait is over.
#[derive(Debug)]
struct Queued<T> {
    bytes: T,
    wait: Pin<Box<Sleep>>,
}

impl<T> Queued<T> {
    fn new(bytes: T, wait: Duration) -> Self {
        let wait = Box::pin(sleep(wait));
        Self { bytes, wait }
    }
}

impl<S> MeteredStream<S> {
    pub fn new(stream: S, traffic: Arc<Traffic>) -> Self {
        Self {
            stream,
            traffic,
            reading: None,
            writing: None,
        }
    }

    /// The connection itself. What passes through it is not counted.
    #[must_use]
    pub fn get_ref(&self) -> &S {
        &self.stream
    }
}

impl<S> Drop for MeteredStream<S> {
    fn drop(&mut self) {
        let Traffic { inward, outward } = &*self.traffic;
        if let (Some(bucket), Some(queued)) = (&outward.bucket, &self.reading) {
            bucket.refund(queued.bytes.len());
        }
        if let (Some(bucket), Some(queued)) = (&inward.bucket, &self.writing) {
            bucket.refund(queued.bytes);
        }
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
        let Some(bucket) = &flow.bucket else {
            let before = buffer.filled().len();
            let polled = stream.poll_read(cx, buffer);
            flow.count(buffer.filled().len() - before);
            return polled;
        };
        if this.reading.is_none() {
            let turn = bucket.turn_bytes().min(buffer.remaining());
            let mut part = ReadBuf::new(buffer.initialize_unfilled_to(turn));
            ready!(stream.poll_read(cx, &mut part))?;
            let read = part.filled().len();
            let wait = bucket.reserve(read);
            // The end of the connection is no byte.
            if read == 0 || wait.is_zero() {
                buffer.advance(read);
                flow.count(read);
                return Poll::Ready(Ok(()));
            }
            this.reading = Some(Queued::new(part.filled().to_vec(), wait));
        }
        if let Some(queued) = &mut this.reading {
            ready!(queued.wait.as_mut().poll(cx));
            // The buffer may be another one than before.
            let passed = queued.bytes.len().min(buffer.remaining());
            buffer.put_slice(&queued.bytes[..passed]);
            queued.bytes.drain(..passed);
            flow.count(passed);
        }
        this.reading.take_if(|queued| queued.bytes.is_empty());
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MeteredStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let flow = &this.traffic.inward;
        let stream = Pin::new(&mut this.stream);
        let Some(bucket) = &flow.bucket else {
            let polled = stream.poll_write(cx, bytes);
            flow.count(written(&polled));
            return polled;
        };
        let mut allowed = bucket.turn_bytes().min(bytes.len());
        if this.writing.is_none() {
            let wait = bucket.reserve(allowed);
            this.writing = (!wait.is_zero()).then(|| Queued::new(allowed, wait));
        }
        if let Some(queued) = &mut this.writing {
            ready!(queued.wait.as_mut().poll(cx));
            allowed = queued.bytes;
            this.writing = None;
        }
        // There may be fewer bytes than before.
        let polled = stream.poll_write(cx, &bytes[..allowed.min(bytes.len())]);
        let written = written(&polled);
        bucket.refund(allowed.saturating_sub(written));
        flow.count(written);
        polled
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.traffic.inward.bucket.is_some() {
            let first = parts.iter().find(|part| !part.is_empty());
            return self.poll_write(cx, first.map_or(&[][..], |part| &**part));
        }
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(cx, parts);
        this.traffic.inward.count(written(&polled));
        polled
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

fn written(polled: &Poll<io::Result<usize>>) -> usize {
    match polled {
        Poll::Ready(Ok(written)) => *written,
        Poll::Ready(Err(_)) | Poll::Pending => 0,
    }
}

#[cfg(test)]
mod tests {
    use conman_proto::Bandwidth;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::task::JoinSet;
    use tokio::time::{Instant, timeout};

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
        let waited = timeout(Duration::from_millis(100), read).await;
        waited.expect_err("the burst has passed");
        let bucket = traffic.outward.bucket.as_ref().expect("a limit");
        let before = bucket.reserve(0);
        drop(stream);
        assert!(bucket.reserve(0) < before);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_with_little_to_pass_wait_only_for_what_others_pass() {
        let traffic = traffic(Some("8mbit"), Some("8mbit"));
        let exchange = async {
            // Meanwhile the limits become used up.
            sleep(Duration::from_millis(500)).await;
            let begun = Instant::now();
            let mut tunnels = JoinSet::new();
            for _ in 0..100 {
                let (mut stream, mut session) = connection(&traffic);
                tunnels.spawn(async move {
                    session.write_all(b"few").await.expect("room");
                    let mut few = [0; 3];
                    stream.read_exact(&mut few).await.expect("read");
                    stream.write_all(&few).await.expect("room");
                });
            }
            tunnels.join_all().await;
            begun.elapsed()
        };
        let (_, _, took) = tokio::join!(receive(&traffic), send(&traffic), exchange);
        assert!(took < Duration::from_millis(100), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_that_wait_pass_in_order_and_once_whatever_the_reader_does() {
        let traffic = traffic(None, Some("128kbit"));
        let (mut stream, mut session) = connection(&traffic);
        let sent: Vec<u8> = (0..=255).cycle().take(40_000).collect();
        session.write_all(&sent).await.expect("room");
        drop(session);
        let mut received = Vec::new();
        loop {
            // It does not wait, and comes back with less room.
            let mut part = vec![0; 2_000];
            let read = timeout(Duration::from_millis(1), stream.read(&mut part)).await;
            let read = match read {
                Ok(read) => read.expect("no error"),
                Err(_) => stream.read(&mut part[..300]).await.expect("no error"),
            };
            part.truncate(read);
            if part.is_empty() {
                break;
            }
            received.extend(part);
        }
        assert!(received == sent, "{} bytes", received.len());
        assert_eq!(traffic.carried(), (0, 40_000));
    }
}
