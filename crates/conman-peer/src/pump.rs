//! Moves the bytes of a tunnel one way.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use metrics::Counter;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::buffers::Buffer;
use crate::frames::FrameTracker;
use crate::watchdog::Watchdog;

/// Reads in one turn before the worker's other tunnels get theirs. With full buffers that is 1
/// MiB; an exchange of small messages needs one.
const MAX_READS: usize = 8;

/// Moves bytes one way. It owns a buffer only while it holds bytes.
#[derive(Debug)]
pub(crate) struct Direction {
    /// Bytes that were read before the tunnel began.
    early: Bytes,
    buffer: Option<Buffer>,
    /// The part of the buffer that is not written yet.
    start: usize,
    end: usize,
    /// Nothing more will be read.
    ended: bool,
    /// TLS may still hold back written bytes.
    unflushed: bool,
    stall: Watchdog,
    stall_timeout: Duration,
    moved: u64,
    counter: Counter,
}

/// Why no more bytes can be moved.
#[derive(Debug, Error)]
pub(crate) enum PumpError {
    #[error("the sending side broke")]
    Read(#[source] io::Error),
    #[error("the receiving side broke")]
    Write(#[source] io::Error),
    #[error("the receiving side accepted nothing for {} s", .0.as_secs())]
    Stalled(Duration),
}

impl Direction {
    /// Begins with `early`, which `frames` processes.
    pub(crate) fn new(
        early: Bytes,
        frames: Option<&mut FrameTracker>,
        stall_timeout: Duration,
        counter: Counter,
    ) -> Self {
        if let Some(frames) = frames {
            frames.advance(&early);
        }
        Self {
            // Empty bytes would still keep hyper's whole read buffer alive.
            early: if early.is_empty() {
                Bytes::new()
            } else {
                early
            },
            buffer: None,
            start: 0,
            end: 0,
            ended: false,
            unflushed: false,
            stall: Watchdog::default(),
            stall_timeout,
            moved: 0,
            counter,
        }
    }

    /// Bytes moved so far.
    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    /// Ready once `from` has ended and everything that was read is written to `to`, or one of the two
    /// is broken.
    pub(crate) fn poll<R, W>(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut R,
        to: &mut W,
        mut frames: Option<&mut FrameTracker>,
    ) -> Poll<Result<(), PumpError>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        for _ in 0..MAX_READS {
            ready!(self.poll_drain(cx, to))?;
            if self.ended {
                self.buffer = None;
                return Poll::Ready(Ok(()));
            }
            let buffer = self.buffer.get_or_insert_with(Buffer::take);
            let mut space = ReadBuf::new(buffer);
            match Pin::new(&mut *from).poll_read(cx, &mut space) {
                Poll::Ready(Ok(())) => {
                    let read = space.filled();
                    (self.start, self.end) = (0, read.len());
                    self.ended = read.is_empty();
                    if let Some(frames) = &mut frames {
                        frames.advance(read);
                    }
                }
                Poll::Ready(Err(error)) => {
                    self.buffer = None;
                    return Poll::Ready(Err(PumpError::Read(error)));
                }
                Poll::Pending => {
                    self.buffer = None;
                    return Poll::Pending;
                }
            }
        }
        ready!(self.poll_drain(cx, to))?;
        self.buffer = None;
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Ready once everything that was read is written.
    pub(crate) fn poll_drain<W: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut W,
    ) -> Poll<Result<(), PumpError>> {
        loop {
            let pending = match &self.buffer {
                _ if !self.early.is_empty() => &self.early[..],
                Some(buffer) if self.start < self.end => &buffer[self.start..self.end],
                _ => return self.poll_flush(cx, to),
            };
            let written = match Pin::new(&mut *to).poll_write(cx, pending) {
                Poll::Ready(Ok(0)) => Err(PumpError::Write(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(written)) => Ok(written),
                Poll::Ready(Err(error)) => Err(PumpError::Write(error)),
                Poll::Pending => {
                    ready!(self.stall.poll(cx, self.stall_timeout));
                    Err(PumpError::Stalled(self.stall_timeout))
                }
            }?;
            self.stall.calm();
            self.unflushed = true;
            if self.early.is_empty() {
                self.start += written;
            } else {
                self.early.advance(written);
                if self.early.is_empty() {
                    // Frees hyper's read buffer.
                    self.early = Bytes::new();
                }
            }
            self.moved += written as u64;
            self.counter.increment(written as u64);
        }
    }

    fn poll_flush<W: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut W,
    ) -> Poll<Result<(), PumpError>> {
        if !self.unflushed {
            return Poll::Ready(Ok(()));
        }
        match Pin::new(to).poll_flush(cx) {
            Poll::Ready(flushed) => {
                flushed.map_err(PumpError::Write)?;
                self.stall.calm();
                self.unflushed = false;
                Poll::Ready(Ok(()))
            }
            Poll::Pending => {
                ready!(self.stall.poll(cx, self.stall_timeout));
                Poll::Ready(Err(PumpError::Stalled(self.stall_timeout)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    fn direction(early: &'static [u8]) -> Direction {
        let early = Bytes::from_static(early);
        Direction::new(early, None, Duration::from_secs(60), Counter::noop())
    }

    fn poll_once(direction: &mut Direction, from: &mut DuplexStream, to: &mut DuplexStream) {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(direction.poll(&mut cx, from, to, None).is_pending());
    }

    #[tokio::test]
    async fn it_holds_a_buffer_only_while_bytes_wait_to_be_written() {
        let (mut sender, mut from) = tokio::io::duplex(64);
        let (mut to, mut receiver) = tokio::io::duplex(4);
        let mut direction = direction(b"");
        poll_once(&mut direction, &mut from, &mut to);
        assert!(direction.buffer.is_none(), "idle");
        sender.write_all(b"0123456789").await.expect("room for it");
        poll_once(&mut direction, &mut from, &mut to);
        assert!(direction.buffer.is_some(), "the receiver is slow");
        let mut taken = [0; 4];
        for _ in 0..2 {
            receiver.read_exact(&mut taken).await.expect("bytes");
            poll_once(&mut direction, &mut from, &mut to);
        }
        assert!(direction.buffer.is_none(), "drained");
        assert_eq!(direction.moved(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_receiver_that_takes_nothing_is_given_up() {
        let (mut sender, mut from) = tokio::io::duplex(64);
        let (mut to, _receiver) = tokio::io::duplex(4);
        sender.write_all(b"0123456789").await.expect("room for it");
        let mut direction = direction(b"");
        let ended = poll_fn(|cx| direction.poll(cx, &mut from, &mut to, None)).await;
        assert!(matches!(ended, Err(PumpError::Stalled(_))), "{ended:?}");
    }

    proptest! {
        #[test]
        fn every_byte_arrives_once_and_in_order(
            chunks in proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), 1..300),
                0..20,
            ),
            room_in in 1_usize..400,
            room_out in 1_usize..400,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .build()
                .expect("a runtime");
            let expected = [&b"early"[..], &chunks.concat()].concat();
            let received = runtime.block_on(async {
                let (mut sender, mut from) = tokio::io::duplex(room_in);
                let (mut to, mut receiver) = tokio::io::duplex(room_out);
                let sending = async move {
                    for chunk in chunks {
                        sender.write_all(&chunk).await.expect("the pump reads");
                    }
                };
                let pumping = async move {
                    let mut direction = direction(b"early");
                    poll_fn(|cx| direction.poll(cx, &mut from, &mut to, None))
                        .await
                        .expect("nothing breaks");
                };
                let receiving = async move {
                    let mut received = Vec::new();
                    receiver.read_to_end(&mut received).await.expect("the pump writes");
                    received
                };
                tokio::join!(sending, pumping, receiving).2
            });
            prop_assert_eq!(received, expected);
        }
    }
}
