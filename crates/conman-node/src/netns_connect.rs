//! Connections to a port inside a container's network namespace, over its loopback interface.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use conman_linux::{NetnsSockets, PidFd};
use tokio::net::{TcpSocket, TcpStream};

/// Connects to 127.0.0.1, and to ::1 when nothing listens there: a program that resolves `localhost` may
/// listen on either.
pub(crate) async fn connect(
    sockets: &NetnsSockets,
    process: &Arc<PidFd>,
    port: u16,
) -> io::Result<TcpStream> {
    let refused = match connect_to(sockets, process, Ipv4Addr::LOCALHOST.into(), port).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => error,
        other => return other,
    };
    // Without IPv6 in the namespace the first error is more useful.
    connect_to(sockets, process, Ipv6Addr::LOCALHOST.into(), port)
        .await
        .map_err(|_| refused)
}

async fn connect_to(
    sockets: &NetnsSockets,
    process: &Arc<PidFd>,
    address: IpAddr,
    port: u16,
) -> io::Result<TcpStream> {
    let socket = sockets
        .tcp_socket(Arc::clone(process), address.is_ipv6())
        .await?;
    let stream = TcpSocket::from_std_stream(socket)
        .connect(SocketAddr::new(address, port))
        .await?;
    // Requests and frames are written whole; waiting for more only adds delay.
    stream.set_nodelay(true)?;
    Ok(stream)
}
