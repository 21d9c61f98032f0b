//! Checks whether a host can have the links of a pool, before anything is changed.

use std::collections::BTreeSet;
use std::io;

use ipnet::IpNet;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::link_identity::LinkIdentity;
use crate::link_messages::all_links;
use crate::netlink::RouteSocket;
use crate::plane::FoundLink;
use crate::pool::PoolNetworks;

/// The settings without which the host forwards nothing, of each family.
const FORWARDING: [&str; 2] = ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"];

/// Why a host cannot have the links.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error(
        "`net.pool` {pool} overlaps the host's route to {route}; choose a network that this host does not \
         use"
    )]
    Overlap { pool: IpNet, route: IpNet },
    #[error(
        "{setting} is not 1, so that this host forwards nothing for sessions; run `sysctl -w {setting}=1`, \
         and write it to a file in /etc/sysctl.d"
    )]
    NotForwarding { setting: &'static str },
    #[error("cannot use netlink")]
    Netlink(#[source] io::Error),
}

pub(crate) fn check(networks: &PoolNetworks, identity: &LinkIdentity) -> Result<(), HostError> {
    let mut pools = vec![IpNet::from(networks.v4())];
    pools.extend(networks.v6().map(IpNet::from));
    for (pool, setting) in pools.iter().zip(FORWARDING) {
        let path = format!("/proc/sys/{}", setting.replace('.', "/"));
        if std::fs::read_to_string(path).is_ok_and(|value| value.trim() != "1") {
            return Err(HostError::NotForwarding { setting });
        }
        let routes = routes(pool, identity).map_err(HostError::Netlink)?;
        let overlapping = |route: &IpNet| route.contains(pool) || pool.contains(route);
        if let Some(route) = routes.into_iter().find(overlapping) {
            return Err(HostError::Overlap { pool: *pool, route });
        }
    }
    Ok(())
}

/// The host's routes of the pool's family, without default routes and those to links of this instance.
fn routes(pool: &IpNet, identity: &LinkIdentity) -> io::Result<Vec<IpNet>> {
    let mut socket = RouteSocket::open()?;
    let links = socket.dump(&all_links())?;
    let links = links.into_iter().filter_map(FoundLink::of);
    let ours: BTreeSet<u32> = links
        .filter(|link| identity.owns(&link.name))
        .map(|link| link.index)
        .collect();
    let mut request = RouteMessage::default();
    request.header.address_family = match pool {
        IpNet::V4(_) => AddressFamily::Inet,
        IpNet::V6(_) => AddressFamily::Inet6,
    };
    let routes = socket.dump(&RouteNetlinkMessage::GetRoute(request))?;
    Ok(routes
        .into_iter()
        .filter_map(|message| destination(message, &ours))
        .filter(|network| network.prefix_len() > 0)
        .collect())
}

/// `None` for a default route, and for one to a link of this instance.
fn destination(message: RouteNetlinkMessage, ours: &BTreeSet<u32>) -> Option<IpNet> {
    let RouteNetlinkMessage::NewRoute(route) = message else {
        return None;
    };
    let mut address = None;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) if ours.contains(index) => return None,
            RouteAttribute::Destination(RouteAddress::Inet(v4)) => address = Some((*v4).into()),
            RouteAttribute::Destination(RouteAddress::Inet6(v6)) => address = Some((*v6).into()),
            _ => {}
        }
    }
    IpNet::new(address?, route.header.destination_prefix_length).ok()
}
