//! A stream whose peer may refuse a request before it has read all of it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Ignores what is written once writing has failed, so that reading continues: the peer's answer
/// may have arrived already, and explains more than the failed write. Without an answer, reading
/// reports that the connection has ended.
#[derive(Debug)]
pub(super) struct Refusable<S> {
    stream: S,
    refused: bool,
}

impl<S> Refusable<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            refused: false,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Refusable<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Refusable<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !self.refused {
            match ready!(Pin::new(&mut self.stream).poll_write(context, bytes)) {
                Ok(count) => return Poll::Ready(Ok(count)),
                Err(_) => self.refused = true,
            }
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.refused && ready!(Pin::new(&mut self.stream).poll_flush(context)).is_err() {
            self.refused = true;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn an_answer_is_read_although_the_peer_took_no_more() {
        let (mut peer, own) = UnixStream::pair().expect("a pair");
        let mut own = Refusable::new(own);
        peer.write_all(b"no room").await.expect("written");
        drop(peer);
        for _ in 0..10 {
            own.write_all(&[0; 65_536]).await.expect("dropped");
        }
        own.flush().await.expect("dropped");
        let mut answer = String::new();
        own.read_to_string(&mut answer).await.expect("read");
        assert_eq!(answer, "no room");
    }
}
