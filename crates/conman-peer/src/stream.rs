use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

/// A node that is gone without a word is noticed within this and three probes: sooner than a
/// client would be, because its sessions may have moved.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_PROBES: u32 = 3;
/// Longest time that sent bytes stay unacknowledged; probes do not run meanwhile.
const USER_TIMEOUT: Duration = Duration::from_secs(11);

/// What names a connection in the seals of its requests.
const BINDING_LABEL: &[u8] = b"EXPORTER-conman-peer-seal";
const BINDING_BYTES: usize = 32;

/// No delay for small writes, and probes that find a node which is gone. Best effort: a socket
/// that is closed already shows that at its first use.
pub(crate) fn tune(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    let tuned = socket
        .set_tcp_nodelay(true)
        .and_then(|()| socket.set_tcp_keepalive(&probes))
        .and_then(|()| socket.set_tcp_user_timeout(Some(USER_TIMEOUT)));
    if let Err(error) = tuned {
        tracing::debug!(%error, "a connection between nodes could not be tuned");
    }
}

/// Key material of a TLS connection, the same at both ends and on no other connection.
pub(crate) fn binding(connection: &TlsStream<TcpStream>) -> io::Result<Vec<u8>> {
    let output = vec![0; BINDING_BYTES];
    let material = match connection {
        TlsStream::Client(stream) => {
            stream
                .get_ref()
                .1
                .export_keying_material(output, BINDING_LABEL, None)
        }
        TlsStream::Server(stream) => {
            stream
                .get_ref()
                .1
                .export_keying_material(output, BINDING_LABEL, None)
        }
    };
    material.map_err(io::Error::other)
}
