//! Checks whether a host can have the links of a pool, before anything is changed.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::thread;

use conman_linux::{Namespaces, unshare_namespaces};
use conman_proto::Bandwidth;
use ipnet::IpNet;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::fabric_routes::PROTOCOL;
use crate::host_netlink::HostNetlink;
use crate::link_identity::LinkIdentity;
use crate::link_messages::{FoundLink, Link, all_links};
use crate::pool::{Addresses, PoolNetworks};
use crate::vxlan::{self, Device};

/// The settings without which the host forwards nothing, of each family.
const FORWARDING: [&str; 2] = ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"];

/// Index of the loopback interface in every namespace.
const LOOPBACK: u32 = 1;

/// Why a host cannot have the links.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error(
        "the pool {pool} of `[net]` overlaps the host's route to {route}; choose a network that this host does not \
         use"
    )]
    Overlap { pool: IpNet, route: IpNet },
    #[error(
        "{setting} is not 1, so that this host forwards nothing for sessions; run `sysctl -w {setting}=1`, \
         and write it to a file in /etc/sysctl.d"
    )]
    NotForwarding { setting: &'static str },
    #[error("cannot create a veth pair; Linux must have the module veth")]
    NoLink(#[source] io::Error),
    #[error("cannot use netlink")]
    Netlink(#[source] io::Error),
}

/// Everything for which this host cannot have the links.
pub(crate) async fn problems(
    netlink: &HostNetlink,
    networks: &PoolNetworks,
    identity: &LinkIdentity,
) -> Vec<HostError> {
    let mut problems = Vec::new();
    let mut pools = vec![IpNet::from(networks.v4())];
    pools.extend(networks.v6().map(IpNet::from));
    for (pool, setting) in pools.iter().zip(FORWARDING) {
        let path = format!("/proc/sys/{}", setting.replace('.', "/"));
        if std::fs::read_to_string(path).is_ok_and(|value| value.trim() != "1") {
            problems.push(HostError::NotForwarding { setting });
        }
        let overlapping = |route: &IpNet| route.contains(pool) || pool.contains(route);
        match routes(netlink, pool, identity).await {
            Ok(routes) => {
                let route = routes.into_iter().find(overlapping);
                problems.extend(route.map(|route| HostError::Overlap { pool: *pool, route }));
            }
            Err(error) => problems.push(HostError::Netlink(error)),
        }
    }
    problems
}

/// Creates a link between two network namespaces that exist only for this.
pub(crate) async fn try_link() -> Result<(), HostError> {
    // Each namespace ends with its thread and what is open of it.
    let host = in_new_namespace(|| {
        let netlink = HostNetlink::default();
        netlink.open().map(|()| netlink)
    });
    let session = in_new_namespace(|| File::open("/proc/thread-self/ns/net"));
    let link = Link {
        name: "probe".to_owned(),
        addresses: Addresses {
            v4: Ipv4Addr::new(192, 0, 2, 1),
            v6: None,
        },
        group: 1,
        mtu: 1_500,
        bandwidth: Bandwidth::default(),
    };
    let made = async {
        let (host, session) = (host?, session?);
        let changes = link.host_changes(session.as_fd());
        host.change_all(changes).await
    };
    made.await.map_err(HostError::NoLink)
}

/// Creates a VXLAN device in a network namespace that exists only for this.
pub(crate) async fn try_vxlan() -> io::Result<()> {
    let netlink = in_new_namespace(|| {
        let netlink = HostNetlink::default();
        netlink.open().map(|()| netlink)
    })?;
    let local = Ipv4Addr::LOCALHOST.into();
    let device = Device {
        name: "probe".to_owned(),
        vni: 1,
        port: 1,
        local,
        mac: vxlan::device_mac(local),
        mtu: 1_280,
        below: LOOPBACK,
    };
    netlink.change_all(vec![device.create()]).await
}

fn in_new_namespace<T: Send>(run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare_namespaces(Namespaces::NEWNET)?;
            run()
        });
        let panicked = |_| Err(io::Error::other("a panic"));
        thread.join().unwrap_or_else(panicked)
    })
}

/// The host's routes of the pool's family, without default routes and those to links of this instance.
async fn routes(
    netlink: &HostNetlink,
    pool: &IpNet,
    identity: &LinkIdentity,
) -> io::Result<Vec<IpNet>> {
    let links = netlink.dump(all_links()).await?;
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
    let routes = netlink.dump(RouteNetlinkMessage::GetRoute(request)).await?;
    Ok(routes
        .into_iter()
        .filter_map(|message| destination(message, &ours))
        .filter(|network| network.prefix_len() > 0)
        .collect())
}

/// `None` for a default route, and for one to a link of this instance or of a fabric.
fn destination(message: RouteNetlinkMessage, ours: &BTreeSet<u32>) -> Option<IpNet> {
    let RouteNetlinkMessage::NewRoute(route) = message else {
        return None;
    };
    if u8::from(route.header.protocol) == PROTOCOL {
        return None;
    }
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
