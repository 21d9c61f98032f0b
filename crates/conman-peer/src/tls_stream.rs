//! A TLS connection to another node, and the options of its socket.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::AlertDescription as Alert;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// Probes of an idle connection. They keep it known to firewalls, and find a machine that has restarted:
/// it answers with a reset. Streams to a node that stays silent end when it is declared dead (`lost_nodes`).
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time for which sent bytes or probes may stay unacknowledged; with it the kernel does not count
/// probes (tcp(7)). The kernel also counts the time for which the receiver has no room, even if it
/// acknowledges every probe. So this is longer than the time for which the proxy lets a slow receiver
/// take nothing.
const USER_TIMEOUT: Duration = Duration::from_secs(75);

/// Disables the delay of small writes, and enables probes that detect a lost node. Best effort: on
/// a socket that is already closed, the first use fails anyway.
pub(crate) fn tune(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL);
    let tuned = socket
        .set_tcp_nodelay(true)
        .and_then(|()| socket.set_tcp_keepalive(&probes))
        .and_then(|()| socket.set_tcp_user_timeout(Some(USER_TIMEOUT)));
    if let Err(error) = tuned {
        tracing::debug!(%error, "cannot set socket options of a peer connection");
    }
}

/// A TLS connection to another node. Whether that node accepts this one's certificate is known only
/// when its answer is read: reading then fails with [`io::ErrorKind::PermissionDenied`].
pub(crate) struct ToNode(pub(crate) TlsStream<TcpStream>);

impl ToNode {
    fn stream(self: Pin<&mut Self>) -> Pin<&mut TlsStream<TcpStream>> {
        Pin::new(&mut self.get_mut().0)
    }
}

impl AsyncRead for ToNode {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream().poll_read(cx, buf).map_err(judged)
    }
}

impl AsyncWrite for ToNode {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(cx)
    }
}

fn judged(error: io::Error) -> io::Error {
    let why = error.get_ref().and_then(|why| why.downcast_ref());
    match why {
        Some(rustls::Error::AlertReceived(alert)) if refuses_certificate(*alert) => {
            io::Error::new(io::ErrorKind::PermissionDenied, error)
        }
        _ => error,
    }
}

/// Whether the other end does not accept this node's certificate.
pub(crate) fn refuses_certificate(alert: Alert) -> bool {
    matches!(
        alert,
        Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::DecryptError
            | Alert::CertificateRequired
    )
}
