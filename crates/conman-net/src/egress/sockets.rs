//! The sockets inside a session's network namespace.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

use conman_core::egress::{EGRESS_DNS_PORT, EGRESS_PROXY_PORT};
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};

use crate::namespace_thread::{enter_other, on_thread};

/// Connections that the kernel queues for a listener.
const BACKLOG: i32 = 128;

/// The resolver's sockets, and the proxy's of a session that has one, which take connections from now on. [`super::Egress::serve`] serves
/// them; closing them refuses what has connected.
#[derive(Debug)]
pub struct EgressSockets {
    pub(super) proxy: Option<TcpListener>,
    pub(super) resolver: TcpListener,
    pub(super) datagrams: UdpSocket,
}

impl EgressSockets {
    /// Opens them in a session's network namespace, whose loopback interface is up. Refuses conman's own.
    pub async fn open(namespace: OwnedFd, with_proxy: bool) -> io::Result<Self> {
        on_thread(move || {
            enter_other(namespace.as_fd())?;
            let proxy = with_proxy.then(|| listener(EGRESS_PROXY_PORT));
            Ok(Self {
                proxy: proxy.transpose()?.map(TcpListener::from),
                resolver: listener(EGRESS_DNS_PORT)?.into(),
                datagrams: bound(SocketType::DGRAM, EGRESS_DNS_PORT)?.into(),
            })
        })
        .await?
    }
}

fn listener(port: u16) -> io::Result<OwnedFd> {
    let socket = bound(SocketType::STREAM, port)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn bound(kind: SocketType, port: u16) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, kind, flags, None)?;
    if kind == SocketType::STREAM {
        // Connections of a previous daemon may linger in the namespace.
        set_socket_reuseaddr(&socket, true)?;
    }
    bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    Ok(socket)
}
