//! Copies bytes between a client and a session after an upgrade, and closes both sides with a reason.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use conman_core::Closing;
use metrics::Counter;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::watch;

use crate::frames::{FrameTracker, close_frame};
use crate::pump::{Direction, PumpError};
use crate::watchdog::Watchdog;

/// How long a tunnel of an unknown protocol stays open without a byte once one side has ended: the other side
/// may still answer for a while, but a dead peer must not keep it for ever.
const HALF_CLOSED_IDLE: Duration = Duration::from_secs(300);

/// Time for the peers of a closing tunnel: to take the Close frame, and to close after it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes read at once while a tunnel closes.
const SCRATCH_BYTES: usize = 2 * 1024;

/// One end of a tunnel as the upgrade left it.
#[derive(Debug)]
pub struct Side<S> {
    pub stream: S,
    /// Bytes that hyper had read beyond the head; they come before all others.
    pub read_already: Bytes,
}

/// How a tunnel waits, and where its bytes are counted.
#[derive(Debug, Clone)]
pub struct TunnelOptions {
    /// Longest time without progress while bytes wait to be written.
    pub write_stall_timeout: Duration,
    /// How long a tunnel whose session has disappeared waits for the reason.
    pub reason_timeout: Duration,
    pub to_session_bytes: Counter,
    pub to_client_bytes: Counter,
}

/// The protocol of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    WebSocket,
    /// Anything whose boundaries are unknown.
    Other,
}

/// A client and a session that exchange bytes after an upgrade.
///
/// ```text
/// flowing ──> both sides ended, or one broke ────────────────────> closed
///    │  └──> session gone without a Close frame ──> reason? ─no──> closed
///    │                                                 │yes
///    └──> ordered to close ────────────────────────────┴──> Close frame at a boundary ──> closed
/// ```
#[derive(Debug)]
pub struct Tunnel<C, S> {
    flow: Flow<C, S>,
    closing: watch::Receiver<Option<Closing>>,
    reason_timeout: Duration,
}

/// The two sides and the bytes on their way between them.
#[derive(Debug)]
struct Flow<C, S> {
    client: C,
    session: S,
    /// From the client to the session.
    up: Direction,
    up_ended: bool,
    /// From the session to the client.
    down: Direction,
    down_ended: bool,
    /// For a WebSocket: the position in its frames.
    frames: Option<Frames>,
    half_closed: Watchdog,
}

#[derive(Debug, Default)]
struct Frames {
    up: FrameTracker,
    down: FrameTracker,
}

/// How bytes stopped flowing.
#[derive(Debug)]
enum Ended {
    /// In order, or broken.
    Closed,
    /// The session disappeared without a Close frame to the client.
    SessionGone,
    /// It was ordered to end.
    Ordered(Closing),
}

impl<C, S> Tunnel<C, S>
where
    C: AsyncRead + AsyncWrite + Unpin,
    S: AsyncRead + AsyncWrite + Unpin,
{
    pub fn new(
        client: Side<C>,
        session: Side<S>,
        protocol: Protocol,
        options: TunnelOptions,
        closing: watch::Receiver<Option<Closing>>,
    ) -> Self {
        let mut frames = match protocol {
            Protocol::WebSocket => Some(Frames::default()),
            Protocol::Other => None,
        };
        let stall = options.write_stall_timeout;
        let up_frames = frames.as_mut().map(|frames| &mut frames.up);
        let up = Direction::new(
            client.read_already,
            up_frames,
            stall,
            options.to_session_bytes,
        );
        let down_frames = frames.as_mut().map(|frames| &mut frames.down);
        let down = Direction::new(
            session.read_already,
            down_frames,
            stall,
            options.to_client_bytes,
        );
        let flow = Flow {
            client: client.stream,
            session: session.stream,
            up,
            up_ended: false,
            down,
            down_ended: false,
            frames,
            half_closed: Watchdog::default(),
        };
        Self {
            flow,
            closing,
            reason_timeout: options.reason_timeout,
        }
    }

    /// Tunnels until one side ends it, `closing` has a reason, or this node `leaves`, and closes both
    /// sides.
    pub async fn run(self, leaves: impl Future<Output = ()>) {
        let Self {
            mut flow,
            mut closing,
            reason_timeout,
        } = self;
        let ended = tokio::select! {
            biased;
            // Cancel safe: bytes on their way stay in the flow.
            ended = poll_fn(|cx| flow.poll(cx)) => ended,
            // Cancel safe: watch channels keep their value.
            Some(closing) = reason(&mut closing) => Ended::Ordered(closing),
            // Dropped with the tunnel.
            () = leaves => {
                Ended::Ordered(Closing::service_restart("the node leaves, connect again"))
            }
        };
        let closing = match ended {
            Ended::Closed => return,
            Ended::Ordered(closing) => closing,
            Ended::SessionGone => {
                match tokio::time::timeout(reason_timeout, reason(&mut closing)).await {
                    Ok(Some(closing)) => closing,
                    Ok(None) | Err(_) => return,
                }
            }
        };
        match tokio::time::timeout(CLOSE_TIMEOUT, flow.close_with_reason(&closing)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a tunnel closed without a Close frame"),
            Err(_elapsed) => tracing::debug!("a client did not read its Close frame in time"),
        }
    }
}

impl<C, S> Flow<C, S>
where
    C: AsyncRead + AsyncWrite + Unpin,
    S: AsyncRead + AsyncWrite + Unpin,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Ended> {
        let moved = self.up.moved() + self.down.moved();
        if !self.up_ended {
            let frames = self.frames.as_mut().map(|frames| &mut frames.up);
            match self
                .up
                .poll(cx, &mut self.client, &mut self.session, frames)
            {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => {
                    self.up_ended = true;
                    // An error shows in the other direction, if it matters.
                    let _ = Pin::new(&mut self.session).poll_shutdown(cx);
                }
                // The session may have sent its last bytes before it stopped reading.
                Poll::Ready(Err(PumpError::Write(_))) => self.up_ended = true,
                Poll::Ready(Err(PumpError::Read(_) | PumpError::Stalled(_))) => {
                    return Poll::Ready(Ended::Closed);
                }
            }
        }
        if !self.down_ended {
            let frames = self.frames.as_mut().map(|frames| &mut frames.down);
            match self
                .down
                .poll(cx, &mut self.session, &mut self.client, frames)
            {
                Poll::Pending => {}
                Poll::Ready(Ok(())) if self.is_unfinished() => {
                    return Poll::Ready(Ended::SessionGone);
                }
                Poll::Ready(Ok(())) => {
                    self.down_ended = true;
                    let _ = Pin::new(&mut self.client).poll_shutdown(cx);
                }
                Poll::Ready(Err(PumpError::Read(_))) if self.is_unfinished() => {
                    return Poll::Ready(Ended::SessionGone);
                }
                Poll::Ready(Err(_)) => return Poll::Ready(Ended::Closed),
            }
        }
        match (self.up_ended, self.down_ended) {
            (false, false) => Poll::Pending,
            (true, true) => Poll::Ready(Ended::Closed),
            (true, false) | (false, true) => {
                if moved != self.up.moved() + self.down.moved() {
                    self.half_closed.calm();
                }
                // No side of a WebSocket ends its half first and then waits for messages (RFC 6455, section
                // 7.1.1): a client that did is gone, and its session may never close.
                let limit = match self.frames {
                    Some(_) => CLOSE_TIMEOUT,
                    None => HALF_CLOSED_IDLE,
                };
                self.half_closed.poll(cx, limit).map(|()| Ended::Closed)
            }
        }
    }

    /// Whether an end of the session at this point would be irregular for a WebSocket: neither side
    /// has sent a Close frame.
    fn is_unfinished(&self) -> bool {
        self.frames
            .as_ref()
            .is_some_and(|frames| !frames.up.close_seen() && !frames.down.close_seen())
    }

    /// Sends the reason to the client of a WebSocket, after a whole frame of the session. Clients of
    /// other protocols see only the end.
    async fn close_with_reason(&mut self, closing: &Closing) -> io::Result<()> {
        self.finish_frame().await?;
        let Some(frames) = &self.frames else {
            return Ok(());
        };
        if !frames.down.close_seen() {
            self.client.write_all(&close_frame(closing)).await?;
        }
        self.client.shutdown().await?;
        // Closing with unread bytes would reset the connection, and the frame might be lost.
        poll_fn(|cx| poll_discard(cx, &mut self.client)).await;
        Ok(())
    }

    /// Writes what was read from the session, and the rest of the frame that it ends in.
    async fn finish_frame(&mut self) -> io::Result<()> {
        poll_fn(|cx| self.down.poll_drain(cx, &mut self.client))
            .await
            .map_err(io::Error::other)?;
        while let Some(frames) = &mut self.frames
            && !frames.down.at_boundary()
        {
            let tracker = &mut frames.down;
            let session = &mut self.session;
            let rest = poll_fn(|cx| poll_rest_of_frame(cx, session, tracker)).await?;
            self.client.write_all(&rest).await?;
        }
        Ok(())
    }
}

/// Some more of the frame that `tracker` is in.
fn poll_rest_of_frame<S: AsyncRead + Unpin>(
    cx: &mut Context<'_>,
    session: &mut S,
    tracker: &mut FrameTracker,
) -> Poll<io::Result<Vec<u8>>> {
    let mut bytes = [0; SCRATCH_BYTES];
    let mut space = ReadBuf::new(&mut bytes);
    ready!(Pin::new(session).poll_read(cx, &mut space))?;
    let read = space.filled();
    if read.is_empty() {
        return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
    }
    let used = tracker.advance_to_boundary(read);
    Poll::Ready(Ok(read[..used].to_vec()))
}

/// Ready once the peer has ended or is gone.
fn poll_discard<C: AsyncRead + Unpin>(cx: &mut Context<'_>, client: &mut C) -> Poll<()> {
    loop {
        let mut bytes = [0; SCRATCH_BYTES];
        let mut space = ReadBuf::new(&mut bytes);
        match ready!(Pin::new(&mut *client).poll_read(cx, &mut space)) {
            Ok(()) if !space.filled().is_empty() => {}
            Ok(()) | Err(_) => return Poll::Ready(()),
        }
    }
}

/// Returns why the session's tunnels are to be closed, once that is known; `None` if the sender was
/// dropped.
async fn reason(closing: &mut watch::Receiver<Option<Closing>>) -> Option<Closing> {
    let reason = closing.wait_for(Option::is_some).await.ok()?;
    reason.clone()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, DuplexStream, duplex};

    use super::*;

    fn tunnel(
        client: DuplexStream,
        session: DuplexStream,
        protocol: Protocol,
        closing: watch::Receiver<Option<Closing>>,
    ) -> Tunnel<DuplexStream, DuplexStream> {
        let side = |stream| Side {
            stream,
            read_already: Bytes::new(),
        };
        let options = TunnelOptions {
            write_stall_timeout: Duration::from_secs(60),
            reason_timeout: Duration::ZERO,
            to_session_bytes: Counter::noop(),
            to_client_bytes: Counter::noop(),
        };
        Tunnel::new(side(client), side(session), protocol, options, closing)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_gone_ends_its_tunnel_although_the_session_never_closes() {
        for (protocol, limit) in [
            (Protocol::WebSocket, CLOSE_TIMEOUT),
            (Protocol::Other, HALF_CLOSED_IDLE),
        ] {
            let (client, mut client_end) = duplex(64);
            let (session, _session_end) = duplex(64);
            let (_sender, closing) = watch::channel(None);
            let begun = tokio::time::Instant::now();
            client_end.shutdown().await.expect("open");
            tunnel(client, session, protocol, closing)
                .run(std::future::pending())
                .await;
            let lasted = begun.elapsed();
            assert!(
                lasted >= limit && lasted < limit * 2,
                "{protocol:?}: {lasted:?}"
            );
        }
    }

    #[tokio::test]
    async fn the_end_of_the_daemon_is_no_reason_to_close_a_tunnel() {
        const EMPTY_TEXT: [u8; 2] = [0x81, 0];
        let (client, mut client_end) = duplex(64);
        let (session, mut session_end) = duplex(64);
        let (sender, closing) = watch::channel(None);
        drop(sender);
        let tunnel = tunnel(client, session, Protocol::WebSocket, closing);
        tokio::spawn(tunnel.run(std::future::pending()));
        tokio::task::yield_now().await;
        let sent = session_end.write_all(&EMPTY_TEXT).await;
        sent.expect("room for it");
        let mut received = [0; 2];
        let read = client_end.read_exact(&mut received).await;
        read.expect("it is open");
        assert_eq!(received, EMPTY_TEXT);
    }
}
