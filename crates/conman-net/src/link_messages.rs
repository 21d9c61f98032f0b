//! The messages that create, find and delete links, as data.
//!
//! A link is a veth pair: the host's end has a route to the session's addresses, the session's end has
//! the addresses and a default route. Both ends have the same hardware address and no ARP, so neither
//! looks for the other, and there is nothing to spoof. No end gets link-local addresses.
//!
//! The host's end of a link without an IPv6 address is dormant: it carries packets, but never counts as up, so the
//! kernel does not configure IPv6 on it. Otherwise each end would add a multicast route to one list, and a link
//! that is made or deleted would walk the routes of all others.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use conman_proto::{Bandwidth, Rate};
use ipnet::IpNet;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute,
    LinkFlags, LinkInfo, LinkMessage, LinkMode,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
    RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;

use crate::bandwidth::limit_sending;
use crate::link_identity::{link_index, link_mac};
use crate::netlink::Change;
use crate::pool::Addresses;

/// Name of a session's end.
pub const SESSION_LINK: &str = "eth0";

/// Next hop of a session. No interface has the address, and none answers for it.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Number of queues of each end, in each direction: more would only cost memory.
const QUEUES: u32 = 1;

/// A link that is to exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    /// Name of the host's end.
    pub(crate) name: String,
    pub(crate) addresses: Addresses,
    pub(crate) group: u32,
    /// In bytes.
    pub(crate) mtu: u32,
    pub(crate) bandwidth: Bandwidth,
}

impl Link {
    /// Changes in the host's namespace that create the link, with its other end in `namespace`.
    pub(crate) fn host_changes(&self, namespace: BorrowedFd<'_>) -> Vec<Change> {
        let index = link_index(self.addresses.v4);
        let mut changes = vec![Change::Create(self.pair(index, namespace))];
        // What the host sends, the session receives.
        changes.extend(self.limit(index, self.bandwidth.inward));
        changes.extend(bring_up(index, self.addresses.v6.is_some()));
        let to_session = |destination: IpAddr| {
            let mut route = route(IpNet::from(destination), index);
            route.header.scope = RouteScope::Link;
            Change::Create(RouteNetlinkMessage::NewRoute(route))
        };
        changes.push(to_session(self.addresses.v4.into()));
        changes.extend(self.addresses.v6.map(|v6| to_session(v6.into())));
        changes
    }

    /// Changes in the session's namespace that make its end usable.
    pub(crate) fn session_changes(&self, ipv6: bool) -> Vec<Change> {
        let index = link_index(self.addresses.v4);
        let mut changes = Vec::from_iter(self.limit(index, self.bandwidth.outward));
        changes.extend(bring_up(index, ipv6));
        let v6 = self.addresses.v6.map(IpAddr::V6);
        let v6 = v6.map(|v6| (v6, IpAddr::V6(GATEWAY6)));
        let v4 = (IpAddr::V4(self.addresses.v4), IpAddr::V4(GATEWAY));
        for (own, gateway) in [v4].into_iter().chain(v6) {
            changes.push(address(own.into(), index));
            changes.push(default_route(gateway, index));
        }
        changes
    }

    fn limit(&self, index: u32, rate: Option<Rate>) -> Option<Change> {
        rate.map(|rate| limit_sending(index, self.mtu, rate))
    }

    fn pair(&self, index: u32, namespace: BorrowedFd<'_>) -> RouteNetlinkMessage {
        let end = |name: &str| {
            let mut end = LinkMessage::default();
            end.header.index = index;
            end.header.flags = LinkFlags::Noarp;
            end.header.change_mask = LinkFlags::Noarp;
            end.attributes = vec![
                LinkAttribute::IfName(name.to_owned()),
                LinkAttribute::Address(link_mac(self.addresses.v4).to_vec()),
                LinkAttribute::Mtu(self.mtu),
                LinkAttribute::NumTxQueues(QUEUES),
                LinkAttribute::NumRxQueues(QUEUES),
            ];
            end
        };
        let mut session = end(SESSION_LINK);
        session
            .attributes
            .push(LinkAttribute::NetNsFd(namespace.as_raw_fd()));
        let mut host = end(&self.name);
        host.attributes.push(LinkAttribute::Group(self.group));
        if self.addresses.v6.is_none() {
            host.attributes.push(LinkAttribute::Mode(LinkMode::Dormant));
        }
        host.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(session))),
        ]));
        RouteNetlinkMessage::NewLink(host)
    }
}

/// A link as the kernel describes it.
#[derive(Default)]
pub(crate) struct FoundLink {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) group: u32,
    pub(crate) mtu: u32,
    pub(crate) alias: String,
    /// Hardware address; six bytes on Ethernet.
    pub(crate) mac: Vec<u8>,
    pub(crate) kind: Option<InfoKind>,
}

impl FoundLink {
    pub(crate) fn of(message: RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewLink(message) = message else {
            return None;
        };
        let mut found = Self {
            index: message.header.index,
            ..Self::default()
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => found.name = name,
                LinkAttribute::Group(group) => found.group = group,
                LinkAttribute::Mtu(mtu) => found.mtu = mtu,
                LinkAttribute::IfAlias(alias) => found.alias = alias,
                LinkAttribute::Address(mac) => found.mac = mac,
                LinkAttribute::LinkInfo(info) => {
                    found.kind = info.into_iter().find_map(|one| match one {
                        LinkInfo::Kind(kind) => Some(kind),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        Some(found)
    }
}

/// Returns the link that a request for one has found.
pub(crate) fn link_or_none(
    found: io::Result<RouteNetlinkMessage>,
) -> io::Result<Option<FoundLink>> {
    match found {
        Ok(message) => Ok(FoundLink::of(message)),
        Err(error) if is_no_link(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a request failed because there is no such link.
pub(crate) fn is_no_link(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::NODEV)
}

/// The request for the list of all links.
pub(crate) fn all_links() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetLink(LinkMessage::default())
}

/// The request for the link with this name.
pub(crate) fn link_named(name: &str) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message
        .attributes
        .push(LinkAttribute::IfName(name.to_owned()));
    RouteNetlinkMessage::GetLink(message)
}

/// Succeeds if the link exists, and fails with ENODEV otherwise.
pub(crate) fn find_link(index: u32) -> Change {
    let mut message = LinkMessage::default();
    message.header.index = index;
    Change::Apply(RouteNetlinkMessage::GetLink(message))
}

/// Deletes one link, which takes the kernel a hundred times longer than one of a group.
pub(crate) fn delete_link(index: u32) -> Change {
    let mut message = LinkMessage::default();
    message.header.index = index;
    Change::Apply(RouteNetlinkMessage::DelLink(message))
}

/// Moves a link to a group.
pub(crate) fn set_group(index: u32, group: u32) -> Change {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::Group(group));
    Change::Apply(RouteNetlinkMessage::SetLink(message))
}

/// Deletes all links of a group at once.
pub(crate) fn delete_group(group: u32) -> Change {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::Group(group));
    Change::Apply(RouteNetlinkMessage::DelLink(message))
}

/// Without link-local addresses, which the kernel would choose when the link comes up.
pub(crate) fn bring_up(index: u32, ipv6: bool) -> Vec<Change> {
    let change = |edit: &dyn Fn(&mut LinkMessage)| {
        let mut message = LinkMessage::default();
        message.header.index = index;
        edit(&mut message);
        Change::Apply(RouteNetlinkMessage::SetLink(message))
    };
    let no_addresses = change(&|message| {
        let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
        let mode = vec![AfSpecUnspec::Inet6(vec![mode])];
        message.attributes.push(LinkAttribute::AfSpecUnspec(mode));
    });
    let up = change(&|message| {
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
    });
    ipv6.then_some(no_addresses)
        .into_iter()
        .chain([up])
        .collect()
}

pub(crate) fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

pub(crate) fn address(net: IpNet, index: u32) -> Change {
    let address = net.addr();
    let mut message = AddressMessage::default();
    message.header.family = family(address);
    message.header.prefix_len = net.prefix_len();
    message.header.scope = AddressScope::Universe;
    message.header.index = index;
    message.attributes = vec![
        AddressAttribute::Local(address),
        AddressAttribute::Address(address),
    ];
    if address.is_ipv6() {
        message.header.flags = AddressHeaderFlags::Nodad;
        message
            .attributes
            .push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    Change::Create(RouteNetlinkMessage::NewAddress(message))
}

/// The request for the route that packets to one address take.
pub(crate) fn route_request(destination: IpAddr) -> RouteMessage {
    let destination = IpNet::from(destination);
    let mut message = RouteMessage::default();
    message.header.address_family = family(destination.addr());
    message.header.destination_prefix_length = destination.prefix_len();
    message.attributes = vec![RouteAttribute::Destination(route_address(
        destination.addr(),
    ))];
    message
}

/// A route to a network through the interface.
pub(crate) fn route(destination: IpNet, index: u32) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(destination.addr());
    message.header.destination_prefix_length = destination.prefix_len();
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Static;
    message.header.scope = RouteScope::Universe;
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![
        RouteAttribute::Destination(route_address(destination.network())),
        RouteAttribute::Oif(index),
    ];
    message
}

/// Adds a route to a network, through a gateway in a network of the interface if there is one.
pub(crate) fn add_route(destination: IpNet, gateway: Option<IpAddr>, index: u32) -> Change {
    let mut message = route(destination, index);
    match gateway.map(route_address) {
        Some(gateway) => message.attributes.push(RouteAttribute::Gateway(gateway)),
        None => message.header.scope = RouteScope::Link,
    }
    Change::Create(RouteNetlinkMessage::NewRoute(message))
}

fn default_route(gateway: IpAddr, index: u32) -> Change {
    let everything: IpAddr = match gateway {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let mut message = route(IpNet::new_assert(everything, 0), index);
    // The gateway is in no network of the interface.
    message.header.flags = RouteFlags::Onlink;
    message
        .attributes
        .push(RouteAttribute::Gateway(route_address(gateway)));
    Change::Create(RouteNetlinkMessage::NewRoute(message))
}

pub(crate) fn route_address(address: IpAddr) -> RouteAddress {
    match address {
        IpAddr::V4(v4) => RouteAddress::Inet(v4),
        IpAddr::V6(v6) => RouteAddress::Inet6(v6),
    }
}
