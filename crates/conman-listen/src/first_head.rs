//! Reads the first request of a connection, within a time limit.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};

/// Bytes read at a time; most heads fit.
const READ_BYTES: usize = 2 * 1024;

/// Sent to a client whose head has begun but is not completed in time.
const TIMEOUT: &[u8] = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\
    content-length: 0\r\n\r\n";

/// A connection whose first bytes were already read; they are returned first.
#[derive(Debug)]
pub struct Begun<S> {
    stream: S,
    head: Vec<u8>,
    /// Bytes of `head` that were returned.
    taken: usize,
}

/// Waits until a connection's first request can be parsed: its head is complete, longer than
/// `most`, or certainly invalid. `None` if the client closes the connection before, or if nothing
/// was received when `draining` ends.
///
/// # Errors
/// `TimedOut` after `patience`, and read errors.
pub async fn begin<S>(
    mut stream: S,
    most: usize,
    patience: Duration,
    draining: impl Future<Output = ()>,
) -> io::Result<Option<Begun<S>>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut head = Vec::new();
    let read = async {
        tokio::select! {
            biased;
            // Cancel safe: what was read is in `head`.
            complete = read_head(&mut stream, &mut head, most) => return complete,
            () = draining => {}
        }
        if head.is_empty() {
            return Ok(false);
        }
        read_head(&mut stream, &mut head, most).await
    };
    match tokio::time::timeout(patience, read).await {
        Ok(Ok(true)) => Ok(Some(Begun {
            stream,
            head,
            taken: 0,
        })),
        Ok(Ok(false)) => Ok(None),
        Ok(Err(error)) => Err(error),
        Err(_elapsed) => {
            if !head.is_empty() {
                // If the client does not read this line, it is dropped.
                let _ = stream.write(TIMEOUT).now_or_never();
            }
            Err(io::ErrorKind::TimedOut.into())
        }
    }
}

/// Appends to `head` until it can be parsed; `false` at the end of the connection.
async fn read_head<S>(stream: &mut S, head: &mut Vec<u8>, most: usize) -> io::Result<bool>
where
    S: AsyncRead + Unpin,
{
    loop {
        let before = head.len();
        poll_fn(|cx| {
            // On the stack, so that a connection without input has no buffer.
            let mut bytes = [0; READ_BYTES];
            let mut bytes = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut bytes))?;
            head.extend_from_slice(bytes.filled());
            Poll::Ready(io::Result::Ok(()))
        })
        .await?;
        if head.len() == before {
            return Ok(false);
        }
        if head.len() >= most || can_be_parsed(head, before) {
            return Ok(true);
        }
    }
}

/// Whether the head is complete or invalid. Its first `known` bytes were checked before.
fn can_be_parsed(bytes: &[u8], known: usize) -> bool {
    let begin = bytes.iter().position(|byte| !b"\r\n".contains(byte));
    let Some(head) = begin.map(|begin| &bytes[begin..]) else {
        // Empty lines may come before a head.
        return false;
    };
    let known = known.saturating_sub(bytes.len() - head.len());
    let line = head.iter().position(|&byte| byte == b'\n');
    if line.is_none_or(|end| end >= known) {
        let line = line.map_or(head, |end| &head[..=end]);
        if httparse::Request::new(&mut []).parse(line).is_err() {
            return true;
        }
    }
    // An empty line, whose start may be in the bytes that were checked before.
    let fresh = &head[known.saturating_sub(2)..];
    let mut line_feeds = fresh.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    line_feeds.any(|(at, _)| matches!(fresh[at + 1..], [b'\n', ..] | [b'\r', b'\n', ..]))
}

impl<S> Begun<S> {
    /// The connection itself.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }

    /// The connection, and what was read from it but not returned yet.
    pub fn into_parts(mut self) -> (S, Vec<u8>) {
        self.head.drain(..self.taken);
        (self.stream, self.head)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Begun<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let rest = &this.head[this.taken..];
        if rest.is_empty() {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        let count = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..count]);
        this.taken += count;
        if this.taken == this.head.len() {
            (this.head, this.taken) = (Vec::new(), 0);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Begun<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
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
    use std::future::pending;

    use tokio::io::{AsyncReadExt as _, duplex};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(15);

    /// The first bytes of a connection after these pieces, if its head is complete.
    async fn begun(pieces: &[&[u8]]) -> Option<Vec<u8>> {
        let (mut client, server) = duplex(1 << 20);
        let beginning = begin(server, 8_192, PATIENCE, pending());
        let sending = async {
            for piece in pieces {
                client.write_all(piece).await.expect("room");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // The connection stays open.
            client
        };
        let (begun, _client) = tokio::join!(beginning, sending);
        begun.ok()?.map(|begun| begun.into_parts().1)
    }

    #[tokio::test(start_paused = true)]
    async fn it_begins_once_the_first_head_is_complete_however_it_arrives() {
        for head in [
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "\r\n\r\nGET / HTTP/1.0\r\n\r\n",
            "GET / HTTP/1.1\nHost: a\n\n",
            "GET / HTTP/1.1\r\nHost: a\n\r\n",
        ] {
            let bytes = head.as_bytes();
            for size in [1, 2, 3, 7, bytes.len()] {
                let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
                assert_eq!(begun(&pieces).await.as_deref(), Some(bytes), "{head:?}");
                let (_, partial) = pieces.split_last().expect("some");
                assert_eq!(begun(partial).await, None, "{head:?} without its end");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_no_request_or_too_long_is_not_waited_for() {
        let long = format!("GET / HTTP/1.1\r\nA: {}", "x".repeat(9_000));
        for bytes in ["\x16\x03\x01\x02", "hello\r\n", "PRI * HTTP/2.0\r\n", &long] {
            let begun = begun(&[bytes.as_bytes()]).await;
            assert!(begun.is_some(), "{bytes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_does_not_end_is_answered_and_silence_is_not() {
        for (sent, answer) in [("GET / HT", "HTTP/1.1 408 "), ("", "")] {
            let (mut client, server) = duplex(1 << 10);
            client.write_all(sent.as_bytes()).await.expect("room");
            let error = begin(server, 8_192, PATIENCE, pending()).await;
            let error = error.expect_err("no head").kind();
            assert_eq!(error, io::ErrorKind::TimedOut);
            let mut answered = String::new();
            client.read_to_string(&mut answered).await.expect("closed");
            assert!(answered.starts_with(answer), "{answered}");
            assert_eq!(answered.is_empty(), answer.is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_follows_the_head_comes_after_it() {
        let (mut client, server) = duplex(1 << 10);
        let head = b"GET / HTTP/1.1\r\n\r\nand";
        client.write_all(head).await.expect("room");
        let begun = begin(server, 8_192, PATIENCE, pending()).await;
        let mut begun = begun.expect("no error").expect("a head");
        client.write_all(b" more").await.expect("room");
        drop(client);
        let mut first = [0; 4];
        begun.read_exact(&mut first).await.expect("enough");
        let mut rest = String::new();
        begun.read_to_string(&mut rest).await.expect("text");
        assert_eq!(
            (&first, rest.as_str()),
            (b"GET ", "/ HTTP/1.1\r\n\r\nand more")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn while_draining_only_a_request_that_has_begun_is_waited_for() {
        let (_client, server) = duplex(1 << 10);
        let begun = begin(server, 8_192, PATIENCE, async {}).await;
        assert!(begun.expect("no error").is_none());
        let (mut client, server) = duplex(1 << 10);
        client.write_all(b"GET / HTTP/1.1\r\n").await.expect("room");
        let (begun, sent) = tokio::join!(begin(server, 8_192, PATIENCE, async {}), async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            client.write_all(b"\r\n").await
        });
        sent.expect("room");
        assert!(begun.expect("no error").is_some());
    }
}
