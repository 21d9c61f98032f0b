//! Connections to a port inside a container's network namespace, or of the host that it shares, over the
//! loopback interface.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use conman_linux::{NetnsSockets, PidFd};
use conman_proto::Network;
use tokio::net::{TcpSocket, TcpStream};

/// Connects to 127.0.0.1, and to ::1 when nothing listens there: a program that resolves `localhost` may
/// listen on either.
pub(crate) async fn on_loopback(
    sockets: &NetnsSockets,
    process: &Arc<PidFd>,
    network: &Network,
    port: u16,
) -> io::Result<TcpStream> {
    let to = |address| connect_to(sockets, process, network, SocketAddr::new(address, port));
    let refused = match to(Ipv4Addr::LOCALHOST.into()).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => error,
        other => return other,
    };
    // Without IPv6 in the namespace the first error is more useful.
    to(Ipv6Addr::LOCALHOST.into()).await.map_err(|_| refused)
}

async fn connect_to(
    sockets: &NetnsSockets,
    process: &Arc<PidFd>,
    network: &Network,
    address: SocketAddr,
) -> io::Result<TcpStream> {
    let socket = match (network.traits().shares_host, address) {
        (true, SocketAddr::V4(_)) => TcpSocket::new_v4()?,
        (true, SocketAddr::V6(_)) => TcpSocket::new_v6()?,
        (false, _) => {
            let socket = sockets.tcp_socket(Arc::clone(process), address.is_ipv6());
            TcpSocket::from_std_stream(socket.await?)
        }
    };
    let stream = socket.connect(address).await?;
    // Requests and frames are written whole; waiting for more only adds delay.
    stream.set_nodelay(true)?;
    Ok(stream)
}
