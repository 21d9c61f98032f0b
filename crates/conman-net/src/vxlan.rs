//! A fabric's VXLAN device: which entries it has for other nodes, as data.
//!
//! Nothing is learnt, asked or flooded: each node's hardware address has one entry with the node's address, and
//! each part's first address, which no session has, is a neighbour with that hardware address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::{fmt, io};

use conman_core::ownership::Underlay;
use ipnet::IpNet;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::link_identity::{link_mac, mac_text};
use crate::link_messages::family;
use crate::netlink::Change;

/// Bytes that are added to a packet: the inner Ethernet header, VXLAN, UDP and the outer IP.
pub(crate) fn overhead(underlay: IpAddr) -> u32 {
    14 + 8
        + 8
        + match underlay {
            IpAddr::V4(_) => 20,
            IpAddr::V6(_) => 40,
        }
}

/// A device that is to exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) vni: u32,
    pub(crate) port: u16,
    pub(crate) local: IpAddr,
    pub(crate) mac: [u8; 6],
    pub(crate) mtu: u32,
    /// Index of the interface below.
    pub(crate) below: u32,
}

impl Device {
    pub(crate) fn create(&self) -> Change {
        let mut message = LinkMessage::default();
        let local = match self.local {
            IpAddr::V4(v4) => InfoVxlan::Local(v4),
            IpAddr::V6(v6) => InfoVxlan::Local6(v6),
        };
        message.attributes = vec![
            LinkAttribute::IfName(self.name.clone()),
            LinkAttribute::Address(self.mac.to_vec()),
            LinkAttribute::Mtu(self.mtu),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Vxlan),
                LinkInfo::Data(InfoData::Vxlan(vec![
                    InfoVxlan::Id(self.vni),
                    InfoVxlan::Link(self.below),
                    local,
                    InfoVxlan::Learning(false),
                    InfoVxlan::Port(self.port),
                ])),
            ]),
        ];
        Change::Create(RouteNetlinkMessage::NewLink(message))
    }

    /// The device that the kernel describes.
    pub(crate) fn compare(&self, found: &RouteNetlinkMessage) -> Option<FoundDevice> {
        let RouteNetlinkMessage::NewLink(found) = found else {
            return None;
        };
        let (mut same, mut same_link) = (false, 0);
        for attribute in &found.attributes {
            match attribute {
                LinkAttribute::Address(mac) if *mac == self.mac => same_link += 1,
                LinkAttribute::Mtu(mtu) if *mtu == self.mtu => same_link += 1,
                LinkAttribute::LinkInfo(info) => same = self.has(info),
                _ => {}
            }
        }
        Some(FoundDevice {
            index: found.header.index,
            is_same: same && same_link == 2,
            is_up: found.header.flags.contains(LinkFlags::Up),
        })
    }

    fn has(&self, info: &[LinkInfo]) -> bool {
        let data = info.iter().find_map(|info| match info {
            LinkInfo::Data(InfoData::Vxlan(data)) => Some(data),
            _ => None,
        });
        let has = |wanted: InfoVxlan| data.is_some_and(|data| data.contains(&wanted));
        let local = match self.local {
            IpAddr::V4(v4) => InfoVxlan::Local(v4),
            IpAddr::V6(v6) => InfoVxlan::Local6(v6),
        };
        has(InfoVxlan::Id(self.vni))
            && has(InfoVxlan::Port(self.port))
            && has(InfoVxlan::Link(self.below))
            && has(local)
    }
}

/// The port of a link that is a VXLAN device.
pub(crate) fn port_of(link: &RouteNetlinkMessage) -> Option<u16> {
    let RouteNetlinkMessage::NewLink(link) = link else {
        return None;
    };
    let info = link
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::LinkInfo(info) => Some(info),
            _ => None,
        });
    let data = info?.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(data)) => Some(data),
        _ => None,
    });
    data?.iter().find_map(|one| match one {
        InfoVxlan::Port(port) => Some(*port),
        _ => None,
    })
}

/// A device that exists.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundDevice {
    pub(crate) index: u32,
    /// It is as it is to be.
    pub(crate) is_same: bool,
    pub(crate) is_up: bool,
}

/// Hardware address of the device of the node with this address. It differs from node to node, and nobody has to
/// believe a node's record: the address gives it.
pub(crate) fn device_mac(address: IpAddr) -> [u8; 6] {
    match address {
        IpAddr::V4(v4) => link_mac(v4),
        IpAddr::V6(v6) => {
            let hash = v6
                .octets()
                .iter()
                .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                    (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
                });
            let [a, b, c, d, e, ..] = hash.to_be_bytes();
            [0x02, a, b, c, d, e]
        }
    }
}

/// Why a node cannot be reached by its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordFault {
    #[error(
        "has no address of the same family as this node's; set `net.fabric.address` to one on each"
    )]
    Family,
    #[error("has the address {0}, which is not of a node")]
    Address(IpAddr),
    #[error(
        "has another hardware address than its address gives; run the same conman version on every node"
    )]
    HardwareAddress,
    #[error(
        "has the hardware address of another node; give one of them another `net.fabric.address`"
    )]
    Conflict,
}

/// What the device needs to send packets to nodes.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    pub(crate) all: BTreeSet<Entry>,
    nodes: BTreeMap<[u8; 6], IpAddr>,
}

impl Entries {
    /// Adds those for a part of a node, or nothing if its record is wrong: a wrong entry would take packets of
    /// others. `local`: this node's address.
    pub(crate) fn add(
        &mut self,
        to: IpNet,
        underlay: &Underlay,
        local: IpAddr,
    ) -> Result<(), RecordFault> {
        let node = match local {
            IpAddr::V4(_) => underlay.v4.map(IpAddr::V4),
            IpAddr::V6(_) => underlay.v6.map(IpAddr::V6),
        };
        let node = node.ok_or(RecordFault::Family)?;
        let is_broadcast = node == IpAddr::V4(Ipv4Addr::BROADCAST);
        if node.is_multicast() || node.is_unspecified() || node.is_loopback() || is_broadcast {
            return Err(RecordFault::Address(node));
        }
        let mac = underlay.mac;
        if mac != device_mac(node) {
            return Err(RecordFault::HardwareAddress);
        }
        if *self.nodes.entry(mac).or_insert(node) != node {
            return Err(RecordFault::Conflict);
        }
        let hop = to.network();
        self.all.insert(Entry::Neighbour { hop, mac });
        self.all.insert(Entry::Forward { mac, to: node });
        Ok(())
    }
}

/// An entry of the device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Entry {
    /// Packets to this hardware address go to this node.
    Forward { mac: [u8; 6], to: IpAddr },
    /// This next hop has this hardware address.
    Neighbour { hop: IpAddr, mac: [u8; 6] },
}

impl fmt::Display for Entry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward { mac, to } => write!(formatter, "{} by {to}", mac_text(*mac)),
            Self::Neighbour { hop, mac } => write!(formatter, "{hop} at {}", mac_text(*mac)),
        }
    }
}

impl Entry {
    /// Whether it takes the place of another one.
    pub(crate) fn replaces(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Neighbour { hop, .. }, Self::Neighbour { hop: other, .. }) => hop == other,
            // The kernel keeps several destinations of one address side by side.
            _ => false,
        }
    }

    pub(crate) fn add(&self, device: u32) -> Change {
        Change::Replace(RouteNetlinkMessage::NewNeighbour(self.message(device)))
    }

    pub(crate) fn delete(&self, device: u32) -> Change {
        Change::Apply(RouteNetlinkMessage::DelNeighbour(self.message(device)))
    }

    fn message(&self, device: u32) -> NeighbourMessage {
        let mut message = NeighbourMessage::default();
        message.header.ifindex = device;
        message.header.state = NeighbourState::Permanent;
        let (address, mac) = match self {
            Self::Forward { mac, to } => {
                message.header.family = AddressFamily::Bridge;
                message.header.flags = NeighbourFlags::Own;
                (*to, mac)
            }
            Self::Neighbour { hop, mac } => {
                message.header.family = family(*hop);
                (*hop, mac)
            }
        };
        message.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::from(address)),
            NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        ];
        message
    }

    /// The entry of a message, if it is one of the device.
    pub(crate) fn of(message: &RouteNetlinkMessage, device: u32) -> Option<Self> {
        let RouteNetlinkMessage::NewNeighbour(message) = message else {
            return None;
        };
        if message.header.ifindex != device || message.header.state != NeighbourState::Permanent {
            return None;
        }
        let (mut address, mut mac) = (None, None);
        for attribute in &message.attributes {
            match attribute {
                NeighbourAttribute::Destination(destination) => address = ip(destination),
                NeighbourAttribute::LinkLayerAddress(bytes) => {
                    mac = <[u8; 6]>::try_from(&bytes[..]).ok();
                }
                _ => {}
            }
        }
        let (address, mac) = (address?, mac?);
        Some(match message.header.family {
            AddressFamily::Bridge => Self::Forward { mac, to: address },
            _ => Self::Neighbour { hop: address, mac },
        })
    }

    /// The requests for all entries.
    pub(crate) fn all() -> [RouteNetlinkMessage; 3] {
        [
            AddressFamily::Bridge,
            AddressFamily::Inet,
            AddressFamily::Inet6,
        ]
        .map(|family| {
            let mut message = NeighbourMessage::default();
            message.header.family = family;
            RouteNetlinkMessage::GetNeighbour(message)
        })
    }
}

fn ip(address: &NeighbourAddress) -> Option<IpAddr> {
    match address {
        NeighbourAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        NeighbourAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        NeighbourAddress::Other(bytes) => {
            let v4 = <[u8; 4]>::try_from(&bytes[..]).map(|v4| Ipv4Addr::from(v4).into());
            let v6 = || <[u8; 16]>::try_from(&bytes[..]).map(|v6| Ipv6Addr::from(v6).into());
            v4.or_else(|_| v6()).ok()
        }
        _ => None,
    }
}

/// Whether an error says that there is no such device.
pub(crate) fn found(
    answer: io::Result<RouteNetlinkMessage>,
) -> io::Result<Option<RouteNetlinkMessage>> {
    match answer {
        Ok(message) => Ok(Some(message)),
        Err(error) if crate::link_messages::is_no_link(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_record_adds_no_entry_and_leaves_those_of_others() {
        let local: IpAddr = [10, 0, 0, 1].into();
        let to = |part: u8| IpNet::new([10, 96, part, 0].into(), 24).expect("a network");
        let of = |v4: [u8; 4]| Underlay {
            v4: Some(v4.into()),
            mac: device_mac(v4.into()),
            ..Underlay::default()
        };
        let mut entries = Entries::default();
        assert_eq!(entries.add(to(1), &of([10, 0, 0, 2]), local), Ok(()));
        let right = entries.all.clone();
        let only_v6 = Underlay {
            v6: Some(Ipv6Addr::LOCALHOST),
            ..Underlay::default()
        };
        let multicast = Underlay {
            mac: [0x01, 0, 0x5e, 0, 0, 1],
            ..of([10, 0, 0, 3])
        };
        let of_another = Underlay {
            mac: device_mac([10, 0, 0, 2].into()),
            ..of([10, 0, 0, 4])
        };
        for (wrong, fault) in [
            (only_v6, RecordFault::Family),
            (
                of([224, 0, 0, 1]),
                RecordFault::Address([224, 0, 0, 1].into()),
            ),
            (multicast, RecordFault::HardwareAddress),
            (of_another, RecordFault::HardwareAddress),
        ] {
            assert_eq!(entries.add(to(2), &wrong, local), Err(fault));
        }
        assert_eq!(entries.all, right);
        // Another part of the same node.
        assert_eq!(entries.add(to(3), &of([10, 0, 0, 2]), local), Ok(()));
        assert_eq!(entries.all.len(), 3);
    }

    #[test]
    fn nodes_whose_addresses_have_the_same_bits_in_other_places_differ() {
        let macs: BTreeSet<[u8; 6]> = ["2001:db8::1:2", "2001:db8::2:1", "2001:db8:0:1::2"]
            .iter()
            .map(|text| device_mac(text.parse().expect("an address")))
            .collect();
        assert_eq!(macs.len(), 3);
        assert!(macs.iter().all(|mac| mac[0] & 3 == 2), "local, of one node");
    }
}
