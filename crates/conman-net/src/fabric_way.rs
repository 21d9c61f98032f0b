//! How a fabric's packets leave this host, and reach it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use conman_core::ownership::Underlay;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage, AddressScope};

use crate::fabric::{FabricError, FabricKind, FabricOptions, RemotePart};
use crate::host_netlink::HostNetlink;
use crate::link_identity::LinkIdentity;
use crate::link_messages::{FoundLink, all_links};
use crate::vxlan::{self, Device};

/// Length of an Ethernet address.
const MAC_BYTES: usize = 6;

/// The interface towards the other nodes, and what follows from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Way {
    /// Index of the interface.
    pub(crate) below: u32,
    pub(crate) device: Option<Device>,
    pub(crate) underlay: Underlay,
}

impl Way {
    /// The largest packet of a node that takes only smaller ones than this node; the kernel reports it to senders.
    pub(crate) fn smaller_mtu(&self, part: &RemotePart) -> Option<u32> {
        let mtu = part.underlay.mtu;
        (mtu < self.underlay.mtu).then_some(mtu)
    }
}

/// Finds the interface. Changes nothing.
pub(crate) async fn way(
    options: &FabricOptions,
    netlink: &HostNetlink,
) -> Result<Way, FabricError> {
    let address = options.address;
    let (below, v4, v6) = addresses_beside(netlink, address).await?;
    let links = netlink.dump(all_links()).await?;
    let links = links.into_iter().filter_map(FoundLink::of);
    let link = links.into_iter().find(|link| Some(link.index) == below);
    let link = link.ok_or(FabricError::NoInterface { address })?;
    let interface = link.name.clone();
    let overhead = match options.kind {
        FabricKind::HostGateway => 0,
        FabricKind::Vxlan { .. } => vxlan::overhead(address),
    };
    let most = link.mtu.saturating_sub(overhead);
    let mtu = options.mtu.unwrap_or(most);
    if mtu > most {
        return Err(FabricError::Mtu {
            mtu,
            interface,
            below: link.mtu,
            overhead,
            most,
        });
    }
    let (device, mac) = match options.kind {
        FabricKind::HostGateway => {
            let mac = <[u8; MAC_BYTES]>::try_from(&link.mac[..]);
            let mac = mac.map_err(|_| FabricError::NotEthernet { interface })?;
            (None, mac)
        }
        FabricKind::Vxlan { vni, port } => {
            let mac = vxlan::device_mac(address);
            let device = Device {
                name: LinkIdentity::new(&options.instance).fabric_device(),
                vni,
                port,
                local: address,
                mac,
                mtu,
                below: link.index,
            };
            (Some(device), mac)
        }
    };
    // VXLAN needs the one address of this family only.
    let (v4, v6) = match (&device, address) {
        (Some(_), IpAddr::V4(v4)) => (Some(v4), None),
        (Some(_), IpAddr::V6(v6)) => (None, Some(v6)),
        (None, _) => (v4, v6),
    };
    Ok(Way {
        below: link.index,
        device,
        underlay: Underlay { v4, v6, mac, mtu },
    })
}

/// Fails if a program has the port. VXLAN devices share one, this fabric's present device among them.
pub(crate) async fn check_port(
    netlink: &HostNetlink,
    address: IpAddr,
    port: u16,
) -> Result<(), FabricError> {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let Err(source) = UdpSocket::bind((any, port)) else {
        return Ok(());
    };
    let links = netlink.dump(all_links()).await?;
    match links.iter().any(|link| vxlan::port_of(link) == Some(port)) {
        true => Ok(()),
        false => Err(FabricError::Port { port, source }),
    }
}

/// The interface with this address, and its addresses of both families.
async fn addresses_beside(
    netlink: &HostNetlink,
    address: IpAddr,
) -> io::Result<(Option<u32>, Option<Ipv4Addr>, Option<Ipv6Addr>)> {
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let found = netlink.dump(request).await?;
    let addresses: Vec<(u32, AddressScope, IpAddr)> = found
        .into_iter()
        .filter_map(|message| match message {
            RouteNetlinkMessage::NewAddress(message) => Some(message),
            _ => None,
        })
        .flat_map(|message| {
            let (index, scope) = (message.header.index, message.header.scope);
            let of = move |attribute| match attribute {
                AddressAttribute::Local(address) | AddressAttribute::Address(address) => {
                    Some((index, scope, address))
                }
                _ => None,
            };
            message.attributes.into_iter().filter_map(of)
        })
        .collect();
    let index = addresses.iter().find(|(.., found)| *found == address);
    let index = index.map(|(index, ..)| *index);
    let beside = addresses.iter().filter(|(found, ..)| Some(*found) == index);
    let (mut v4, mut v6) = (None, None);
    for (_, scope, found) in beside {
        match found {
            IpAddr::V4(found) => v4 = v4.or(Some(*found)),
            // One that is valid beyond the link rather than one of the link.
            IpAddr::V6(found) if *scope == AddressScope::Universe => v6 = Some(*found),
            IpAddr::V6(found) => v6 = v6.or(Some(*found)),
        }
    }
    match address {
        IpAddr::V4(address) => v4 = Some(address),
        IpAddr::V6(address) => v6 = Some(address),
    }
    Ok((index, v4, v6))
}
