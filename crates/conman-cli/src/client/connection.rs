//! Byte streams to a daemon.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use super::ClientError;
use super::target::Target;

/// Bound on connecting: a full backlog, or an address that drops packets.
const CONNECT: Duration = Duration::from_secs(5);

/// A dead peer is noticed after `IDLE + PROBES * INTERVAL`; otherwise a follower of events or
/// logs would wait for ever.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 4;

/// A connection of either family.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Connects, within a bound.
pub(super) async fn connect(target: &Target) -> Result<Box<dyn Duplex>, ClientError> {
    let connected = async {
        match target {
            Target::Unix(path) => {
                Ok::<_, io::Error>(Box::new(UnixStream::connect(path).await?) as Box<dyn Duplex>)
            }
            Target::Tcp { host, port } => {
                let host = host.trim_start_matches('[').trim_end_matches(']');
                let stream = TcpStream::connect((host, *port)).await?;
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                Ok(Box::new(stream) as Box<dyn Duplex>)
            }
        }
    };
    match tokio::time::timeout(CONNECT, connected).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(source)) => Err(explain(target, source)),
        Err(_) => Err(ClientError::ConnectTimedOut {
            peer: target.to_string(),
            after_s: CONNECT.as_secs(),
        }),
    }
}

fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;

    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}

fn explain(target: &Target, source: io::Error) -> ClientError {
    match (target, source.kind()) {
        (Target::Unix(path), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            ClientError::NoSocket { path: path.clone() }
        }
        // A killed daemon leaves a socket file without a listener.
        (Target::Unix(path), io::ErrorKind::ConnectionRefused) => {
            ClientError::StaleSocket { path: path.clone() }
        }
        (Target::Unix(path), io::ErrorKind::PermissionDenied) => {
            ClientError::NotAllowed { path: path.clone() }
        }
        _ => ClientError::Connect {
            peer: target.to_string(),
            source,
        },
    }
}
