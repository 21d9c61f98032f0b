//! From a host and a port as a client names them to a connection: checks, resolves, checks, connects.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use conman_core::egress::{EgressRefusal, HostError, NamedBy, TargetHost};
use conman_core::error_chain;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::RouteType;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::buffers::Sockets;
use super::resolver::LookupError;
use super::session::Session;
use super::shared_stream::SharedStream;
use crate::host_netlink::HostNetlink;
use crate::link_messages::route_request;

/// Bound on connecting to one address.
const CONNECT: Duration = Duration::from_secs(5);
/// Addresses of a name that are tried.
const MAX_ADDRESSES: usize = 4;
/// How long a silent connection to a target may be idle before the kernel probes it.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Refused(#[from] EgressRefusal),
    #[error(transparent)]
    Lookup(#[from] LookupError),
    #[error("cannot connect to {address}")]
    Connect {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("{address} has not answered within {} s", CONNECT.as_secs())]
    TimedOut { address: SocketAddr },
}

impl DialError {
    /// Value of a metric's label.
    fn label(&self) -> &'static str {
        match self {
            Self::Host(_) => "bad_host",
            Self::Refused(refusal) => refusal.label(),
            Self::Lookup(_) => "lookup_failed",
            Self::Connect { .. } => "connect_failed",
            Self::TimedOut { .. } => "connect_timed_out",
        }
    }
}

/// Connects to a target if the session may.
pub(super) async fn dial(
    session: &Session,
    sockets: &Sockets,
    host: &str,
    port: u16,
) -> Result<SharedStream, DialError> {
    let dialled = match TargetHost::parse(host) {
        Ok(TargetHost::Address(address)) => {
            connect_to_first(session, &[address], port, NamedBy::Address).await
        }
        Ok(TargetHost::Name(name)) => by_name(session, &name, port).await,
        Err(error) => Err(error.into()),
    };
    if let Err(error) = &dialled {
        let shown: String = host
            .chars()
            .take(253)
            .flat_map(char::escape_debug)
            .collect();
        let target = format!("{shown}:{port}");
        let sentence = format!("{target}: {}", error_chain(error));
        session.refused(error.label(), &target, &sentence);
    }
    let stream = dialled?;
    Ok(SharedStream(sockets.add(stream, session.connections())))
}

async fn by_name(session: &Session, name: &str, port: u16) -> Result<TcpStream, DialError> {
    session.rules.allow_name(name, port)?;
    let addresses = look_up(session, name).await?;
    connect_to_first(session, &addresses, port, NamedBy::Name).await
}

/// Resolves a name. A session that waits for many names delays only itself.
pub(super) async fn look_up(session: &Session, name: &str) -> Result<Vec<IpAddr>, LookupError> {
    let _place = session.lookups.acquire().await;
    session.node.names.resolve(name).await
}

/// Connects to the first address that is allowed and answers. Returns the last error.
async fn connect_to_first(
    session: &Session,
    addresses: &[IpAddr],
    port: u16,
    named_by: NamedBy,
) -> Result<TcpStream, DialError> {
    let mut last = DialError::Lookup(LookupError::NoAddress);
    for address in addresses.iter().take(MAX_ADDRESSES) {
        let address = address.to_canonical();
        match connect(session, address, port, named_by).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn connect(
    session: &Session,
    address: IpAddr,
    port: u16,
    named_by: NamedBy,
) -> Result<TcpStream, DialError> {
    let target = SocketAddr::new(address, port);
    let failed = |source| DialError::Connect {
        address: target,
        source,
    };
    let is_hosts = is_hosts(&session.node.netlink, address)
        .await
        .map_err(failed)?;
    let special = &session.node.special;
    session
        .rules
        .allow_address(address, port, named_by, special, is_hosts)?;
    let stream = timeout(CONNECT, TcpStream::connect(target))
        .await
        .map_err(|_| DialError::TimedOut { address: target })?
        .map_err(failed)?;
    let _ = stream.set_nodelay(true);
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE);
    let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
    Ok(stream)
}

/// Whether an address is one of the host's own, or no single machine's: the kernel has no route of type unicast
/// to it. Nothing is sent.
pub(super) async fn is_hosts(netlink: &HostNetlink, address: IpAddr) -> io::Result<bool> {
    let request = RouteNetlinkMessage::GetRoute(route_request(address));
    let found = netlink.get(request).await?;
    Ok(!matches!(
        found,
        RouteNetlinkMessage::NewRoute(route) if route.header.kind == RouteType::Unicast
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn secondary_addresses_of_the_host_are_its_own() {
        let netlink = HostNetlink::default();
        for own in ["127.0.0.1", "127.0.0.2", "::1", "224.0.0.1"] {
            let own: IpAddr = own.parse().expect("an address");
            let answer = is_hosts(&netlink, own).await;
            assert!(answer.expect("the kernel answers"), "{own}");
        }
        // Another machine's; without a route it cannot be told.
        let other: IpAddr = "198.51.100.1".parse().expect("an address");
        assert!(!is_hosts(&netlink, other).await.unwrap_or(false));
    }
}
